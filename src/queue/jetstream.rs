//! The queue in a JetStream of NATS, for installations with more than one node; beside it, on our own disk, an outbox.
//!
//! This file is who does what; `publish` brings assignments into the stream, `lease` takes and settles them, `check` decides whether the
//! server and the stream can be trusted with jobs. Until they can, nothing is leased and nothing may be fetched: the controller starts
//! all the same, and running jobs are served. Nothing here makes or changes a stream; `setup` does, for the operator.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_nats::jetstream::message::StreamMessage;
use async_trait::async_trait;
use tokio::sync::watch;

use self::{
    api::ApiError,
    known::Known,
    link::{Link, Role},
    outbox::Outbox,
    publish::Pump,
};
pub use self::{
    check::{ACCEPTED_FILE, Accepted, KNOWN_FILE},
    look::{Found, examine},
    names::{Names, Settings, User},
};
use super::{
    AssignmentQueue, Dead, Depth, Lease, Published, QueueError, QueueHealth, Queued, QueuedFacts, Settled, StoreUse, Tended,
    store::MIN_FREE_BYTES,
};
use crate::ids::{Lane, TaskId};

mod api;
mod check;
mod judge;
mod known;
mod lease;
mod link;
mod look;
pub mod migrate;
mod monitor;
mod names;
mod outbox;
mod publish;
pub mod setup;
mod stuck;

/// No `lease` call waits longer.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// An outbox that has not been empty for so long keeps more from being fetched.
const OUTBOX_PATIENCE: Duration = Duration::from_secs(30);
/// Who waits for the stream looks so often whether it is there.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// At most so many dead letters are shown, the newest.
const DEAD_SHOWN: u64 = 1000;

/// What a test must be able to change.
#[derive(Debug, Clone)]
pub struct JetStreamOptions {
    pub min_free_bytes: u64,
}

impl Default for JetStreamOptions {
    fn default() -> Self {
        Self { min_free_bytes: MIN_FREE_BYTES }
    }
}

/// Whether jobs may be entrusted to the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Gate {
    /// As it was found over these connections (producer's, worker's); a new one is looked at first.
    Open((u64, u64)),
    /// With the reason and the way out.
    Closed(String),
}

pub struct JetStreamQueue {
    settings: Settings,
    names: Names,
    /// The folder of the outbox, where `nats-setup` leaves its word.
    folder: PathBuf,
    producer: Link,
    worker: Link,
    outbox: Outbox,
    known: Known,
    pump: Pump,
    /// One publisher at a time looks whether its task is there already, and puts it.
    publishing: tokio::sync::Mutex<()>,
    gate: watch::Sender<Gate>,
    checks: tokio::sync::Mutex<check::Memory>,
    /// Something went wrong that the next look should explain.
    recheck: AtomicBool,
    /// The largest message that the server and the stream take.
    max_message: AtomicUsize,
    suspects: Mutex<stuck::Suspects>,
    /// Of the stream, as the last look found it.
    store_use: Mutex<Option<StoreUse>>,
}

impl JetStreamQueue {
    /// Opens the outbox, or makes a new one where there is no file, and begins to connect: NATS need not be there.
    ///
    /// # Errors
    /// As `EmbeddedQueue::open`, and `Unavailable` where the settings make no sense to the client.
    pub async fn open(path: &Path, settings: Settings, options: JetStreamOptions) -> Result<Self, QueueError> {
        let JetStreamOptions { min_free_bytes } = options;
        let file = path.to_owned();
        let opened = tokio::task::spawn_blocking(move || Outbox::open(&file, min_free_bytes)).await;
        let outbox = opened.map_err(|error| QueueError::Unavailable(format!("open outbox: {error}")))??;
        let producer = Link::open(&settings, &settings.producer, Role::Producer).await.map_err(QueueError::Unavailable)?;
        let worker = Link::open(&settings, &settings.worker, Role::Worker).await.map_err(QueueError::Unavailable)?;
        let (gate, _) = watch::channel(Gate::Closed("the stream in NATS has not been looked at yet".into()));
        Ok(Self {
            names: settings.names.clone(),
            settings,
            folder: path.parent().unwrap_or(Path::new(".")).to_owned(),
            producer,
            worker,
            outbox,
            known: Known::default(),
            pump: Pump::default(),
            publishing: tokio::sync::Mutex::default(),
            gate,
            checks: tokio::sync::Mutex::default(),
            recheck: AtomicBool::new(true),
            max_message: AtomicUsize::new(usize::MAX),
            suspects: Mutex::default(),
            store_use: Mutex::default(),
        })
    }

    fn is_open(&self) -> bool {
        *self.gate.borrow() == Gate::Open(self.connections())
    }

