//! What a check needs of a forge beside the protocol, and the two forges that have it: the stand-in and a real Gitea.
//!
//! Where versions of Gitea differ, a fact says so; checks ask the fact, never the version.

use async_trait::async_trait;
use gitea_dynamic_runner::demo::forge::{Forge, ForgeConfig, JobId, JobSpec, JobStatus, Needs, workflow_text};
use http::Method;
use serde_json::{Value, json};
use std::time::Duration;

use crate::support::{
    eventually,
    gitea::{RealGitea, Repository, Version, Visibility},
    peers_dir,
};

/// Short enough to wait for, long enough that no other check runs into it.
pub(crate) const ZOMBIE: Duration = Duration::from_secs(8);

/// In what versions of Gitea differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// Declare answers the header `X-Gitea-Actions-Capabilities`.
    pub(crate) server_capabilities: &'static str,
    /// A cancelled job of a runner with `cancelling` waits for the runner's report.
    pub(crate) cancelling: bool,
    /// More than 16 searches at once are throttled; without that, 40 of 40 get their job, or lose a race and get nothing.
    pub(crate) throttles: bool,
    /// A job that ends while others of its repository wait moves the version.
    pub(crate) end_moves_version: bool,
    /// UpdateLog with `no_more` and no rows seals the log.
    pub(crate) empty_end_seals: bool,
    /// REST shows each step as it was reported. Without that it shows the job's own end for each of them.
    pub(crate) shows_steps: bool,
}

/// What people see of a job or a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Waiting,
    Running,
    Success,
    Failure,
    Cancelled,
    Skipped,
}

/// A job that was pushed.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) repository: String,
    pub(crate) run: i64,
    pub(crate) job: i64,
}

#[async_trait(?Send)]
pub(crate) trait ForgeUnderTest {
    fn url(&self) -> String;
    fn registration_token(&self) -> String;
    fn facts(&self) -> Facts;
    /// One run of these jobs in a repository of its own. All wait, or are blocked by their needs, on return.
    async fn push(&self, jobs: Vec<JobSpec>) -> Vec<Handle>;
    async fn job(&self, job: &Handle) -> (Shown, Vec<Shown>);
    async fn log(&self, job: &Handle) -> Vec<String>;
    async fn cancel(&self, job: &Handle);
    async fn delete_repository(&self, job: &Handle);
    async fn set_disabled(&self, runner: i64, disabled: bool);
    async fn delete_runner(&self, runner: i64);
}

pub(crate) struct StandIn(Forge);

impl StandIn {
    pub(crate) async fn start() -> Self {
        let config = ForgeConfig { zombie_timeout: ZOMBIE, sweep_every: Duration::from_secs(1), ..ForgeConfig::default() };
        Self(Forge::start(config).await.unwrap())
    }
}

fn shown(status: JobStatus) -> Shown {
    match status {
        JobStatus::Blocked | JobStatus::Waiting => Shown::Waiting,
        JobStatus::Running | JobStatus::Cancelling => Shown::Running,
        JobStatus::Success => Shown::Success,
        JobStatus::Failure => Shown::Failure,
        JobStatus::Cancelled => Shown::Cancelled,
        JobStatus::Skipped => Shown::Skipped,
    }
}

#[async_trait(?Send)]
impl ForgeUnderTest for StandIn {
    fn url(&self) -> String {
        self.0.url()
    }

    fn registration_token(&self) -> String {
        self.0.registration_token().expose().to_owned()
    }

    fn facts(&self) -> Facts {
        CURRENT
    }

    async fn push(&self, jobs: Vec<JobSpec>) -> Vec<Handle> {
        let repository = format!("boss/{}", name());
        let jobs = jobs.into_iter().map(|job| job.context("repository", repository.as_str()));
        let pushed = self.0.push(jobs);
        let handle = |job: &JobId| Handle { repository: repository.clone(), run: pushed.run.0, job: job.0 };
        pushed.jobs.iter().map(handle).collect()
    }

    async fn job(&self, job: &Handle) -> (Shown, Vec<Shown>) {
        let job = self.0.job(JobId(job.job)).unwrap();
        (shown(job.status), job.steps.iter().map(|step| shown(step.status)).collect())
    }

    async fn log(&self, job: &Handle) -> Vec<String> {
        self.0.job(JobId(job.job)).unwrap().log
    }

    async fn cancel(&self, job: &Handle) {
        self.0.cancel(JobId(job.job));
    }

    async fn delete_repository(&self, job: &Handle) {
        self.0.forget(JobId(job.job));
    }

    async fn set_disabled(&self, runner: i64, disabled: bool) {
        self.0.set_disabled(runner, disabled);
    }

    async fn delete_runner(&self, runner: i64) {
        self.0.delete_runner(runner);
    }
}

