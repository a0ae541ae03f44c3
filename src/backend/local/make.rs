//! Makes one environment: record, uid, folder, keeper, in this order.
//!
//! The record comes first, so that a crash at any later point leaves something that `list` shows and `end` removes. A crash before the keeper: the next
//! `ensure` starts it, or after 60 s the environment has ended without ever starting. Two keepers of one environment are impossible (its lock).

use std::{
    collections::{BTreeMap, HashSet},
    fs, io,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use nix::unistd::{Gid, Uid, User, chown};
use tokio::{io::AsyncReadExt as _, io::AsyncWriteExt as _, sync::Notify, time::timeout};

use super::{
    Isolation, LocalConfig,
    cgroup::CgroupPlan,
    look,
    order::{Mode, Order},
    state::{self, Durable, Layout, RECORD_VERSION, Record},
    unit::{self, Keepers, Unit},
};
use crate::{
    backend::{BackendError, Ensured, EnvironmentSpec},
    failpoint,
    ids::EnvironmentName,
    names::{env, metadata},
    process,
};

/// Whether the warning about shared folders was written already.
static SAID_SHARED: AtomicBool = AtomicBool::new(false);
/// A keeper that has not answered by then is left to itself: the environment shows what became of it.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Uids that are looked at for a free one.
const UID_RANGE: u32 = 10_000;
/// Folders for everybody, of which each environment gets its own.
const SHARED_TMP: [&str; 2] = ["/tmp", "/var/tmp"];
const FOLDERS: [&str; 3] = ["home", "tmp", "work"];

pub(super) struct Maker<'a> {
    pub(super) config: &'a LocalConfig,
    pub(super) layout: &'a Layout,
    pub(super) cgroups: &'a CgroupPlan,
}

/// All that `prepare` needs; no uid yet.
pub(super) struct Plan {
    layout: Layout,
    name: EnvironmentName,
    record: Record,
    isolation: Isolation,
    order: Order,
}

pub(super) struct Prepared {
    pub(super) ensured: Ensured,
    /// To be given to a keeper; none if the environment has or had one.
    pub(super) order: Option<Order>,
}

