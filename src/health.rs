//! Whether the process is ready, and if not, every reason.

use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::scheduler::{FetchState, SchedulerStatus};

/// An answer from Gitea older than this is no answer.
const STALE: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub struct Health {
    pub scheduler: watch::Receiver<SchedulerStatus>,
    /// Environments were counted and the facade serves.
    pub serving: watch::Receiver<bool>,
    pub stopping: tokio_util::sync::CancellationToken,
}

impl Health {
    /// Empty: ready.
    pub fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.stopping.is_cancelled() {
            reasons.push("stopping".to_owned());
        }
        if !*self.serving.borrow() {
            reasons.push("facade: still counting the environments".to_owned());
        }
        let status = self.scheduler.borrow();
        match &status.state {
            FetchState::Asking => {
                let age = status.last_answer.and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
                if age > STALE {
                    reasons.push(format!("gitea: no answer for {} s", age.as_secs()));
                }
            }
            // A wanted state is no fault (decision 20).
            FetchState::Draining => {}
            FetchState::Starting => reasons.push("gitea: not asked yet".to_owned()),
            FetchState::Held(why) => reasons.push(format!("scheduler: holds back: {why}")),
            FetchState::Failing(why) => reasons.push(format!("gitea: {why}")),
            FetchState::Parked(why) => reasons.push(format!("gitea: {why}; register anew")),
        }
        reasons
    }

    /// Whether Gitea is asked for jobs now, for people.
    pub fn fetching(&self) -> String {
        let status = self.scheduler.borrow();
        match &status.state {
            FetchState::Starting => "Gitea was not asked for jobs yet.".into(),
            FetchState::Asking => "Gitea is asked for jobs.".into(),
            FetchState::Draining => "Nothing is fetched: somebody asked to drain.".into(),
            FetchState::Held(why) => format!("Nothing is fetched now: {why}. It goes on by itself."),
            FetchState::Failing(why) => format!("Gitea does not give jobs now: {why}. It is asked again."),
            FetchState::Parked(why) => format!("Nothing is fetched: {why}. Register this runner anew."),
        }
    }
}
