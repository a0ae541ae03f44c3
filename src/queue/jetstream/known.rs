//! What this process remembers of the assignments in NATS: their place, and who holds them.
//!
//! Only a help: the server tells neither which deliveries are out nor, in one question, in which order its subjects are. After a restart
//! places are asked for once. Memory only, and never more than the stream holds.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    ids::{Lane, TaskId},
    queue::{Lease, QueuedState},
};

/// A delivery of which nothing was heard for so long is not out any more: it was to be extended or given again long before.
const OUT_COUNTS: Duration = Duration::from_secs(120);

#[derive(Debug, Clone)]
struct Seen {
    seq: u64,
    deliveries: u32,
    out: Out,
    /// When it was last placed, leased or extended.
    at: Instant,
}

#[derive(Debug, Clone)]
enum Out {
    No,
    /// With the id under which the message was published, if it was by us.
    Held {
        fence: u64,
        reply: String,
        message_id: Option<String>,
    },
    /// Given back, to come again at this time.
    Delayed(Instant),
}

#[derive(Default)]
pub(super) struct Known(Mutex<HashMap<(Lane, TaskId), Seen>>);

/// How a lease stands to what is known.
pub(super) enum Standing {
    /// With the subject at which its delivery is settled.
    Ours(String),
    Gone,
    Lost,
}

impl Known {
    fn lock(&self) -> MutexGuard<'_, HashMap<(Lane, TaskId), Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is stored at this place. A new place is a new message, of which nothing else is known.
    pub(super) fn placed(&self, lane: Lane, task: TaskId, seq: u64) {
        let mut known = self.lock();
        if known.get(&(lane, task)).is_none_or(|seen| seen.seq != seq) {
            known.insert((lane, task), Seen { seq, deliveries: 0, out: Out::No, at: Instant::now() });
        }
    }

    pub(super) fn leased(&self, lease: &Lease, reply: String, message_id: Option<String>) {
        let Lease { lane, task, delivery, ref token, .. } = *lease;
        let out = Out::Held { fence: token.fence, reply, message_id };
        self.lock().insert((lane, task), Seen { seq: token.seq, deliveries: delivery, out, at: Instant::now() });
    }

    pub(super) fn standing(&self, lease: &Lease) -> Standing {
        match self.lock().get(&(lease.lane, lease.task)) {
            Some(seen) if seen.seq == lease.token.seq => match &seen.out {
                Out::Held { fence, reply, .. } if *fence == lease.token.fence => Standing::Ours(reply.clone()),
                _ => Standing::Lost,
            },
            _ => Standing::Gone,
        }
    }

    pub(super) fn extended(&self, lease: &Lease) {
        if let Some(seen) = self.lock().get_mut(&(lease.lane, lease.task)) {
            seen.at = Instant::now();
        }
    }

    pub(super) fn released(&self, lease: &Lease, due: Option<Instant>) {
        if let Some(seen) = self.lock().get_mut(&(lease.lane, lease.task))
            && matches!(&seen.out, Out::Held { fence, .. } if *fence == lease.token.fence)
        {
            seen.out = due.map_or(Out::No, Out::Delayed);
        }
    }

    /// Gives the message id, where it was held.
    pub(super) fn gone(&self, lane: Lane, task: TaskId) -> Option<String> {
        match self.lock().remove(&(lane, task))?.out {
            Out::Held { message_id, .. } => message_id,
            Out::No | Out::Delayed(_) => None,
        }
    }

    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    pub(super) fn place(&self, lane: Lane, task: TaskId) -> Option<u64> {
        self.lock().get(&(lane, task)).map(|seen| seen.seq)
    }

    /// What the server did not have any more when it was `asked` is forgotten; what came since is not.
    pub(super) fn only(&self, lane: Lane, there: &[TaskId], asked: Instant) {
        self.lock().retain(|(of, task), seen| *of != lane || seen.at >= asked || there.contains(task));
    }

    pub(super) fn state(&self, lane: Lane, task: TaskId) -> (QueuedState, u32) {
        match self.lock().get(&(lane, task)) {
            None => (QueuedState::Ready, 0),
            Some(seen) => {
                let state = match &seen.out {
                    Out::Held { .. } => QueuedState::Leased,
                    Out::Delayed(due) if *due > Instant::now() => QueuedState::Delayed,
                    Out::Delayed(_) | Out::No => QueuedState::Ready,
                };
                (state, seen.deliveries)
            }
        }
    }

    pub(super) fn held(&self, lane: Lane) -> u64 {
        self.lock().iter().filter(|((of, _), seen)| *of == lane && matches!(seen.out, Out::Held { .. })).count() as u64
    }

    /// Whether we hold it, or know when it comes again.
    pub(super) fn is_out(&self, lane: Lane, task: TaskId) -> bool {
        match self.lock().get(&(lane, task)) {
            Some(Seen { out: Out::Held { .. }, at, .. }) => at.elapsed() < OUT_COUNTS,
            Some(Seen { out: Out::Delayed(due), .. }) => due.elapsed() < OUT_COUNTS,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::queue::LeaseToken;

    fn lease(task: i64, seq: u64, fence: u64) -> Lease {
        Lease { lane: Lane::Pod, task: TaskId(task), sealed: Vec::new(), delivery: 1, token: LeaseToken { seq, fence } }
    }

    fn take(known: &Known, lease: &Lease) {
        known.leased(lease, "reply".into(), None);
    }

    #[test]
    fn what_came_after_the_server_was_asked_is_not_forgotten_for_not_being_in_its_answer() {
        let known = Known::default();
        let (old, new) = (lease(1, 1, 1), lease(2, 2, 2));
        take(&known, &old);
        std::thread::sleep(Duration::from_millis(2));
        let asked = Instant::now();
        take(&known, &new);
        known.only(Lane::Pod, &[], asked);
        assert!(matches!(known.standing(&old), Standing::Gone));
        assert!(matches!(known.standing(&new), Standing::Ours(_)));
    }

    #[test]
    fn a_later_delivery_and_a_later_message_end_what_was_known_of_the_one_before() {
        let known = Known::default();
        let (first, second) = (lease(1, 1, 1), lease(1, 1, 2));
        take(&known, &first);
        assert!(known.is_out(Lane::Pod, TaskId(1)));
        take(&known, &second);
        assert!(matches!(known.standing(&first), Standing::Lost) && matches!(known.standing(&second), Standing::Ours(_)));
        known.released(&first, None);
        assert!(matches!(known.standing(&second), Standing::Ours(_)), "who lost it gives nothing back");
        known.placed(Lane::Pod, TaskId(1), 9);
        assert!(matches!(known.standing(&second), Standing::Gone));
        assert!(!known.is_out(Lane::Pod, TaskId(1)));
        assert_eq!(known.place(Lane::Pod, TaskId(1)), Some(9));
    }
}
