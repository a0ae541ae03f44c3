//! The queue in a redb file of its own: for one controller on one machine.
//!
//! This file is the waiting and the waking; `rows` has the transactions, `store` opens the file and judges its failures. Every
//! transaction is blocking and runs on a blocking thread. The file's lock makes this process the only one, so a start takes
//! back every lease of the process before it. Deliveries are at least once: whoever acts on one must be able to do so again.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use redb::{ReadTransaction, WriteTransaction};
use tokio::sync::Notify;

use self::rows::{Held, Taken};
pub use super::store::MIN_FREE_BYTES;
use super::{
    AssignmentQueue, Dead, Depth, Lease, MAX_DELAY, MAX_SEALED_BYTES, Published, QueueError, QueueHealth, Queued, QueuedFacts,
    Settled, Tended,
    store::{self, Kind, Store},
    stored::{self, Failure, Step},
};
use crate::ids::{Lane, TaskId};

mod dead;
mod rows;

const KIND: Kind = Kind {
    found: rows::found,
    take_over: rows::take_over,
    holds: "It holds the jobs that were taken from Gitea and not started yet.",
    without: "the queue is then empty, and jobs that Gitea still shows as running without a log must be cancelled and run again there",
};

/// A lease ends this long after it was given or extended.
pub const LEASE_TIME: Duration = Duration::from_secs(60);
/// No `lease` call waits longer.
const MAX_WAIT: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    pub lease_time: Duration,
    pub min_free_bytes: u64,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        Self { lease_time: LEASE_TIME, min_free_bytes: MIN_FREE_BYTES }
    }
}

#[derive(Debug)]
pub struct EmbeddedQueue {
    store: Arc<Store>,
    lease_time: Duration,
    /// One a lane, by its code: something may have become ready, or will sooner than it was known.
    wakes: [Notify; Lane::ALL.len()],
}

impl EmbeddedQueue {
    /// Opens the queue, or makes a new one where there is no file. Blocking.
    ///
    /// # Errors
    /// `InUse`: another process has it. `Damaged`: it is no whole queue of this version; it is left as it is, and the text says
    /// the way out. `Unavailable`: the folder cannot be used.
    pub fn open(path: &Path) -> Result<Self, QueueError> {
        Self::open_with(path, EmbeddedOptions::default())
    }

    pub fn open_with(path: &Path, options: EmbeddedOptions) -> Result<Self, QueueError> {
        let EmbeddedOptions { lease_time, min_free_bytes } = options;
        let store = Arc::new(Store::open(path, &KIND, min_free_bytes)?);
        Ok(Self { store, lease_time, wakes: Default::default() })
    }

    fn wake(&self, lane: Lane) -> Result<&Notify, QueueError> {
        let wake = self.wakes.get(usize::from(lane.code()));
        wake.ok_or_else(|| QueueError::Unavailable(format!("lane {lane} has no place in this queue")))
    }

    async fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&WriteTransaction) -> Result<Step<T>, Failure> + Send + 'static,
    ) -> Result<T, QueueError> {
        self.store.run(move |store| store.write(change)).await
    }

    async fn read<T: Send + 'static>(
        &self,
        look: impl FnOnce(&ReadTransaction) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, QueueError> {
        self.store.run(move |store| store.read(look)).await
    }

    /// When something leased or extended now is due again.
    fn deadline_ms(&self) -> u64 {
        self.store.now_ms().saturating_add(stored::ms(self.lease_time))
    }
}

#[async_trait]
impl AssignmentQueue for EmbeddedQueue {
    async fn publish(&self, lane: Lane, task: TaskId, sealed: &[u8]) -> Result<Published, QueueError> {
        if sealed.len() > MAX_SEALED_BYTES {
            return Err(QueueError::TooLarge { bytes: sealed.len(), limit: MAX_SEALED_BYTES });
        }
        let wake = self.wake(lane)?;
        let sealed = sealed.to_vec();
        let published = self.write(move |txn| rows::publish(txn, lane, task, &sealed)).await?;
        wake.notify_waiters();
        Ok(published)
    }

    async fn lease(&self, lane: Lane, wait: Duration) -> Result<Option<Lease>, QueueError> {
        let end = Instant::now() + wait.min(MAX_WAIT);
        let wake = self.wake(lane)?;
        loop {
            // Listening starts before looking, so that nothing published in between is slept through.
            let mut woken = std::pin::pin!(wake.notified());
            woken.as_mut().enable();
            let (now, deadline) = (self.store.now_ms(), self.deadline_ms());
            let next_ms = match self.write(move |txn| rows::take(txn, lane, now, deadline)).await? {
                Taken::Lease(lease) => return Ok(Some(lease)),
                Taken::Nothing { next_ms } => next_ms,
            };
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            // Never longer than a lease time: a lease given to another caller since may run out by then.
            let due = next_ms.map_or(self.lease_time, |at| Duration::from_millis(at.saturating_sub(self.store.now_ms()) + 1));
            tokio::select! {
                () = woken => {}
                () = tokio::time::sleep(left.min(due).min(self.lease_time)) => {}
            }
        }
    }

    async fn extend(&self, lease: &Lease) -> Result<(), QueueError> {
        let (held, deadline) = (Held::from(lease), self.deadline_ms());
        self.write(move |txn| rows::extend(txn, &held, deadline)).await
    }

    async fn release(&self, lease: Lease, delay: Duration) -> Result<(), QueueError> {
        let held = Held::from(&lease);
        let due = (!delay.is_zero()).then(|| self.store.now_ms().saturating_add(stored::ms(delay.min(MAX_DELAY))));
        self.write(move |txn| rows::release(txn, &held, due)).await?;
        self.wake(lease.lane)?.notify_waiters();
        Ok(())
    }

    async fn complete(&self, lease: Lease) -> Result<Settled, QueueError> {
        let held = Held::from(&lease);
        self.write(move |txn| rows::complete(txn, &held)).await
    }

    async fn reject(&self, lease: Lease, reason: &str) -> Result<(), QueueError> {
        let (held, reason, at_ms) = (Held::from(&lease), reason.to_owned(), store::wall_ms());
        self.write(move |txn| rows::reject(txn, &held, &reason, at_ms)).await
    }

    async fn cancel(&self, lane: Lane, task: TaskId) -> Result<bool, QueueError> {
        self.write(move |txn| rows::cancel(txn, lane, task)).await
    }

    async fn depth(&self, lane: Lane) -> Result<Depth, QueueError> {
        let now = self.store.now_ms();
        self.read(move |txn| rows::depth(txn, lane, now)).await
    }

    async fn get(&self, task: TaskId) -> Result<Option<Queued>, QueueError> {
        self.read(move |txn| rows::get(txn, task)).await
    }

    async fn list(&self, lane: Lane) -> Result<Vec<QueuedFacts>, QueueError> {
        let now = self.store.now_ms();
        self.read(move |txn| rows::list(txn, lane, now)).await
    }

    async fn dead(&self) -> Result<Vec<Dead>, QueueError> {
        self.read(dead::all).await
    }

    async fn highest_task(&self) -> Result<Option<TaskId>, QueueError> {
        self.read(rows::highest_task).await
    }

    async fn tend(&self) -> Tended {
        Tended { outbox: 0, store: self.store.run(|store| Ok(store.used())).await.ok().flatten() }
    }

    async fn health(&self) -> QueueHealth {
        match self.store.run(|store| Ok(store.health())).await {
            Ok(health) => health,
            Err(error) => QueueHealth::Unfit(error.to_string()),
        }
    }
}
