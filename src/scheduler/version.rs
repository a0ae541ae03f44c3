//! The tasks version that all questions share (rule R2).
//!
//! Gitea does not look for a job when asked with its current version, and does not raise it when it assigns one. So after each
//! task, and after each Declare, the next question must be 0, whatever older answers still say.

use std::sync::{Mutex, PoisonError};

#[derive(Default)]
pub(super) struct TasksVersion(Mutex<Inner>);

#[derive(Default, Clone, Copy)]
struct Inner {
    generation: u64,
    version: i64,
}

/// A question's version, and the generation in which it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    generation: u64,
    pub(super) version: i64,
}

impl TasksVersion {
    pub(super) fn ask(&self) -> Asked {
        let Inner { generation, version } = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Asked { generation, version }
    }

    pub(super) fn reset(&self) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *inner = Inner { generation: inner.generation + 1, version: 0 };
    }

    /// Moves up, and only on an answer to a question of the present generation.
    pub(super) fn answered(&self, asked: Asked, version: i64) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.generation == inner.generation && version > inner.version {
            inner.version = version;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_an_older_question_does_not_hide_a_waiting_job() {
        let versions = TasksVersion::default();
        let (first, second) = (versions.ask(), versions.ask());
        versions.answered(first, 7);
        assert_eq!(versions.ask().version, 7);
        // The second question brought a task.
        versions.reset();
        versions.answered(second, 8);
        assert_eq!(versions.ask().version, 0);
        let third = versions.ask();
        versions.answered(third, 8);
        versions.answered(third, 5);
        assert_eq!(versions.ask().version, 8);
    }
}
