//! A machine with systemd: a Debian that boots in a container, on a copy of the cached system, with this machine's loopback.
//!
//! Commands go into it by `nsenter`. It is ended by the process id of its PID 1, also when a story panics.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use gitea_dynamic_runner::process::{ProcessIdentity, Send};
use http::Method;

use crate::support::{am_root, eventually, free_port, gitea::RealGitea, peers_dir, rest::Rest};

/// The unit under test.
pub(crate) const SERVICE: &str = "gitea-dynamic-runner.service";
/// The units of its environments.
pub(crate) const ENVIRONMENTS: &str = "gitea-dynamic-runner-ci-*.service";
const BOOT: Duration = Duration::from_secs(60);

pub(crate) struct Machine {
    folder: tempfile::TempDir,
    running: Option<(Child, ProcessIdentity)>,
    http: u16,
}

impl Machine {
    /// Booted, with the official runner in its PATH.
    pub(crate) async fn boot() -> Self {
        assert!(am_root(), "a container needs root: run `tests/run.sh systemd` as root");
        let system = peers_dir().join("systemd/root");
        assert!(system.join("usr/bin/systemctl").exists(), "{} is missing: run `tests/run.sh systemd`", system.display());
        let folder = tempfile::Builder::new().prefix("m").rand_bytes(4).tempdir().unwrap();
        for name in ["changed", "work", "root"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let at = |name: &str| folder.path().join(name).display().to_string();
        let layers = format!("lowerdir={},upperdir={},workdir={}", system.display(), at("changed"), at("work"));
        run("mount", &["-t", "overlay", "overlay", "-o", &layers, &at("root")]);
        let mut machine = Self { folder, running: None, http: free_port() };
        let runner = machine.root().join("usr/local/bin/gitea-runner");
        fs::copy(peers_dir().join("bin/gitea-runner"), runner).unwrap();
        machine.start().await;
        machine
    }

    /// Boots it, also once more after [`Self::power_cut`].
    pub(crate) async fn start(&mut self) {
        assert!(self.running.is_none(), "it runs already");
        let log = fs::File::options().create(true).append(true).open(self.folder.path().join("console")).unwrap();
        let mut command = Command::new("systemd-nspawn");
        command.args(["--quiet", "--boot", "--register=no", "--keep-unit", "--machine=gdr-test", "--directory"]).arg(self.root());
        let nspawn = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", nspawn.id());
        let init = eventually("the container has a PID 1", BOOT, async || {
            // For a moment nspawn has another child, which makes this one and ends.
            let children = fs::read_to_string(&children).ok()?;
            let pid = children.split_whitespace().find(|pid| is_first_of_its_namespace(pid))?.parse().ok()?;
            ProcessIdentity::of(pid).unwrap()
        })
        .await;
        self.running = Some((nspawn, init));
        eventually("the container has booted", BOOT, async || {
            let said = self.enter(&["systemctl", "is-system-running"]);
            ["running", "degraded"].contains(&text(&said.stdout).as_str()).then_some(())
        })
        .await;
    }

    /// Its PID 1 is gone, and so is everything in it, at once.
    pub(crate) fn power_cut(&mut self) {
        let (nspawn, init) = self.running.take().unwrap();
        init.send(Send::Kill).unwrap();
        ended(nspawn);
    }

    /// Everything in it is stopped in order.
    pub(crate) fn power_off(&mut self) {
        self.run(&["systemctl", "poweroff", "--no-block"]);
        let (nspawn, _) = self.running.take().unwrap();
        assert!(ended(nspawn), "a machine is off within {BOOT:?}");
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub(crate) fn scratch(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command in it, whatever comes of it.
    pub(crate) fn enter(&self, command: &[&str]) -> Output {
        let (_, init) = self.running.as_ref().unwrap();
        let pid = init.pid.to_string();
        let mut enter = Command::new("nsenter");
        enter.args(["--target", &pid, "--mount", "--pid", "--uts", "--ipc", "--"]).args(command).stdin(Stdio::null());
        enter
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive");
        enter.output().unwrap()
    }

    /// What a command says that must succeed.
    pub(crate) fn run(&self, command: &[&str]) -> String {
        let said = self.enter(command);
        assert!(said.status.success(), "{command:?}: {}\n{}\n{}", said.status, text(&said.stdout), text(&said.stderr));
        text(&said.stdout)
    }

    /// Builds the package of the program under test and installs it.
    pub(crate) fn install(&self, version: &str) -> String {
        let package = build_package(self.scratch(), version);
        let inside = self.root().join("mnt/package.deb");
        fs::copy(package, &inside).unwrap();
        let said = self.run(&["dpkg", "--install", "/mnt/package.deb"]);
        fs::remove_file(inside).unwrap();
        said
    }

    /// Settings of a machine that shares its ports with others, and the registration at this Gitea.
    pub(crate) fn configure(&self, gitea: &RealGitea) {
        let facade = free_port();
        let settings = self.root().join("etc/gitea-dynamic-runner/env");
        let mut lines = fs::read_to_string(&settings).unwrap();
        lines.push_str(&format!(
            "\nGITEA_URL={}\nHTTP_LISTEN=127.0.0.1:{}\nRUNNER_FACADE_LISTEN=127.0.0.1:{facade}\n",
            gitea.url(),
            self.http
        ));
        fs::write(settings, lines).unwrap();
        fs::write(self.root().join("mnt/token"), gitea.registration_token()).unwrap();
        // As the package says after its installation.
        let register = "set -a; . /etc/gitea-dynamic-runner/env; STATE_DIRECTORY=/var/lib/gitea-dynamic-runner gitea-dynamic-runner register --token-file /mnt/token";
        self.run(&["sh", "-c", register]);
        fs::remove_file(self.root().join("mnt/token")).unwrap();
    }

    /// A drop-in for the unit; an empty text removes it.
    pub(crate) fn drop_in(&self, lines: &str) {
        let folder = self.root().join("etc/systemd/system").join(format!("{SERVICE}.d"));
        if lines.is_empty() {
            fs::remove_dir_all(folder).unwrap();
        } else {
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("test.conf"), format!("[Service]\n{lines}\n")).unwrap();
        }
        self.run(&["systemctl", "daemon-reload"]);
    }

    /// A property of a unit.
    pub(crate) fn property(&self, unit: &str, name: &str) -> String {
        self.run(&["systemctl", "show", "--value", "--property", name, unit])
    }

    pub(crate) fn main_pid(&self) -> u32 {
        self.property(SERVICE, "MainPID").parse().unwrap()
    }

    /// The loaded units of environments.
    pub(crate) fn environments(&self) -> Vec<String> {
        let listed = self.run(&["systemctl", "list-units", "--all", "--plain", "--no-legend", ENVIRONMENTS]);
        listed.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
    }

    /// Waits until the service is active with another process than before.
    pub(crate) async fn active_anew(&self, before: u32, limit: Duration) {
        eventually("the service is active with a new process", limit, async || {
            let active = self.property(SERVICE, "ActiveState") == "active";
            (active && ![0, before].contains(&self.main_pid())).then_some(())
        })
        .await;
        assert_eq!(self.readiness().await, Some(200), "active means ready");
    }

    /// The status of `/readyz`, if somebody answers.
    pub(crate) async fn readiness(&self) -> Option<u16> {
        let rest = Rest::anonymous(&format!("http://127.0.0.1:{}", self.http));
        rest.send(Method::GET, "/readyz", &[], "".into()).await.ok().map(|answer| answer.status.as_u16())
    }

    pub(crate) fn journal(&self) -> String {
        self.run(&["journalctl", "--no-pager", "--output=cat", "--unit", SERVICE])
    }

    /// No environment is left: no unit, no process of a job's user, no folder.
    pub(crate) async fn nothing_runs(&self) {
        eventually("all environments are gone", Duration::from_secs(20), async || self.environments().is_empty().then_some(()))
            .await;
        let owners = self.run(&["sh", "-c", "stat --format='%u %n' /proc/[0-9]* 2>/dev/null; true"]);
        let of_a_job = |line: &&str| line.split(' ').next().is_some_and(|uid| uid.parse::<u32>().unwrap() >= 2000);
        let jobs: Vec<&str> = owners.lines().filter(of_a_job).collect();
        assert!(jobs.is_empty(), "{jobs:?}");
        let state = self.root().join("var/lib/gitea-dynamic-runner");
        for folder in ["env", "private/environments"].map(|name| state.join(name)).iter().filter(|folder| folder.exists()) {
            let left: Vec<_> =
                fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).filter(|name| name != ".all").collect();
            assert!(left.is_empty(), "{left:?} in {}", folder.display());
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() && self.running.is_some() {
            println!("{}", text(&self.enter(&["journalctl", "--no-pager", "--lines=200"]).stdout));
        }
        if self.running.is_some() {
            self.power_cut();
        }
        run("umount", &[&self.root().display().to_string()]);
    }
}

fn is_first_of_its_namespace(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    pids.split_whitespace().count() > 1 && pids.ends_with("\t1")
}

/// Waits for the end of a container; `false` if it had to be killed.
fn ended(mut nspawn: Child) -> bool {
    let until = Instant::now() + BOOT;
    while nspawn.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            nspawn.kill().unwrap();
            nspawn.wait().unwrap();
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// The package of the program under test.
pub(crate) fn build_package(folder: &Path, version: &str) -> PathBuf {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/build-deb.sh");
    let output = folder.display().to_string();
    let mut command = Command::new("bash");
    command.args([script, "--binary", env!("CARGO_BIN_EXE_gitea-dynamic-runner"), "--version", version, "--output", &output]);
    // Packed quickly: it is unpacked at once.
    command.env("DEB_COMPRESSION", "1").stdin(Stdio::null());
    let said = command.output().unwrap();
    assert!(said.status.success(), "{}", text(&said.stderr));
    text(&said.stdout).into()
}

/// What a command of this machine says, that must succeed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let said = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    assert!(said.status.success(), "{program} {arguments:?}: {}\n{}", said.status, text(&said.stderr));
    text(&said.stdout)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}
