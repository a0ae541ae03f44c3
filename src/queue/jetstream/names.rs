//! Where NATS is, who we are there, and how subjects, stream and consumers are called.
//!
//! Spelling only. The names are fixed by the system that this follows; each task has a subject of its own, so that a lane can hold
//! it once only.

use std::path::PathBuf;

use crate::{
    ids::{Lane, TaskId},
    secret::Secret,
};

/// What the operator set.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `nats://` or `tls://`, several separated by commas.
    pub url: String,
    /// The authority of the server's certificate. Set: TLS or nothing.
    pub ca_file: Option<PathBuf>,
    /// May publish assignments, and nothing else.
    pub producer: User,
    /// May consume them.
    pub worker: User,
    pub names: Names,
    /// Where the server's own `/varz` is, `http://…`. `None`: it cannot be checked whether it writes to disk at once.
    pub monitor_url: Option<String>,
}

#[derive(Debug, Clone)]
pub struct User {
    pub name: String,
    pub password: Secret,
}

impl Settings {
    /// Never plaintext where TLS was asked for.
    pub(super) fn tls(&self) -> bool {
        self.ca_file.is_some() || self.url.split(',').any(|url| url.trim().starts_with("tls://"))
    }
}

/// Stream and subjects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub stream: String,
    /// Subjects are `<base>.<lane>.<task id>`.
    pub base: String,
}

impl Default for Names {
    fn default() -> Self {
        Self { stream: "CI_RUNNER".into(), base: "ci.assignment".into() }
    }
}

impl Names {
    pub fn subject(&self, lane: Lane, task: TaskId) -> String {
        format!("{}.{lane}.{task}", self.base)
    }

    /// What the consumer of a lane takes; it is named as the lane.
    pub fn of_lane(&self, lane: Lane) -> String {
        format!("{}.{lane}.>", self.base)
    }

    /// The subject of a lane in the old layout, in which all its assignments shared one.
    pub fn flat(&self, lane: Lane) -> String {
        format!("{}.{lane}", self.base)
    }

    pub(super) fn in_any_lane(&self, task: TaskId) -> String {
        format!("{}.*.{task}", self.base)
    }

    pub fn all(&self) -> String {
        format!("{}.>", self.base)
    }

    pub(super) fn parse(&self, subject: &str) -> Option<(Lane, TaskId)> {
        let (lane, task) = subject.strip_prefix(&self.base)?.strip_prefix('.')?.split_once('.')?;
        let lane = Lane::ALL.into_iter().find(|known| known.as_str() == lane)?;
        Some((lane, task.parse().ok()?))
    }

    /// `CI_DEAD` for `CI_RUNNER`.
    pub fn dead_stream(&self) -> String {
        match self.stream.strip_suffix("_RUNNER") {
            Some(system) => format!("{system}_DEAD"),
            None => format!("{}_DEAD", self.stream),
        }
    }

    /// `ci.dead` for `ci.assignment`.
    fn dead_base(&self) -> String {
        match self.base.rsplit_once('.') {
            Some((above, _)) => format!("{above}.dead"),
            None => format!("{}-dead", self.base),
        }
    }

    pub fn all_dead(&self) -> String {
        format!("{}.>", self.dead_base())
    }

    /// `task`: its id, or what stood in its place.
    pub(super) fn dead(&self, lane: Lane, task: &str) -> String {
        format!("{}.{lane}.{task}", self.dead_base())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_says_lane_and_task_and_nothing_else_passes_for_one() {
        let names = Names::default();
        let subject = names.subject(Lane::Vm, TaskId(71));
        assert_eq!(subject, "ci.assignment.vm.71");
        assert_eq!(names.parse(&subject), Some((Lane::Vm, TaskId(71))));
        for other in [
            "ci.assignment.vm",
            "ci.assignment.vm.",
            "ci.assignment.vm.x",
            "ci.assignment.x.1",
            "ci.assignments.vm.1",
            "ci.assignment.vm.1.2",
        ] {
            assert_eq!(names.parse(other), None, "{other}");
        }
        assert_eq!((names.dead_stream().as_str(), names.all_dead().as_str()), ("CI_DEAD", "ci.dead.>"));
        let own = Names { stream: "TEST".into(), base: "test".into() };
        assert_eq!((own.dead_stream().as_str(), own.all_dead().as_str()), ("TEST_DEAD", "test-dead.>"));
    }
}
