//! Whether the job shall stop, and why: asked by anyone, once, and seen by all.
//!
//! The first cause stays; what follows from it is for bridge, supervisor and delivery.

use std::sync::Arc;

use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopCause {
    /// A person or a newer push cancelled the job.
    Cancelled,
    /// The environment's time is over.
    Deadline,
    /// The executor got SIGTERM, or the controller takes the environment away.
    Shutdown,
    /// Gitea ended the job itself, with a result of its own.
    EndedByGitea,
    /// The task was deleted, or this environment revoked.
    Gone,
}

impl StopCause {
    /// For the end of the job's log.
    pub fn told(self) -> &'static str {
        match self {
            StopCause::Cancelled => "This job was stopped, because it was cancelled.",
            StopCause::Deadline => "This job was stopped, because its environment reached its time limit (deadline).",
            StopCause::Shutdown => "This job was stopped, because its environment was asked to end (SIGTERM).",
            StopCause::EndedByGitea => "This job was stopped, because Gitea had ended it.",
            StopCause::Gone => "This job was stopped, because Gitea does not have it any more.",
        }
    }
}

#[derive(Clone)]
pub struct Stop(Arc<watch::Sender<Option<StopCause>>>);

impl Default for Stop {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl Stop {
    pub fn ask(&self, cause: StopCause) {
        let first = self.0.send_if_modified(|seen| seen.is_none() && seen.replace(cause).is_none());
        if first {
            tracing::info!(?cause, "the job is asked to stop");
        }
    }

    pub fn seen(&self) -> Option<StopCause> {
        *self.0.borrow()
    }

    /// Waits until a stop is asked.
    pub async fn asked(&self) -> StopCause {
        let mut seen = self.0.subscribe();
        loop {
            if let Some(cause) = *seen.borrow_and_update() {
                return cause;
            }
            // The sender lives as long as `self`.
            if seen.changed().await.is_err() {
                return StopCause::Shutdown;
            }
        }
    }
}
