//! The file beside NATS: what was fetched and is not acknowledged by NATS yet, and the little that a start must remember.
//!
//! A row is here before anything is sent, and goes after NATS has said that it has it: dying in between sends it again, under the
//! same message id. What a publish means is for `publish`. The rows' keys are kept in memory too, so that a look costs nothing.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use redb::{ReadableTable as _, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use crate::{
    failpoint,
    ids::{Lane, TaskId},
    queue::{
        QueueError, QueueHealth,
        store::{Kind, Store},
        stored::{Failure, Step, check_schema, decode, encode, lane_of},
    },
};

const SCHEMA: u64 = 1;
const ROW_VERSION: u8 = 1;

const META_SCHEMA: u8 = 0;
const META_NUMBER: u8 = 1;
const META_HIGHEST_TASK: u8 = 2;
const META_STREAM_CREATED: u8 = 3;

/// One of the `META_…` numbers to its value.
const META: TableDefinition<'_, u8, u64> = TableDefinition::new("meta");
/// A number from the counter, which is the order, to [`Row`].
const ROWS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("outbox");
/// The same number to the sealed assignment.
const PAYLOADS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("outbox_payloads");

const KIND: Kind = Kind {
    found,
    take_over,
    holds: "It holds jobs that were taken from Gitea and that NATS has not acknowledged yet.",
    without: "jobs that were in it, and that Gitea still shows as running without a log, must be cancelled and run again there",
};

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    lane: u8,
    task: i64,
    message_id: String,
}

/// What waits for NATS, without its payload.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) lane: Lane,
    pub(super) task: TaskId,
    pub(super) message_id: String,
    /// When this process first saw it.
    pub(super) since: Instant,
}

/// Keys in memory, changed after the file was.
#[derive(Default)]
struct Index {
    rows: BTreeMap<u64, Waiting>,
    highest_task: u64,
    stream_created: Option<u64>,
}

pub(super) struct Outbox {
    store: Arc<Store>,
    index: Mutex<Index>,
}

fn found(txn: &WriteTransaction) -> Result<Step<()>, Failure> {
    txn.open_table(META)?.insert(META_SCHEMA, SCHEMA)?;
    txn.open_table(ROWS)?;
    txn.open_table(PAYLOADS)?;
    Ok(Step::Commit(()))
}

fn take_over(txn: &WriteTransaction, _: u64, _: bool) -> Result<Step<()>, Failure> {
    let mut meta = txn.open_table(META)?;
    check_schema(meta.get(META_SCHEMA)?.map(|schema| schema.value()), SCHEMA, "an outbox")?;
    meta.insert(META_SCHEMA, SCHEMA)?;
    let payloads = txn.open_table(PAYLOADS)?;
    for entry in txn.open_table(ROWS)?.iter()? {
        let (number, bytes) = entry?;
        read_row(number.value(), bytes.value())?;
        if payloads.get(number.value())?.is_none() {
            return Err(Failure::Row(format!("row {} has no payload", number.value())));
        }
    }
    Ok(Step::Commit(()))
}

fn read_row(number: u64, bytes: &[u8]) -> Result<Waiting, Failure> {
    let row: Row = decode(ROW_VERSION, &format!("outbox row {number}"), bytes)?;
    Ok(Waiting { lane: lane_of(row.lane)?, task: TaskId(row.task), message_id: row.message_id, since: Instant::now() })
}

