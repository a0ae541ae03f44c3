//! How many environments of one backend may exist at once, and which assignments have one.
//!
//! A worker takes a slot first and only then leases, so a full pool leaves its assignments in the queue. A slot is freed when its
//! environment is confirmed gone (rule R10), which is the caller's to know. Nothing here is stored: at start the slots are counted
//! again from what exists, and may then exceed a capacity that was lowered meanwhile.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::ids::AssignmentId;

/// The slots of one backend. A clone is another handle to the same slots.
#[derive(Clone)]
pub struct Slots {
    capacity: usize,
    /// Waits in the order of arrival, and is safe to cancel.
    free: Arc<Semaphore>,
    /// Never held across an await. A holder without a permit was restored beyond the capacity; it takes the next permit that
    /// becomes free, before anyone who waits.
    held: Arc<Mutex<BTreeMap<AssignmentId, Option<OwnedSemaphorePermit>>>>,
}

/// A slot that no assignment has yet; free again when dropped.
#[must_use = "a dropped reservation gives its slot back"]
pub struct Reservation {
    slots: Slots,
    permit: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    Held,
    /// The assignment had a slot already; the reservation was given back.
    Already,
}

impl Slots {
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.min(Semaphore::MAX_PERMITS);
        Self { capacity, free: Arc::new(Semaphore::new(capacity)), held: Arc::default() }
    }

    /// Waits for a free slot, first come first served. Has no limit of its own: a job may run for days. Safe to drop.
    pub async fn reserve(&self) -> Reservation {
        loop {
            let Ok(permit) = Arc::clone(&self.free).acquire_owned().await else {
                // The semaphore is never closed.
                std::future::pending::<()>().await;
                continue;
            };
            // Somebody may have been restored beyond the capacity while this permit was on its way.
            if let Some(permit) = self.settle_excess(permit) {
                return Reservation { slots: self.clone(), permit: Some(permit) };
            }
        }
    }

    /// Counts an environment that exists already, whether or not a slot is free.
    pub fn restore(&self, assignment: AssignmentId) {
        let mut held = self.held();
        if !held.contains_key(&assignment) {
            held.insert(assignment, Arc::clone(&self.free).try_acquire_owned().ok());
        }
    }

    /// Frees the assignment's slot. `false`: it had none.
    pub fn release(&self, assignment: AssignmentId) -> bool {
        let removed = self.held().remove(&assignment);
        if let Some(Some(permit)) = removed {
            drop(self.settle_excess(permit));
            return true;
        }
        removed.is_some()
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The assignments that hold a slot, in their order. May be more than the capacity after `restore`.
    pub fn active(&self) -> Vec<AssignmentId> {
        self.held().keys().copied().collect()
    }

    /// How many more could be reserved now.
    pub fn free(&self) -> usize {
        let held = self.held();
        let excess = held.values().filter(|permit| permit.is_none()).count();
        self.free.available_permits().saturating_sub(excess)
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<AssignmentId, Option<OwnedSemaphorePermit>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the permit to a holder that has none, or gives it back to the caller.
    fn settle_excess(&self, permit: OwnedSemaphorePermit) -> Option<OwnedSemaphorePermit> {
        match self.held().values_mut().find(|permit| permit.is_none()) {
            Some(place) => {
                *place = Some(permit);
                None
            }
            None => Some(permit),
        }
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({:?} of {})", self.active(), self.capacity)
    }
}

impl Reservation {
    /// Makes it the slot of this assignment, until `release`.
    pub fn bind(mut self, assignment: AssignmentId) -> Bound {
        let mut held = self.slots.held();
        if held.contains_key(&assignment) {
            drop(held);
            return Bound::Already;
        }
        held.insert(assignment, self.permit.take());
        drop(held);
        Bound::Held
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            drop(self.slots.settle_excess(permit));
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation of {:?}", self.slots)
    }
}