pub(crate) struct Real {
    gitea: RealGitea,
    facts: Facts,
}

const CURRENT: Facts = Facts {
    server_capabilities: "job-summary",
    cancelling: true,
    throttles: true,
    end_moves_version: true,
    empty_end_seals: true,
    shows_steps: true,
};

const OLD: Facts = Facts {
    server_capabilities: "",
    cancelling: false,
    throttles: false,
    end_moves_version: false,
    empty_end_seals: false,
    shows_steps: false,
};

impl Real {
    pub(crate) async fn start(version: Version) -> Self {
        let (folder, facts) = match version {
            Version::Current => (peers_dir(), CURRENT),
            Version::Old => (peers_dir().join("gitea-1.26.0"), OLD),
        };
        let program = folder.join("bin/gitea");
        assert!(program.exists(), "there is no {}: tests/run.sh gitea builds it, and then runs this", program.display());
        let seconds = ZOMBIE.as_secs();
        let ini = format!(
            "[cron.stop_zombie_tasks]\nENABLED = true\nRUN_AT_START = false\nSCHEDULE = @every 1s\n[actions]\nZOMBIE_TASK_TIMEOUT = {seconds}s\n"
        );
        Self { gitea: RealGitea::start(version, &ini).await, facts }
    }

    fn repository(&self, job: &Handle) -> Repository<'_> {
        let (owner, name) = job.repository.split_once('/').unwrap();
        Repository { gitea: &self.gitea, owner: owner.into(), name: name.into() }
    }
}

#[async_trait(?Send)]
impl ForgeUnderTest for Real {
    fn url(&self) -> String {
        self.gitea.url().to_owned()
    }

    fn registration_token(&self) -> String {
        self.gitea.registration_token().to_owned()
    }

    fn facts(&self) -> Facts {
        self.facts
    }

    async fn push(&self, jobs: Vec<JobSpec>) -> Vec<Handle> {
        let name = name();
        let repository = self.gitea.repository(&name, Visibility::Public, &[]).await;
        for job in &jobs {
            for (name, value) in &job.secrets {
                repository.secret(name, value).await;
            }
            for (name, value) in &job.vars {
                repository.variable(name, value).await;
            }
        }
        let run = repository.push_workflow(&workflow_text(&jobs, Needs::Kept)).await;
        // The list comes in pages of 50 at most, and holds them all.
        let path = format!("/repos/boss/{name}/actions/runs/{run}/jobs?limit=50");
        let made = eventually("the jobs of the run", Duration::from_secs(10), async || {
            let made = self.gitea.rest.get(&path).await["jobs"].as_array()?.clone();
            (made.len() == jobs.len()).then_some(made)
        })
        .await;
        let job = |spec: &JobSpec| made.iter().find(|job| job["name"] == *spec.key).unwrap()["id"].as_i64().unwrap();
        jobs.iter().map(|spec| Handle { repository: format!("boss/{name}"), run, job: job(spec) }).collect()
    }

    async fn job(&self, job: &Handle) -> (Shown, Vec<Shown>) {
        let job = self.gitea.rest.get(&format!("/repos/{}/actions/jobs/{}", job.repository, job.job)).await;
        let steps = job["steps"].as_array().map(Vec::as_slice).unwrap_or_default();
        (of_words(&job), steps.iter().map(of_words).collect())
    }

    async fn log(&self, job: &Handle) -> Vec<String> {
        self.repository(job).log(job.job).await
    }

    async fn cancel(&self, job: &Handle) {
        self.repository(job).cancel(job.run).await;
    }

    async fn delete_repository(&self, job: &Handle) {
        self.gitea.rest.api(Method::DELETE, &format!("/repos/{}", job.repository), None).await;
    }

    async fn set_disabled(&self, runner: i64, disabled: bool) {
        let path = format!("/admin/actions/runners/{runner}");
        self.gitea.rest.api(Method::PATCH, &path, Some(json!({"disabled": disabled}))).await;
    }

    async fn delete_runner(&self, runner: i64) {
        self.gitea.rest.api(Method::DELETE, &format!("/admin/actions/runners/{runner}"), None).await;
    }
}

/// Of a job or of a step.
fn of_words(value: &Value) -> Shown {
    match (value["status"].as_str(), value["conclusion"].as_str()) {
        (_, Some("success")) => Shown::Success,
        (_, Some("failure")) => Shown::Failure,
        (_, Some("cancelled")) => Shown::Cancelled,
        (_, Some("skipped")) => Shown::Skipped,
        (Some("in_progress"), _) => Shown::Running,
        _ => Shown::Waiting,
    }
}

/// A name that no other check uses.
pub(crate) fn name() -> String {
    format!("n{}", gitea_dynamic_runner::ids::Nonce::random())
}
