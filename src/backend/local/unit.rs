//! Environments in systemd units of their own, where the controller itself is a service: PID 1 starts the keeper, not we.
//!
//! So nothing of the service is the job's: not its restart or stop, its hardening, its rights, its memory limit, its place in line for the OOM
//! killer. A unit only starts a keeper and ends with it; records, lock and `end` are the same as without systemd. It speaks to systemd
//! through `systemd-run` and `systemctl`, which need no message bus as root.

use std::{
    fs, io,
    path::Path,
    process::{Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::net::{UnixListener, UnixStream};

use super::{
    cgroup::Limits,
    state::{self, Layout},
};
use crate::ids::EnvironmentName;

/// For one word of systemd's; it answers in milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// In an emergency the kernel ends jobs before it ends anything of the machine's.
const OOM_SCORE: u32 = 500;

/// Who starts the keepers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Keepers {
    /// We do. They outlive us, but stay in our cgroup.
    Children,
    /// Systemd, each in a transient unit.
    Units {
        /// The unit that we are, such as `gitea-dynamic-runner.service`.
        service: String,
    },
}

impl Keepers {
    /// Systemd, where it runs this machine and we are one of its services, as root; else we.
    pub fn here() -> Self {
        let is_ours = nix::unistd::geteuid().is_root() && Path::new("/run/systemd/system").is_dir();
        if !is_ours || std::env::var_os("INVOCATION_ID").is_none() {
            return Keepers::Children;
        }
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        service_of(&own).map_or(Keepers::Children, |service| Keepers::Units { service })
    }
}

/// The service in `/proc/self/cgroup`, in systemd's own hierarchy (version 1) or in the only one (version 2).
fn service_of(own: &str) -> Option<String> {
    let path =
        own.lines().find_map(|line| line.split_once(":name=systemd:").map(|(_, path)| path).or(line.strip_prefix("0::")))?;
    let unit = path.rsplit('/').next()?;
    unit.ends_with(".service").then(|| unit.to_owned())
}

/// The name of an environment's unit. The environment's own name has instance and nonce, so no two are alike.
pub(super) fn name(environment: &EnvironmentName) -> String {
    format!("gitea-dynamic-runner-{environment}.service")
}

/// One keeper's unit, before it is started.
pub(super) struct Unit<'a> {
    pub(super) name: &'a str,
    pub(super) service: &'a str,
    pub(super) self_exe: &'a Path,
    pub(super) limits: &'a Limits,
}

impl Unit<'_> {
    /// Starts it, and returns the socket that its keeper has as its stdin. The order goes through that: properties and arguments of a unit
    /// are there for everybody to read.
    pub(super) async fn start(&self, layout: &Layout, environment: &EnvironmentName) -> Result<UnixStream> {
        let path = layout.order_socket(environment);
        state::unlink(&path)?;
        let listener = UnixListener::bind(&path).with_context(|| format!("listen on {}", path.display()))?;
        let mut command = tokio::process::Command::new("systemd-run");
        command.args(self.properties(&path)).stdin(Stdio::null()).kill_on_drop(true);
        let answer = tokio::time::timeout(ANSWER_LIMIT * 2, command.output()).await;
        let answer = answer.context("systemd does not answer")?.context("run systemd-run")?;
        if !answer.status.success() {
            // A unit of this name that ends just now is the rest of an earlier try; the next try finds it gone.
            bail!("start {} with systemd: {}", self.name, said(&answer));
        }
        let (socket, _) =
            tokio::time::timeout(ANSWER_LIMIT, listener.accept()).await.context("the unit's keeper does not call")??;
        ensure!(socket.peer_cred()?.uid() == 0, "somebody other than systemd called for an order");
        state::unlink(&path)?;
        Ok(socket)
    }

    fn properties(&self, socket: &Path) -> Vec<String> {
        let Limits { tasks, memory, cpu_percent } = self.limits;
        let socket = socket.display();
        let mut properties = vec![
            // An error of the start is told to us.
            "Type=exec".to_owned(),
            // A stop is for the keeper to hand on; what it leaves is killed.
            "KillMode=mixed".to_owned(),
            // To say how it ended, at a machine's shutdown, say; not longer than an operator likes to wait.
            "TimeoutStopSec=30".to_owned(),
            // Of a job that takes too much one process dies, and the job can say so.
            "OOMPolicy=continue".to_owned(),
            format!("OOMScoreAdjust={OOM_SCORE}"),
            // At a shutdown jobs are stopped while their controller can still report it.
            format!("After={}", self.service),
            // The same socket for both is one connection in both directions.
            format!("StandardInput=file:{socket}"),
            format!("StandardOutput=file:{socket}"),
            "StandardError=journal".to_owned(),
            format!("TasksMax={tasks}"),
        ];
        properties.extend(memory.map(|bytes| format!("MemoryMax={bytes}")));
        properties.extend(cpu_percent.map(|percent| format!("CPUQuota={percent}%")));
        let mut arguments =
            ["--quiet", "--collect", "--description=An environment of one Gitea Actions job"].map(str::to_owned).to_vec();
        arguments.push(format!("--unit={}", self.name));
        arguments.extend(properties.into_iter().map(|property| format!("--property={property}")));
        // `systemd-run` looks whether what it runs is there, and may not look at our binary without a right that we do not want to
        // have (CAP_SYS_PTRACE). `env` has no such scruples, and PID 1 has the right.
        arguments.extend(["--".to_owned(), "/usr/bin/env".to_owned(), self.keeper_path(), "local-keeper".to_owned()]);
        arguments
    }

    /// This very binary, even if an upgrade has replaced it on disk.
    fn keeper_path(&self) -> String {
        let own = Path::new("/proc/self/exe");
        if self.self_exe == own { format!("/proc/{}/exe", std::process::id()) } else { self.self_exe.display().to_string() }
    }
}

