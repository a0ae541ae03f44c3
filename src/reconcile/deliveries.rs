//! Looks after the queue's store: that what was fetched reaches it, and that what it holds is given to somebody.
//!
//! Only periods are here; what there is to look at, each store knows. A store without a server has nothing to do for either.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use crate::{
    board::{Board, Standing, Told},
    metrics::Metrics,
    queue::{AssignmentQueue, QueueHealth, StoreUse},
};

/// Short, since a fetched job may wait for it: cheap while all is well.
const STORE_PERIOD: Duration = Duration::from_millis(500);
/// Found in two looks, a stuck delivery is brought back within a minute.
const DELIVERIES_PERIOD: Duration = Duration::from_secs(20);

/// Looks until `stop`.
pub async fn store(queue: Arc<dyn AssignmentQueue>, metrics: Metrics, board: Board, stop: CancellationToken) {
    // The pass is never cut off: what it sends may have arrived.
    while !stop.is_cancelled() {
        store_pass(queue.as_ref(), &metrics, &board).await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(STORE_PERIOD) => {}
        }
    }
}

pub async fn store_pass(queue: &dyn AssignmentQueue, metrics: &Metrics, board: &Board) {
    let began = Instant::now();
    let tended = queue.tend().await;
    let standing = match queue.health().await {
        QueueHealth::Fine => Standing::Fine,
        QueueHealth::Unfit(why) => Standing::Trouble(why),
    };
    board.neighbour("queue", standing);
    let told = Told { saw: format!("{} assignment(s) not yet in the queue's store", tended.outbox), changed: None };
    board.pass("queue store", began.elapsed(), Ok(told));
    if let Some(StoreUse { used, limit }) = tended.store {
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let _ = metrics.queue_store_used.set(bytes(used));
        let _ = metrics.queue_store_limit.set(bytes(limit));
    }
    let _ = metrics.queue_outbox.set(i64::try_from(tended.outbox).unwrap_or(i64::MAX));
}

/// Looks until `stop`.
pub async fn deliveries(queue: Arc<dyn AssignmentQueue>, metrics: Metrics, board: Board, stop: CancellationToken) {
    while !stop.is_cancelled() {
        deliveries_pass(queue.as_ref(), &metrics, &board).await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(DELIVERIES_PERIOD) => {}
        }
    }
}

pub async fn deliveries_pass(queue: &dyn AssignmentQueue, metrics: &Metrics, board: &Board) {
    let began = Instant::now();
    let told = match queue.revive_stuck().await {
        Ok(revived) => {
            metrics.stuck_deliveries.inc_by(revived);
            let changed = (revived > 0).then(|| format!("queued {revived} stuck delivery(s) anew"));
            Ok(Told { saw: "what the queue has given out".into(), changed })
        }
        Err(e) => {
            tracing::debug!(error = %e, "failed to look for stuck deliveries; will try again");
            Err(e.to_string())
        }
    };
    board.pass("queue deliveries", began.elapsed(), told);
}
