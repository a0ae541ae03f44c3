//! The mirror's tables, and the small writes of which each change is made.
//!
//! `by_state` is an index of `assignments` and changes with it in one transaction, as does the ring of events. Table types are
//! ints, fixed tuples and byte slices only, so that a later redb reads them. What a note means is `apply`'s.

use redb::{ReadableTable as _, Table, TableDefinition, WriteTransaction};

use super::{
    job::{Event, Finished, Job, Slot, Unreadable, decode, encode, text},
    migrate,
};
use crate::ids::{InstanceId, TaskId};

pub(super) const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
/// Task id to [`Job`].
pub(super) const JOBS: TableDefinition<'_, i64, &[u8]> = TableDefinition::new("assignments");
/// Task id to its sealed envelope, until it is claimed.
pub(super) const PAYLOADS: TableDefinition<'_, i64, &[u8]> = TableDefinition::new("payload");
/// A key of the index: (lane, phase, received ms, task id).
pub(super) type Place = (u8, u8, u64, i64);
pub(super) const BY_STATE: TableDefinition<'_, Place, ()> = TableDefinition::new("by_state");
/// (lane, number) to [`Slot`].
pub(super) const SLOTS: TableDefinition<'_, (u8, u32), &[u8]> = TableDefinition::new("slots");
/// Task id to [`Finished`].
pub(super) const FINISHED: TableDefinition<'_, i64, &[u8]> = TableDefinition::new("finished");
/// (ms, number within it) to [`Event`].
pub(super) const EVENTS: TableDefinition<'_, (u64, u32), &[u8]> = TableDefinition::new("events");

pub(super) const META_SCHEMA: &str = "schema_version";
pub(super) const META_INSTANCE: &str = "instance_id";
pub(super) const META_REBUILT: &str = "rebuilt_at";
pub(super) const META_RECONCILED: &str = "last_reconcile";

/// What is kept of what is over. All of it is bounded in age and in number.
#[derive(Debug, Clone)]
pub struct Keep {
    /// Of ended jobs, and of the record that a task is over.
    pub ended_ms: u64,
    pub ended_jobs: u64,
    pub finished: u64,
    pub events_ms: u64,
    pub events: u64,
}

const DAY_MS: u64 = 24 * 3600 * 1000;

impl Default for Keep {
    fn default() -> Self {
        Self { ended_ms: 30 * DAY_MS, ended_jobs: 20_000, finished: 100_000, events_ms: 7 * DAY_MS, events: 10_000 }
    }
}

/// Rows removed in one transaction at most, so that none is long.
const PRUNE_MOST: usize = 2000;

/// Why a transaction was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0}")]
    Store(redb::Error),
    #[error("{0}")]
    Row(#[from] Unreadable),
}

impl<E: Into<redb::Error>> From<E> for Failure
where
    E: StoreError,
{
    fn from(error: E) -> Self {
        Failure::Store(error.into())
    }
}

/// redb's own errors; keeps the conversion above from taking ours.
pub(super) trait StoreError {}
impl StoreError for redb::TransactionError {}
impl StoreError for redb::TableError {}
impl StoreError for redb::StorageError {}
impl StoreError for redb::CommitError {}
impl StoreError for redb::SetDurabilityError {}

/// All tables of one write transaction.
pub(super) struct Tables<'t> {
    pub(super) meta: Table<'t, &'static str, &'static [u8]>,
    jobs: Table<'t, i64, &'static [u8]>,
    payloads: Table<'t, i64, &'static [u8]>,
    by_state: Table<'t, Place, ()>,
    slots: Table<'t, (u8, u32), &'static [u8]>,
    finished: Table<'t, i64, &'static [u8]>,
    events: Table<'t, (u64, u32), &'static [u8]>,
}

/// A new file's first transaction.
pub(super) fn found(txn: &WriteTransaction, instance: &InstanceId, now_ms: u64) -> Result<(), Failure> {
    let mut tables = Tables::open(txn)?;
    tables.meta.insert(META_SCHEMA, migrate::SCHEMA.to_le_bytes().as_slice())?;
    tables.meta.insert(META_INSTANCE, instance.as_str().as_bytes())?;
    tables.meta.insert(META_REBUILT, now_ms.to_le_bytes().as_slice())?;
    Ok(())
}

impl<'t> Tables<'t> {
    pub(super) fn open(txn: &'t WriteTransaction) -> Result<Self, Failure> {
        Ok(Self {
            meta: txn.open_table(META)?,
            jobs: txn.open_table(JOBS)?,
            payloads: txn.open_table(PAYLOADS)?,
            by_state: txn.open_table(BY_STATE)?,
            slots: txn.open_table(SLOTS)?,
            finished: txn.open_table(FINISHED)?,
            events: txn.open_table(EVENTS)?,
        })
    }

    pub(super) fn job(&self, task: TaskId) -> Result<Option<Job>, Failure> {
        match self.jobs.get(task.0)? {
            Some(row) => Ok(Some(decode("assignments", row.value())?)),
            None => Ok(None),
        }
    }