/// Stops a unit, at the latest until `until`; `true` once systemd does not know it any more.
pub(super) fn ensure_stopped(unit: &str, until: Instant) -> io::Result<bool> {
    let mut stop_asked = false;
    loop {
        let shown = systemctl(&["show", "--property=LoadState", "--value", unit])?;
        if shown == "not-found" {
            return Ok(true);
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        if stop_asked {
            sleep(LOOK_AGAIN);
        } else {
            stop_asked = true;
            // It may be gone by now, which the next look tells.
            systemctl(&["stop", "--no-block", unit]).ok();
        }
    }
}

fn systemctl(arguments: &[&str]) -> io::Result<String> {
    let mut command = Command::new("systemctl");
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| io::Error::new(e.kind(), format!("run systemctl: {e}")))?;
    let until = Instant::now() + ANSWER_LIMIT;
    while child.try_wait()?.is_none() {
        if Instant::now() >= until {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, "systemd does not answer systemctl"));
        }
        sleep(Duration::from_millis(2));
    }
    let answer = child.wait_with_output()?;
    if !answer.status.success() {
        return Err(io::Error::other(format!("systemctl {}: {}", arguments.join(" "), said(&answer))));
    }
    Ok(String::from_utf8_lossy(&answer.stdout).trim().to_owned())
}

/// What a program said when it failed, on one line.
fn said(answer: &Output) -> String {
    let text = String::from_utf8_lossy(&answer.stderr);
    let text: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(500).collect();
    if text.is_empty() { answer.status.to_string() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_is_taken_for_one() {
        let service = |own: &str| service_of(own);
        let ours = Some("gitea-dynamic-runner.service".to_owned());
        assert_eq!(service("0::/system.slice/gitea-dynamic-runner.service\n"), ours);
        assert_eq!(
            service("4:memory:/a.service\n1:name=systemd:/system.slice/gitea-dynamic-runner.service\n0::/x.scope\n"),
            ours
        );
        assert_eq!(service("0::/user.slice/user-0.slice/session-3.scope\n"), None);
        assert_eq!(service("0::/\n"), None);
        assert_eq!(service(""), None);
    }

    #[test]
    fn a_unit_says_the_limits_and_no_secret_could_be_among_its_arguments() {
        let limits = Limits { tasks: 9, memory: Some(1 << 20), cpu_percent: Some(150) };
        let unit = Unit { name: "x.service", service: "us.service", self_exe: Path::new("/proc/self/exe"), limits: &limits };
        let arguments = unit.properties(Path::new("/state/private/abc.sock"));
        for wanted in ["TasksMax=9", "MemoryMax=1048576", "CPUQuota=150%", "After=us.service", "KillMode=mixed"] {
            assert!(arguments.contains(&format!("--property={wanted}")), "{wanted} in {arguments:?}");
        }
        assert_eq!(arguments.iter().filter(|a| a.ends_with("file:/state/private/abc.sock")).count(), 2);
        assert_eq!(arguments.last().map(String::as_str), Some("local-keeper"));
        assert!(!arguments.iter().any(|a| a.starts_with("--setenv") || a.contains("Environment=")), "{arguments:?}");
    }
}
