//! What people and programs are shown: one set of types for the pages, the JSON answers and the command line.
//!
//! Everything comes from one moment of the mirror, and from what the parts say of themselves (`board`, `claims`). What was not read
//! is `None`, never zero. How it is put together is `look`'s, the sentences are `words`'.

use std::{collections::HashMap, sync::Arc, time::SystemTime};

use serde::{Serialize, Serializer};
use time::format_description::well_known::Rfc3339;
use utoipa::ToSchema;

use crate::{
    board::{self, Board, Standing},
    claims::Claims,
    ids::{BackendKind, InstanceId},
    mirror::{Mirror, ms_of},
};

pub(super) mod look;
pub(super) mod words;

/// Older than this, what is shown is said to be old.
pub const STALE_MS: u64 = 5_000;

/// Where everything that is shown comes from.
#[derive(Clone)]
pub struct Source {
    pub mirror: Mirror,
    pub claims: Claims,
    pub board: Board,
    pub operation: Operations,
    pub capacity: HashMap<BackendKind, usize>,
    pub about: About,
}

/// What does not change while the process runs.
#[derive(Debug, Clone)]
pub struct About {
    pub version: &'static str,
    pub instance: InstanceId,
    /// Where people reach Gitea, without a slash at the end.
    pub gitea_url: String,
    /// What is behind each backend, the queue and the identities, in words.
    pub kinds: HashMap<&'static str, String>,
    /// The label of the vm backend.
    pub vm_label: String,
    /// Jobs of one user can read everything of it.
    pub unisolated: bool,
}

/// What the wiring knows of the whole, anew at each call.
pub type Operations = Arc<dyn Fn() -> Operation + Send + Sync>;

#[derive(Debug, Clone, Default)]
pub struct Operation {
    /// Why the process is not ready; empty if it is.
    pub reasons: Vec<String>,
    /// Whether Gitea is asked for jobs now, in words.
    pub fetching: String,
    /// The labels that Gitea knows of us; `None`: not declared yet.
    pub declared: Option<Vec<String>>,
    pub draining_since: Option<SystemTime>,
    /// This process may act; a standby only shows.
    pub leads: bool,
    /// What waits at Gitea itself; `None`: nobody was asked to look.
    pub backlog: Option<Backlog>,
}

/// Unix milliseconds, spelled as RFC 3339 in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub u64);

impl Moment {
    pub fn now() -> Self {
        Self(ms_of(SystemTime::now()))
    }

    /// How long it was ago then, to the second.
    pub fn ago(&self, now: &Moment) -> String {
        words::span(now.0.saturating_sub(self.0) / 1000 * 1000)
    }

    pub fn rfc(self) -> String {
        let at = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1_000_000);
        // A clock that far off says nothing.
        at.ok().and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_else(|| "9999-12-31T23:59:59Z".into())
    }
}

