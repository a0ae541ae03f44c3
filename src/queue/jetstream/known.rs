//! What this process remembers of the assignments in NATS: their place, and who holds them.
//!
//! Only a help: the server tells neither which deliveries are out nor, in one question, in which order its subjects are. After a restart
//! places are asked for once. Memory only, and never more than the stream holds.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    ids::{Lane, TaskId},
    queue::{Lease, LeaseToken, QueuedState},
};

#[derive(Debug, Clone)]
struct Seen {
    seq: u64,
    deliveries: u32,
    out: Out,
}

#[derive(Debug, Clone)]
enum Out {
    No,
    Held {
        fence: u64,
        reply: String,
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
            known.insert((lane, task), Seen { seq, deliveries: 0, out: Out::No });
        }
    }

    pub(super) fn leased(&self, lane: Lane, task: TaskId, token: &LeaseToken, delivery: u32, reply: String) {
        let out = Out::Held { fence: token.fence, reply };
        self.lock().insert((lane, task), Seen { seq: token.seq, deliveries: delivery, out });
    }

    pub(super) fn standing(&self, lease: &Lease) -> Standing {
        match self.lock().get(&(lease.lane, lease.task)) {
            Some(seen) if seen.seq == lease.token.seq => match &seen.out {
                Out::Held { fence, reply } if *fence == lease.token.fence => Standing::Ours(reply.clone()),
                _ => Standing::Lost,
            },
            _ => Standing::Gone,
        }
    }

    pub(super) fn released(&self, lease: &Lease, due: Option<Instant>) {
        if let Some(seen) = self.lock().get_mut(&(lease.lane, lease.task))
            && matches!(&seen.out, Out::Held { fence, .. } if *fence == lease.token.fence)
        {
            seen.out = due.map_or(Out::No, Out::Delayed);
        }
    }

    pub(super) fn gone(&self, lane: Lane, task: TaskId) {
        self.lock().remove(&(lane, task));
    }

    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    pub(super) fn place(&self, lane: Lane, task: TaskId) -> Option<u64> {
        self.lock().get(&(lane, task)).map(|seen| seen.seq)
    }

    /// What the server does not have any more is forgotten.
    pub(super) fn only(&self, lane: Lane, there: &[TaskId]) {
        self.lock().retain(|(of, task), _| *of != lane || there.contains(task));
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
        matches!(self.lock().get(&(lane, task)), Some(Seen { out: Out::Held { .. } | Out::Delayed(_), .. }))
    }
}
