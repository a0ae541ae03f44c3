//! What the mirror remembers of one job, and how rows are spelled on disk.
//!
//! A row is `[version] ++ postcard`, which is positional: never reorder or remove a field or a variant, a change is a new version
//! with a step in `migrate`. Whatever people wrote is cut here, so that no row grows without bound. Nothing of the task's
//! secrets is in here: the only trace of one is the hash of its token.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    assignment::Assignment,
    claims::Verdict,
    ids::{Lane, TaskId},
    proto::runner::TaskResult,
};

/// Of every row that this version writes.
pub(super) const ROW_VERSION: u8 = 1;
/// Characters kept of a name, and of a reason.
const NAME: usize = 200;
const TEXT: usize = 600;
/// Labels kept of one job.
const LABELS: usize = 16;

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// On disk in the queue; no environment yet, or none any more.
    Queued,
    /// It has a slot, and perhaps an environment that has not started it yet.
    Starting,
    /// Started in its environment, so never anywhere else.
    Claimed,
    /// Gitea has its end.
    Finished,
    /// A dead letter: it could not be read.
    Dead,
    /// It was in no queue and no environment any more, and failed for that.
    Lost,
}

impl Phase {
    pub const ALL: [Phase; 6] = [Phase::Queued, Phase::Starting, Phase::Claimed, Phase::Finished, Phase::Dead, Phase::Lost];

    /// The number that stands for it in stored keys. Never renumber.
    pub(super) fn code(self) -> u8 {
        match self {
            Phase::Queued => 0,
            Phase::Starting => 1,
            Phase::Claimed => 2,
            Phase::Finished => 3,
            Phase::Dead => 4,
            Phase::Lost => 5,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Queued => "queued",
            Phase::Starting => "starting",
            Phase::Claimed => "claimed",
            Phase::Finished => "finished",
            Phase::Dead => "dead",
            Phase::Lost => "lost",
        }
    }

    /// Not over yet.
    pub fn is_open(self) -> bool {
        matches!(self, Phase::Queued | Phase::Starting | Phase::Claimed)
    }
}

/// How a job ended at Gitea.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Success,
    Failure,
    Cancelled,
    Skipped,
    /// Over at Gitea, or deleted there; which, was not told.
    Unknown,
}

impl Outcome {
    /// What Gitea says, where it says something.
    pub fn of(result: Option<TaskResult>) -> Self {
        match result {
            Some(TaskResult::ResultSuccess) => Outcome::Success,
            Some(TaskResult::ResultFailure) => Outcome::Failure,
            Some(TaskResult::ResultCancelled) => Outcome::Cancelled,
            Some(TaskResult::ResultSkipped) => Outcome::Skipped,
            Some(TaskResult::ResultUnspecified) | None => Outcome::Unknown,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Success => "success",
            Outcome::Failure => "failure",
            Outcome::Cancelled => "cancelled",
            Outcome::Skipped => "skipped",
            Outcome::Unknown => "unknown",
        }
    }
}

impl From<Verdict> for Outcome {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Failure => Outcome::Failure,
            Verdict::Cancelled => Outcome::Cancelled,
        }
    }
}

/// A job's timeline: Unix milliseconds, each where it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Gitea handed it out.
    pub fetched: Option<u64>,
    /// It was on disk in the queue.
    pub durable: Option<u64>,
    pub slot: Option<u64>,
    /// Its environment was made; the last one, where there were several.
    pub created: Option<u64>,
    /// The environment could prove who it is.
    pub identity: Option<u64>,
    pub claimed: Option<u64>,
    pub first_step: Option<u64>,
    /// Gitea has its end.
    pub ended: Option<u64>,
    /// Out of the queue for good.
    pub acknowledged: Option<u64>,
    /// Nothing of its environment is left.
    pub gone: Option<u64>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub lane: Lane,
    pub phase: Phase,
    pub details: Details,
    /// Environments that ended without a start.
    pub attempts: u32,
    /// Its environment now; after its end the last one.
    pub environment: Option<String>,
    pub result: Option<Outcome>,
    /// Why it waits again, failed, or is lost.
    pub reason: Option<String>,
    pub times: Times,
    /// Orders it among its like: when it was fetched, else when it was first seen.
    pub received_ms: u64,
    pub changed_ms: u64,
    /// Its row was made from what was found, not from what happened: the timeline before is unknown.
    pub rebuilt: bool,
}

/// What a job is; empty where it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Details {
    pub repository: String,
    pub job_key: String,
    pub job_name: String,
    pub run_id: String,
    pub labels: Vec<String>,
    pub steps: u32,
    /// See [`Assignment::token_hash`].
    pub token_hash: Option<[u8; 32]>,
}

impl Details {
    pub fn of(assignment: &Assignment) -> Self {
        Self {
            repository: assignment.repository.clone(),
            job_key: assignment.job_key.clone(),
            job_name: assignment.job_name.clone(),
            run_id: assignment.run_id.clone(),
            labels: assignment.labels.clone(),
            steps: assignment.steps,
            token_hash: Some(assignment.token_hash),
        }
    }

