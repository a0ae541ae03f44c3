//! A real Gitea of a story's own, and what a person or a program does with it: push, look, cancel, run again.
//!
//! The server is started by `tests/peers/run-gitea.sh` and stopped, by its recorded process id, when the value is dropped.
//! Where Gitea has no REST call (cancel, approve) the web form is posted, as a browser would.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use base64::Engine as _;
use http::Method;
use nix::{sys::signal, unistd::Pid};
use serde_json::{Value, json};

use super::{eventually, free_port, passable, peers_dir, rest::Rest};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// 1.27.3, with the capability `cancelling`.
    Current,
    /// 1.26.0, without.
    Old,
}

pub(crate) struct RealGitea {
    base: tempfile::TempDir,
    peers: PathBuf,
    facts: Value,
    /// As the administrator.
    pub(crate) rest: Rest,
}

impl RealGitea {
    /// Healthy on return. `extra_ini` is appended to its configuration.
    pub(crate) async fn start(version: Version, extra_ini: &str) -> Self {
        let peers = match version {
            Version::Current => peers_dir(),
            Version::Old => peers_dir().join("gitea-1.26.0"),
        };
        let base = tempfile::Builder::new().prefix("g").rand_bytes(4).tempdir().unwrap();
        passable(base.path());
        let ini = base.path().join("extra.ini");
        std::fs::write(&ini, extra_ini).unwrap();
        // Somebody else may take the port between the look and the start.
        for attempt in 1.. {
            let folder = base.path().join("gitea");
            let arguments = [free_port().to_string(), folder.display().to_string()];
            match script(&peers, &ini, &arguments.each_ref().map(String::as_str)).await {
                Ok(line) => {
                    let facts: Value = serde_json::from_str(&line).unwrap();
                    let rest = Rest::anonymous(text(&facts["url"])).with_token(text(&facts["token"]));
                    return Self { base, peers, facts, rest };
                }
                Err(error) if attempt == 3 => panic!("start Gitea: {error}"),
                Err(_) => std::fs::remove_dir_all(&folder).unwrap_or_default(),
            }
        }
        unreachable!("the third attempt returns or panics")
    }

    pub(crate) fn url(&self) -> &str {
        text(&self.facts["url"])
    }

    /// For everything else of the story; other users may pass through it.
    pub(crate) fn base(&self) -> &Path {
        self.base.path()
    }

    pub(crate) fn registration_token(&self) -> &str {
        text(&self.facts["registration_token"])
    }

    /// For the REST API, as the administrator.
    pub(crate) fn token(&self) -> &str {
        text(&self.facts["token"])
    }

    /// Where it listens, whatever its ROOT_URL.
    pub(crate) fn port(&self) -> u16 {
        u16::try_from(self.facts["port"].as_u64().unwrap()).unwrap()
    }

    fn folder(&self) -> &str {
        text(&self.facts["dir"])
    }

    /// As a machine's power cut: nothing is said to anybody.
    pub(crate) fn kill(&self) {
        let pid = std::fs::read_to_string(Path::new(self.folder()).join("gitea.pid")).unwrap();
        signal::kill(Pid::from_raw(pid.trim().parse().unwrap()), signal::SIGKILL).unwrap();
    }

    /// The same server once more, after [`Self::kill`].
    pub(crate) async fn start_again(&self) {
        script(&self.peers, &self.base.path().join("extra.ini"), &["--again", self.folder()]).await.unwrap();
    }