impl Outbox {
    /// As `EmbeddedQueue::open`. Blocking.
    pub(super) fn open(path: &Path, min_free_bytes: u64) -> Result<Self, QueueError> {
        let store = Arc::new(Store::open(path, &KIND, min_free_bytes)?);
        let index = store.read(|txn| {
            let mut index = Index::default();
            for entry in txn.open_table(ROWS)?.iter()? {
                let (number, bytes) = entry?;
                index.rows.insert(number.value(), read_row(number.value(), bytes.value())?);
            }
            let meta = txn.open_table(META)?;
            index.highest_task = meta.get(META_HIGHEST_TASK)?.map_or(0, |highest| highest.value());
            index.stream_created = meta.get(META_STREAM_CREATED)?.map(|created| created.value());
            Ok(index)
        })?;
        Ok(Self { store, index: Mutex::new(index) })
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Durable on return; gives the row's number. The message id is new with each row, so that a row sent twice is stored once, and a
    /// task that a restored Gitea gives anew is no duplicate of the old one.
    pub(super) async fn put(&self, lane: Lane, task: TaskId, sealed: Vec<u8>) -> Result<u64, QueueError> {
        let message_id = format!("{task}-{}", hex::encode(rand::random::<[u8; 8]>()));
        let row = Row { lane: lane.code(), task: task.0, message_id: message_id.clone() };
        let number = self.store.run(move |store| store.write(|txn| put(txn, &row, &sealed))).await?;
        let mut index = self.index();
        index.rows.insert(number, Waiting { lane, task, message_id, since: Instant::now() });
        index.highest_task = index.highest_task.max(u64::try_from(task.0).unwrap_or(0));
        failpoint::reached("outbox.put");
        Ok(number)
    }

    pub(super) async fn payload(&self, number: u64) -> Result<Vec<u8>, QueueError> {
        let read = move |store: &Store| {
            store.read(|txn| {
                let sealed = txn.open_table(PAYLOADS)?.get(number)?.map(|bytes| bytes.value().to_vec());
                sealed.ok_or_else(|| Failure::Row(format!("row {number} has no payload")))
            })
        };
        self.store.run(read).await
    }

    /// Durable on return. One that is not there is removed already.
    pub(super) async fn remove(&self, number: u64) -> Result<(), QueueError> {
        let remove = move |txn: &WriteTransaction| {
            txn.open_table(ROWS)?.remove(number)?;
            txn.open_table(PAYLOADS)?.remove(number)?;
            Ok(Step::Commit(()))
        };
        self.store.run(move |store| store.write(remove)).await?;
        self.index().rows.remove(&number);
        Ok(())
    }

    /// The first row behind `number`.
    pub(super) fn next_after(&self, number: u64) -> Option<(u64, Waiting)> {
        let index = self.index();
        index.rows.range(number + 1..).next().map(|(number, waiting)| (*number, waiting.clone()))
    }

    pub(super) fn find(&self, task: TaskId) -> Option<(u64, Waiting)> {
        let index = self.index();
        index.rows.iter().find(|(_, waiting)| waiting.task == task).map(|(number, waiting)| (*number, waiting.clone()))
    }

    /// Of one lane, in order.
    pub(super) fn of_lane(&self, lane: Lane) -> Vec<TaskId> {
        self.index().rows.values().filter(|waiting| waiting.lane == lane).map(|waiting| waiting.task).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.index().rows.len()
    }

    /// How long the oldest row has waited.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.index().rows.values().map(|waiting| waiting.since).min()
    }

    pub(super) fn highest_task(&self) -> Option<TaskId> {
        let highest = self.index().highest_task;
        i64::try_from(highest).ok().filter(|highest| *highest > 0).map(TaskId)
    }

    /// When the stream was made that we know, in nanoseconds since 1970.
    pub(super) fn stream_created(&self) -> Option<u64> {
        self.index().stream_created
    }

    /// Remembers a stream, and that ids up to `highest` were seen in it.
    pub(super) async fn remember_stream(&self, created: u64, highest: u64) -> Result<(), QueueError> {
        let highest = highest.max(self.index().highest_task);
        let remember = move |txn: &WriteTransaction| {
            let mut meta = txn.open_table(META)?;
            meta.insert(META_STREAM_CREATED, created)?;
            meta.insert(META_HIGHEST_TASK, highest)?;
            Ok(Step::Commit(()))
        };
        self.store.run(move |store| store.write(remember)).await?;
        let mut index = self.index();
        (index.stream_created, index.highest_task) = (Some(created), highest);
        Ok(())
    }

    /// Whether the file can be written and its disk has room.
    pub(super) async fn health(&self) -> QueueHealth {
        match self.store.run(|store| Ok(store.health())).await {
            Ok(health) => health,
            Err(error) => QueueHealth::Unfit(error.to_string()),
        }
    }
}

fn put(txn: &WriteTransaction, row: &Row, sealed: &[u8]) -> Result<Step<u64>, Failure> {
    let mut meta = txn.open_table(META)?;
    let number = meta.get(META_NUMBER)?.map_or(0, |number| number.value()) + 1;
    meta.insert(META_NUMBER, number)?;
    let highest = meta.get(META_HIGHEST_TASK)?.map_or(0, |highest| highest.value());
    meta.insert(META_HIGHEST_TASK, highest.max(u64::try_from(row.task).unwrap_or(0)))?;
    txn.open_table(ROWS)?.insert(number, encode(ROW_VERSION, row)?.as_slice())?;
    txn.open_table(PAYLOADS)?.insert(number, sealed)?;
    Ok(Step::Commit(number))
}