    /// Waits for the gate, but not longer than `limit`. Whoever waits looks, so that a new connection is of use at once.
    async fn open_within(&self, limit: Duration) -> bool {
        let end = tokio::time::Instant::now() + limit;
        let (mut gate, mut worker, mut producer) = (self.gate.subscribe(), self.worker.watch(), self.producer.watch());
        loop {
            if self.worker.is_up() && self.producer.is_up() && !self.is_open() {
                self.try_look().await;
            }
            let now = tokio::time::Instant::now();
            if self.is_open() || now >= end {
                return self.is_open();
            }
            tokio::select! {
                _ = gate.changed() => {}
                _ = worker.changed() => {}
                _ = producer.changed() => {}
                // State and event of a connection do not come together.
                () = tokio::time::sleep_until(end.min(now + LOOK_AGAIN)) => {}
            }
        }
    }

    /// Lets the next look come soon.
    fn recheck(&self) {
        self.recheck.store(true, Ordering::Relaxed);
    }

    /// For a question to the stream: `Err` at once while there is no connection, so that nobody waits for an answer that cannot come.
    fn up(&self) -> Result<&Link, QueueError> {
        if self.worker.is_up() { Ok(&self.worker) } else { Err(QueueError::Unavailable("NATS is away".into())) }
    }

    /// The message of a task, in whichever lane.
    async fn find_message(&self, task: TaskId) -> Result<Option<(Lane, StreamMessage)>, QueueError> {
        let found = api::first_message(self.up()?, &self.names.stream, &self.names.in_any_lane(task), 1).await;
        let found = found.map_err(|e| e.while_doing("look for an assignment in NATS"))?;
        Ok(found.and_then(|message| Some((self.names.parse(&message.subject)?.0, message))))
    }

    async fn purge(&self, lane: Lane, task: TaskId) -> Result<u64, QueueError> {
        let purged = api::purge(self.up()?, &self.names.stream, &self.names.subject(lane, task)).await;
        purged.map_err(|e| e.while_doing("take an assignment out of NATS")).inspect(|_| drop(self.known.gone(lane, task)))
    }

    /// The tasks in a lane of the stream, oldest first. One question, and one more for each whose place is not known.
    async fn in_order(&self, lane: Lane) -> Result<Vec<TaskId>, QueueError> {
        let failed = |e: ApiError| e.while_doing("list the assignments in NATS");
        let (link, stream, asked) = (self.up()?, &self.names.stream, Instant::now());
        let subjects = api::subjects(link, stream, &self.names.of_lane(lane)).await.map_err(failed)?;
        let tasks: Vec<TaskId> = subjects.keys().filter_map(|subject| Some(self.names.parse(subject)?.1)).collect();
        self.known.only(lane, &tasks, asked);
        let mut placed = Vec::with_capacity(tasks.len());
        for task in tasks {
            let place = match self.known.place(lane, task) {
                Some(place) => place,
                None => match api::first_message(link, stream, &self.names.subject(lane, task), 1).await.map_err(failed)? {
                    Some(message) => {
                        self.known.placed(lane, task, message.sequence);
                        message.sequence
                    }
                    // It left between the two questions.
                    None => continue,
                },
            };
            placed.push((place, task));
        }
        placed.sort_unstable();
        Ok(placed.into_iter().map(|(_, task)| task).collect())
    }

    /// Everything that keeps jobs from being taken, the first reason only.
    async fn trouble(&self) -> Option<String> {
        if let QueueHealth::Unfit(why) = self.outbox.health().await {
            return Some(why);
        }
        if let Gate::Closed(why) = &*self.gate.borrow() {
            return Some(why.clone());
        }
        if !self.is_open() || !self.worker.is_up() || !self.producer.is_up() {
            self.recheck();
            return Some(format!("the connection to NATS at {} was lost; it is made again and looked at", self.settings.url));
        }
        if let Some(why) = self
            .producer
            .refusal()
            .or_else(|| self.worker.refusal())
            .or_else(|| self.pump.failure().filter(|_| self.outbox.len() > 0))
        {
            return Some(why);
        }
        if let Some((rows, bytes)) = self.pump.too_large() {
            return Some(format!(
                "{rows} assignments of up to {bytes} bytes are larger than the stream {} takes: raise its max_message_size and the \
                 server's max_payload (docs/nats.md)",
                self.names.stream
            ));
        }
        let since = self.outbox.oldest()?.elapsed();
        (since > OUTBOX_PATIENCE)
            .then(|| format!("{} assignments wait to be handed to NATS, since {} s", self.outbox.len(), since.as_secs()))
    }