impl Maker<'_> {
    pub(super) fn plan(&self, spec: &EnvironmentSpec) -> Result<Plan, BackendError> {
        let now = state::unix_ms(SystemTime::now());
        let deadline_ms = now.saturating_add(spec.deadline_seconds.saturating_mul(1000));
        let boot = process::boot_id().map_err(|error| BackendError::Transient(format!("read the boot id: {error}")))?;
        let (labels, annotations) = self.metadata(spec);
        let name = spec.name.to_string();
        let record = Record {
            version: RECORD_VERSION,
            name: name.clone(),
            labels,
            annotations,
            uid: None,
            created_ms: now,
            deadline_ms,
            boot: boot.clone(),
            unit: matches!(self.config.keepers, Keepers::Units { .. }).then(|| unit::name(&spec.name)),
        };
        let command = self.config.executor.iter().map(|part| text(Path::new(part))).collect::<Result<_, _>>()?;
        let order = Order {
            name,
            state: self.layout.state.clone(),
            command,
            environment: self.environment(spec)?,
            directory: self.layout.env(&spec.name).join("work"),
            mode: Mode::Unisolated,
            cgroups: self.cgroups.of(spec.name.as_str()),
            tasks: self.config.limits.tasks,
            boot,
            deadline_ms,
            grace_ms: u64::try_from(self.config.grace.as_millis()).unwrap_or(u64::MAX),
        };
        let mut plan =
            Plan { layout: self.layout.clone(), name: spec.name.clone(), record, isolation: self.config.isolation, order };
        if let Isolation::UidPerSlot { base } = self.config.isolation {
            plan.order.mode = Mode::Isolated { uid: base, binds: self.binds(spec) };
        }
        Ok(plan)
    }

    fn metadata(&self, spec: &EnvironmentSpec) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
        let key = |name: &str| format!("{}/{name}", self.config.metadata_prefix);
        let labels = [
            (metadata::RUNNER, "true".to_owned()),
            (metadata::ASSIGNMENT_ID, spec.assignment.to_string()),
            (metadata::TASK_ID, spec.assignment.task().to_string()),
            (metadata::BACKEND, self.config.kind.to_string()),
            (metadata::INSTANCE, spec.instance.to_string()),
            (metadata::ENVIRONMENT, spec.nonce.to_string()),
        ];
        let annotations = [
            (metadata::REPOSITORY, spec.repository.clone()),
            (metadata::JOB_KEY, spec.job_key.clone()),
            (metadata::SPIFFE_ID, spec.spiffe_id.clone()),
            (metadata::STEPS, spec.steps.to_string()),
        ];
        (labels.map(|(k, v)| (key(k), v)).into(), annotations.map(|(k, v)| (key(k), v)).into())
    }

    /// Exactly what the executor gets, and nothing of the controller's own.
    fn environment(&self, spec: &EnvironmentSpec) -> Result<Vec<(String, String)>, BackendError> {
        let folder = self.layout.env(&spec.name);
        let inside = |name: &str| text(&folder.join(name));
        let mut variables = vec![
            (env::ASSIGNMENT_ID, spec.assignment.to_string()),
            (env::SPIFFE_ID, spec.spiffe_id.clone()),
            (env::CAPABILITY, spec.capability.expose().to_owned()),
            (env::FACADE_URL, spec.facade_url.clone()),
            (env::FACADE_SPIFFE_ID, spec.facade_spiffe_id.clone()),
            (env::GITEA_URL, spec.gitea_url.clone()),
            (env::SPIFFE_ENDPOINT_SOCKET, format!("unix://{}", text(&self.layout.socket(&spec.name))?)),
            (env::WORK_DIRECTORY, inside("work")?),
            ("HOME", inside("home")?),
            ("TMPDIR", inside("tmp")?),
            ("PATH", self.config.path.clone()),
            ("LANG", "C.UTF-8".to_owned()),
        ];
        if let Some(file) = &spec.gitea_ca_file {
            variables.push((env::GITEA_CA_FILE, text(file)?));
        }
        if let Some(file) = &self.config.runner_bin {
            variables.push((env::RUNNER_BIN, text(file)?));
        }
        #[cfg(feature = "failpoints")]
        let at = std::env::var(failpoint::EXECUTOR_VARIABLE).ok();
        #[cfg(feature = "failpoints")]
        variables.extend(at.map(|at| (failpoint::VARIABLE, at)));
        let mut variables: Vec<(String, String)> = variables.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        variables.extend(self.config.proxy.iter().cloned());
        if let Some((key, _)) = variables.iter().find(|(key, value)| key.contains('\0') || value.contains('\0')) {
            return Err(BackendError::Permanent(format!("{key} contains a zero byte")));
        }
        Ok(variables)
    }

    /// Its own `/tmp` and `/var/tmp`, unless something that the job needs lies there.
    fn binds(&self, spec: &EnvironmentSpec) -> Vec<(PathBuf, PathBuf)> {
        let mut needed = vec![self.layout.state.clone()];
        needed.extend(self.config.executor.first().map(PathBuf::from));
        needed.extend(self.config.runner_bin.clone());
        needed.extend(spec.gitea_ca_file.clone());
        let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        // What is named through `/proc` (this binary) needs no path in the environment.
        let needed: Vec<PathBuf> = needed.iter().filter(|path| !path.starts_with("/proc")).map(|path| real(path)).collect();
        let mut binds = Vec::new();
        for target in SHARED_TMP.map(PathBuf::from).into_iter().filter(|target| target.is_dir()) {
            let covered = real(&target);
            match needed.iter().find(|path| path.starts_with(&covered)) {
                // The same for every environment of this process, so it is said once.
                Some(_) if SAID_SHARED.swap(true, Ordering::Relaxed) => {}
                Some(path) => tracing::warn!(
                    folder = %target.display(), needed = %path.display(),
                    "environments share this folder, because what they need lies there; put STATE_DIRECTORY elsewhere to give each its own"
                ),
                None => binds.push((self.layout.env(&spec.name).join("tmp"), target)),
            }
        }
        binds
    }
}

/// Writes the record and makes the folder, if that is not done yet.
pub(super) fn prepare(mut plan: Plan) -> io::Result<Prepared> {
    let (layout, name) = (plan.layout.clone(), plan.name.clone());
    let ensured = {
        let _all = layout.lock_all()?;
        if let Some(record) = layout.read_record(&name)? {
            // Its own deadline goes on; its keeper, if it needs one still, is told that one.
            plan.order.deadline_ms = record.deadline_ms;
            plan.record = record;
            Ensured::Adopted
        } else {
            if let Isolation::UidPerSlot { base } = plan.isolation {
                plan.record.uid = Some(free_uid(&layout, base)?);
            }
            state::write_json(&layout.record(&name), &plan.record, Durable::Disk)?;
            failpoint::reached("local.recorded");
            Ensured::Created
        }
    };
    if layout.keeper(&name).exists() || look::phase(&layout, &name, &plan.record)?.ended().is_some() {
        return Ok(Prepared { ensured, order: None });
    }
    if let (Mode::Isolated { uid, .. }, Some(own)) = (&mut plan.order.mode, plan.record.uid) {
        *uid = own;
    } else if matches!(plan.order.mode, Mode::Isolated { .. }) || plan.record.uid.is_some() {
        return Err(io::Error::other(format!(
            "environment {name} was made with another isolation than is set now: it has to be ended first"
        )));
    }
    make_folders(&layout.env(&name), plan.record.uid)?;
    failpoint::reached("local.foldered");
    drop(state::open_lock(&layout.lock(&name))?);
    Ok(Prepared { ensured, order: Some(plan.order) })
}

