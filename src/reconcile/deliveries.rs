//! Looks after the queue's store: that what was fetched reaches it, and that what it holds is given to somebody.
//!
//! Only periods are here; what there is to look at, each store knows. A store without a server has nothing to do for either.

use std::{sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{metrics::Metrics, queue::AssignmentQueue};

/// Short, since a fetched job may wait for it: cheap while all is well.
const STORE_PERIOD: Duration = Duration::from_millis(500);
/// Found in two looks, a stuck delivery is brought back within a minute.
const DELIVERIES_PERIOD: Duration = Duration::from_secs(20);

/// Looks until `stop`.
pub async fn store(queue: Arc<dyn AssignmentQueue>, metrics: Metrics, stop: CancellationToken) {
    // The pass is never cut off: what it sends may have arrived.
    while !stop.is_cancelled() {
        store_pass(queue.as_ref(), &metrics).await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(STORE_PERIOD) => {}
        }
    }
}

pub async fn store_pass(queue: &dyn AssignmentQueue, metrics: &Metrics) {
    let tended = queue.tend().await;
    let _ = metrics.queue_outbox.set(i64::try_from(tended.outbox).unwrap_or(i64::MAX));
}

/// Looks until `stop`.
pub async fn deliveries(queue: Arc<dyn AssignmentQueue>, metrics: Metrics, stop: CancellationToken) {
    while !stop.is_cancelled() {
        deliveries_pass(queue.as_ref(), &metrics).await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(DELIVERIES_PERIOD) => {}
        }
    }
}

pub async fn deliveries_pass(queue: &dyn AssignmentQueue, metrics: &Metrics) {
    match queue.revive_stuck().await {
        Ok(revived) => drop(metrics.stuck_deliveries.inc_by(revived)),
        Err(e) => tracing::debug!(error = %e, "failed to look for stuck deliveries; will try again"),
    }
}