    /// A repository of the administrator with these files in its first push.
    pub(crate) async fn repository(&self, name: &str, visibility: Visibility, files: &[(&str, &str)]) -> Repository<'_> {
        let private = visibility == Visibility::Private;
        self.rest
            .post("/user/repos", json!({"name": name, "auto_init": true, "default_branch": "main", "private": private}))
            .await;
        let repository = Repository { gitea: self, owner: "boss".into(), name: name.into() };
        if !files.is_empty() {
            repository.push(&self.rest, "main", files).await;
        }
        repository
    }

    /// A public repository with this workflow alone, and the run that its push began.
    pub(crate) async fn run(&self, name: &str, workflow: &str) -> (Repository<'_>, i64) {
        let repository = self.repository(name, Visibility::Public, &[]).await;
        let run = repository.push_workflow(workflow).await;
        (repository, run)
    }

    /// Another user, as whom the returned client speaks.
    pub(crate) async fn user(&self, name: &str) -> Rest {
        let password = "a-password-of-a-test";
        let user = json!({"username": name, "email": format!("{name}@example.invalid"), "password": password, "must_change_password": false});
        self.rest.post("/admin/users", user).await;
        self.rest.with_password(name, password)
    }

    /// The web's cookies of the administrator.
    async fn session(&self) -> String {
        let form = format!("user_name={}&password={}", text(&self.facts["admin"]), text(&self.facts["password"]));
        let kind = [("content-type", "application/x-www-form-urlencoded")];
        let answer = Rest::anonymous(self.url()).send(Method::POST, "/user/login", &kind, form.into()).await.unwrap();
        assert!(answer.status.is_redirection(), "log in: {} {}", answer.status, answer.text());
        // The session's cookie is set twice, and a browser keeps the last of each name.
        let jar: BTreeMap<&str, &str> = answer.cookies.iter().filter_map(|cookie| cookie.split_once('=')).collect();
        jar.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("; ")
    }

    /// Posts a form without fields or gets a page of the web, as the administrator.
    pub(crate) async fn web(&self, method: Method, path: &str) -> super::rest::Answer {
        let cookies = self.session().await;
        let answer = Rest::anonymous(self.url()).send(method, path, &[("cookie", &cookies)], "".into()).await.unwrap();
        assert!(answer.status.is_success(), "{path}: {} {}", answer.status, answer.text());
        answer
    }
}

impl Drop for RealGitea {
    fn drop(&mut self) {
        let stop = std::process::Command::new("bash").args([RUN_GITEA, "--stop", self.folder()]).stdin(Stdio::null()).status();
        if !std::thread::panicking() {
            assert!(stop.is_ok_and(|status| status.success()), "Gitea could not be stopped");
        }
    }
}

const RUN_GITEA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/peers/run-gitea.sh");

/// What the script prints. Its output goes to a file: a pipe would stay open in the server that it leaves behind.
async fn script(peers: &Path, ini: &Path, arguments: &[&str]) -> Result<String, String> {
    let (said, log) = (ini.with_file_name("run-gitea.out"), ini.with_file_name("run-gitea.err"));
    let mut command = tokio::process::Command::new("bash");
    command.arg(RUN_GITEA).args(arguments).env("PEERS_DIR", peers).env("GITEA_EXTRA_INI", ini).stdin(Stdio::null());
    command.stdout(std::fs::File::create(&said).unwrap()).stderr(std::fs::File::create(&log).unwrap());
    let status =
        tokio::time::timeout(Duration::from_secs(60), command.status()).await.map_err(|_| "no end within 60 s".to_owned())?;
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    if status.is_ok_and(|status| status.success()) { Ok(read(&said)) } else { Err(read(&log)) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visibility {
    Public,
    Private,
}

#[derive(Clone)]
pub(crate) struct Repository<'a> {
    pub(crate) gitea: &'a RealGitea,
    pub(crate) owner: String,
    pub(crate) name: String,
}

/// A job as Gitea's REST API shows it.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: i64,
    pub(crate) name: String,
    /// `queued`, `in_progress`, `completed`, …
    pub(crate) status: String,
    /// Empty while there is none.
    pub(crate) conclusion: String,
    /// Each step's name and conclusion.
    pub(crate) steps: Vec<(String, String)>,
}

