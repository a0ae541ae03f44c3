//! What a start does before anything new is begun: environments are counted, and what the mirror remembers is taken over.
//!
//! And who compares the mirror with the facts from then on.

use std::{sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use super::Parts;
use crate::{
    backoff::Backoff,
    mirror,
    reconcile::{Reconciler, Steps, mirror::Keeper},
};

/// The first pass of each backend, until each has answered: before that, nobody knows whose request is whose.
pub(super) async fn count_environments(reconcilers: Vec<Reconciler>, stop: &CancellationToken) -> Vec<(Reconciler, Steps)> {
    let mut counted = Vec::new();
    for reconciler in reconcilers {
        let (mut steps, mut backoff) = (Steps::new(), Backoff::new(Duration::from_millis(200), Duration::from_secs(10)));
        while let Err(e) = reconciler.environments_pass(&mut steps).await {
            tracing::warn!(backend = %reconciler.backend.kind(), error = %e, "failed to count environments; will try again");
            tokio::select! {
                () = backoff.wait() => {}
                () = stop.cancelled() => break,
            }
        }
        counted.push((reconciler, steps));
    }
    counted
}

impl Parts<'_> {
    /// A crash of ours does not begin the count of a job's ended environments anew (rule R10).
    pub(super) async fn remember_attempts(&self) {
        for open in self.core.mirror.ask(|mirror| mirror.open_jobs()).await.unwrap_or_default() {
            if open.job.attempts > 0 {
                self.core.claims.restore_attempts(open.task.assignment(), open.job.attempts);
            }
        }
    }

    pub(super) fn keeper(&self) -> Keeper {
        let core = self.core;
        Keeper {
            mirror: core.mirror.clone(),
            backends: core.backends.clone(),
            slots: core.slots.clone(),
            queue: Arc::clone(&core.queue),
            claims: core.claims.clone(),
            rpc: core.rpc.clone(),
            rules: self.rules(),
            keys: core.keys.clone(),
            keep: mirror::Keep::default(),
            metrics: core.metrics.clone(),
            board: core.board.clone(),
            pass: core.pass,
            stop: self.begin.clone(),
        }
    }
}
