//! The official runner as a child process: its files, its clean environment, its end.
//!
//! It runs one job and exits; what it says about the job it says to the bridge, and its exit code says nothing
//! (`gitea.md` §4.6). When and why to stop is decided elsewhere; how a job is stopped is here.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::{Child, Command},
    time::{Instant, MissedTickBehavior},
};

use super::{
    bridge::RunnerIdentity,
    processes,
    stop::{Stop, StopCause},
};
use crate::files::{self, Durable};

/// `--version` of a healthy runner answers in milliseconds.
const VERSION_LIMIT: Duration = Duration::from_secs(20);
/// How long the runner has after a stop to report by itself.
const GRACE: Duration = Duration::from_secs(15);
/// Runner 2.0 and later run `if: always()` steps after a cancel (`gitea.md` §4.5).
const CLEANUP_GRACE: Duration = Duration::from_secs(5 * 60);
/// Runner 1.x kills the shell of a step but not the shell's children, and waits for them (measured with 1.0.8).
const STEP_GRACE: Duration = Duration::from_secs(2);
/// How long what was killed may take to be gone; a process in uninterruptible sleep takes as long as its disk.
const KILL_LIMIT: Duration = Duration::from_secs(10);

/// The official runner's program.
#[derive(Debug, Clone)]
pub(super) struct RunnerProgram {
    pub(super) path: PathBuf,
    /// 1 if it cannot be told.
    pub(super) major: u32,
}

/// Folders of one environment, below the one that it may write.
#[derive(Debug, Clone)]
pub(super) struct Folders {
    /// `.runner` and `config.yaml`.
    pub(super) runner: PathBuf,
    pub(super) spool: PathBuf,
    /// Where jobs' workspaces go.
    pub(super) job: PathBuf,
}

/// Why there is no runner to run.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRunner {
    #[error("find {0:?} in PATH; set RUNNER_BIN to the official runner")]
    Missing(String),
    #[error("run {path} --version: {error}", path = path.display())]
    Refuses { path: PathBuf, error: io::Error },
    #[error("wait {s} s for {path} --version", s = VERSION_LIMIT.as_secs(), path = .0.display())]
    Silent(PathBuf),
}

impl NoRunner {
    /// Whether the next try would end the same way; a machine under load may only be slow.
    pub(super) fn is_permanent(&self) -> bool {
        use io::ErrorKind::{NotFound, PermissionDenied};
        match self {
            NoRunner::Missing(_) => true,
            NoRunner::Refuses { error, .. } => {
                matches!(error.kind(), NotFound | PermissionDenied) || error.raw_os_error() == Some(nix::libc::ENOEXEC)
            }
            NoRunner::Silent(_) => false,
        }
    }
}

impl RunnerProgram {
    /// Finds it and asks for its version, so that a missing or broken one is known before `start`.
    pub(super) async fn find(name: &str, environment: &[(String, String)]) -> Result<Self, NoRunner> {
        let path = which(name).ok_or_else(|| NoRunner::Missing(name.to_owned()))?;
        let mut command = clean(&path, environment);
        command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null());
        let output = tokio::time::timeout(VERSION_LIMIT, command.output())
            .await
            .map_err(|_| NoRunner::Silent(path.clone()))?
            .map_err(|error| NoRunner::Refuses { path: path.clone(), error })?;
        let major = major(&String::from_utf8_lossy(&output.stdout));
        Ok(Self { path, major })
    }
}

impl Folders {
    /// Makes them, for this user only.
    pub(super) fn make(work: &Path) -> io::Result<Self> {
        let folders = Self { runner: work.join("runner"), spool: work.join("spool"), job: work.join("job") };
        for folder in [&folders.runner, &folders.spool, &folders.job] {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        Ok(folders)
    }
}

/// Writes what the runner reads: `.runner` instead of a registration, and `config.yaml`.
pub(super) fn write_files(
    folders: &Folders,
    identity: &RunnerIdentity,
    address: &str,
    labels: &[String],
) -> anyhow::Result<PathBuf> {
    let labels: Vec<String> = labels.iter().map(|label| format!("{label}:host")).collect();
    let registration = serde_json::json!({
        "id": 1,
        "uuid": identity.uuid,
        "name": identity.name,
        "token": identity.token.expose(),
        "address": address,
        "labels": labels,
        "ephemeral": false,
    });
    let file = folders.runner.join(".runner");
    files::write_private(&file, &serde_json::to_vec(&registration)?, Durable::Boot).context("write .runner")?;
    let config = folders.runner.join("config.yaml");
    files::write_private(&config, config_yaml(&file, &folders.job)?.as_bytes(), Durable::Boot)
        .context("write the runner's settings")?;
    Ok(config)
}

/// Every key is understood or passed over by each build since 0.2 (`gitea.md` §4.7). JSON strings are YAML strings.
fn config_yaml(file: &Path, job: &Path) -> anyhow::Result<String> {
    let text =
        |path: &Path| serde_json::to_string(path.to_str().context("the work folder's path is no UTF-8")?).context("quote path");
    // A `shutdown_timeout` above 0 would let the job run on after SIGTERM for that long. The controller and Gitea bound the job.
    Ok(format!(
        "log:\n  level: info\nrunner:\n  file: {}\n  capacity: 1\n  env_file: \"\"\n  timeout: 24h\n  shutdown_timeout: 0s\n  \
         fetch_timeout: 5s\n  fetch_interval: 1s\n\
         cache:\n  enabled: false\nhost:\n  workdir_parent: {}\n",
        text(file)?,
        text(job)?
    ))
}

/// Starts the runner in a process group of its own.
pub(super) fn spawn(
    program: &RunnerProgram,
    config: &Path,
    folders: &Folders,
    environment: &[(String, String)],
) -> anyhow::Result<Child> {
    clean(&program.path, environment)
        .args(["daemon", "--once", "-c"])
        .arg(config)
        .current_dir(&folders.runner)
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("start {}", program.path.display()))
}

