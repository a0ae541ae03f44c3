//! What runs: the tasks that begin new things and those that answer requests, and the order in which they end.
//!
//! Nothing new is begun before the last request is answered, and the authority goes with the servers: an executor that calls while
//! we end is answered or refused, never half-served. Environments are not touched.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    identity::authority::Authority,
    supervise::{EndedEarly, Essential},
};

/// Ending takes at most this and `SERVE_DRAIN` together, so that systemd's and Kubernetes' patience is never needed.
const BEGIN_DRAIN: Duration = Duration::from_secs(8);
const SERVE_DRAIN: Duration = Duration::from_millis(1500);

#[derive(Default)]
pub(super) struct Running {
    /// Cancelled: nothing new is begun.
    pub(super) begin: CancellationToken,
    /// Cancelled after `begin`: no more requests are answered.
    pub(super) serve: CancellationToken,
    beginning: Essential,
    serving: Essential,
}

impl Running {
    pub(super) fn beginning(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.beginning.spawn(name, task);
    }

    pub(super) fn serving(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.serving.spawn(name, task);
    }

    /// Waits for `stop` (`None`), or for an essential task that ends before.
    pub(super) async fn watch(&mut self, stop: &CancellationToken) -> Option<EndedEarly> {
        tokio::select! {
            () = stop.cancelled() => None,
            ended = self.beginning.ended() => Some(ended),
            ended = self.serving.ended() => Some(ended),
        }
    }

    pub(super) async fn end(self, authority: &Authority) {
        self.begin.cancel();
        still_running(&self.beginning.drain(BEGIN_DRAIN).await);
        self.serve.cancel();
        authority.shutdown().await;
        still_running(&self.serving.drain(SERVE_DRAIN).await);
    }
}

fn still_running(names: &[&'static str]) {
    if !names.is_empty() {
        tracing::warn!(?names, "tasks did not end in time; what they held is found again at the next start");
    }
}
