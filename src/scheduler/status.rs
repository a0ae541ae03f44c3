//! What the scheduler shows of itself, for readiness and later the dashboard.

use std::time::SystemTime;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FetchState {
    #[default]
    Starting,
    /// Gitea answers.
    Asking,
    /// Nothing is fetched, for a reason of ours; it goes on by itself.
    Held(String),
    /// Gitea does not answer, or with errors; asked again with back-off.
    Failing(String),
    /// A person must act.
    Parked(String),
}

#[derive(Debug, Clone, Default)]
pub struct SchedulerStatus {
    pub state: FetchState,
    pub last_answer: Option<SystemTime>,
}
