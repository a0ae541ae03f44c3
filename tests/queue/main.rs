//! The queue: what every implementation must do (`suite`), and what the embedded one must survive (the others). JetStream needs its server, so its part is of the group `nats`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{any::Any, path::Path, sync::Arc, time::Duration};

use gitea_dynamic_runner::queue::{
    AssignmentQueue,
    embedded::{EmbeddedOptions, EmbeddedQueue},
};

mod crash;
mod disk;
mod embedded;
mod jetstream;
mod model;
mod suite;
#[path = "../support/mod.rs"]
mod support;

/// A queue, and what must live as long as it.
pub(crate) struct Rig {
    queue: Arc<dyn AssignmentQueue>,
    _keep: Box<dyn Any>,
}

pub(crate) const LONG_LEASE: Duration = Duration::from_secs(60);

pub(crate) fn options(lease_time: Duration) -> EmbeddedOptions {
    // How full the disk of the test machine is, is not what these tests are about.
    EmbeddedOptions { lease_time, min_free_bytes: 0 }
}

pub(crate) fn open(path: &Path) -> EmbeddedQueue {
    EmbeddedQueue::open_with(path, options(LONG_LEASE)).unwrap()
}

/// A folder in memory where there is one: for tests that make thousands of commits and cut no power.
pub(crate) fn quick_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

async fn embedded_rig(lease_time: Duration) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let queue = EmbeddedQueue::open_with(&folder.path().join("queue.redb"), options(lease_time)).unwrap();
    Rig { queue: Arc::new(queue), _keep: Box::new(folder) }
}

suite::run_for!(embedded_rig);

pub(crate) use support::small_disk;
