//! What can be asked of the mirror: everything is read in one transaction, so an answer is of one moment.
//!
//! The same for the controller's own file and for a reader beside it. Lists are paged and bounded. A row that cannot be read is
//! left out here; whoever writes next finds it and sets the file aside.

use std::collections::{BTreeMap, HashMap, HashSet};

use redb::{ReadTransaction, ReadableTable as _, ReadableTableMetadata as _};

use super::{
    job::{Event, Finished, Job, Phase, Slot, decode},
    rows::{BY_STATE, EVENTS, FINISHED, Failure, JOBS, META, META_REBUILT, META_RECONCILED, PAYLOADS, Place, SLOTS},
};
use crate::ids::{Lane, TaskId};

/// Rows of one answer at most.
const PAGE_MOST: usize = 1000;
/// Rows looked at for one answer at most, so that a filter that fits nothing ends.
const LOOK_MOST: usize = 100_000;

/// One moment of the mirror. Short-lived: it keeps old pages of the file from being used again.
pub struct Snapshot(pub(super) ReadTransaction);

/// How many there are of what, and how old the mirror is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overview {
    pub jobs: Vec<(Lane, Phase, u64)>,
    /// Timelines begin here.
    pub rebuilt_ms: Option<u64>,
    /// When its facts were last compared with queue and backends.
    pub reconciled_ms: Option<u64>,
    pub finished: u64,
    pub events: u64,
}

/// In which order jobs are listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sorted {
    #[default]
    NewestFirst,
    OldestFirst,
}

/// Which jobs.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub sorted: Sorted,
    pub phase: Option<Phase>,
    pub lane: Option<Lane>,
    pub repository: Option<String>,
    /// Where the page before this one ended: received ms and task id of its last row.
    pub after: Option<(u64, TaskId)>,
    pub limit: usize,
}

/// A job that is not over.
#[derive(Debug, Clone)]
pub struct OpenJob {
    pub task: TaskId,
    pub job: Job,
    pub has_payload: bool,
}

impl Snapshot {
    pub fn overview(&self) -> Result<Overview, String> {
        self.ask(|txn| {
            let counted = |(lane, phase)| count(txn, lane, phase).map(|n| (lane, phase, n));
            let jobs = places(None, None).map(counted).collect::<Result<_, _>>()?;
            let meta = txn.open_table(META)?;
            let number = |name| -> Result<Option<u64>, Failure> {
                Ok(meta.get(name)?.and_then(|v| v.value().try_into().ok().map(u64::from_le_bytes)))
            };
            Ok(Overview {
                jobs,
                rebuilt_ms: number(META_REBUILT)?,
                reconciled_ms: number(META_RECONCILED)?,
                finished: txn.open_table(FINISHED)?.len()?,
                events: txn.open_table(EVENTS)?.len()?,
            })
        })
    }

    /// How many jobs of one kind there are.
    pub fn count(&self, lane: Lane, phase: Phase) -> Result<u64, String> {
        self.ask(|txn| count(txn, lane, phase))
    }

    pub fn job(&self, task: TaskId) -> Result<Option<Job>, String> {
        self.ask(|txn| {
            let row = txn.open_table(JOBS)?.get(task.0)?;
            row.map(|row| decode("assignments", row.value())).transpose().map_err(Failure::from)
        })
    }

    pub fn finished(&self, task: TaskId) -> Result<Option<Finished>, String> {
        self.ask(|txn| {
            let row = txn.open_table(FINISHED)?.get(task.0)?;
            row.map(|row| decode("finished", row.value())).transpose().map_err(Failure::from)
        })
    }

    /// The sealed envelope, where there is one.
    pub fn payload(&self, task: TaskId) -> Result<Option<Vec<u8>>, String> {
        self.ask(|txn| Ok(txn.open_table(PAYLOADS)?.get(task.0)?.map(|row| row.value().to_vec())))
    }

    /// All jobs that are not over, oldest first of each kind.
    pub fn open_jobs(&self) -> Result<Vec<OpenJob>, String> {
        self.ask(|txn| {
            let (index, jobs, payloads) = (txn.open_table(BY_STATE)?, txn.open_table(JOBS)?, txn.open_table(PAYLOADS)?);
            let mut open = Vec::new();
            for (lane, phase) in places(None, None).filter(|(_, phase)| phase.is_open()) {
                let (first, last) = span(lane, phase);
                for place in index.range(first..=last)?.take(LOOK_MOST) {
                    let task = TaskId(place?.0.value().3);
                    let row = jobs.get(task.0)?;
                    if let Some(job) = row.and_then(|row| decode::<Job>("assignments", row.value()).ok()) {
                        open.push(OpenJob { task, job, has_payload: payloads.get(task.0)?.is_some() });
                    }
                }
            }
            Ok(open)
        })
    }

