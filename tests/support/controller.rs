//! The controller under test, as its operator starts it: `register` once where it needs it, then `serve --standalone` with local backends.
//!
//! It is the built binary, at a real Gitea or at the stand-in forge. What runs because of it is told by the uid range that it was given (as root) or by its folder; when
//! the value is dropped in a passing test, nothing of that may be left.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gitea_dynamic_runner::ids::TaskId;
use http::Method;
use nix::{sys::signal, unistd::Pid};

use super::{am_root, eventually, free_port, gitea::RealGitea, passable, peers_dir, rest::Rest};

/// More than any story has slots.
const UIDS: u32 = 64;
/// The design's limit for SIGTERM while Gitea answers.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Loopback alone may not read.
pub(crate) const READ_TOKEN: &str = "may-read";
pub(crate) const ADMIN_TOKEN: &str = "may-drain";

pub(crate) struct ControllerOptions {
    pub(crate) pod_capacity: u32,
    pub(crate) vm_capacity: u32,
    /// More settings; they win.
    pub(crate) env: Vec<(&'static str, String)>,
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self { pod_capacity: 4, vm_capacity: 1, env: Vec::new() }
    }
}

pub(crate) struct Controller {
    child: Option<Child>,
    folder: PathBuf,
    program: PathBuf,
    settings: BTreeMap<&'static str, String>,
    http: Rest,
    first_uid: u32,
    gitea_folder: PathBuf,
}

/// A process that runs because of this controller, the controller itself left out.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) command: String,
}

impl Controller {
    /// At a real Gitea: registered, started and ready on return.
    pub(crate) async fn start(gitea: &RealGitea, options: ControllerOptions) -> Self {
        let runner = peers_dir().join("bin/gitea-runner");
        let mut controller = Self::prepare(gitea.base(), gitea.url(), Some(&runner), options);
        controller.register(gitea.registration_token());
        controller.start_again().await;
        controller
    }

    /// Its folder below `base` and its settings; nothing runs yet. Without a `runner`, the demo's steps runner is the inner one.
    pub(crate) fn prepare(base: &Path, gitea_url: &str, runner: Option<&Path>, options: ControllerOptions) -> Self {
        let folder = base.join("c");
        std::fs::create_dir(&folder).unwrap();
        passable(&folder);
        // Other users must be able to run both, and neither the build's folder nor the cache need be open to them.
        let program = place(env!("CARGO_BIN_EXE_gitea-dynamic-runner").as_ref(), &folder);
        let runner = runner.map_or_else(|| program.clone(), |runner| place(runner, &folder));
        let reader = folder.join("read-token");
        std::fs::write(&reader, READ_TOKEN).unwrap();
        let admin = folder.join("admin-token");
        std::fs::write(&admin, ADMIN_TOKEN).unwrap();
        let (facade, http) = (free_port(), free_port());
        // Ports of this machine are given once at a time, so uids derived from one are, too.
        let first_uid = 200_000 + u32::from(http) * UIDS;
        let mut settings = BTreeMap::from([
            ("GITEA_URL", gitea_url.to_owned()),
            ("STATE_DIRECTORY", folder.join("state").display().to_string()),
            ("POD_BACKEND", "local".to_owned()),
            ("VM_BACKEND", "local".to_owned()),
            ("POD_CAPACITY", options.pod_capacity.to_string()),
            ("VM_CAPACITY", options.vm_capacity.to_string()),
            ("POD_EXECUTOR_UID", first_uid.to_string()),
            ("RUNNER_FACADE_LISTEN", format!("127.0.0.1:{facade}")),
            ("HTTP_LISTEN", format!("127.0.0.1:{http}")),
            ("RUNNER_BIN", runner.display().to_string()),
            ("READ_TOKEN_FILE", reader.display().to_string()),
            ("ADMIN_TOKEN_FILE", admin.display().to_string()),
            ("LOG_FORMAT", "json".to_owned()),
            ("PATH", std::env::var("PATH").unwrap()),
            ("HOME", folder.display().to_string()),
        ]);
        if !am_root() {
            settings.insert("LOCAL_UNISOLATED", "1".to_owned());
        }
        settings.extend(options.env);
        let http = Rest::anonymous(&format!("http://127.0.0.1:{http}")).with_password("reader", READ_TOKEN);
        Self { child: None, folder, program, settings, http, first_uid, gitea_folder: base.join("gitea") }
    }

