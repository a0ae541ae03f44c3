//! Limits on what an environment uses, by cgroups where the machine lets us: version 2 if a delegated one is there, else version 1.
//!
//! The controller plans once, at its start; a keeper makes the folders, the environment's init enters them, the end removes them. What cannot be
//! limited is told to the operator by `local`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use crate::process::{self, Send};

/// The subgroup into which a controller moves itself, since a version 2 group with processes of its own cannot limit its children.
const OWN_SUBGROUP: &str = "controller";
/// What `pids` limits, in words.
pub(super) const TASKS: &str = "tasks";
/// Deeper than any group that a job makes for good reason.
const MAX_DEPTH: u32 = 16;

/// What one environment may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Processes and threads.
    pub tasks: u64,
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent of one core: 150 is a core and a half.
    pub cpu_percent: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { tasks: 4096, memory: None, cpu_percent: None }
    }
}

/// Files of a group, and what is written into each.
type Writes = Vec<(String, String)>;

/// A group of one environment: its folder, and what is written into which of its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CgroupDir {
    pub(super) path: PathBuf,
    pub(super) writes: Writes,
}

/// Where the groups of environments go, and which limits nobody holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CgroupPlan {
    parents: Vec<CgroupDir>,
    pub(super) unlimited: Vec<&'static str>,
}

impl CgroupPlan {
    /// `root` is `/sys/fs/cgroup`; `own` the text of `/proc/self/cgroup`. Moves this process into a subgroup where version 2 wants that.
    pub(super) fn make(root: &Path, own: &str, limits: &Limits) -> Self {
        if root.join("cgroup.controllers").exists() {
            Self::version_2(root, own, limits)
        } else {
            Self::version_1(root, own, limits)
        }
    }

    pub(super) fn of(&self, name: &str) -> Vec<CgroupDir> {
        self.parents.iter().map(|parent| CgroupDir { path: parent.path.join(name), writes: parent.writes.clone() }).collect()
    }

    fn version_1(root: &Path, own: &str, limits: &Limits) -> Self {
        let mut plan = Self::default();
        for (controller, what, writes) in wanted(limits, 1) {
            let group = own.lines().find_map(|line| {
                let mut parts = line.splitn(3, ':').skip(1);
                parts.next()?.split(',').any(|c| c == controller).then(|| parts.next()).flatten()
            });
            // In a container the path may be the host's, while the mount shows only our part of the tree.
            let mount = root.join(controller);
            let inside = group.map(|path| mount.join(path.trim_start_matches('/'))).filter(|path| path.is_dir());
            let parent = inside.unwrap_or(mount);
            if writable(&parent) {
                plan.parents.push(CgroupDir { path: parent, writes });
            } else {
                plan.unlimited.push(what);
            }
        }
        plan
    }

    fn version_2(root: &Path, own: &str, limits: &Limits) -> Self {
        let group = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
        let mut parent = root.join(group.trim_start_matches('/'));
        if parent.file_name().is_some_and(|name| name == OWN_SUBGROUP) {
            parent.pop();
        }
        let mut plan = Self::default();
        let mut dir = CgroupDir { path: parent.clone(), writes: Vec::new() };
        if !writable(&parent) {
            plan.unlimited = wanted(limits, 2).into_iter().map(|(_, what, _)| what).collect();
            return plan;
        }
        for (controller, what, writes) in wanted(limits, 2) {
            match enable(&parent, controller) {
                Ok(()) => dir.writes.extend(writes),
                Err(_) => plan.unlimited.push(what),
            }
        }
        plan.parents.push(dir);
        plan
    }
}

/// The controllers that the limits need: name, what it limits in words, files and values.
fn wanted(limits: &Limits, version: u8) -> Vec<(&'static str, &'static str, Writes)> {
    let file = |v1: &str, v2: &str, value: String| (if version == 1 { v1 } else { v2 }.to_owned(), value);
    let mut wanted = vec![("pids", TASKS, vec![file("pids.max", "pids.max", limits.tasks.to_string())])];
    if let Some(bytes) = limits.memory {
        wanted.push(("memory", "memory", vec![file("memory.limit_in_bytes", "memory.max", bytes.to_string())]));
    }
    if let Some(percent) = limits.cpu_percent {
        let quota = u64::from(percent) * 1000;
        wanted.push((
            "cpu",
            "CPU",
            vec![file("cpu.cfs_quota_us", "cpu.max", if version == 1 { quota.to_string() } else { format!("{quota} 100000") })],
        ));
    }
    wanted
}