    /// Writes a job's row and its place in the index.
    pub(super) fn put(&mut self, task: TaskId, job: &Job) -> Result<(), Failure> {
        if let Some(old) = self.job(task)?.filter(|old| old.place(task) != job.place(task)) {
            self.by_state.remove(old.place(task))?;
        }
        self.by_state.insert(job.place(task), ())?;
        self.jobs.insert(task.0, encode("assignments", job)?.as_slice())?;
        Ok(())
    }

    pub(super) fn keep_payload(&mut self, task: TaskId, sealed: &[u8]) -> Result<(), Failure> {
        self.payloads.insert(task.0, sealed)?;
        Ok(())
    }

    pub(super) fn drop_payload(&mut self, task: TaskId) -> Result<(), Failure> {
        self.payloads.remove(task.0)?;
        Ok(())
    }

    /// All envelopes: some note was lost, so any of their jobs may have been claimed since.
    pub(super) fn drop_all_payloads(&mut self) -> Result<(), Failure> {
        self.payloads.retain(|_, _| false)?;
        Ok(())
    }

    pub(super) fn finish(&mut self, task: TaskId, finished: &Finished) -> Result<(), Failure> {
        self.finished.insert(task.0, encode("finished", finished)?.as_slice())?;
        Ok(())
    }

    /// After the last event, however the clock went.
    pub(super) fn event(&mut self, at_ms: u64, task: Option<TaskId>, kind: &str, words: String) -> Result<(), Failure> {
        let last = self.events.last()?.map(|(key, _)| key.value());
        let key = match last {
            Some((ms, n)) if ms >= at_ms => match n.checked_add(1) {
                Some(n) => (ms, n),
                None => (ms.saturating_add(1), 0),
            },
            _ => (at_ms, 0),
        };
        let event = Event { task: task.map(|t| t.0), kind: kind.into(), text: text(words) };
        self.events.insert(key, encode("events", &event)?.as_slice())?;
        Ok(())
    }

    /// The job's slot, the lowest number that is free if it has none.
    pub(super) fn take_slot(&mut self, lane: u8, task: TaskId, since_ms: u64) -> Result<(), Failure> {
        let mut free = 0;
        for row in self.slots.range((lane, 0)..=(lane, u32::MAX))? {
            let (key, value) = row?;
            if decode::<Slot>("slots", value.value())?.task == task.0 {
                return Ok(());
            }
            if key.value().1 == free {
                free += 1;
            }
        }
        let slot = encode("slots", &Slot { task: task.0, since_ms })?;
        self.slots.insert((lane, free), slot.as_slice())?;
        Ok(())
    }

    pub(super) fn free_slot(&mut self, task: TaskId) -> Result<(), Failure> {
        self.keep_slots(|_, slot| slot.task != task.0)
    }

    pub(super) fn keep_slots(&mut self, keep: impl Fn(u8, Slot) -> bool) -> Result<(), Failure> {
        // A row that cannot be read belongs to nobody.
        self.slots.retain(|(lane, _), row| decode::<Slot>("slots", row).is_ok_and(|slot| keep(lane, slot)))?;
        Ok(())
    }

    /// Removes what is older, or more, than is kept; the oldest first.
    pub(super) fn prune(&mut self, keep: &Keep, now_ms: u64) -> Result<(), Failure> {
        let mut ended: Vec<(u64, i64, Job)> = Vec::new();
        for row in self.jobs.iter()? {
            let (task, row) = row?;
            let job: Job = decode("assignments", row.value())?;
            if !job.phase.is_open() {
                ended.push((job.changed_ms, task.value(), job));
            }
        }
        ended.sort_by_key(|(at, task, _)| (*at, *task));
        let ages: Vec<u64> = ended.iter().map(|(at, ..)| *at).collect();
        for (_, task, job) in ended.into_iter().take(too_many(&ages, keep.ended_jobs, now_ms.saturating_sub(keep.ended_ms))) {
            self.by_state.remove(job.place(TaskId(task)))?;
            self.jobs.remove(task)?;
            self.payloads.remove(task)?;
        }
        let mut over: Vec<(u64, i64)> = Vec::new();
        for row in self.finished.iter()? {
            let (task, row) = row?;
            over.push((decode::<Finished>("finished", row.value())?.ended_ms, task.value()));
        }
        over.sort_unstable();
        let ages: Vec<u64> = over.iter().map(|(at, _)| *at).collect();
        for (_, task) in over.into_iter().take(too_many(&ages, keep.finished, now_ms.saturating_sub(keep.ended_ms))) {
            self.finished.remove(task)?;
        }
        let mut events: Vec<(u64, u32)> = Vec::new();
        for row in self.events.iter()? {
            events.push(row?.0.value());
        }
        let ages: Vec<u64> = events.iter().map(|(at, _)| *at).collect();
        for key in events.into_iter().take(too_many(&ages, keep.events, now_ms.saturating_sub(keep.events_ms))) {
            self.events.remove(key)?;
        }
        Ok(())
    }
}

/// How many of the oldest go: those older than `since`, and those above `most`.
fn too_many(oldest_first: &[u64], most: u64, since_ms: u64) -> usize {
    let old = oldest_first.iter().take_while(|at| **at < since_ms).count();
    let above = oldest_first.len().saturating_sub(usize::try_from(most).unwrap_or(usize::MAX));
    old.max(above).min(PRUNE_MOST)
}