/// Waits for the runner's end, and makes it end when a stop is asked. Nothing of the job is left when this returns.
pub(super) async fn supervise(mut runner: Child, major: u32, stop: &Stop) -> io::Result<ExitStatus> {
    let pid = runner.id();
    let mut tick = tokio::time::interval(Duration::from_secs(2));
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let exited = loop {
        tokio::select! {
            exited = runner.wait() => break exited,
            cause = stop.asked() => break end(&mut runner, major, cause).await,
            _ = tick.tick() => processes::reap(pid),
        }
    };
    sweep().await?;
    exited
}

/// SIGTERM; soon the step's leftovers, without which the runner can report in order; after the grace SIGKILL.
async fn end(runner: &mut Child, major: u32, cause: StopCause) -> io::Result<ExitStatus> {
    let Some(pid) = runner.id() else { return runner.wait().await };
    let grace = if major >= 2 && cause == StopCause::Cancelled { CLEANUP_GRACE } else { GRACE };
    tracing::info!(?cause, grace_s = grace.as_secs(), "stop the runner");
    // Not reaped yet, so the pid is still the runner's.
    if let Err(error) = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM) {
        tracing::warn!(%error, "the runner cannot be signalled");
    }
    // A step's child whose shell was killed is ours by now, not the runner's; it still holds the pipe that the runner reads.
    let job = || {
        processes::below(Some(pid)).unwrap_or_else(|error| {
            tracing::warn!(%error, "the job's processes cannot be listed");
            Vec::new()
        })
    };
    let stopped = job();
    let deadline = Instant::now() + grace;
    let mut tick = tokio::time::interval_at(Instant::now() + STEP_GRACE, STEP_GRACE);
    loop {
        tokio::select! {
            exited = runner.wait() => return exited,
            () = tokio::time::sleep_until(deadline) => break,
            _ = tick.tick() => {
                // Steps that a newer runner starts after the cancel are its cleanup, and live.
                processes::kill_all(&if major >= 2 { stopped.clone() } else { job() });
                processes::reap(Some(pid));
            }
        }
    }
    tracing::warn!("the runner did not end in time and is killed");
    runner.start_kill()?;
    runner.wait().await
}

/// Kills what the job left behind, until nothing is found.
async fn sweep() -> io::Result<()> {
    let deadline = Instant::now() + KILL_LIMIT;
    loop {
        let left = processes::below(None)?;
        processes::kill_all(&left);
        processes::reap(None);
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let text = format!("{} processes of the job outlive SIGKILL; the backend removes the environment", left.len());
            return Err(io::Error::other(text));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A command that inherits nothing of ours but what it is given.
fn clean(program: &Path, environment: &[(String, String)]) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
    command
}

fn which(name: &str) -> Option<PathBuf> {
    let found = |path: PathBuf| fs::metadata(&path).is_ok_and(|file| file.is_file()).then_some(path);
    if name.contains('/') {
        return found(fs::canonicalize(name).ok()?);
    }
    std::env::split_paths(&std::env::var_os("PATH")?).find_map(|folder| found(folder.join(name)))
}

/// `gitea-runner version v1.0.8` → 1.
fn major(version: &str) -> u32 {
    let numbers = version.split_whitespace().filter_map(|word| word.trim_start_matches('v').split_once('.'));
    numbers.filter_map(|(major, _)| major.parse().ok()).next().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn the_major_version_is_read_and_an_unknown_one_counts_as_old() {
        for (text, expected) in [
            ("gitea-runner version v1.0.8", 1),
            ("gitea-runner version v3.2.0-4-gabc\n", 3),
            ("act_runner version 0.2.13", 0),
            ("dev", 1),
            ("", 1),
        ] {
            assert_eq!(major(text), expected, "{text}");
        }
    }

    #[test]
    fn the_runners_files_are_its_own_and_name_the_bridge() {
        use std::os::unix::fs::PermissionsExt as _;
        let work = tempfile::tempdir().unwrap();
        let folders = Folders::make(work.path()).unwrap();
        let token = crate::secret::Secret::random();
        let identity = RunnerIdentity { uuid: "u".into(), name: "n".into(), token: token.clone() };
        let config = write_files(&folders, &identity, "http://127.0.0.1:4711", &["self-hosted".into(), "pod".into()]).unwrap();
        let file = folders.runner.join(".runner");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let registration: serde_json::Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(registration["labels"], serde_json::json!(["self-hosted:host", "pod:host"]));
        assert_eq!(registration["token"], token.expose());
        let config = fs::read_to_string(config).unwrap();
        assert!(config.contains("cache:\n  enabled: false"), "{config}");
        assert!(!config.contains(token.expose()));
    }
}