    fn suspects(&self) -> std::sync::MutexGuard<'_, stuck::Suspects> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl AssignmentQueue for JetStreamQueue {
    async fn publish(&self, lane: Lane, task: TaskId, sealed: &[u8]) -> Result<Published, QueueError> {
        self.store(lane, task, sealed).await
    }

    async fn lease(&self, lane: Lane, wait: Duration) -> Result<Option<Lease>, QueueError> {
        self.pull(lane, wait).await
    }

    async fn extend(&self, lease: &Lease) -> Result<(), QueueError> {
        self.progress(lease).await
    }

    async fn release(&self, lease: Lease, delay: Duration) -> Result<(), QueueError> {
        self.nak(&lease, delay).await
    }

    async fn complete(&self, lease: Lease) -> Result<Settled, QueueError> {
        self.ack(&lease).await
    }

    async fn reject(&self, lease: Lease, reason: &str) -> Result<(), QueueError> {
        self.dead_letter(&lease, reason).await
    }

    async fn cancel(&self, lane: Lane, task: TaskId) -> Result<bool, QueueError> {
        // What is being sent just now must not arrive after it was looked for.
        let _paused = self.pump.pause().await;
        let row = self.outbox.find(task).filter(|(_, row)| row.lane == lane);
        let purged = self.purge(lane, task).await?;
        if let Some((number, _)) = &row {
            self.outbox.remove(*number).await?;
        }
        Ok(row.is_some() || purged > 0)
    }

    async fn depth(&self, lane: Lane) -> Result<Depth, QueueError> {
        let info = api::consumer_info(self.up()?, &self.names.stream, lane.as_str()).await;
        let info = info.map_err(|e| e.while_doing("count the assignments in NATS"))?;
        let out = info.num_ack_pending as u64;
        let leased = self.known.held(lane).min(out);
        let ready = info.num_pending + self.outbox.of_lane(lane).len() as u64;
        Ok(Depth { ready, delayed: out - leased, leased })
    }

    async fn get(&self, task: TaskId) -> Result<Option<Queued>, QueueError> {
        if let Some((number, row)) = self.outbox.find(task) {
            // It may go between the two looks; then it is in the stream.
            if let Ok(sealed) = self.outbox.payload(number).await {
                return Ok(Some(Queued { lane: row.lane, task, sealed }));
            }
        }
        let found = self.find_message(task).await?;
        Ok(found.map(|(lane, message)| Queued { lane, task, sealed: message.payload.to_vec() }))
    }

    async fn list(&self, lane: Lane) -> Result<Vec<QueuedFacts>, QueueError> {
        // The outbox first: what moves on in between is then seen twice rather than not at all.
        let waiting = self.outbox.of_lane(lane);
        let mut tasks = self.in_order(lane).await?;
        for task in waiting {
            if !tasks.contains(&task) {
                tasks.push(task);
            }
        }
        let facts = |task| {
            let (state, deliveries) = self.known.state(lane, task);
            QueuedFacts { lane, task, state, deliveries }
        };
        Ok(tasks.into_iter().map(facts).collect())
    }

    async fn dead(&self) -> Result<Vec<Dead>, QueueError> {
        let failed = |e: ApiError| e.while_doing("read the dead letters in NATS");
        let (link, stream) = (self.up()?, self.names.dead_stream());
        let last = api::stream_info(link, &stream).await.map_err(failed)?.state.last_sequence;
        let mut letters = Vec::new();
        let mut next = last.saturating_sub(DEAD_SHOWN) + 1;
        while let Some(message) = api::first_message(link, &stream, &self.names.all_dead(), next).await.map_err(failed)? {
            next = message.sequence + 1;
            let header = |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
            let lane = Lane::ALL.into_iter().find(|lane| header("Backend").as_deref() == Some(lane.as_str()));
            letters.push(Dead {
                lane: lane.unwrap_or(Lane::Refused),
                task: header("Task-Id").and_then(|task| task.parse().ok()).unwrap_or(TaskId(0)),
                reason: header("Reason").unwrap_or_default(),
                at_ms: u64::try_from(message.time.unix_timestamp_nanos() / 1_000_000).unwrap_or(0),
                sealed: message.payload.to_vec(),
            });
        }
        Ok(letters)
    }

    async fn highest_task(&self) -> Result<Option<TaskId>, QueueError> {
        Ok(self.outbox.highest_task())
    }

    async fn health(&self) -> QueueHealth {
        self.trouble().await.map_or(QueueHealth::Fine, QueueHealth::Unfit)
    }

    async fn tend(&self) -> Tended {
        self.look().await;
        self.drain().await;
        Tended { outbox: self.outbox.len() as u64, store: *self.store_use.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    async fn revive_stuck(&self) -> Result<u64, QueueError> {
        self.revive().await
    }
}