    fn register(&self, token: &str) {
        let file = self.folder.join("registration-token");
        std::fs::write(&file, token).unwrap();
        let mut command = self.command();
        let said = command.args(["register", "--token-file"]).arg(&file).output().unwrap();
        std::fs::remove_file(&file).unwrap();
        let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success(), "register: {}\n{out}\n{err}", said.status);
    }

    /// The program with its settings, as the operator has them in his shell.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().envs(&self.settings).current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Another program for [`Self::use_program`], where users of jobs can run it.
    pub(crate) fn place_program(&self, file: &Path, name: &str) -> PathBuf {
        let folder = self.folder.join(name);
        std::fs::create_dir(&folder).unwrap();
        passable(&folder);
        place(file, &folder)
    }

    /// For its next start.
    pub(crate) fn use_program(&mut self, program: &Path) {
        program.clone_into(&mut self.program);
    }

    /// After [`Self::kill9`] or [`Self::sigterm`]; ready on return.
    pub(crate) async fn start_again(&mut self) {
        self.spawn();
        self.ready().await;
    }

    /// Starts it, and does not wait for it.
    pub(crate) fn spawn(&mut self) {
        assert!(self.child.is_none(), "it runs already");
        let log = std::fs::File::options().create(true).append(true).open(self.log_file()).unwrap();
        let mut command = self.command();
        command.args(["serve", "--standalone"]).stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    /// Waits until it is ready.
    pub(crate) async fn ready(&mut self) {
        self.ready_within(Duration::from_secs(20)).await;
    }

    /// As [`Self::ready`], on a machine with more to do.
    pub(crate) async fn ready_within(&mut self, limit: Duration) {
        let Self { child, http, .. } = self;
        let ready = eventually("the controller is ready", limit, async || {
            if let Some(status) = child.as_mut().unwrap().try_wait().unwrap() {
                return Some(Err(status));
            }
            readiness(http).await.is_some_and(|reasons| reasons.is_empty()).then_some(Ok(()))
        });
        if let Err(status) = ready.await {
            panic!("the controller ended at its start: {status}");
        }
    }

    /// Why it is not ready, in its own words; empty if it is, `None` if it does not answer.
    pub(crate) async fn readiness(&self) -> Option<String> {
        readiness(&self.http).await
    }

    /// All of `/metrics`; `None` if nobody answers.
    pub(crate) async fn metrics(&self) -> Option<String> {
        let answer = self.http.send(Method::GET, "/metrics", &[], "".into()).await.ok()?;
        answer.status.is_success().then(|| answer.text())
    }

    /// The value of one series; `None` if it is not there, or nobody answers.
    pub(crate) async fn metric(&self, series: &str) -> Option<f64> {
        self.metrics().await?.lines().find_map(|line| line.strip_prefix(&format!("gitea_dynamic_runner_{series} "))?.parse().ok())
    }

    /// A page of the dashboard, as who may read it.
    pub(crate) async fn page(&self, path: &str) -> String {
        let answer = self.http.send(Method::GET, path, &[], "".into()).await.unwrap();
        assert!(answer.status.is_success(), "{path}: {} {}", answer.status, answer.text());
        answer.text()
    }

    pub(crate) async fn api(&self, path: &str) -> serde_json::Value {
        serde_json::from_str(&self.page(path).await).unwrap()
    }

    /// Where its pages and answers are.
    pub(crate) fn http_url(&self) -> String {
        format!("http://{}", self.settings["HTTP_LISTEN"])
    }

    /// Of the running controller.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub(crate) fn setting(&self, name: &str) -> &str {
        &self.settings[name]
    }

    /// A setting for its next start; `None` takes it away.
    pub(crate) fn set(&mut self, name: &'static str, value: Option<String>) {
        match value {
            Some(value) => drop(self.settings.insert(name, value)),
            None => drop(self.settings.remove(name)),
        }
    }

    /// Waits until it ends itself by SIGKILL, as it does at a failpoint.
    pub(crate) async fn crashes(&mut self, limit: Duration) {
        use std::os::unix::process::ExitStatusExt as _;
        let child = self.child.as_mut().unwrap();
        let status = eventually("the controller crashes", limit, async || child.try_wait().unwrap()).await;
        assert_eq!(status.signal(), Some(9), "it ended by itself: {status}");
        self.child = None;
    }

    /// The crash that nothing can prepare for.
    pub(crate) fn kill9(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Asks it to end, and panics if it takes longer than it may. Running jobs go on.
    pub(crate) fn sigterm(&mut self) {
        let child = self.child.take().unwrap();
        let status = end(child).expect("the controller ends within 10 s of a SIGTERM");
        assert!(status.success(), "after SIGTERM: {status}\n{}", self.log());
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    fn log_file(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// All that it has logged, over its restarts.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// How often it has logged an event about a task.
    pub(crate) fn events(&self, event: &str, task: TaskId) -> usize {
        let (event, assignment) = (format!("\"event\":\"{event}\""), format!("\"assignment\":\"{}\"", task.assignment()));
        self.log().lines().filter(|line| line.contains(&event) && line.contains(&assignment)).count()
    }

    /// The names of the environments that exist, by the controller's own metadata on disk.
    pub(crate) fn environments(&self) -> Vec<String> {
        let files = names(&self.state().join("private/environments"));
        files.iter().filter_map(|file| file.strip_suffix(".json")).map(str::to_owned).collect()
    }

    /// What runs because of this controller.
    pub(crate) fn processes(&self) -> Vec<Process> {
        let controller = self.child.as_ref().map(|child| i32::try_from(child.id()).unwrap());
        let numbers = names(Path::new("/proc")).into_iter().filter_map(|name| name.parse().ok());
        numbers.filter(|pid| Some(*pid) != controller).filter_map(|pid| self.process(pid)).collect()
    }

    /// The process, if it is one of ours.
    fn process(&self, pid: i32) -> Option<Process> {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let status = std::fs::read_to_string(proc.join("status")).ok()?;
        if status.lines().any(|line| line.starts_with("State:\tZ") || line.starts_with("State:\tX")) {
            return None;
        }
        let uid: u32 = status.lines().find_map(|line| line.strip_prefix("Uid:\t"))?.split('\t').next()?.parse().ok()?;
        let command = String::from_utf8_lossy(&std::fs::read(proc.join("cmdline")).ok()?).replace('\0', " ");
        let folder = self.folder.to_str().unwrap();
        let by_uid = am_root() && (self.first_uid..self.first_uid + UIDS).contains(&uid);
        let within = |link: &str| std::fs::read_link(proc.join(link)).is_ok_and(|target| target.starts_with(folder));
        let by_folder = command.contains(folder) || within("cwd") || within("exe");
        let giteas = command.contains(self.gitea_folder.to_str().unwrap());
        (by_uid || (by_folder && !giteas)).then_some(Process { pid, command })
    }

    /// The processes of environments that are executors (and not what an executor started).
    pub(crate) fn executors(&self) -> Vec<Process> {
        let is_executor = |process: &Process| process.command.split(' ').nth(1) == Some("executor");
        self.processes().into_iter().filter(is_executor).collect()
    }

    /// What an ended story must not leave: environments, their folders, processes.
    fn left(&self) -> Vec<String> {
        let mut left: Vec<String> = self.environments().into_iter().map(|name| format!("environment {name}")).collect();
        left.extend(names(&self.state().join("env")).into_iter().map(|name| format!("folder env/{name}")));
        left.extend(self.processes().into_iter().map(|process| format!("process {} {}", process.pid, process.command)));
        left
    }

    /// Blocks until nothing is left, at most for `limit`; what still is.
    fn left_after(&self, limit: Duration) -> Vec<String> {
        let began = Instant::now();
        loop {
            let left = self.left();
            if left.is_empty() || began.elapsed() > limit {
                return left;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        let left = if failed { Vec::new() } else { self.left_after(Duration::from_secs(20)) };
        let ended = self.child.take().map(end);
        // Whatever the verdict, this machine must not keep what the test started.
        for process in self.processes() {
            signal::kill(Pid::from_raw(process.pid), signal::SIGKILL).ok();
        }
        if failed || !left.is_empty() {
            eprintln!("the controller's last rows:\n{}", tail(&self.log(), 60));
            let logs = self.state().join("private/logs");
            for name in names(&logs) {
                eprintln!("{name}:\n{}", tail(&std::fs::read_to_string(logs.join(&name)).unwrap_or_default(), 15));
            }
        }
        if !failed {
            assert!(left.is_empty(), "left behind: {left:#?}");
            assert!(ended.is_none_or(|status| status.is_some()), "the controller did not end within {STOP_LIMIT:?} of a SIGTERM");
        }
    }
}

async fn readiness(http: &Rest) -> Option<String> {
    let answer = http.send(Method::GET, "/readyz", &[], "".into()).await.ok()?;
    Some(if answer.status.is_success() { String::new() } else { answer.text() })
}

/// Ends it by SIGTERM, or after the limit by SIGKILL (`None`).
fn end(mut child: Child) -> Option<std::process::ExitStatus> {
    let began = Instant::now();
    signal::kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal::SIGTERM).ok();
    while began.elapsed() < STOP_LIMIT {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().ok();
    child.wait().ok();
    None
}

/// A file's link, or copy where a link cannot be made, in `folder`.
fn place(file: &Path, folder: &Path) -> PathBuf {
    let placed = folder.join(file.file_name().unwrap());
    if std::fs::hard_link(file, &placed).is_err() {
        std::fs::copy(file, &placed)
            .unwrap_or_else(|error| panic!("{}: {error}; tests/run.sh gitea installs it", file.display()));
    }
    placed
}

fn tail(text: &str, rows: usize) -> String {
    let skip = text.lines().count().saturating_sub(rows);
    text.lines().skip(skip).collect::<Vec<_>>().join("\n")
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}
