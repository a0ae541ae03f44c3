//! A task as Gitea hands it out, read: what job it is, what it runs on, whose it is.
//!
//! Only facts from the task's own trusted context; no decision (that is `assignment` and `plan`), no IO. Any bytes at all are
//! answered by facts or by a reason that the user can read, never by a panic (`fuzz/fuzz_targets/task.rs`).

use crate::{ids::TaskId, secret::Secret};

/// A task larger than this is refused. Gitea bounds secrets to 64 KiB and outputs to 1 MiB each; see `gitea.md` §3.6.
pub const MAX_TASK_BYTES: usize = 32 << 20;
/// A workflow payload larger than this is refused.
pub const MAX_PAYLOAD_BYTES: usize = 8 << 20;

/// What a task says of its job.
#[derive(Debug, Clone)]
pub struct TaskFacts {
    pub id: TaskId,
    /// The only key below `jobs:` in the payload, as written.
    pub job_key: String,
    /// The job's name as people see it (interpolated by Gitea); the key if the payload has none. May hold any characters.
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
    /// For the job's log: what is wrong and what to write instead.
    pub reason: String,
}

impl std::fmt::Display for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// Reads the raw bytes of a `runner.v1.Task`.
pub fn read_task(raw: &[u8]) -> Result<TaskFacts, TaskFault> {
    let _ = raw;
    Err(TaskFault { id: None, steps: 0, reason: "not built".into() })
}

/// The backend that `runs-on` names, or why none: it must contain `self-hosted` and exactly one of `pod` and `vm_label`.
pub fn backend_of(labels: &[String], vm_label: &str) -> Result<crate::ids::BackendKind, String> {
    let _ = (labels, vm_label);
    Err("not built".into())
}
