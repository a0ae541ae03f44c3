//! Where environments are made: one trait, an implementation for each kind of place.
//!
//! A backend keeps the metadata of its environments; that is the truth about who serves which assignment. Whether an
//! environment *should* exist is `plan`'s business, never a backend's.

use async_trait::async_trait;

pub use crate::environment::{Ensured, EnvironmentSpec, Gone, JobNeeds, Mark, Observed, Phase};
use crate::{
    ids::{BackendKind, EnvironmentName},
    leader::LeaderPass,
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
    /// Nothing of it runs any more once this answers `Gone`; its metadata stays. For a job that must be settled before its traces go.
    async fn ensure_halted(&self, name: &EnvironmentName, pass: &LeaderPass) -> Result<Gone, BackendError>;
    /// Asks the executor to end in order (SIGTERM), for the deadline or a cancel. Returns at once; one that has ended needs no asking.
    async fn ask_stop(&self, name: &EnvironmentName, pass: &LeaderPass) -> Result<(), BackendError>;
    /// Deletes; `Gone` only when nothing of it is left. Ask again while `Leaving`. A name that does not exist is `Gone`.
    async fn ensure_gone(&self, name: &EnvironmentName, pass: &LeaderPass) -> Result<Gone, BackendError>;
    /// Resolves when something about the environments may have changed (one ended, say), or after a while; a hint only.
    async fn changed(&self);
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Worth another try.
    #[error("{0}")]
    Transient(String),
    /// This environment can never be made as asked; the job fails with this reason.
    #[error("{0}")]
    Permanent(String),
    /// A newer version of this program made environments here; they were left as they are.
    #[error("{0}")]
    Newer(String),
    /// No environment of that name.
    #[error("no such environment")]
    NotFound,
}
