//! The leases that this process holds, by task: taken by the worker, completed by whoever sees the job start or end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{AssignmentQueue, Lease, QueueError, Settled};
use crate::ids::{Lane, TaskId};

/// A shared handle. Bounded by the slots: a lease is only taken with one.
#[derive(Clone, Default)]
pub struct Leases(Arc<Mutex<HashMap<TaskId, Arc<Lease>>>>);

impl Leases {
    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, Arc<Lease>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn hold(&self, lease: Lease) {
        self.lock().insert(lease.task, Arc::new(lease));
    }

    fn take(&self, task: TaskId) -> Option<Lease> {
        self.lock().remove(&task).and_then(Arc::into_inner)
    }

    /// Puts off the deadlines of all held leases. One that is lost is dropped: its environment is served on, by id.
    pub async fn extend_pass(&self, queue: &dyn AssignmentQueue) -> Result<(), QueueError> {
        let held: Vec<_> = self.lock().values().cloned().collect();
        for lease in held {
            match queue.extend(&lease).await {
                Ok(()) => {}
                Err(QueueError::LeaseLost) => {
                    self.lock().remove(&lease.task);
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Takes an assignment out of the queue for good, by its lease where we hold one, else by its id. Durable on return.
    ///
    /// A lease that was lost meanwhile changes nothing: the id is unique in its lane.
    pub async fn complete(&self, queue: &dyn AssignmentQueue, lane: Lane, task: TaskId) -> Result<(), QueueError> {
        if let Some(lease) = self.take(task)
            && matches!(queue.complete(lease).await?, Settled::Done | Settled::AlreadyGone)
        {
            return Ok(());
        }
        queue.cancel(lane, task).await.map(|_| ())
    }

    /// Gives the assignment back to the queue after `delay`. Without a lease it is there already.
    pub async fn release(&self, queue: &dyn AssignmentQueue, task: TaskId, delay: std::time::Duration) -> Result<(), QueueError> {
        match self.take(task) {
            Some(lease) => queue.release(lease, delay).await,
            None => Ok(()),
        }
    }
}
