//! A task as Gitea hands it out, read: what job it is, what it runs on, whose it is.
//!
//! Only facts from the task's own trusted context; no decision (that is `assignment` and `plan`), no IO. Any bytes at all are
//! answered by facts or by a reason that the user can read, never by a panic (`fuzz/fuzz_targets/task.rs`).
//! The workflow's text is read in `payload`, the `github` context in `context`, the damaged message in `salvage`.

use buffa::Message as _;

use crate::{ids::TaskId, proto::runner, secret::Secret};

mod context;
mod labels;
mod payload;
mod salvage;

pub use labels::backend_of;

/// A task larger than this is refused. Gitea bounds secrets to 64 KiB and outputs to 1 MiB each; see `gitea.md` §3.6.
pub const MAX_TASK_BYTES: usize = 32 << 20;
/// A workflow payload larger than this is refused.
pub const MAX_PAYLOAD_BYTES: usize = 8 << 20;

/// Bounds of single texts, in bytes. Gitea's own columns are 255 characters; a display name was seen with 300 letters `ü`.
const MAX_NAME_BYTES: usize = 2048;
const MAX_KEY_BYTES: usize = 1024;
const MAX_REPOSITORY_BYTES: usize = 512;
const MAX_LABELS: usize = 64;
const MAX_LABEL_BYTES: usize = 255;

/// What a task says of its job.
#[derive(Debug, Clone)]
pub struct TaskFacts {
    pub id: TaskId,
    /// The only key below `jobs:` in the payload, as written.
    pub job_key: String,
    /// The job's name as people see it (interpolated by Gitea); the key if the payload has none. May hold any characters; cut at
    /// 2 KiB.
    pub job_name: String,
    /// `runs-on`, evaluated by Gitea, in order, scalars as their source text (`1.10` stays `1.10`).
    pub labels: Vec<String>,
    /// `jobs.x.uses`: a caller of a reusable workflow, handed out by Gitea ≤ 1.26.
    pub uses: Option<String>,
    /// Non-null entries of `steps`, which is how many Gitea shows.
    pub steps: u32,
    /// Why the job needs a container engine (`container:`, `services:`, `uses: docker://…`), or `None`.
    pub needs_docker: Option<String>,
    pub repository: Repository,
    /// The workflow's file name.
    pub workflow: String,
    /// `refs/heads/main`, `refs/pull/12/head`.
    pub git_ref: String,
    pub sha: String,
    pub event: String,
    pub run_id: String,
    pub run_number: String,
    pub run_attempt: String,
    pub trust: Trust,
    /// The task's own token (`context.token`).
    pub token: Secret,
}

/// Owner and name in their original case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    pub owner: String,
    pub name: String,
}

/// Whose code the job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Trust {
    /// The repository's own: identity below `/ci/`.
    Own,
    /// A fork's or an AGit pull request's, or it cannot be told: identity below `/ci-pr/`.
    PullRequest,
}

/// A task that cannot be served, with what is needed to fail it at Gitea.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFault {
    /// `None` only if not even the id can be read.
    pub id: Option<TaskId>,
    /// Steps to list in the terminal report; 0 if unknown.
    pub steps: u32,
    /// `owner/name` for people; empty if unknown.
    pub repository: String,
    /// Empty if unknown.
    pub run_id: String,
    /// For the job's log: what is wrong and what to write instead.
    pub reason: String,
}

impl std::fmt::Display for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl TaskFault {
    fn new(id: Option<TaskId>, steps: u32, reason: impl Into<String>) -> Self {
        Self { id, steps, repository: String::new(), run_id: String::new(), reason: reason.into() }
    }
}

/// Reads the raw bytes of a `runner.v1.Task`.
pub fn read_task(raw: &[u8]) -> Result<TaskFacts, TaskFault> {
    if raw.len() > MAX_TASK_BYTES {
        let reason = format!(
            "The task is larger than {} MiB. Make its needs' outputs, secrets or workflow smaller.",
            MAX_TASK_BYTES >> 20
        );
        return Err(TaskFault::new(salvage::fields(raw).id, 0, reason));
    }
    let task = match runner::Task::decode_from_slice(raw) {
        Ok(task) => task,
        Err(fault) => {
            let found = salvage::fields(raw);
            let steps = found.payload.and_then(|text| payload::read(text).ok()).map_or(0, |job| job.steps);
            let reason = format!(
                "The task that Gitea sent cannot be decoded ({fault}). Run the job again; if it comes again, look at its event's body."
            );
            return Err(TaskFault::new(found.id, steps, reason));
        }
    };
    facts_of(&task)
}

fn facts_of(task: &runner::Task) -> Result<TaskFacts, TaskFault> {
    let id = task_id(task.id);
    let context = task.context.as_option().map(context::read).unwrap_or_default();
    let job = payload::read(task.workflow_payload.as_deref().unwrap_or_default());
    let fault = |steps, reason: String| TaskFault {
        repository: context.repository.as_ref().map(Repository::to_string).unwrap_or_default(),
        run_id: context.run_id.clone(),
        ..TaskFault::new(id, steps, reason)
    };
    let job = job.map_err(|reason| fault(0, reason))?;
    let Some(id) = id else {
        return Err(fault(job.steps, "The task has no id.".into()));
    };
    let repository = match &context.repository {
        Ok(repository) => repository.clone(),
        Err(reason) => return Err(fault(job.steps, reason.clone())),
    };
    let secret = |name: &str| task.secrets.get(name).cloned();
    let token = Some(context.token.expose().to_owned()).filter(|token| !token.is_empty());
    let token = token.or_else(|| secret("GITEA_TOKEN")).or_else(|| secret("GITHUB_TOKEN")).unwrap_or_default();
    Ok(TaskFacts {
        id,
        job_name: job.name.unwrap_or_else(|| job.key.clone()),
        job_key: job.key,
        labels: job.labels,
        uses: job.uses,
        steps: job.steps,
        needs_docker: job.needs_docker,
        repository,
        workflow: context.workflow,
        git_ref: context.git_ref,
        sha: context.sha,
        event: context.event,
        run_id: context.run_id,
        run_number: context.run_number,
        run_attempt: context.run_attempt,
        trust: context.trust,
        token: Secret::new(token),
    })
}

/// Gitea's ids start at 1; 0 is what an absent field decodes to.
fn task_id(id: i64) -> Option<TaskId> {
    (id > 0).then_some(TaskId(id))
}

/// At most `max` bytes of a text, whole characters, with a sign that something is missing.
fn cut(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(max)])
}
