//! A copy of what is true elsewhere, on disk, for people to look at: each job with its phase and timeline, slots, events.
//!
//! Nothing here is needed for a job to end right. Roles hold a handle and note what happened, without waiting and without errors; a
//! note that is lost makes the mirror stale until `reconcile` compares it with the facts. It also remembers a little that makes
//! restarts better: which tasks are over, the token hash of a running job, and the sealed envelope of one that waits.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use redb::{Database, ReadableDatabase as _};
use tokio::sync::{mpsc, oneshot};

use self::{
    file::Trouble,
    writer::{Missed, Order, Writer},
};
pub use self::{
    job::{Details, Event, Finished, Job, Outcome, Phase, Slot, Times, Unreadable, read_any_row},
    migrate::SCHEMA,
    read::{Filter, OpenJob, Overview, Snapshot, Sorted},
    reader::Reader,
    rows::Keep,
};
use crate::{
    assignment::Assignment,
    ids::{InstanceId, Lane, TaskId},
    metrics::Metrics,
};

mod apply;
mod file;
mod job;
mod migrate;
mod read;
mod reader;
mod rows;
mod writer;

/// The name of the file in the private state folder.
pub const FILE: &str = "mirror.redb";
/// Notes that may wait for the writer.
const ROOM: usize = 4096;
/// And bytes of envelopes among them; beyond, a note goes without its envelope.
const PAYLOAD_ROOM: usize = 64 << 20;
/// An answer that takes longer is none: nobody may be held up by this.
const READ_LIMIT: Duration = Duration::from_secs(2);
/// What ending waits for it, so that a stop with a hanging disk stays within its ten seconds.
const CLOSE_LIMIT: Duration = Duration::from_millis(400);

/// Something that happened to a job.
#[derive(Debug, Clone)]
pub struct Note {
    pub(crate) task: TaskId,
    pub(crate) at_ms: u64,
    pub(crate) what: What,
}

/// What happened.
#[derive(Debug, Clone)]
pub enum What {
    /// It is on disk in the queue. A new job, whatever was known under this id.
    Queued {
        lane: Lane,
        details: Box<Details>,
        fetched_ms: u64,
        sealed: Option<Vec<u8>>,
    },
    Slot,
    /// No environment could be made now.
    Returned {
        reason: String,
    },
    /// It was in no queue and no environment, and is queued again.
    Republished {
        reason: String,
    },
    /// Its environment exists.
    Created {
        environment: String,
    },
    Identity {
        environment: String,
    },
    Claimed {
        environment: String,
    },
    /// Out of the queue for good, after its start.
    Acknowledged,
    FirstStep,
    /// An environment ended before the start, and nothing of it is left.
    MadeAgain {
        environment: String,
        reason: String,
        attempts: u32,
    },
    /// Gitea has its end.
    Finished {
        result: Outcome,
        reason: Option<String>,
        token_hash: Option<[u8; 32]>,
    },
    /// It was nowhere any more, and was failed for that.
    Lost {
        reason: String,
        token_hash: Option<[u8; 32]>,
    },
    Dead {
        reason: String,
    },
    /// Nothing is left of an environment.
    Gone {
        environment: String,
    },
    /// `reconcile` found what the row does not show.
    Seen(Box<Seen>),
    /// All assignments that hold a slot of one backend now.
    Slots {
        lane: Lane,
        held: Vec<TaskId>,
    },
    /// The facts were compared; what is too old goes.
    Reconciled(Keep),
}

/// A present fact.
#[derive(Debug, Clone)]
pub struct Seen {
    /// When the look began, Unix milliseconds: what was noted later is newer.
    pub looked_ms: u64,
    pub lane: Lane,
    pub phase: Phase,
    /// Its environment, and when that was made.
    pub environment: Option<(String, u64)>,
    /// From its envelope, where that could be opened.
    pub details: Option<Details>,
    /// From its environment, for want of better.
    pub shown: Details,
    pub fetched_ms: Option<u64>,
    pub sealed: Option<Vec<u8>>,
}

impl Note {
    fn payload_len(&self) -> usize {
        match &self.what {
            What::Queued { sealed: Some(sealed), .. } => sealed.len(),
            What::Seen(seen) => seen.sealed.as_ref().map_or(0, Vec::len),
            _ => 0,
        }
    }

    fn without_payload(mut self) -> Self {
        match &mut self.what {
            What::Queued { sealed, .. } => *sealed = None,
            What::Seen(seen) => seen.sealed = None,
            _ => {}
        }
        self
    }
}

/// Why the controller must not start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A newer program ran here: a fault of the configuration, not of the machine.
    #[error("{0}")]
    Newer(String),
    #[error("{0}")]
    InUse(String),
    #[error("start the mirror's thread: {0}")]
    Thread(std::io::Error),
}

/// A shared handle; clones write to the same file.
#[derive(Clone)]
pub struct Mirror {
    shared: Arc<Shared>,
    orders: Option<mpsc::Sender<Order>>,
}

struct Shared {
    path: PathBuf,
    instance: InstanceId,
    metrics: Metrics,
    /// `None` while it cannot be used.
    database: RwLock<Option<Database>>,
    missed: Mutex<Missed>,
    payload_bytes: AtomicUsize,
    /// When it last showed all that was noted.
    current_ms: AtomicU64,
}

impl Shared {
    fn new(path: PathBuf, instance: InstanceId, metrics: Metrics) -> Self {
        Self {
            path,
            instance,
            metrics,
            database: RwLock::new(None),
            missed: Mutex::default(),
            payload_bytes: AtomicUsize::new(0),
            current_ms: AtomicU64::new(0),
        }
    }

