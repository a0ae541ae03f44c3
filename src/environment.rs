//! An environment: what is asked of a backend, and what a backend shows. Data only.

use std::{path::PathBuf, time::SystemTime};

use crate::{
    assignment::Assignment,
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

/// What an environment is told about us.
#[derive(Debug, Clone)]
pub struct Target {
    pub instance: InstanceId,
    pub facade_url: String,
    pub facade_spiffe_id: String,
    pub gitea_url: String,
    pub gitea_ca_file: Option<PathBuf>,
    pub pod_deadline_seconds: u64,
    pub vm_deadline_seconds: u64,
}

impl Target {
    /// The environment of this nonce for an assignment; the same whenever it is asked for.
    pub fn spec(&self, backend: BackendKind, assignment: &Assignment, nonce: Nonce, capability: Secret) -> EnvironmentSpec {
        EnvironmentSpec {
            name: EnvironmentName::new(&self.instance, assignment.task, &nonce),
            instance: self.instance.clone(),
            assignment: assignment.id,
            capability,
            nonce,
            repository: assignment.repository.clone(),
            job_key: assignment.job_key.clone(),
            spiffe_id: assignment.spiffe_id.clone(),
            steps: assignment.steps,
            facade_url: self.facade_url.clone(),
            facade_spiffe_id: self.facade_spiffe_id.clone(),
            gitea_url: self.gitea_url.clone(),
            gitea_ca_file: self.gitea_ca_file.clone(),
            deadline_seconds: match backend {
                BackendKind::Pod => self.pod_deadline_seconds,
                BackendKind::Vm => self.vm_deadline_seconds,
            },
        }
    }
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
    pub gitea_ca_file: Option<PathBuf>,
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
    pub workload_socket: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Made, its executor not yet seen running.
    Pending,
    Running,
    /// Its executor has ended; the text says how (exit code, signal, lost).
    Ended(String),
    /// Its executor has ended because it can never run a job there, and the next one would end the same way.
    Unfit(String),
}

impl Phase {
    /// How it ended; `None` while it may still live.
    pub fn ended(&self) -> Option<&str> {
        match self {
            Phase::Pending | Phase::Running => None,
            Phase::Ended(how) | Phase::Unfit(how) => Some(how),
        }
    }
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
