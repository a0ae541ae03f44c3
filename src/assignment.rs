//! One job that Gitea gave us: what it is, and the sealed envelope in which it waits.
//!
//! The envelope is the only form in which an assignment rests anywhere. It is checked again whenever it is opened; the task's raw bytes are
//! kept as they came, so that fields we do not know survive.

use crate::{
    ids::{AssignmentId, Lane, TaskId},
    secret::SecretBytes,
    task::Trust,
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
    /// SHA-256 of the task token: tells a task of a restored Gitea from the one we knew (rule R4).
    pub token_hash: [u8; 32],
    /// Unix milliseconds of the FetchTask answer; Gitea's three hours start there.
    pub fetched_at_ms: u64,
    /// Why it cannot be served; set exactly when `lane` is `Refused`.
    pub refusal: Option<String>,
    /// The task as Gitea sent it.
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