/// Lets the children of a version 2 group use a controller.
fn enable(parent: &Path, controller: &str) -> io::Result<()> {
    let has =
        |file: &str| fs::read_to_string(parent.join(file)).is_ok_and(|text| text.split_whitespace().any(|c| c == controller));
    if !has("cgroup.controllers") {
        return Err(io::ErrorKind::NotFound.into());
    }
    if has("cgroup.subtree_control") {
        return Ok(());
    }
    let turn_on = || fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
    turn_on().or_else(|_| {
        // Busy: we are in it ourselves. If others are too (a login session, say), it is not ours to split, and this fails again.
        let own = parent.join(OWN_SUBGROUP);
        fs::create_dir_all(&own)?;
        fs::write(own.join("cgroup.procs"), "0")?;
        turn_on()
    })
}

fn writable(folder: &Path) -> bool {
    folder.is_dir()
        && access(&folder.join("cgroup.procs"), AccessFlags::W_OK).is_ok()
        && access(folder, AccessFlags::W_OK).is_ok()
}

/// Makes the groups with their limits; existing ones are taken over.
pub(super) fn create(dirs: &[CgroupDir]) -> io::Result<()> {
    for dir in dirs {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("limit through {}: {e}", dir.path.display()));
        fs::create_dir_all(&dir.path).map_err(named)?;
        for (file, value) in &dir.writes {
            fs::write(dir.path.join(file), value).map_err(named)?;
        }
    }
    Ok(())
}

/// Moves the calling process into the groups.
pub(super) fn enter(dirs: &[CgroupDir]) -> io::Result<()> {
    for dir in dirs {
        fs::write(dir.path.join("cgroup.procs"), "0")
            .map_err(|e| io::Error::new(e.kind(), format!("enter {}: {e}", dir.path.display())))?;
    }
    Ok(())
}

/// Kills what is in the group and below it, and removes it; `false` while something of it is left.
pub(super) fn remove(path: &Path) -> io::Result<bool> {
    remove_to(path, MAX_DEPTH)
}

fn remove_to(path: &Path, depth: u32) -> io::Result<bool> {
    let procs = match fs::read_to_string(path.join("cgroup.procs")) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        // A threaded group does not list processes; its parent does.
        Err(_) => String::new(),
    };
    for pid in procs.lines().filter_map(|line| line.parse().ok()) {
        // The group is looked at again below: a pid that left it in between was never ours to kill.
        if let Some(row) = process::table_row(pid)?
            && fs::read_to_string(path.join("cgroup.procs")).is_ok_and(|now| now.lines().any(|line| line.parse() == Ok(pid)))
        {
            process::send_to(&row, Send::Kill)?;
        }
    }
    if depth > 0 {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                remove_to(&entry.path(), depth - 1)?;
            }
        }
    }
    match fs::remove_dir(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(false),
        Err(e) => Err(io::Error::new(e.kind(), format!("remove {}: {e}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn group(root: &Path, path: &str) {
        fs::create_dir_all(root.join(path)).unwrap();
        fs::write(root.join(path).join("cgroup.procs"), "").unwrap();
    }

    #[test]
    fn version_1_uses_our_own_group_of_each_controller_and_names_what_is_missing() {
        let root = tempfile::tempdir().unwrap();
        group(root.path(), "pids");
        group(root.path(), "memory");
        group(root.path(), "memory/service");
        let limits = Limits { tasks: 9, memory: Some(1 << 20), cpu_percent: Some(150) };
        let plan = CgroupPlan::make(root.path(), "8:pids:/\n4:memory:/service\n1:cpu,cpuacct:/\n", &limits);
        let paths: Vec<_> = plan.of("ci-x").into_iter().map(|dir| (dir.path, dir.writes)).collect();
        let write = |file: &str, value: &str| vec![(file.to_owned(), value.to_owned())];
        let expected = vec![
            (root.path().join("pids/ci-x"), write("pids.max", "9")),
            (root.path().join("memory/service/ci-x"), write("memory.limit_in_bytes", "1048576")),
        ];
        assert_eq!(paths, expected);
        assert_eq!(plan.unlimited, ["CPU"]);
    }

    #[test]
    fn version_2_uses_the_delegated_group_above_the_controllers_own() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.controllers"), "").unwrap();
        group(root.path(), "system.slice/us.service");
        group(root.path(), "system.slice/us.service/controller");
        let service = root.path().join("system.slice/us.service");
        fs::write(service.join("cgroup.controllers"), "pids memory").unwrap();
        fs::write(service.join("cgroup.subtree_control"), "pids memory").unwrap();
        let limits = Limits { tasks: 9, memory: Some(5), cpu_percent: Some(50) };
        let plan = CgroupPlan::make(root.path(), "0::/system.slice/us.service/controller\n", &limits);
        let write = |file: &str, value: &str| (file.to_owned(), value.to_owned());
        let expected = CgroupDir { path: service.join("ci-x"), writes: vec![write("pids.max", "9"), write("memory.max", "5")] };
        assert_eq!(plan.of("ci-x"), [expected]);
        assert_eq!(plan.unlimited, ["CPU"]);
    }
}