    fn missed(&self) -> MutexGuard<'_, Missed> {
        self.missed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A note about the task went lost.
    fn lost(&self, task: i64) {
        self.missed().add(task);
        self.metrics.mirror_dropped.inc();
    }
}

impl Mirror {
    /// Opens the file, or begins one: also where it is damaged, which sets it aside. One that cannot be used now is tried again
    /// later. Blocking.
    ///
    /// # Errors
    /// Only what must not be started on, with the way out.
    pub fn open(path: &Path, instance: InstanceId, metrics: Metrics) -> Result<Self, OpenError> {
        let refused = |trouble: Trouble| match trouble {
            Trouble::Newer(version) => OpenError::Newer(file::newer(path, version)),
            Trouble::InUse(why) | Trouble::Damaged(why) | Trouble::OtherInstance(why) | Trouble::Unavailable(why) => {
                OpenError::InUse(why)
            }
        };
        let lock = file::lock(path).map_err(refused)?;
        let shared = Arc::new(Shared::new(path.to_owned(), instance, metrics));
        let mut writer = Writer::new(Arc::clone(&shared), lock);
        writer.open_first().map_err(refused)?;
        let (orders, receiver) = mpsc::channel(ROOM);
        let thread = std::thread::Builder::new().name("mirror".into());
        thread.spawn(move || writer.run(receiver)).map_err(OpenError::Thread)?;
        Ok(Self { shared, orders: Some(orders) })
    }

    /// One that keeps nothing: for a room that is tested alone.
    pub fn none() -> Self {
        let shared = Shared::new(PathBuf::new(), InstanceId::of_uuid(""), Metrics::new());
        Self { shared: Arc::new(shared), orders: None }
    }

    /// Notes what happened just now. Never waits; what cannot be kept is counted.
    pub fn note(&self, task: TaskId, what: What) {
        let Some(orders) = &self.orders else { return };
        let mut note = Note { task, at_ms: now_ms(), what };
        let bytes = note.payload_len();
        if self.shared.payload_bytes.load(Ordering::Relaxed) + bytes > PAYLOAD_ROOM {
            note = note.without_payload();
        }
        let bytes = note.payload_len();
        self.shared.payload_bytes.fetch_add(bytes, Ordering::Relaxed);
        if orders.try_send(Order::Note(Box::new(note))).is_err() {
            self.shared.payload_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.lost(task.0);
        }
    }

    pub fn queued(&self, assignment: &Assignment, sealed: &[u8]) {
        let details = Box::new(Details::of(assignment));
        let (lane, fetched_ms) = (assignment.lane, assignment.fetched_at_ms);
        self.note(assignment.task, What::Queued { lane, details, fetched_ms, sealed: Some(sealed.to_vec()) });
    }

    pub fn finished(&self, task: TaskId, result: Outcome, reason: Option<&str>, token_hash: Option<[u8; 32]>) {
        self.note(task, What::Finished { result, reason: reason.map(str::to_owned), token_hash });
    }

    /// Asks one moment of the file; `None`: it does not answer now.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Snapshot) -> Result<T, String> + Send + 'static,
    ) -> Option<T> {
        let shared = Arc::clone(&self.shared);
        let asked = tokio::task::spawn_blocking(move || {
            let database = shared.database.read().unwrap_or_else(PoisonError::into_inner);
            let snapshot = Snapshot(database.as_ref()?.begin_read().ok()?);
            drop(database);
            question(&snapshot).map_err(|e| tracing::debug!(error = e, "failed to read the mirror")).ok()
        });
        // A panic on a damaged page ends there, too; the writer finds the damage when it opens the file again.
        tokio::time::timeout(READ_LIMIT, asked).await.ok()?.ok()?
    }

    /// Waits until what was noted is on disk or dropped, at most a moment.
    pub async fn flush(&self) {
        self.order(Order::Flush, READ_LIMIT).await;
    }

    /// Writes what was noted, and closes the file; later notes are dropped.
    pub async fn close(&self) {
        self.order(Order::Close, CLOSE_LIMIT).await;
    }

    async fn order(&self, order: impl FnOnce(oneshot::Sender<()>) -> Order, limit: Duration) {
        let Some(orders) = &self.orders else { return };
        let (done, is_done) = oneshot::channel();
        let asked = async {
            if orders.send(order(done)).await.is_ok() {
                is_done.await.ok();
            }
        };
        tokio::time::timeout(limit, asked).await.ok();
    }

    /// Since the mirror last showed all that was noted; `None`: not since this process began. Follows a `flush` at once.
    pub fn age(&self) -> Option<Duration> {
        let current = self.shared.current_ms.load(Ordering::Relaxed);
        (current > 0).then(|| Duration::from_millis(now_ms().saturating_sub(current)))
    }
}

/// Sets the file aside, so that the next start makes it anew. Answers its new name; `None`: there is none. Blocking.
///
/// # Errors
/// A text for the operator; the controller runs, say.
pub fn set_aside(path: &Path) -> Result<Option<PathBuf>, String> {
    let told = |trouble| match trouble {
        Trouble::InUse(why) | Trouble::Unavailable(why) | Trouble::Damaged(why) | Trouble::OtherInstance(why) => why,
        Trouble::Newer(version) => file::newer(path, version),
    };
    let _lock = file::lock(path).map_err(told)?;
    if !path.exists() {
        return Ok(None);
    }
    let at = now_ms();
    file::aside(path, "asked", "asked for by rebuild-mirror", at).map_err(told)?;
    Ok(Some(crate::files::with_suffix(path, &format!(".bad-{}", at / 1000))))
}

/// Unix milliseconds.
pub fn ms_of(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn now_ms() -> u64 {
    ms_of(SystemTime::now())
}
