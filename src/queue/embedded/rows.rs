//! The queue's tables, and each operation as one transaction over them.
//!
//! A row of `tasks` is the truth of one assignment; `ready` and `timed` are its indexes and change with it in the same transaction.
//! Table types are ints, fixed tuples and byte slices only, and structs are `[version] ++ postcard`, so that a later redb or a later
//! version of ours can read the file. Nothing here knows about files, waiting or clocks: `now` is an argument, in milliseconds.

use redb::{ReadTransaction, ReadableTable, Table, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use super::dead;
use crate::{
    ids::{Lane, TaskId},
    queue::{
        Dead, Depth, Lease, LeaseToken, MAX_DELAY, Published, QueueError, Queued, QueuedFacts, QueuedState, Settled,
        stored::{Failure, Step, check_schema, decode, encode, lane_of, ms},
    },
};

const SCHEMA: u64 = 1;
const ROW_VERSION: u8 = 1;

const META_SCHEMA: u8 = 0;
const META_SEQ: u8 = 1;
const META_FENCE: u8 = 2;
const META_HIGHEST_TASK: u8 = 3;
const META_DEAD_BYTES: u8 = 4;

/// One of the `META_…` numbers to its value.
const META: TableDefinition<'_, u8, u64> = TableDefinition::new("meta");
/// Task id to [`Row`].
const TASKS: TableDefinition<'_, i64, &[u8]> = TableDefinition::new("tasks");
/// Task id to the sealed assignment, as published.
const PAYLOADS: TableDefinition<'_, i64, &[u8]> = TableDefinition::new("payloads");
/// (lane, seq) to task id: what can be leased, oldest first.
const READY: TableDefinition<'_, (u8, u64), i64> = TableDefinition::new("ready");
/// (lane, ms, seq) to task id: what becomes ready at that time, be it a delay or a lease's deadline.
const TIMED: TableDefinition<'_, (u8, u64, u64), i64> = TableDefinition::new("timed");

/// What a look for something to lease found.
pub(super) enum Taken {
    Lease(Lease),
    /// Nothing is ready; something may be at `next_ms`.
    Nothing {
        next_ms: Option<u64>,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    lane: u8,
    seq: u64,
    deliveries: u32,
    state: RowState,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum RowState {
    Ready,
    Delayed { due_ms: u64 },
    Leased { fence: u64, deadline_ms: u64 },
}

impl RowState {
    fn at_ms(self) -> Option<u64> {
        match self {
            RowState::Ready => None,
            RowState::Delayed { due_ms: at_ms } | RowState::Leased { deadline_ms: at_ms, .. } => Some(at_ms),
        }
    }

    fn shown(self, now: u64) -> QueuedState {
        match self {
            RowState::Delayed { due_ms } if due_ms > now => QueuedState::Delayed,
            RowState::Leased { deadline_ms, .. } if deadline_ms > now => QueuedState::Leased,
            _ => QueuedState::Ready,
        }
    }
}

fn no_payload(task: i64) -> Failure {
    Failure::Row(format!("task {task} has no payload"))
}

/// The tables that nearly every change touches.
struct Rows<'txn> {
    meta: Table<'txn, u8, u64>,
    tasks: Table<'txn, i64, &'static [u8]>,
    payloads: Table<'txn, i64, &'static [u8]>,
    ready: Table<'txn, (u8, u64), i64>,
    timed: Table<'txn, (u8, u64, u64), i64>,
}

impl<'txn> Rows<'txn> {
    fn open(txn: &'txn WriteTransaction) -> Result<Self, Failure> {
        Ok(Self {
            meta: txn.open_table(META)?,
            tasks: txn.open_table(TASKS)?,
            payloads: txn.open_table(PAYLOADS)?,
            ready: txn.open_table(READY)?,
            timed: txn.open_table(TIMED)?,
        })
    }

    fn next(&mut self, counter: u8) -> Result<u64, Failure> {
        let next = self.meta.get(counter)?.map_or(0, |value| value.value()) + 1;
        self.meta.insert(counter, next)?;
        Ok(next)
    }

    fn row(&self, task: i64) -> Result<Option<Row>, Failure> {
        match self.tasks.get(task)? {
            Some(bytes) => decode(ROW_VERSION, &format!("task {task}"), bytes.value()).map(Some),
            None => Ok(None),
        }
    }

    /// A row that an index names.
    fn indexed(&self, task: i64) -> Result<Row, Failure> {
        self.row(task)?.ok_or_else(|| Failure::Row(format!("index names task {task}, which is not stored")))
    }

    fn payload(&self, task: i64) -> Result<Vec<u8>, Failure> {
        let sealed = self.payloads.get(task)?.map(|bytes| bytes.value().to_vec());
        sealed.ok_or_else(|| no_payload(task))
    }

    /// Whether the index and the payload that go with a row are there.
    fn check(&self, task: i64, row: &Row) -> Result<(), Failure> {
        lane_of(row.lane)?;
        let indexed = match row.state.at_ms() {
            Some(at_ms) => self.timed.get((row.lane, at_ms, row.seq))?,
            None => self.ready.get((row.lane, row.seq))?,
        };
        if indexed.is_none_or(|found| found.value() != task) {
            return Err(Failure::Row(format!("task {task} is not in its index")));
        }
        if self.payloads.get(task)?.is_none() {
            return Err(no_payload(task));
        }
        Ok(())
    }

    /// Takes the row out of its index.
    fn unlist(&mut self, row: &Row) -> Result<(), Failure> {
        match row.state.at_ms() {
            Some(at_ms) => drop(self.timed.remove((row.lane, at_ms, row.seq))?),
            None => drop(self.ready.remove((row.lane, row.seq))?),
        }
        Ok(())
    }

    /// Writes the row and its index entry.
    fn put(&mut self, task: i64, row: &Row) -> Result<(), Failure> {
        self.tasks.insert(task, encode(ROW_VERSION, row)?.as_slice())?;
        match row.state.at_ms() {
            Some(at_ms) => drop(self.timed.insert((row.lane, at_ms, row.seq), task)?),
            None => drop(self.ready.insert((row.lane, row.seq), task)?),
        }
        Ok(())
    }

    fn change(&mut self, task: i64, row: Row, state: RowState) -> Result<(), Failure> {
        self.unlist(&row)?;
        self.put(task, &Row { state, ..row })
    }

    fn remove(&mut self, task: i64, row: &Row) -> Result<(), Failure> {
        self.unlist(row)?;
        self.tasks.remove(task)?;
        self.payloads.remove(task)?;
        Ok(())
    }

    /// The row of a lease, if the lease still holds it. `None`: what was leased is gone (a row with another seq is a later publish).
    fn held(&self, lease: &Held) -> Result<Option<Row>, Failure> {
        let Some(row) = self.row(lease.task.0)?.filter(|row| row.seq == lease.token.seq) else { return Ok(None) };
        match row.state {
            RowState::Leased { fence, .. } if fence == lease.token.fence => Ok(Some(row)),
            _ => Err(Failure::Refused(QueueError::LeaseLost)),
        }
    }

    fn still_held(&self, lease: &Held) -> Result<Row, Failure> {
        self.held(lease)?.ok_or(Failure::Refused(QueueError::LeaseLost))
    }
}

/// A lease without its payload.
pub(super) struct Held {
    pub(super) task: TaskId,
    pub(super) token: LeaseToken,
}

impl From<&Lease> for Held {
    fn from(lease: &Lease) -> Self {
        Self { task: lease.task, token: lease.token.clone() }
    }
}

/// Makes the tables of a new file.
pub(super) fn found(txn: &WriteTransaction) -> Result<Step<()>, Failure> {
    let mut rows = Rows::open(txn)?;
    dead::found(txn)?;
    rows.meta.insert(META_SCHEMA, SCHEMA)?;
    Ok(Step::Commit(()))
}

/// Checks that the file is a queue of ours and every row readable, and writes, which proves that it can be written.
///
/// With `leases_end` the leases of an earlier process come back under their old seq: the file's lock proves that nobody holds them.
/// A delay further off than any we give was set under another clock, and ends too.
pub(super) fn take_over(txn: &WriteTransaction, now: u64, leases_end: bool) -> Result<Step<()>, Failure> {
    let mut rows = Rows::open(txn)?;
    check_schema(rows.meta.get(META_SCHEMA)?.map(|schema| schema.value()), SCHEMA, "of a queue")?;
    rows.meta.insert(META_SCHEMA, SCHEMA)?;
    let latest = now.saturating_add(ms(MAX_DELAY));
    let mut ended = Vec::new();
    for entry in rows.tasks.iter()? {
        let (task, bytes) = entry?;
        let row: Row = decode(ROW_VERSION, &format!("task {}", task.value()), bytes.value())?;
        rows.check(task.value(), &row)?;
        let ends = match row.state {
            RowState::Leased { .. } => leases_end,
            RowState::Delayed { due_ms } => due_ms > latest,
            RowState::Ready => false,
        };
        if ends {
            ended.push((task.value(), row));
        }
    }
    for (task, row) in ended {
        rows.change(task, row, RowState::Ready)?;
    }
    Ok(Step::Commit(()))
}

pub(super) fn publish(txn: &WriteTransaction, lane: Lane, task: TaskId, sealed: &[u8]) -> Result<Step<Published>, Failure> {
    let mut rows = Rows::open(txn)?;
    if rows.tasks.get(task.0)?.is_some() {
        return Ok(Step::Unchanged(Published::Duplicate));
    }
    let seq = rows.next(META_SEQ)?;
    rows.put(task.0, &Row { lane: lane.code(), seq, deliveries: 0, state: RowState::Ready })?;
    rows.payloads.insert(task.0, sealed)?;
    let id = u64::try_from(task.0).unwrap_or(0);
    let highest = rows.meta.get(META_HIGHEST_TASK)?.map_or(0, |highest| highest.value());
    rows.meta.insert(META_HIGHEST_TASK, highest.max(id))?;
    Ok(Step::Commit(Published::Stored))
}

/// Brings back what is due under its old seq (so nothing is overtaken twice), then leases the oldest.
pub(super) fn take(txn: &WriteTransaction, lane: Lane, now: u64, deadline_ms: u64) -> Result<Step<Taken>, Failure> {
    let mut rows = Rows::open(txn)?;
    let code = lane.code();
    let due: Vec<i64> = rows
        .timed
        .range((code, 0, 0)..=(code, now, u64::MAX))?
        .map(|entry| Ok(entry?.1.value()))
        .collect::<Result<_, redb::StorageError>>()?;
    for task in due {
        let row = rows.indexed(task)?;
        rows.change(task, row, RowState::Ready)?;
    }
    let first = rows.ready.range((code, 0)..=(code, u64::MAX))?.next().transpose()?.map(|(_, task)| task.value());
    let Some(task) = first else {
        // Nothing came due either, else it would be ready now: the transaction changed nothing.
        let next = rows.timed.range((code, 0, 0)..=(code, u64::MAX, u64::MAX))?.next().transpose()?;
        return Ok(Step::Unchanged(Taken::Nothing { next_ms: next.map(|(key, _)| key.value().1) }));
    };
    let row = rows.indexed(task)?;
    let fence = rows.next(META_FENCE)?;
    let delivery = row.deliveries.saturating_add(1);
    let seq = row.seq;
    rows.change(task, Row { deliveries: delivery, ..row }, RowState::Leased { fence, deadline_ms })?;
    let sealed = rows.payload(task)?;
    let token = LeaseToken { seq, fence };
    Ok(Step::Commit(Taken::Lease(Lease { lane, task: TaskId(task), sealed, delivery, token })))
}

pub(super) fn extend(txn: &WriteTransaction, lease: &Held, deadline_ms: u64) -> Result<Step<()>, Failure> {
    let mut rows = Rows::open(txn)?;
    let row = rows.still_held(lease)?;
    rows.change(lease.task.0, row, RowState::Leased { fence: lease.token.fence, deadline_ms })?;
    Ok(Step::Commit(()))
}

/// `due_ms`: `None` is at once.
pub(super) fn release(txn: &WriteTransaction, lease: &Held, due_ms: Option<u64>) -> Result<Step<()>, Failure> {
    let mut rows = Rows::open(txn)?;
    let row = rows.still_held(lease)?;
    rows.change(lease.task.0, row, due_ms.map_or(RowState::Ready, |due_ms| RowState::Delayed { due_ms }))?;
    Ok(Step::Commit(()))
}

pub(super) fn complete(txn: &WriteTransaction, lease: &Held) -> Result<Step<Settled>, Failure> {
    let mut rows = Rows::open(txn)?;
    match rows.held(lease) {
        Ok(Some(row)) => rows.remove(lease.task.0, &row)?,
        Ok(None) => return Ok(Step::Unchanged(Settled::AlreadyGone)),
        Err(Failure::Refused(QueueError::LeaseLost)) => return Ok(Step::Unchanged(Settled::LeaseLost)),
        Err(failure) => return Err(failure),
    }
    Ok(Step::Commit(Settled::Done))
}

pub(super) fn reject(txn: &WriteTransaction, lease: &Held, reason: &str, at_ms: u64) -> Result<Step<()>, Failure> {
    let mut rows = Rows::open(txn)?;
    let row = rows.still_held(lease)?;
    let number = rows.next(META_SEQ)?;
    let lane = lane_of(row.lane)?;
    let sealed = rows.payload(lease.task.0)?;
    let letter = Dead { lane, task: lease.task, reason: reason.to_owned(), at_ms, sealed };
    let kept_bytes = rows.meta.get(META_DEAD_BYTES)?.map_or(0, |bytes| bytes.value());
    let kept_bytes = dead::put(txn, number, letter, kept_bytes)?;
    rows.meta.insert(META_DEAD_BYTES, kept_bytes)?;
    rows.remove(lease.task.0, &row)?;
    Ok(Step::Commit(()))
}

pub(super) fn cancel(txn: &WriteTransaction, lane: Lane, task: TaskId) -> Result<Step<bool>, Failure> {
    let mut rows = Rows::open(txn)?;
    match rows.row(task.0)?.filter(|row| row.lane == lane.code()) {
        Some(row) => rows.remove(task.0, &row)?,
        None => return Ok(Step::Unchanged(false)),
    }
    Ok(Step::Commit(true))
}

pub(super) fn get(txn: &ReadTransaction, task: TaskId) -> Result<Option<Queued>, Failure> {
    let Some(bytes) = txn.open_table(TASKS)?.get(task.0)? else { return Ok(None) };
    let row: Row = decode(ROW_VERSION, &format!("{task:?}"), bytes.value())?;
    let sealed = txn.open_table(PAYLOADS)?.get(task.0)?.map(|bytes| bytes.value().to_vec());
    let sealed = sealed.ok_or_else(|| no_payload(task.0))?;
    Ok(Some(Queued { lane: lane_of(row.lane)?, task, sealed }))
}

pub(super) fn list(txn: &ReadTransaction, lane: Lane, now: u64) -> Result<Vec<QueuedFacts>, Failure> {
    let mut found = Vec::new();
    for entry in txn.open_table(TASKS)?.iter()? {
        let (task, bytes) = entry?;
        let row: Row = decode(ROW_VERSION, &format!("task {}", task.value()), bytes.value())?;
        if row.lane == lane.code() {
            let facts = QueuedFacts { lane, task: TaskId(task.value()), state: row.state.shown(now), deliveries: row.deliveries };
            found.push((row.seq, facts));
        }
    }
    found.sort_by_key(|(seq, _)| *seq);
    Ok(found.into_iter().map(|(_, facts)| facts).collect())
}

pub(super) fn depth(txn: &ReadTransaction, lane: Lane, now: u64) -> Result<Depth, Failure> {
    let mut depth = Depth::default();
    for facts in list(txn, lane, now)? {
        match facts.state {
            QueuedState::Ready => depth.ready += 1,
            QueuedState::Delayed => depth.delayed += 1,
            QueuedState::Leased => depth.leased += 1,
        }
    }
    Ok(depth)
}

pub(super) fn highest_task(txn: &ReadTransaction) -> Result<Option<TaskId>, Failure> {
    let highest = txn.open_table(META)?.get(META_HIGHEST_TASK)?.map(|highest| highest.value());
    Ok(highest.and_then(|highest| i64::try_from(highest).ok()).map(TaskId))
}
