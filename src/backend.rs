//! Where environments are made: one trait, an implementation for each kind of place.
//!
//! A backend keeps the metadata of its environments; that is the truth about who serves which assignment. Whether an
//! environment *should* exist is `plan`'s business, never a backend's.

use std::time::SystemTime;

use async_trait::async_trait;

use crate::{
    ids::{AssignmentId, BackendKind, EnvironmentName, InstanceId, Nonce},
    leader::LeaderPass,
    secret::Secret,
    task::Trust,
};

pub mod local;

#[async_trait]
pub trait Backend: Send + Sync {
    fn kind(&self) -> BackendKind;
    /// Why this backend cannot take such a job, for the job's log; `None` if it can.
    fn refuses(&self, job: &JobNeeds) -> Option<String>;
    /// All environments of this instance. An error means unknown, never none.
    async fn list(&self) -> Result<Vec<Observed>, BackendError>;
    /// Idempotent by name: an environment of this name is adopted.
    async fn ensure(&self, spec: &EnvironmentSpec, pass: &LeaderPass) -> Result<(Ensured, Observed), BackendError>;
    /// Durable on return, idempotent.
    async fn mark(&self, name: &EnvironmentName, mark: Mark, pass: &LeaderPass) -> Result<(), BackendError>;
    /// Deletes; `Gone` only when nothing of it is left. Ask again while `Leaving`. A name that does not exist is `Gone`.
    async fn ensure_gone(&self, name: &EnvironmentName, pass: &LeaderPass) -> Result<Gone, BackendError>;
    /// Resolves when something about the environments may have changed (one ended, say), or after a while; a hint only.
    async fn changed(&self);
}

/// What of a job a backend may refuse.
#[derive(Debug, Clone)]
pub struct JobNeeds {
    pub trust: Trust,
    pub needs_docker: Option<String>,
}

/// All that a backend needs to make one environment.
#[derive(Debug, Clone)]
pub struct EnvironmentSpec {
    pub name: EnvironmentName,
    pub instance: InstanceId,
    pub assignment: AssignmentId,
    pub nonce: Nonce,
    pub repository: String,
    pub job_key: String,
    pub spiffe_id: String,
    pub steps: u32,
    pub capability: Secret,
    pub facade_url: String,
    pub facade_spiffe_id: String,
    pub gitea_url: String,
    pub gitea_ca_file: Option<std::path::PathBuf>,
    /// Seconds from create until the environment is stopped, whatever the job does.
    pub deadline_seconds: u64,
}

/// An environment as its backend shows it.
#[derive(Debug, Clone)]
pub struct Observed {
    pub name: EnvironmentName,
    pub assignment: AssignmentId,
    pub nonce: Nonce,
    pub backend: BackendKind,
    pub claimed: bool,
    pub terminal: bool,
    pub phase: Phase,
    pub repository: String,
    pub job_key: String,
    pub spiffe_id: String,
    pub steps: u32,
    pub created_at: SystemTime,
    pub deadline_at: SystemTime,
    /// The uid that its processes have, where the backend gives one of its own (for the socket's peer check).
    pub uid: Option<u32>,
    /// `SPIFFE_ENDPOINT_SOCKET` of the environment, where the controller itself must serve it (local backends).
    pub workload_socket: Option<std::path::PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Made, its executor not yet seen running.
    Pending,
    Running,
    /// Its executor has ended; the text says how (exit code, signal, lost).
    Ended(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ensured {
    Created,
    Adopted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Claimed,
    Terminal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    Gone,
    Leaving,
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Worth another try.
    #[error("{0}")]
    Transient(String),
    /// This environment can never be made as asked; the job fails with this reason.
    #[error("{0}")]
    Permanent(String),
    /// No environment of that name.
    #[error("no such environment")]
    NotFound,
}
