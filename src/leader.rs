//! The right to act: whoever starts or deletes takes a [`LeaderPass`].
//!
//! Standalone, the exclusive lock of the queue's file (with JetStream, of its outbox) makes this process the only one, so holding it open is
//! the proof. The Kubernetes Lease is a later neighbour of this room.

use crate::queue::{embedded::EmbeddedQueue, jetstream::JetStreamQueue};

/// Proof that no other controller acts for this registration. Zero-sized; minted only here.
#[derive(Debug, Clone, Copy)]
pub struct LeaderPass(());

impl LeaderPass {
    /// The database's lock is the lease: a second process cannot open it.
    pub fn of_database(queue: &EmbeddedQueue) -> Self {
        let _ = queue;
        Self(())
    }

    /// With JetStream the outbox has that lock. It is a lock of this state folder only: two folders with one registration are the
    /// operator's mistake.
    pub fn of_outbox(queue: &JetStreamQueue) -> Self {
        let _ = queue;
        Self(())
    }
}
