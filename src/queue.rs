//! Where assignments wait until they are claimed: one trait, an implementation for each store.
//!
//! Payloads are opaque sealed bytes here. Slots, decoding and what becomes of an assignment are the worker's business.

use std::{fmt, time::Duration};

use async_trait::async_trait;

use crate::ids::{Lane, TaskId};

pub mod embedded;
pub mod held;
pub mod jetstream;
pub mod look;
mod store;
mod stored;

pub use self::store::MIN_FREE_BYTES;

/// A sealed assignment larger than this is refused by `publish` (`TooLarge`).
pub const MAX_SEALED_BYTES: usize = 48 << 20;

/// A longer delay asked of `release` is cut to this, so that nothing can be put off for good.
pub const MAX_DELAY: Duration = Duration::from_secs(15 * 60);

#[async_trait]
pub trait AssignmentQueue: Send + Sync {
    /// Durable on return. A second publish of the same task is `Duplicate` and changes nothing.
    async fn publish(&self, lane: Lane, task: TaskId, sealed: &[u8]) -> Result<Published, QueueError>;
    /// The oldest ready assignment, or `None` after `wait` (an hour at most). The caller holds a slot. Not cancel-safe: a lease
    /// given to a dropped future returns at its deadline.
    async fn lease(&self, lane: Lane, wait: Duration) -> Result<Option<Lease>, QueueError>;
    /// Puts the deadline off by the lease time from now.
    async fn extend(&self, lease: &Lease) -> Result<(), QueueError>;
    /// Back to the queue, in its old place, after `delay` ([`MAX_DELAY`] at most).
    async fn release(&self, lease: Lease, delay: Duration) -> Result<(), QueueError>;
    /// Out of the queue, for good; durable on return.
    async fn complete(&self, lease: Lease) -> Result<Settled, QueueError>;
    /// Dead letter and out of the queue, or neither. The store keeps a bounded number of the newest dead letters.
    async fn reject(&self, lease: Lease, reason: &str) -> Result<(), QueueError>;
    /// Takes a task out whatever its state (ready, delayed, leased). `false`: it was not there.
    async fn cancel(&self, lane: Lane, task: TaskId) -> Result<bool, QueueError>;
    async fn depth(&self, lane: Lane) -> Result<Depth, QueueError>;
    /// Whether a task is held (in whichever lane), and its envelope.
    async fn get(&self, task: TaskId) -> Result<Option<Queued>, QueueError>;
    /// All of a lane in queue order, without payloads.
    async fn list(&self, lane: Lane) -> Result<Vec<QueuedFacts>, QueueError>;
    async fn dead(&self) -> Result<Vec<Dead>, QueueError>;
    /// The highest task id ever stored; probes for lost fetches start above it (rule R3).
    async fn highest_task(&self) -> Result<Option<TaskId>, QueueError>;
    /// Whether the last write succeeded and the store can be written (rule R1).
    async fn health(&self) -> QueueHealth;
    /// Looks after the store: whether its server is there and as it must be, and what waits to be handed to it. Cheap while all is well.
    /// A store without a server has nothing to do.
    async fn tend(&self) -> Tended {
        Tended::default()
    }
    /// Looks for assignments that the store holds and gives to nobody; those found twice in a row are brought back. How many.
    async fn revive_stuck(&self) -> Result<u64, QueueError> {
        Ok(0)
    }
}

/// What a look after the store found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tended {
    /// Assignments on our own disk that the server does not have yet.
    pub outbox: u64,
    /// `None`: not known, or without a limit.
    pub store: Option<StoreUse>,
}

/// How full the store is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreUse {
    pub used: u64,
    /// With as many it takes nothing more.
    pub limit: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    Stored,
    Duplicate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    Done,
    AlreadyGone,
    /// Somebody else holds it now (the deadline passed).
    LeaseLost,
}

/// The right to one delivery, until the lease time after it was given or last extended. Whoever may have to repeat a failed
/// `complete`, `release` or `reject` keeps a clone.
#[derive(Clone)]
pub struct Lease {
    pub lane: Lane,
    pub task: TaskId,
    pub sealed: Vec<u8>,
    /// 1 at the first delivery. Deliveries are not attempts (rule R10).
    pub delivery: u32,
    /// How the implementation knows it again; opaque to others.
    pub token: LeaseToken,
}

/// Without the payload: sealed or not, it is nothing for a log.
impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lease { lane, task, delivery, token, sealed: _ } = self;
        write!(f, "Lease {{ {lane} {task:?} delivery {delivery} seq {} fence {} }}", token.seq, token.fence)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseToken {
    pub seq: u64,
    pub fence: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Depth {
    pub ready: u64,
    pub delayed: u64,
    pub leased: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queued {
    pub lane: Lane,
    pub task: TaskId,
    pub sealed: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedFacts {
    pub lane: Lane,
    pub task: TaskId,
    pub state: QueuedState,
    pub deliveries: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuedState {
    Ready,
    Delayed,
    Leased,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dead {
    pub lane: Lane,
    pub task: TaskId,
    pub reason: String,
    pub at_ms: u64,
    pub sealed: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueHealth {
    Fine,
    /// Nothing must be fetched from Gitea; says what to do.
    Unfit(String),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    #[error("sealed assignment of {bytes} bytes is larger than {limit}")]
    TooLarge { bytes: usize, limit: usize },
    /// Disk full, server away, …: try again later; nothing was acknowledged.
    #[error("queue is unavailable: {0}")]
    Unavailable(String),
    /// The store refuses to be trusted; a person must act.
    #[error("queue is damaged: {0}")]
    Damaged(String),
    /// A newer version of this program wrote the store; it was left as it is.
    #[error("queue is of a newer version: {0}")]
    Newer(String),
    /// Another controller holds the store; only one may.
    #[error("queue is in use: {0}")]
    InUse(String),
    /// A lease that is no longer ours.
    #[error("lease is lost")]
    LeaseLost,
}
