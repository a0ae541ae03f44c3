//! The processes below the executor: found, killed, and reaped.
//!
//! As a child subreaper the executor inherits every orphan of the job, also one that left session and process group; so a walk
//! from the executor downwards finds all of them. That the environment itself is gone is the backend's to prove, not ours.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};

/// A process that is the same one when looked at again: a pid may be given anew, with another start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Process {
    pid: i32,
    /// Clock ticks since boot (`/proc/PID/stat`, field 22).
    started: u64,
}

impl Process {
    pub(super) fn is(&self, pid: i32) -> bool {
        self.pid == pid
    }
}

struct Stat {
    parent: i32,
    zombie: bool,
    process: Process,
}

/// Nobody of our user may read our memory or environment, and no core file holds it.
pub(super) fn harden() -> io::Result<()> {
    nix::sys::prctl::set_dumpable(false)?;
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0)?;
    Ok(())
}

/// Makes orphans of the job children of this process.
pub(super) fn adopt_orphans() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

/// All living processes below `root`, without it; in the order of their pids.
pub(super) fn below(root: i32) -> Vec<Process> {
    let all = read_all();
    let mut found = BTreeSet::from([root]);
    // Children may have lower pids than parents, so look until nothing new is found; each round finds one or ends.
    loop {
        let before = found.len();
        found.extend(all.values().filter(|stat| found.contains(&stat.parent)).map(|stat| stat.process.pid).collect::<Vec<_>>());
        if found.len() == before {
            break;
        }
    }
    found.remove(&root);
    found.iter().filter_map(|pid| all.get(pid)).filter(|stat| !stat.zombie).map(|stat| stat.process).collect()
}

/// SIGKILLs those that are still the same processes.
pub(super) fn kill_all(processes: &[Process]) {
    for process in processes {
        // Between this look and the signal the pid could pass to another process of the environment, which ends here as well.
        if read(process.pid).is_some_and(|stat| stat.process == *process) {
            match kill(Pid::from_raw(process.pid), Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => tracing::warn!(pid = process.pid, %error, "a process of the job cannot be killed"),
            }
        }
    }
}

/// Reaps adopted children that have ended, but for `spared`, whose exit somebody else waits for.
pub(super) fn reap(spared: Option<u32>) {
    let own = own_pid();
    for stat in read_all().into_values() {
        let pid = stat.process.pid;
        if stat.zombie && stat.parent == own && u32::try_from(pid).ok() != spared {
            if let Err(error) = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
                tracing::debug!(pid, %error, "reaped already");
            }
        }
    }
}

pub(super) fn own_pid() -> i32 {
    Pid::this().as_raw()
}

fn read_all() -> BTreeMap<i32, Stat> {
    let Ok(entries) = fs::read_dir("/proc") else { return BTreeMap::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, read(pid)?))).collect()
}

fn read(pid: i32) -> Option<Stat> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses and may hold anything, so the fields are counted from its end.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(text.get(end + 2..)?).ok()?;
    let mut fields = rest.split(' ');
    let zombie = matches!(fields.next()?, "Z" | "X");
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some(Stat { parent, zombie, process: Process { pid, started } })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::{
        process::Command,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn a_process_that_left_its_session_is_found_and_killed() {
        let mut shell = Command::new("sh").args(["-c", "setsid sleep 300 & wait"]).spawn().unwrap();
        let root = i32::try_from(shell.id()).unwrap();
        let limit = Instant::now() + Duration::from_secs(10);
        while below(root).is_empty() {
            assert!(Instant::now() < limit, "no child seen");
            std::thread::yield_now();
        }
        let found = below(root);
        kill_all(&found);
        shell.wait().unwrap();
        assert!(below(root).is_empty());
        assert!(found.iter().all(|process| read(process.pid).is_none_or(|s| s.zombie || s.process != *process)));
    }
}
