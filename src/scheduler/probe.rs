//! At start, and after a question that failed: tasks that Gitea gave us and that never reached the disk (rule R3).
//!
//! A crash between FetchTask's answer and the commit is the one gap that cannot be closed, and so is an answer that a broken
//! connection swallowed: Gitea gives a task once. Its ids
//! only grow, so what is ours, running, and unknown around the highest stored id is such a task. It is failed at once, with
//! its reason, instead of after Gitea's ten minutes.

use std::{
    collections::HashSet,
    time::{Duration, SystemTime},
};

use tokio_util::sync::CancellationToken;

use super::{FetchState, Scheduler};
use crate::{
    backoff::Backoff,
    claims::Verdict,
    gitea::{
        RpcError,
        report::{self, Settlement, Wish},
    },
    ids::{AssignmentId, BackendKind, Lane, TaskId},
    leader::LeaderPass,
    queue::{QueueError, QueueHealth},
};

/// Ids looked at above the highest stored one, at most.
const ABOVE: i64 = 256;
/// So many unknown ids in a row, and there are no more. Ids of other runners count too.
const UNKNOWN_RUN: u32 = 64;

#[derive(Debug, thiserror::Error)]
pub(super) enum ProbeError {
    #[error("ask the queue: {0}")]
    Queue(#[from] QueueError),
    #[error("ask Gitea: {0}")]
    Gitea(#[from] RpcError),
}

impl Scheduler {
    /// Looks until it has seen all, or `stop`.
    pub(super) async fn probe_lost_fetches(&self, stop: &CancellationToken, pass: &LeaderPass) {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));
        loop {
            match self.probe_pass(pass).await {
                Ok(0) => return,
                Ok(lost) => return tracing::warn!(lost, "failed tasks that a crash had lost between Gitea and the disk"),
                Err(e) => tracing::warn!(error = %e, "failed to probe for lost tasks; will try again before fetching"),
            }
            if let QueueHealth::Unfit(reason) = self.queue.health().await {
                self.say(FetchState::Held(format!("the queue cannot take more: {reason}")));
            }
            tokio::select! {
                () = backoff.wait() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// One look, while no question is in flight; answers how many were lost. Repeating it finds them ended.
    pub(super) async fn probe_pass(&self, _: &LeaderPass) -> Result<u32, ProbeError> {
        let Some(TaskId(highest)) = self.queue.highest_task().await? else { return Ok(0) };
        let mut known: HashSet<TaskId> = HashSet::new();
        for lane in Lane::ALL {
            known.extend(self.queue.list(lane).await?.into_iter().map(|q| q.task));
        }
        for backend in BackendKind::ALL {
            known.extend(self.claims.of_backend(backend).into_iter().map(|c| c.assignment.task()));
        }
        // An environment that is settled or removed just now may have neither a claim nor a place in the queue.
        known.extend(self.claims.busy().into_iter().map(AssignmentId::task));
        // One that was on the disk and is nowhere now was no lost fetch: `reconcile` looks into it.
        let remembered = self.mirror.ask(|mirror| mirror.open_jobs()).await.unwrap_or_default();
        known.extend(remembered.into_iter().map(|open| open.task));
        // Answers are stored out of order, by as many as are asked for at once.
        let below = i64::try_from(self.capacity.values().sum::<usize>()).unwrap_or(i64::MAX);
        let (mut lost, mut unknown) = (0, 0);
        for id in highest.saturating_sub(below).max(1)..=highest + ABOVE {
            let task = TaskId(id);
            if known.contains(&task) {
                unknown = 0;
                continue;
            }
            match report::heartbeat(&self.rpc, task).await? {
                Wish::Run => {
                    self.fail_lost(task).await?;
                    (lost, unknown) = (lost + 1, 0);
                }
                Wish::Gone if id > highest => unknown += 1,
                Wish::Gone | Wish::Cancelled | Wish::Final(_) => unknown = 0,
            }
            if unknown >= UNKNOWN_RUN {
                break;
            }
        }
        Ok(lost)
    }

    async fn fail_lost(&self, task: TaskId) -> Result<(), RpcError> {
        tracing::warn!(event = "lost_fetch", assignment = %task.assignment(), "{} never reached the disk; its job is failed", task.assignment());
        let reason = "Gitea handed this job to the runner, but it did not reach its disk: the controller was stopped in that moment, or \
                      the connection broke. It did not run. Please run it again.";
        let settlement = Settlement {
            verdict: Verdict::Failure,
            reasons: vec![reason.into()],
            steps: 0,
            known_steps: Vec::new(),
            started_at: SystemTime::now(),
        };
        report::settle(&self.rpc, task, &settlement).await?;
        self.metrics.lost_fetches.inc();
        Ok(())
    }
}
