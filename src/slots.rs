//! How many environments of one backend may exist at once, and which assignments have one.
//!
//! A worker takes a slot first and only then leases, so a full pool leaves its assignments in the queue. A slot is freed when its
//! environment is confirmed gone (rule R10), which is the caller's to know. Nothing here is stored: at start the slots are counted
//! again from what exists, and may then exceed a capacity that was lowered meanwhile.

use std::{
    collections::{BTreeMap, btree_map::Entry},
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
        held.entry(assignment).or_insert_with(|| Arc::clone(&self.free).try_acquire_owned().ok());
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
        let bound = match held.entry(assignment) {
            Entry::Occupied(_) => Bound::Already,
            Entry::Vacant(place) => {
                place.insert(self.permit.take());
                Bound::Held
            }
        };
        // Dropping what is left of `self` takes the lock again.
        drop(held);
        bound
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::time::Duration;

    use futures::{FutureExt as _, future::BoxFuture, poll};
    use proptest::prelude::*;

    use super::*;
    use crate::ids::TaskId;

    fn id(number: i64) -> AssignmentId {
        TaskId(number).assignment()
    }

    fn at_once(slots: &Slots) -> Option<Reservation> {
        slots.reserve().now_or_never()
    }

    #[test]
    fn a_slot_is_held_until_it_is_released() {
        let slots = Slots::new(2);
        assert_eq!((slots.capacity(), slots.free()), (2, 2));
        assert_eq!(at_once(&slots).unwrap().bind(id(1)), Bound::Held);
        let second = at_once(&slots).unwrap();
        assert_eq!(slots.free(), 0);
        assert!(at_once(&slots).is_none());
        drop(second);
        assert_eq!(slots.free(), 1);
        assert_eq!(slots.active(), [id(1)]);
        assert!(slots.release(id(1)));
        assert!(!slots.release(id(1)), "a second release changes nothing");
        assert_eq!((slots.free(), slots.active()), (2, vec![]));
    }

    #[test]
    fn an_assignment_takes_one_slot_however_often_it_comes() {
        let slots = Slots::new(2);
        slots.restore(id(1));
        slots.restore(id(1));
        assert_eq!(slots.free(), 1);
        assert_eq!(at_once(&slots).unwrap().bind(id(1)), Bound::Already);
        assert_eq!((slots.free(), slots.active()), (1, vec![id(1)]));
    }

    #[test]
    fn what_exists_beyond_a_reduced_capacity_is_worked_off_first() {
        let slots = Slots::new(1);
        let underway = at_once(&slots).unwrap();
        for number in 1..=3 {
            slots.restore(id(number));
        }
        assert_eq!((slots.active().len(), slots.free()), (3, 0));
        drop(underway);
        assert!(at_once(&slots).is_none(), "a given back reservation pays for one of the three");
        assert!(slots.release(id(1)));
        assert!(slots.release(id(2)));
        assert!(at_once(&slots).is_none());
        assert!(slots.release(id(3)));
        assert_eq!(slots.free(), 1);
        assert!(at_once(&slots).is_some());
    }

    #[tokio::test]
    async fn who_waits_first_is_served_first_and_a_cancelled_wait_keeps_nothing() {
        let slots = Slots::new(1);
        let held = at_once(&slots).unwrap();
        let mut first = Box::pin(slots.reserve());
        let mut second = Box::pin(slots.reserve());
        let mut third = Box::pin(slots.reserve());
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending() && poll!(&mut third).is_pending());
        drop(held);
        assert!(poll!(&mut third).is_pending() && poll!(&mut second).is_pending());
        // The slot was meant for the first, which goes without it.
        drop(first);
        assert!(poll!(&mut third).is_pending());
        let Some(reservation) = second.now_or_never() else { panic!("the second is next") };
        assert_eq!(reservation.bind(id(1)), Bound::Held);
        assert!(poll!(&mut third).is_pending());
        assert!(slots.release(id(1)));
        drop(tokio::time::timeout(Duration::from_secs(5), third).await.unwrap());
        assert_eq!(slots.free(), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn many_workers_never_hold_more_than_the_capacity_and_all_get_their_turn() {
        let slots = Slots::new(3);
        let jobs: Vec<_> = (0..200)
            .map(|number| {
                let slots = slots.clone();
                tokio::spawn(async move {
                    let reservation = slots.reserve().await;
                    if number % 7 == 0 {
                        return;
                    }
                    assert_eq!(reservation.bind(id(number)), Bound::Held);
                    tokio::task::yield_now().await;
                    assert!(slots.active().len() <= 3);
                    assert!(slots.release(id(number)));
                })
            })
            .collect();
        for job in jobs {
            tokio::time::timeout(Duration::from_secs(20), job).await.expect("no wake-up is lost").unwrap();
        }
        assert_eq!((slots.free(), slots.active()), (3, vec![]));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Reserve,
        Poll(usize),
        CancelWait(usize),
        Bind(usize, i64),
        DropReservation(usize),
        Restore(i64),
        Release(i64),
    }

    fn ops() -> impl Strategy<Value = Op> {
        let id = || 0..6i64;
        prop_oneof![
            4 => Just(Op::Reserve),
            4 => any::<usize>().prop_map(Op::Poll),
            1 => any::<usize>().prop_map(Op::CancelWait),
            3 => (any::<usize>(), id()).prop_map(|(which, id)| Op::Bind(which, id)),
            1 => any::<usize>().prop_map(Op::DropReservation),
            1 => id().prop_map(Op::Restore),
            3 => id().prop_map(Op::Release),
        ]
    }

    async fn follow(capacity: usize, ops: Vec<Op>) {
        let slots = Slots::new(capacity);
        let mut waiting: Vec<BoxFuture<'_, Reservation>> = Vec::new();
        let mut reserved: Vec<Reservation> = Vec::new();
        let mut held = std::collections::BTreeSet::new();
        let mut restored = 0;
        let at = |which: usize, len: usize| which.checked_rem(len);
        for op in ops {
            let taken = reserved.len() + held.len();
            match op {
                Op::Reserve => waiting.push(slots.reserve().boxed()),
                Op::Poll(which) => {
                    let Some(which) = at(which, waiting.len()) else { continue };
                    if let std::task::Poll::Ready(reservation) = poll!(&mut waiting[which]) {
                        drop(waiting.remove(which));
                        assert!(taken < capacity, "{taken} of {capacity} were taken");
                        reserved.push(reservation);
                    }
                }
                Op::CancelWait(which) => drop(at(which, waiting.len()).map(|which| waiting.remove(which))),
                Op::Bind(which, number) => {
                    let Some(which) = at(which, reserved.len()) else { continue };
                    let new = held.insert(id(number));
                    let expected = if new { Bound::Held } else { Bound::Already };
                    assert_eq!(reserved.remove(which).bind(id(number)), expected);
                }
                Op::DropReservation(which) => drop(at(which, reserved.len()).map(|which| reserved.remove(which))),
                Op::Restore(number) => {
                    slots.restore(id(number));
                    restored += usize::from(held.insert(id(number)));
                }
                Op::Release(number) => assert_eq!(slots.release(id(number)), held.remove(&id(number))),
            }
            assert_eq!(slots.active(), held.iter().copied().collect::<Vec<_>>());
            assert!(reserved.len() + held.len() <= capacity + restored);
            assert!(slots.free() <= capacity.saturating_sub(reserved.len() + held.len()));
        }
        drop((reserved, waiting));
        for assignment in held {
            assert!(slots.release(assignment));
        }
        assert_eq!(slots.free(), capacity, "no slot is lost");
        assert_eq!(at_once(&slots).is_some(), capacity > 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_series_of_calls_keeps_the_capacity_and_loses_no_slot(capacity in 0..4usize, ops in prop::collection::vec(ops(), 1..80)) {
            tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(follow(capacity, ops));
        }
    }
}
