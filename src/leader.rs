//! The right to act: whoever starts or deletes takes a [`LeaderPass`].
//!
//! Standalone, the queue database's exclusive file lock makes this process the only one, so holding the open database is the
//! proof. The Kubernetes Lease is a later neighbour of this room.

use crate::queue::embedded::EmbeddedQueue;

/// Proof that no other controller acts for this registration. Zero-sized; minted only here.
#[derive(Debug, Clone, Copy)]
pub struct LeaderPass(());

impl LeaderPass {
    /// The database's lock is the lease: a second process cannot open it.
    pub fn of_database(queue: &EmbeddedQueue) -> Self {
        let _ = queue;
        Self(())
    }
}
