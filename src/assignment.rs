//! One job that Gitea gave us: what it is, and the sealed envelope in which it waits.
//!
//! The envelope is the only form in which an assignment rests anywhere. It is checked again whenever it is opened; the task's raw bytes are
//! kept as they came, so that fields we do not know survive. Whether a backend takes the job (container engine, forks) is the
//! backend's to say.

use sha2::{Digest as _, Sha256};

use crate::{
    ids::{AssignmentId, Lane, TaskId},
    secret::SecretBytes,
    spiffe_name,
    task::{self, MAX_TASK_BYTES, TaskFacts, TaskFault, Trust},
};

pub mod seal;

/// What an assignment is judged by; the same at sealing and at opening.
#[derive(Debug, Clone)]
pub struct Rules {
    pub trust_domain: String,
    /// `vm` or `vm-dev` (`VM_RUNNER_LABEL`).
    pub vm_label: String,
}

#[derive(Debug, Clone)]
pub struct Assignment {
    pub id: AssignmentId,
    pub task: TaskId,
    pub lane: Lane,
    /// `owner/name` in original case; empty where it could not be read.
    pub repository: String,
    pub job_key: String,
    pub job_name: String,
    /// Empty for a refused one.
    pub spiffe_id: String,
    pub labels: Vec<String>,
    pub steps: u32,
    pub trust: Trust,
    /// See `TaskFacts::needs_docker`.
    pub needs_docker: Option<String>,
    pub run_id: String,
    /// SHA-256 of the task token: tells a task of a restored Gitea from the one we knew (rule R4). Of the raw task where no token
    /// can be read.
    pub token_hash: [u8; 32],
    /// Unix milliseconds of the FetchTask answer; Gitea's three hours start there.
    pub fetched_at_ms: u64,
    /// Why it cannot be served; set exactly when `lane` is `Refused`.
    pub refusal: Option<String>,
    /// The task as Gitea sent it; one that is too large (and so refused) is cut one byte above the limit.
    pub raw: SecretBytes,
}

/// An envelope that cannot be taken at its word.
#[derive(Debug, thiserror::Error)]
pub enum OpenFault {
    /// Sealed with a key that we do not have (rotation): wait, alarm, do not throw away.
    #[error("sealed with the unknown key {0}: put that key back into SEAL_KEY_FILE")]
    UnknownKey(String),
    /// Written by a newer version: wait, alarm, do not throw away.
    #[error("envelope version {0} is newer than this binary knows: run the newer binary")]
    NewerVersion(u8),
    /// Damaged or tampered with: dead letter; the job is failed where its id can be read.
    #[error("envelope refused: {reason}")]
    Refused { reason: String, task: Option<TaskId> },
}

impl Assignment {
    /// Reads a fetched task. Never fails: what cannot be served becomes an assignment of the lane `Refused` that says why.
    /// `Err` only if not even the task's id can be read (nothing can be reported to Gitea then).
    pub fn of_task(mut raw: Vec<u8>, rules: &Rules, fetched_at_ms: u64) -> Result<Assignment, String> {
        // The byte too many keeps it refused whenever it is read again.
        raw.truncate(MAX_TASK_BYTES + 1);
        match task::read_task(&raw) {
            Ok(facts) => Ok(Self::of_facts(facts, raw, rules, fetched_at_ms)),
            Err(TaskFault { id: Some(id), steps, repository, run_id, reason }) => Ok(Self {
                id: id.assignment(),
                task: id,
                lane: Lane::Refused,
                repository,
                job_key: String::new(),
                job_name: String::new(),
                spiffe_id: String::new(),
                labels: Vec::new(),
                steps,
                trust: Trust::PullRequest,
                needs_docker: None,
                run_id,
                token_hash: Sha256::digest(&raw).into(),
                fetched_at_ms,
                refusal: Some(reason),
                raw: SecretBytes::new(raw),
            }),
            Err(TaskFault { id: None, reason, .. }) => Err(reason),
        }
    }

    fn of_facts(facts: TaskFacts, raw: Vec<u8>, rules: &Rules, fetched_at_ms: u64) -> Self {
        let (lane, refusal) = match lane_of(&facts, rules) {
            Ok(lane) => (lane, None),
            Err(reason) => (Lane::Refused, Some(reason)),
        };
        let spiffe_id = match refusal {
            None => spiffe_name::job_id(&rules.trust_domain, &facts.repository, &facts.job_key, facts.trust),
            Some(_) => String::new(),
        };
        Self {
            id: facts.id.assignment(),
            task: facts.id,
            lane,
            repository: facts.repository.to_string(),
            job_key: facts.job_key,
            job_name: facts.job_name,
            spiffe_id,
            labels: facts.labels,
            steps: facts.steps,
            trust: facts.trust,
            needs_docker: facts.needs_docker,
            run_id: facts.run_id,
            token_hash: Sha256::digest(facts.token.expose()).into(),
            fetched_at_ms,
            refusal,
            raw: SecretBytes::new(raw),
        }
    }
}

fn lane_of(facts: &TaskFacts, rules: &Rules) -> Result<Lane, String> {
    if let Some(uses) = &facts.uses {
        return Err(format!(
            "This job calls the reusable workflow `{uses}`. Gitea expands such calls itself from version 1.27 on; this one hands them to \
             the runner, which gets no steps to run. Update Gitea, or write the steps into the job."
        ));
    }
    Ok(task::backend_of(&facts.labels, &rules.vm_label)?.lane())
}
