//! What runs: the tasks that begin new things and those that answer requests, and the order in which they end.
//!
//! Nothing new is begun before the last request is answered, and the authority goes with the servers: an executor that calls while
//! we end is answered or refused, never half-served. Environments are not touched.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    identity::authority::Authority,
    supervise::{EndedEarly, Essential, Pulses, Turns},
};

/// Ending takes at most this and `SERVE_DRAIN` together, so that systemd's and Kubernetes' patience is never needed.
const BEGIN_DRAIN: Duration = Duration::from_secs(8);
const SERVE_DRAIN: Duration = Duration::from_millis(1500);

/// Each of these looks around by itself every 20 s at most; six times that is a hanging one, even on a machine that is busy.
const PERIODIC: [&str; 7] = ["reconcile/pod", "reconcile/vm", "waiting", "mirror", "leases", "queue/store", "queue/deliveries"];
const PERIODIC_LIMIT: Duration = Duration::from_secs(120);
/// It waits for its questions: 25 s for Gitea's answer, and ten minutes for a store that does not take a task.
const SCHEDULER_LIMIT: Duration = Duration::from_secs(900);

pub(super) struct Running {
    /// Cancelled: nothing new is begun.
    pub(super) begin: CancellationToken,
    /// Cancelled after `begin`: no more requests are answered.
    pub(super) serve: CancellationToken,
    beginning: Essential,
    serving: Essential,
    /// Of all of them.
    pub(super) pulses: Pulses,
}

impl Default for Running {
    fn default() -> Self {
        let pulses = Pulses::default();
        let essential = || Essential::seen_in(pulses.clone());
        let (beginning, serving) = (essential(), essential());
        Self { begin: CancellationToken::new(), serve: CancellationToken::new(), beginning, serving, pulses }
    }
}

impl Running {
    pub(super) fn beginning(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let turns = match name {
            "scheduler" => Turns::Within(SCHEDULER_LIMIT),
            periodic if PERIODIC.contains(&periodic) => Turns::Within(PERIODIC_LIMIT),
            // A worker without a free slot waits as long as jobs take.
            _ => Turns::WhenCalled,
        };
        self.beginning.spawn(name, turns, task);
    }

    pub(super) fn serving(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.serving.spawn(name, Turns::WhenCalled, task);
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
