//! The queue in JetStream does what every queue must: the suite against a real nats-server. What it alone must survive is in `tests/nats`.

use std::{sync::Arc, time::Duration};

use gitea_dynamic_runner::queue::{
    AssignmentQueue as _, QueueHealth,
    jetstream::{JetStreamOptions, JetStreamQueue},
};
use serde_json::json;

use crate::{Rig, suite, support::nats::Nats};

async fn jetstream_rig(lease_time: Duration) -> Rig {
    let nats = Nats::start().await;
    nats.set_up().await;
    let admin = nats.admin().await;
    for lane in ["pod", "vm", "refused"] {
        admin.change_consumer(lane, json!({ "ack_wait": u64::try_from(lease_time.as_nanos()).unwrap() })).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = JetStreamOptions { min_free_bytes: 0 };
    let queue = JetStreamQueue::open(&folder.path().join("outbox.redb"), nats.settings(), options).await.unwrap();
    queue.tend().await;
    assert_eq!(queue.health().await, QueueHealth::Fine);
    Rig { queue: Arc::new(queue), _keep: Box::new((nats, folder)) }
}

suite::run_for!(jetstream_rig);