/// Sets a label to `true`, on disk on return; `false` if there is no such environment.
pub(super) fn label(layout: &Layout, name: &EnvironmentName, key: &str) -> io::Result<bool> {
    let _all = layout.lock_all()?;
    let Some(mut record) = layout.read_record(name)? else { return Ok(false) };
    if record.labels.insert(key.to_owned(), "true".to_owned()).as_deref() != Some("true") {
        state::write_json(&layout.record(name), &record, Durable::Disk)?;
    }
    Ok(true)
}

/// The first uid that no environment, no process and no known user has.
fn free_uid(layout: &Layout, base: u32) -> io::Result<u32> {
    let mut taken = HashSet::new();
    for name in layout.names()? {
        taken.extend(layout.read_record(&name)?.and_then(|record| record.uid));
    }
    for row in process::table()? {
        taken.extend(process::uids_of(row.pid)?.map(|(real, effective)| [real, effective]).into_iter().flatten());
    }
    for uid in base..base.saturating_add(UID_RANGE) {
        if !taken.contains(&uid) && User::from_uid(Uid::from_raw(uid))?.is_none() {
            return Ok(uid);
        }
    }
    Err(io::Error::other(format!(
        "no free uid between {base} and {}: set POD_EXECUTOR_UID to a number with free ones above it",
        base + UID_RANGE
    )))
}

/// Nobody but us can write here until the last step gives the top folder away.
fn make_folders(folder: &Path, uid: Option<u32>) -> io::Result<()> {
    let give = |path: &Path| -> io::Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
        Ok(uid.map_or(Ok(()), |uid| chown(path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid))))?)
    };
    for name in FOLDERS {
        fs::create_dir_all(folder.join(name))?;
        give(&folder.join(name))?;
    }
    give(folder)
}

/// Starts a keeper and waits until the executor runs or has failed to.
///
/// We may die in between: a keeper without an order ends by itself (its socket ends with us), and with it its unit if it has one.
pub(super) async fn start(config: &LocalConfig, name: &EnvironmentName, order: Order, changed: &Arc<Notify>) -> Result<()> {
    let mut socket = match &config.keepers {
        Keepers::Children => start_child(&config.self_exe, changed)?,
        Keepers::Units { service } => {
            let unit = Unit { name: &unit::name(name), service, self_exe: &config.self_exe, limits: &config.limits };
            unit.start(&Layout { state: config.state_directory.clone() }, name).await?
        }
    };
    failpoint::reached("local.kept");
    let line = order.line()?;
    drop(order);
    timeout(START_LIMIT, async {
        socket.write_all(&line).await.context("give the keeper its order")?;
        let mut byte = [0];
        // The first byte of a word is enough: which one it was, the records say.
        socket.read(&mut byte).await.context("hear from the keeper")?;
        Ok(())
    })
    .await
    .context("the keeper does not answer")?
}

/// Our end of the socket that the keeper has as its stdin.
fn start_child(self_exe: &Path, changed: &Arc<Notify>) -> Result<tokio::net::UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = tokio::process::Command::new(self_exe);
    command.arg("local-keeper").env_clear().current_dir("/");
    command.stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
    let mut keeper = command.spawn().with_context(|| format!("start {}", self_exe.display()))?;
    // The command holds the keeper's end of the socket; without it the keeper's death can be seen.
    drop(command);
    let changed = changed.clone();
    tokio::spawn(async move {
        // Reaps it. How it ended stands in its status file.
        keeper.wait().await.ok();
        changed.notify_one();
    });
    ours.set_nonblocking(true)?;
    Ok(tokio::net::UnixStream::from_std(ours)?)
}

fn text(path: &Path) -> Result<String, BackendError> {
    path.to_str().map(str::to_owned).ok_or_else(|| BackendError::Permanent(format!("{} is not UTF-8", path.display())))
}