    fn cut(mut self) -> Self {
        for name in [&mut self.repository, &mut self.job_key, &mut self.job_name, &mut self.run_id] {
            cut(name, NAME);
        }
        self.labels.truncate(LABELS);
        self.labels.iter_mut().for_each(|label| cut(label, NAME));
        self
    }
}

impl Job {
    pub(super) fn new(lane: Lane, details: Details, received_ms: u64) -> Self {
        Self {
            lane,
            phase: Phase::Queued,
            details: details.cut(),
            attempts: 0,
            environment: None,
            result: None,
            reason: None,
            times: Times::default(),
            received_ms,
            changed_ms: received_ms,
            rebuilt: false,
        }
    }

    /// Its key in the index by state.
    pub(super) fn place(&self, task: TaskId) -> (u8, u8, u64, i64) {
        (self.lane.code(), self.phase.code(), self.received_ms, task.0)
    }
}

/// That a task is over, kept longer than its job's row: the second guard against a task that is delivered twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    pub ended_ms: u64,
    pub result: Outcome,
    pub token_hash: Option<[u8; 32]>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub task: Option<i64>,
    /// A word of the log's events, or of this room.
    pub kind: String,
    pub text: String,
}

/// Who has a slot. Slots have no numbers of their own; the mirror gives each the lowest that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    pub task: i64,
    pub since_ms: u64,
}

pub(super) fn text(mut text: String) -> String {
    cut(&mut text, TEXT);
    text
}

fn cut(text: &mut String, most: usize) {
    if let Some((at, _)) = text.char_indices().nth(most) {
        text.truncate(at);
    }
}

/// A row that makes no sense to this version.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a row of {what} cannot be read: {why}")]
pub struct Unreadable {
    what: &'static str,
    why: String,
}

pub(super) fn encode<T: Serialize>(what: &'static str, value: &T) -> Result<Vec<u8>, Unreadable> {
    postcard::to_extend(value, vec![ROW_VERSION]).map_err(|e| Unreadable { what, why: e.to_string() })
}

/// Any bytes get an answer.
pub(super) fn decode<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, Unreadable> {
    match bytes.split_first() {
        Some((&ROW_VERSION, rest)) => postcard::from_bytes(rest).map_err(|e| Unreadable { what, why: e.to_string() }),
        Some((version, _)) => {
            Err(Unreadable { what, why: format!("it has version {version}, this program reads {ROW_VERSION}") })
        }
        None => Err(Unreadable { what, why: "it is empty".into() }),
    }
}

/// Reads bytes as each kind of row, for the fuzz target: never panics.
pub fn read_any_row(bytes: &[u8]) {
    drop(decode::<Job>("assignments", bytes));
    drop(decode::<Finished>("finished", bytes));
    drop(decode::<Event>("events", bytes));
    drop(decode::<Slot>("slots", bytes));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn jobs() -> impl Strategy<Value = Job> {
        let names = (".{0,300}", ".{0,300}", proptest::collection::vec(".{0,300}", 0..30));
        let times = proptest::collection::vec(proptest::option::of(any::<u64>()), 10);
        let rest = (0usize..6, 0u8..3, any::<u32>(), proptest::option::of(".{0,40}"), proptest::option::of(any::<[u8; 32]>()));
        (names, times, rest).prop_map(|((repository, job_name, labels), times, (phase, lane, attempts, environment, hash))| {
            let details = Details { repository, job_name, labels, token_hash: hash, ..Default::default() };
            let [fetched, durable, slot, created, identity, claimed, first_step, ended, acknowledged, gone] =
                times.try_into().unwrap();
            Job {
                phase: Phase::ALL[phase],
                attempts,
                environment,
                times: Times { fetched, durable, slot, created, identity, claimed, first_step, ended, acknowledged, gone },
                ..Job::new(Lane::from_code(lane).unwrap(), details, 7)
            }
        })
    }

    proptest! {
        #[test]
        fn a_row_reads_back_what_was_written_and_is_bounded(job in jobs()) {
            let bytes = encode("assignments", &job).unwrap();
            prop_assert!(bytes.len() < 20_000);
            prop_assert_eq!(decode::<Job>("assignments", &bytes).unwrap(), job);
        }

        #[test]
        fn any_bytes_are_a_row_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), whole: bool) {
            if let Some(first) = bytes.first_mut().filter(|_| whole) {
                *first = ROW_VERSION;
            }
            read_any_row(&bytes);
        }

        #[test]
        fn a_damaged_row_never_panics(job in jobs(), at: usize, with: u8, cut: usize) {
            let mut bytes = encode("assignments", &job).unwrap();
            let at = at % bytes.len();
            bytes[at] = with;
            bytes.truncate(cut % (bytes.len() + 1));
            read_any_row(&bytes);
        }
    }

    #[test]
    fn stored_numbers_stay_what_they_are() {
        assert_eq!(Phase::ALL.map(Phase::code), [0, 1, 2, 3, 4, 5]);
        for phase in Phase::ALL {
            assert_eq!(encode("phase", &phase).unwrap(), [ROW_VERSION, phase.code()], "{phase:?}");
        }
        for lane in Lane::ALL {
            assert_eq!(encode("lane", &lane).unwrap(), [ROW_VERSION, lane.code()], "{lane:?}");
        }
    }
}
