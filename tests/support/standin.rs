//! The built binary as a controller with local backends, with the stand-in forge as its Gitea and the demo's steps runner as its runner.
//!
//! For stories about what a job can reach and what is left of it. As root only: each story begins with [`StandIn::as_root`]. A job is told
//! by its task (the executor's environment names it), what runs of it by its uid.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use gitea_dynamic_runner::{
    demo::forge::{Forge, ForgeConfig, JobId, JobSpec, JobView},
    process,
    secret::Secret,
};
use http::Method;
use nix::{sys::signal, unistd::Pid};

use super::{am_root, eventually, free_port, passable, rest::Rest};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const UIDS: u32 = 64;
const READ_TOKEN: &str = "only-for-readers";

pub(crate) struct StandIn {
    pub(crate) forge: Forge,
    pub(crate) runner_token: Secret,
    folder: tempfile::TempDir,
    child: Option<Child>,
    first_uid: u32,
    http: Rest,
}

/// The environment of a running job, as root sees it.
#[derive(Debug, Clone)]
pub(crate) struct Environment {
    pub(crate) name: String,
    pub(crate) uid: u32,
    /// The executor's.
    pub(crate) pid: u32,
    /// `env/<name>`.
    pub(crate) folder: PathBuf,
    /// The executor's variables.
    pub(crate) variables: BTreeMap<String, String>,
}

