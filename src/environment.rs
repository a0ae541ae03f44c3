//! An environment: what is asked of a backend, and what a backend shows. Data only.

use std::time::SystemTime;

use crate::{
    ids::{AssignmentId, BackendKind, EnvironmentName, InstanceId, Nonce},
    secret::Secret,
    task::Trust,
};

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
