//! What the scheduler shows of itself, for readiness and the dashboard.

use std::time::SystemTime;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FetchState {
    #[default]
    Starting,
    /// Gitea answers.
    Asking,
    /// Nothing is fetched, for a reason of ours; it goes on by itself.
    Held(String),
    /// Nothing is fetched, because somebody wants it so.
    Draining,
    /// Gitea does not answer, or with errors; asked again with back-off.
    Failing(String),
    /// A person must act.
    Parked(String),
}

#[derive(Debug, Clone, Default)]
pub struct SchedulerStatus {
    pub state: FetchState,
    pub last_answer: Option<SystemTime>,
    /// The labels that Gitea knows of us; one that is withdrawn for want of room is not among them. `None`: not told yet.
    pub declared: Option<Vec<String>>,
}