    pub fn jobs(&self, filter: &Filter) -> Result<Vec<(TaskId, Job)>, String> {
        self.ask(|txn| {
            let (index, jobs) = (txn.open_table(BY_STATE)?, txn.open_table(JOBS)?);
            let limit = filter.limit.min(PAGE_MOST);
            // Of each kind no more than the page is long can be on it, unless some are left out.
            let look = if filter.repository.is_some() { LOOK_MOST } else { limit };
            let mut found: Vec<(u64, i64)> = Vec::new();
            for (lane, phase) in places(filter.lane, filter.phase) {
                let (first, last) = match (span(lane, phase), filter.after, filter.sorted) {
                    ((first, _), Some((ms, task)), Sorted::NewestFirst) => {
                        (first, (first.0, first.1, ms, task.0.saturating_sub(1)))
                    }
                    ((_, last), Some((ms, task)), Sorted::OldestFirst) => ((last.0, last.1, ms, task.0.saturating_add(1)), last),
                    (whole, None, _) => whole,
                };
                if first > last {
                    continue;
                }
                let places = index.range(first..=last)?;
                let places: Vec<_> = match filter.sorted {
                    Sorted::NewestFirst => places.rev().take(look).collect(),
                    Sorted::OldestFirst => places.take(look).collect(),
                };
                for place in places {
                    let (_, _, received, task) = place?.0.value();
                    found.push((received, task));
                }
            }
            found.sort_unstable();
            if filter.sorted == Sorted::NewestFirst {
                found.reverse();
            }
            let mut page = Vec::new();
            for (_, task) in found {
                if page.len() >= limit {
                    break;
                }
                let Some(row) = jobs.get(task)? else { continue };
                let Ok(job) = decode::<Job>("assignments", row.value()) else { continue };
                if filter.repository.as_ref().is_none_or(|wanted| *wanted == job.details.repository) {
                    page.push((TaskId(task), job));
                }
            }
            Ok(page)
        })
    }

    /// How many jobs of the same lane and phase were received before each of these. One look at each lane, however many are asked for.
    pub fn before(&self, wanted: &[(TaskId, Job)]) -> Result<HashMap<TaskId, u64>, String> {
        self.ask(|txn| {
            let index = txn.open_table(BY_STATE)?;
            let mut last: BTreeMap<(u8, u8), Place> = BTreeMap::new();
            for (task, job) in wanted {
                let place = job.place(*task);
                let latest = last.entry((place.0, place.1)).or_insert(place);
                *latest = place.max(*latest);
            }
            let wanted: HashSet<TaskId> = wanted.iter().map(|(task, _)| *task).collect();
            let mut found = HashMap::new();
            for ((lane, phase), latest) in last {
                for (before, place) in (0..).zip(index.range((lane, phase, 0, i64::MIN)..=latest)?.take(LOOK_MOST)) {
                    let task = TaskId(place?.0.value().3);
                    if wanted.contains(&task) {
                        found.insert(task, before);
                    }
                }
            }
            Ok(found)
        })
    }

    /// When the one of this kind that was received first was received, in Unix milliseconds.
    pub fn oldest(&self, lane: Lane, phase: Phase) -> Result<Option<u64>, String> {
        self.ask(|txn| {
            let (first, last) = span(lane, phase);
            let place = txn.open_table(BY_STATE)?.range(first..=last)?.next().transpose()?;
            Ok(place.map(|(key, _)| key.value().2))
        })
    }

    /// The newest events, newest first; of one task, or of all. With each its Unix milliseconds.
    pub fn events(&self, task: Option<TaskId>, limit: usize) -> Result<Vec<(u64, Event)>, String> {
        self.ask(|txn| {
            let table = txn.open_table(EVENTS)?;
            let mut events = Vec::new();
            for row in table.iter()?.rev().take(LOOK_MOST) {
                let (key, row) = row?;
                let Ok(event) = decode::<Event>("events", row.value()) else { continue };
                if task.is_none_or(|task| event.task == Some(task.0)) {
                    events.push((key.value().0, event));
                }
                if events.len() >= limit.min(PAGE_MOST) {
                    break;
                }
            }
            Ok(events)
        })
    }

    /// Slots in use: lane, the mirror's number for it, and who has it.
    pub fn slots(&self) -> Result<Vec<(Lane, u32, Slot)>, String> {
        self.ask(|txn| {
            let mut slots = Vec::new();
            for row in txn.open_table(SLOTS)?.iter()?.take(LOOK_MOST) {
                let (key, row) = row?;
                let (lane, number) = key.value();
                if let (Some(lane), Ok(slot)) = (Lane::from_code(lane), decode("slots", row.value())) {
                    slots.push((lane, number, slot));
                }
            }
            Ok(slots)
        })
    }

    fn ask<T>(&self, look: impl FnOnce(&ReadTransaction) -> Result<T, Failure>) -> Result<T, String> {
        look(&self.0).map_err(|e| e.to_string())
    }
}

fn count(txn: &ReadTransaction, lane: Lane, phase: Phase) -> Result<u64, Failure> {
    let (first, last) = span(lane, phase);
    Ok(u64::try_from(txn.open_table(BY_STATE)?.range(first..=last)?.count()).unwrap_or(u64::MAX))
}

fn places(lane: Option<Lane>, phase: Option<Phase>) -> impl Iterator<Item = (Lane, Phase)> {
    let all = Lane::ALL.into_iter().flat_map(|lane| Phase::ALL.map(|phase| (lane, phase)));
    all.filter(move |(l, p)| lane.is_none_or(|lane| lane == *l) && phase.is_none_or(|phase| phase == *p))
}

/// The first and the last place of one lane and phase.
fn span(lane: Lane, phase: Phase) -> (Place, Place) {
    ((lane.code(), phase.code(), 0, i64::MIN), (lane.code(), phase.code(), u64::MAX, i64::MAX))
}