impl Repository<'_> {
    fn path(&self, rest: &str) -> String {
        format!("/repos/{}/{}{rest}", self.owner, self.name)
    }

    /// New files in one commit, so one push.
    pub(crate) async fn push(&self, author: &Rest, branch: &str, files: &[(&str, &str)]) {
        let encode = |content: &str| base64::engine::general_purpose::STANDARD.encode(content);
        let files: Vec<Value> = files
            .iter()
            .map(|(path, content)| json!({"operation": "create", "path": path, "content": encode(content)}))
            .collect();
        author.post(&self.path("/contents"), json!({"branch": branch, "message": "Add files", "files": files})).await;
    }

    /// The only workflow file of this repository, and the run that its push begins.
    pub(crate) async fn push_workflow(&self, workflow: &str) -> i64 {
        self.push(&self.gitea.rest, "main", &[(".gitea/workflows/ci.yaml", workflow)]).await;
        self.newest_run_after(0).await
    }

    /// The newest run with a higher number than `earlier`, once it is there.
    pub(crate) async fn newest_run_after(&self, earlier: i64) -> i64 {
        eventually("a new run", Duration::from_secs(15), async || {
            let runs = self.gitea.rest.get(&self.path("/actions/runs")).await;
            runs["workflow_runs"].as_array()?.iter().filter_map(|run| run["id"].as_i64()).filter(|id| *id > earlier).max()
        })
        .await
    }

    pub(crate) async fn tag(&self, name: &str) {
        self.gitea.rest.post(&self.path("/tags"), json!({"tag_name": name, "target": "main"})).await;
    }

    pub(crate) async fn secret(&self, name: &str, value: &str) {
        let path = self.path(&format!("/actions/secrets/{name}"));
        self.gitea.rest.api(Method::PUT, &path, Some(json!({"data": value}))).await;
    }

    pub(crate) async fn variable(&self, name: &str, value: &str) {
        self.gitea.rest.post(&self.path(&format!("/actions/variables/{name}")), json!({"value": value})).await;
    }

    pub(crate) async fn dispatch(&self, file: &str, inputs: Value) {
        let body = json!({"ref": "main", "inputs": inputs});
        self.gitea.rest.post(&self.path(&format!("/actions/workflows/{file}/dispatches")), body).await;
    }

    pub(crate) async fn rerun(&self, run: i64) {
        self.gitea.rest.post(&self.path(&format!("/actions/runs/{run}/rerun")), json!({})).await;
    }

    pub(crate) async fn cancel(&self, run: i64) {
        self.gitea.web(Method::POST, &format!("/{}/{}/actions/runs/{run}/cancel", self.owner, self.name)).await;
    }

    /// Lets a run of a stranger's pull request begin.
    pub(crate) async fn approve(&self, run: i64) {
        self.gitea.web(Method::POST, &format!("/{}/{}/actions/runs/{run}/approve", self.owner, self.name)).await;
    }

    /// A pull request from a fork of `user`, with these files added.
    pub(crate) async fn pull_request_of(&self, user: &str, files: &[(&str, &str)]) {
        let guest = self.gitea.user(user).await;
        guest.post(&self.path("/forks"), json!({"name": self.name})).await;
        let fork = Self { owner: user.into(), ..self.clone() };
        fork.push(&guest, "main", files).await;
        let pull = json!({"title": "A change", "head": format!("{user}:main"), "base": "main"});
        guest.post(&self.path("/pulls"), pull).await;
    }

    pub(crate) async fn jobs(&self, run: i64) -> Vec<Job> {
        let answer = self.gitea.rest.get(&self.path(&format!("/actions/runs/{run}/jobs"))).await;
        answer["jobs"].as_array().map(|jobs| jobs.iter().map(job).collect()).unwrap_or_default()
    }

    /// The run's conclusion, once it has one.
    pub(crate) async fn conclusion(&self, run: i64, limit: Duration) -> String {
        let began = std::time::Instant::now();
        loop {
            let state = self.gitea.rest.get(&self.path(&format!("/actions/runs/{run}"))).await;
            if state["status"] == "completed" {
                return text(&state["conclusion"]).to_owned();
            }
            assert!(began.elapsed() < limit, "run {run} has not ended within {limit:?}: {:?}", self.jobs(run).await);
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    }

    /// A job's rows without their times; empty while it has none.
    pub(crate) async fn log(&self, job: i64) -> Vec<String> {
        let path = format!("/api/v1{}", self.path(&format!("/actions/jobs/{job}/logs")));
        let answer = self.gitea.rest.send(Method::GET, &path, &[], "".into()).await.unwrap();
        if !answer.status.is_success() {
            return Vec::new();
        }
        answer.text().lines().map(|line| line.split_once(' ').map_or("", |(_, row)| row).to_owned()).collect()
    }

    /// The log of the run's only job.
    pub(crate) async fn only_log(&self, run: i64) -> Vec<String> {
        let jobs = self.jobs(run).await;
        assert_eq!(jobs.len(), 1, "one job: {jobs:?}");
        self.log(jobs[0].id).await
    }
}

fn job(value: &Value) -> Job {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let steps = value["steps"].as_array().map(Vec::as_slice).unwrap_or_default();
    Job {
        id: value["id"].as_i64().unwrap(),
        name: word(&value["name"]),
        status: word(&value["status"]),
        conclusion: word(&value["conclusion"]),
        steps: steps.iter().map(|step| (word(&step["name"]), word(&step["conclusion"]))).collect(),
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("a text, not {value}"))
}
