//! The names of things: each id is a type of its own, so that none is taken for another.
//!
//! Only spelling and parsing; nothing here knows what an id stands for.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A task's number at Gitea. Never reused by Gitea, but a restored Gitea may give it again (rule R4).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskId(pub i64);

/// `gitea-task-<task id>`: one assignment a task.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AssignmentId(pub TaskId);

/// What a job can run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    Pod,
    Vm,
}

/// Which consumer of the queue takes an assignment: a backend's worker, or the one that only settles what cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    Pod,
    Vm,
    Refused,
}

/// The random part of one environment (label `environment`); 16 lower-case hex digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Nonce(String);

/// The hash of the runner's UUID (label `instance`); 8 lower-case hex digits.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InstanceId(String);

/// `ci-<instance>-<task id>-<nonce>`: fit for a Pod name, a folder, a label value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EnvironmentName(String);

/// A text is not the id it was taken for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is no {kind}")]
pub struct NotAnId {
    kind: &'static str,
    text: String,
}

impl NotAnId {
    fn new(kind: &'static str, text: &str) -> Self {
        Self { kind, text: text.chars().take(80).collect() }
    }
}

impl TaskId {
    pub fn assignment(self) -> AssignmentId {
        AssignmentId(self)
    }
}

impl AssignmentId {
    pub fn task(self) -> TaskId {
        self.0
    }
}

impl BackendKind {
    pub const ALL: [BackendKind; 2] = [BackendKind::Pod, BackendKind::Vm];

    pub fn as_str(self) -> &'static str {
        match self {
            BackendKind::Pod => "pod",
            BackendKind::Vm => "vm",
        }
    }

    pub fn lane(self) -> Lane {
        match self {
            BackendKind::Pod => Lane::Pod,
            BackendKind::Vm => Lane::Vm,
        }
    }
}

impl Lane {
    pub const ALL: [Lane; 3] = [Lane::Pod, Lane::Vm, Lane::Refused];

    pub fn as_str(self) -> &'static str {
        match self {
            Lane::Pod => "pod",
            Lane::Vm => "vm",
            Lane::Refused => "refused",
        }
    }

    pub fn backend(self) -> Option<BackendKind> {
        match self {
            Lane::Pod => Some(BackendKind::Pod),
            Lane::Vm => Some(BackendKind::Vm),
            Lane::Refused => None,
        }
    }

    /// The number that stands for it in stored keys. Never renumber.
    pub fn code(self) -> u8 {
        match self {
            Lane::Pod => 0,
            Lane::Vm => 1,
            Lane::Refused => 2,
        }
    }

    pub fn from_code(code: u8) -> Option<Lane> {
        Lane::ALL.into_iter().find(|lane| lane.code() == code)
    }
}

impl Nonce {
    pub fn random() -> Self {
        Self(hex::encode(rand::random::<[u8; 8]>()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl InstanceId {
    pub fn of_uuid(uuid: &str) -> Self {
        use sha2::Digest as _;
        let hash = sha2::Sha256::digest(uuid.trim().as_bytes());
        Self(hex::encode(&hash[..4]))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl EnvironmentName {
    pub fn new(instance: &InstanceId, task: TaskId, nonce: &Nonce) -> Self {
        Self(format!("ci-{}-{}-{}", instance.as_str(), task, nonce.as_str()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The parts, as `new` took them.
    pub fn parts(&self) -> Option<(InstanceId, TaskId, Nonce)> {
        let mut parts = self.0.strip_prefix("ci-")?.splitn(3, '-');
        let instance = parts.next().filter(|p| is_hex(p, 8))?;
        let task = parts.next()?.parse().ok()?;
        let nonce = parts.next()?.parse().ok()?;
        Some((InstanceId(instance.to_owned()), task, nonce))
    }
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

impl FromStr for TaskId {
    type Err = NotAnId;
    fn from_str(text: &str) -> Result<Self, NotAnId> {
        match text.parse::<i64>() {
            Ok(id) if id > 0 => Ok(Self(id)),
            _ => Err(NotAnId::new("task id", text)),
        }
    }
}

impl FromStr for AssignmentId {
    type Err = NotAnId;
    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let id = text.strip_prefix("gitea-task-").and_then(|id| id.parse().ok());
        id.map(Self).ok_or_else(|| NotAnId::new("assignment id", text))
    }
}

impl FromStr for Nonce {
    type Err = NotAnId;
    fn from_str(text: &str) -> Result<Self, NotAnId> {
        if is_hex(text, 16) { Ok(Self(text.to_owned())) } else { Err(NotAnId::new("environment nonce", text)) }
    }
}

impl FromStr for EnvironmentName {
    type Err = NotAnId;
    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let name = Self(text.to_owned());
        if name.parts().is_some() { Ok(name) } else { Err(NotAnId::new("environment name", text)) }
    }
}

impl FromStr for BackendKind {
    type Err = NotAnId;
    fn from_str(text: &str) -> Result<Self, NotAnId> {
        BackendKind::ALL.into_iter().find(|b| b.as_str() == text).ok_or_else(|| NotAnId::new("backend", text))
    }
}

macro_rules! shown {
    ($($type:ident |$id:ident| $show:expr;)*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let $id = self;
                write!(f, "{}", $show)
            }
        }
    )*};
}
macro_rules! debug_kind {
    ($($type:ident $kind:literal;)*) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($kind, ":{}"), self)
            }
        }
    )*};
}
shown! {
    TaskId |id| id.0;
    AssignmentId |id| format_args!("gitea-task-{}", id.0);
    Nonce |id| id.0;
    InstanceId |id| id.0;
    EnvironmentName |id| id.0;
    BackendKind |id| id.as_str();
    Lane |id| id.as_str();
}
debug_kind! { TaskId "task"; AssignmentId "assignment"; Nonce "nonce"; InstanceId "instance"; EnvironmentName "environment"; }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_reads_back_what_it_shows() {
        let nonce = Nonce::random();
        let instance = InstanceId::of_uuid("8fd0eaaa-4799-4bfc-ac29-cd55a49bc845\n");
        let name = EnvironmentName::new(&instance, TaskId(71), &nonce);
        assert_eq!(name.to_string().parse::<EnvironmentName>(), Ok(name.clone()));
        assert_eq!(name.parts(), Some((instance, TaskId(71), nonce)));
        assert_eq!("gitea-task-71".parse::<AssignmentId>(), Ok(TaskId(71).assignment()));
        assert_eq!(TaskId(71).assignment().to_string(), "gitea-task-71");
        assert_eq!(format!("{:?}", TaskId(71)), "task:71");
        for lane in Lane::ALL {
            assert_eq!(Lane::from_code(lane.code()), Some(lane));
        }
    }

    #[test]
    fn what_is_no_id_is_refused() {
        for text in ["", "0", "-3", "gitea-task-0", "gitea-task-", "../x", "9223372036854775808"] {
            assert!(text.parse::<TaskId>().is_err(), "{text}");
            assert!(text.parse::<AssignmentId>().is_err(), "{text}");
            assert!(text.parse::<EnvironmentName>().is_err(), "{text}");
        }
        assert!("ci-0123abcd-7-0123456789abcdeF".parse::<EnvironmentName>().is_err());
        assert!("ci-0123abcd-7-0123456789abcdef/..".parse::<EnvironmentName>().is_err());
    }
}