impl StandIn {
    /// `None`, said aloud, where we are not root.
    pub(crate) async fn as_root(pod_capacity: u32) -> Option<Self> {
        if !am_root() {
            println!("not root: this story needs root and is not told");
            return None;
        }
        // Not below /tmp, so that environments get a /tmp of their own.
        let folder = tempfile::Builder::new().prefix("gdr-").tempdir_in("/var/lib").unwrap();
        passable(folder.path());
        let program = folder.path().join("gitea-dynamic-runner");
        fs::copy(env!("CARGO_BIN_EXE_gitea-dynamic-runner"), &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let forge = Forge::start(ForgeConfig::default()).await.unwrap();
        let (uuid, runner_token) = forge.new_runner("controller", &[]);
        let (facade, port) = (free_port(), free_port());
        let token_file = folder.path().join("read-token");
        fs::write(&token_file, READ_TOKEN).unwrap();
        fs::set_permissions(&token_file, fs::Permissions::from_mode(0o600)).unwrap();
        // Ports of this machine are given once at a time, so uids derived from one are, too.
        let first_uid = 200_000 + u32::from(port) * UIDS;
        let settings = [
            ("GITEA_URL", forge.url()),
            ("GITEA_RUNNER_UUID", uuid),
            ("GITEA_RUNNER_TOKEN", runner_token.expose().to_owned()),
            ("STATE_DIRECTORY", folder.path().join("state").display().to_string()),
            ("POD_CAPACITY", pod_capacity.to_string()),
            ("POD_EXECUTOR_UID", first_uid.to_string()),
            ("RUNNER_FACADE_LISTEN", format!("127.0.0.1:{facade}")),
            ("HTTP_LISTEN", format!("127.0.0.1:{port}")),
            ("READ_TOKEN_FILE", token_file.display().to_string()),
            ("RUNNER_BIN", program.display().to_string()),
            ("RUST_LOG", "debug".to_owned()),
            ("PATH", std::env::var("PATH").unwrap()),
        ];
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Command::new(&program);
        command.args(["serve", "--standalone"]).env_clear().envs(settings).current_dir(folder.path());
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let child = Some(command.spawn().unwrap());
        let http = Rest::anonymous(&format!("http://127.0.0.1:{port}"));
        let standin = Self { forge, runner_token, folder, child, first_uid, http };
        let ready = async || {
            let answer = standin.http.send(Method::GET, "/readyz", &[], "".into()).await.ok()?;
            answer.status.is_success().then_some(())
        };
        eventually("the controller is ready", LIMIT, ready).await;
        Some(standin)
    }

    pub(crate) fn controller(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// The page, as somebody sees it who may read.
    pub(crate) async fn page(&self, path: &str) -> String {
        let token = format!("Bearer {READ_TOKEN}");
        let answer = self.http.send(Method::GET, path, &[("authorization", &token)], "".into()).await.unwrap();
        assert!(answer.status.is_success(), "{path}: {}", answer.status);
        answer.text()
    }

    pub(crate) fn push(&self, job: JobSpec) -> JobId {
        self.forge.push([job]).jobs[0]
    }

    pub(crate) fn job(&self, id: JobId) -> JobView {
        self.forge.job(id).unwrap()
    }

    /// Waits for a row of the job's log that contains `text`.
    pub(crate) async fn says(&self, job: JobId, text: &str) {
        let said = self.forge.wait_for(text, LIMIT, |forge| {
            let job = forge.job(job)?;
            assert!(!job.status.is_final(), "it ended before it said {text:?}: {:#?}", job.log);
            job.log.iter().any(|row| row.contains(text)).then_some(())
        });
        if let Err(error) = said.await {
            panic!("{error:#}: {:#?}\n{}", self.job(job).log, self.log());
        }
    }

    /// The end of a job and of its environment.
    pub(crate) async fn ended(&self, job: JobId) -> JobView {
        let view = self.forge.wait_done(job, LIMIT).await.unwrap();
        let task = format!("-{}-", view.task.unwrap());
        let gone = async || (!names(&self.state().join("env")).iter().any(|name| name.contains(&task))).then_some(());
        eventually("the environment is gone", LIMIT, gone).await;
        view
    }

    /// The environment of a running job.
    pub(crate) fn environment(&self, job: JobId) -> Environment {
        let task = self.job(job).task.unwrap();
        let rows = process::table().unwrap();
        let found = rows.iter().filter(|row| row.runs).find_map(|row| {
            let line = fs::read(format!("/proc/{}/cmdline", row.pid)).ok()?;
            if line.split(|byte| *byte == 0).nth(1) != Some(b"executor") {
                return None;
            }
            let variables = variables(row.pid);
            let folder = PathBuf::from(variables.get("CI_WORK_DIRECTORY")?).parent()?.to_owned();
            let ours = variables.get("CI_ASSIGNMENT_ID")? == &format!("gitea-task-{task}") && folder.starts_with(self.folder());
            let uid = process::uids_of(row.pid).ok()??.0;
            let name = folder.file_name()?.to_str()?.to_owned();
            ours.then_some(Environment { name, uid, pid: row.pid, folder, variables })
        });
        found.expect("the job's executor runs")
    }

    /// Processes with the uid of some environment.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let uids = self.first_uid..self.first_uid + UIDS;
        let of_job = |pid| process::uids_of(pid).unwrap().is_some_and(|(real, _)| uids.contains(&real));
        process::table().unwrap().into_iter().filter(|row| row.runs && of_job(row.pid)).map(|row| row.pid).collect()
    }

    /// The end of every story: no environment, process or folder of a job is left, and the controller ends when asked.
    pub(crate) async fn end(mut self) {
        let left = || {
            let records = names(&self.state().join("private/environments"));
            let mut left: Vec<String> = records.into_iter().filter(|name| name.ends_with(".json")).collect();
            left.extend(["env", "sock"].iter().flat_map(|folder| names(&self.state().join(folder))));
            left.extend(self.processes().into_iter().map(|pid| format!("process {pid}")));
            left
        };
        eventually("nothing is left of the jobs", LIMIT, async || left().is_empty().then_some(())).await;
        let mut child = self.child.take().unwrap();
        signal::kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal::SIGTERM).unwrap();
        let status = eventually("the controller ends", LIMIT, async || child.try_wait().unwrap()).await;
        assert!(status.success(), "{status}\n{}", self.log());
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        // After a failure: this machine must not keep what the test started.
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
            for pid in self.processes() {
                signal::kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal::SIGKILL).ok();
            }
            eprintln!("the controller's last rows:\n{}", self.log().lines().rev().take(40).collect::<Vec<_>>().join("\n"));
        }
    }
}

/// Environment variables of a process, empty if it is gone.
pub(crate) fn variables(pid: u32) -> BTreeMap<String, String> {
    let bytes = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let pairs = bytes.split(|byte| *byte == 0).filter_map(|pair| std::str::from_utf8(pair).ok()?.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}