impl From<SystemTime> for Moment {
    fn from(at: SystemTime) -> Self {
        Self(ms_of(at))
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.rfc())
    }
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Overview {
    pub version: String,
    /// The hash of the runner's UUID, part of every environment's name.
    pub instance: String,
    /// Of which moment this is; null: the mirror does not answer, and what comes from it is unknown.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub as_of: Option<Moment>,
    /// It is older than 5 s.
    pub stale: bool,
    pub ready: bool,
    /// Why it is not ready, as `/readyz` has it.
    pub reasons: Vec<String>,
    /// The state of the whole in one sentence.
    pub sentence: String,
    /// Whether Gitea is asked for jobs, in words.
    pub fetching: String,
    /// Nothing new is fetched or started since then.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub draining_since: Option<Moment>,
    pub backends: Vec<Backend>,
    /// Jobs that wait or start, the one that waits longest first; the first twenty.
    pub waiting: Option<Vec<Job>>,
    /// Jobs that run, the oldest first.
    pub running: Option<Vec<Job>>,
    /// The last ten that ended.
    pub ended: Option<Vec<Job>>,
    pub neighbours: Vec<Neighbour>,
    /// What waits at Gitea itself; null: no GITEA_API_TOKEN is set.
    pub backlog: Option<Backlog>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Backend {
    /// `pod` or `vm`.
    pub backend: String,
    /// Slots that are configured.
    pub limit: usize,
    pub used: Option<usize>,
    pub free: Option<usize>,
    pub running: Option<u64>,
    pub starting: Option<u64>,
    pub waiting: Option<u64>,
    /// Since when the job waits that waits longest.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub oldest_waiting: Option<Moment>,
    /// Gitea keeps further jobs of this label until there is room; null: not known yet.
    pub label_withdrawn: Option<bool>,
    /// One for each slot.
    pub slots: Option<Vec<Slot>>,
    pub standing: Neighbour,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Slot {
    /// `running`, `starting`, `leaving`, `free` or `unavailable`.
    pub state: &'static str,
    pub task: Option<i64>,
}

/// One job, as `show job --json` tells it, too.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Job {
    /// Its number at Gitea.
    pub task: i64,
    pub assignment: String,
    /// `pod`, `vm`, or `refused` where no backend can serve it.
    pub backend: String,
    /// `queued`, `starting`, `claimed`, `finished`, `dead` or `lost`.
    pub phase: String,
    /// The same for people: `waiting`, `starting`, `running`, `success`, `failure`, `cancelled`, `skipped`, `infrastructure`, …
    pub state: String,
    /// Why it is where it is. Every job that waits or starts has one.
    pub why: Option<String>,
    pub repository: String,
    pub job_key: String,
    pub job_name: String,
    pub run_id: String,
    /// The run's page at Gitea.
    pub run_url: Option<String>,
    pub labels: Vec<String>,
    pub steps: u32,
    /// Environments that ended without a start.
    pub attempts: u32,
    pub environment: Option<String>,
    pub result: Option<String>,
    pub reason: Option<String>,
    /// Its row was made from what was found: the timeline before is not known.
    pub rebuilt: bool,
    #[schema(value_type = String, format = DateTime)]
    pub received_at: Moment,
    #[schema(value_type = String, format = DateTime)]
    pub changed_at: Moment,
    /// When its environment was heard of last.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub heard_at: Option<Moment>,
    pub times: Times,
}

/// When a job came where; a station that is not known, or not reached, is left out.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct Times {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub fetched: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub durable: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub slot: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub created: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub identity: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub claimed: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub first_step: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub ended: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub acknowledged: Option<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime, nullable = false)]
    pub gone: Option<Moment>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct JobList {
    pub jobs: Vec<Job>,
    /// Give it as `after` for the next page; null: this was the last.
    pub next: Option<String>,
}

/// A job with what happened to it, the newest first.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct JobDetails {
    #[serde(flatten)]
    pub job: Job,
    pub events: Vec<Event>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Event {
    #[schema(value_type = String, format = DateTime)]
    pub at: Moment,
    pub task: Option<i64>,
    pub event: String,
    pub text: String,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Environment {
    pub environment: String,
    pub backend: String,
    pub task: i64,
    /// `starting` or `claimed`; `finished`: its job is over, and it is being removed.
    pub phase: String,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub created_at: Option<Moment>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub heard_at: Option<Moment>,
    pub repository: String,
}

/// What waits in one lane of the queue.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Lane {
    /// `pod`, `vm` or `refused`.
    pub lane: String,
    /// Null: the queue does not answer.
    pub ready: Option<u64>,
    pub delayed: Option<u64>,
    pub leased: Option<u64>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub oldest_waiting: Option<Moment>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Queue {
    pub standing: Neighbour,
    pub lanes: Vec<Lane>,
}

/// A part that is asked, and how it answers.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Neighbour {
    pub name: String,
    /// What is behind the name.
    pub kind: String,
    /// `fine`, `trouble`, or `unknown` before it was asked.
    pub state: &'static str,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub since: Option<Moment>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub asked: Option<Moment>,
    /// The trouble it has, or had last.
    pub last_trouble: Option<Trouble>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Trouble {
    #[schema(value_type = String, format = DateTime)]
    pub at: Moment,
    pub what: String,
}

impl Neighbour {
    pub fn of(name: &str, kind: &str, known: Option<board::Neighbour>) -> Self {
        let (state, since, asked) = match &known {
            None => ("unknown", None, None),
            Some(n) => {
                (if n.standing == Standing::Fine { "fine" } else { "trouble" }, Some(n.since.into()), Some(n.asked.into()))
            }
        };
        let last_trouble = known.and_then(|n| n.last_trouble).map(|(at, what)| Trouble { at: at.into(), what });
        Self { name: name.into(), kind: kind.into(), state, since, asked, last_trouble }
    }
}

/// A part that looks again and again, and what its last look did.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Reconciler {
    pub name: String,
    #[schema(value_type = String, format = DateTime)]
    pub last_pass: Moment,
    pub took_ms: u64,
    /// The last pass could look at everything it needs.
    pub ok: bool,
    /// What it saw, or why it could not look.
    pub saw: String,
    /// The last time that it changed something.
    pub last_change: Option<Trouble>,
}

impl Reconciler {
    pub fn took(&self) -> String {
        words::span(self.took_ms)
    }
}

#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Reconcilers {
    pub reconcilers: Vec<Reconciler>,
    /// What happened without anybody asking for it, the newest first; null: the mirror does not answer.
    pub events: Option<Vec<Event>>,
}

/// What waits at Gitea and was not given to anybody.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Backlog {
    /// Null: Gitea did not tell.
    pub queued: Option<u64>,
    #[schema(value_type = Option<String>, format = DateTime)]
    pub as_of: Option<Moment>,
    /// Labels of queued jobs that this runner does not declare, so that it never gets them, with the number of jobs.
    pub nobodys: Vec<UnknownLabels>,
    /// Why Gitea did not tell.
    pub trouble: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct UnknownLabels {
    /// As Gitea has them: `Array` and an empty label are what a bad `runs-on` becomes.
    pub labels: Vec<String>,
    pub jobs: u64,
    /// One of them, as `owner/name`.
    pub example: String,
}
