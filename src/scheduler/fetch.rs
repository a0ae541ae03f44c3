//! One question to Gitea, and what it brought made durable.

use std::time::{Duration, Instant};

use super::{Scheduler, TasksVersion, unix_seconds};
use crate::{
    assignment::Assignment,
    backoff::Backoff,
    claims::Verdict,
    failpoint,
    gitea::{
        RpcError,
        report::{self, Settlement, Wish},
    },
    leader::LeaderPass,
    metrics::LaneLabel,
    mirror,
    queue::{Published, QueueError},
    secret::SecretBytes,
};

/// How long a fetched task is tried to be stored. Longer is no use: after ten minutes Gitea gives it up.
const STORE_LIMIT: Duration = Duration::from_secs(10 * 60);

/// How a question ended.
pub(super) enum Outcome {
    Stored,
    Empty,
    Throttled,
    Failed(RpcError),
}

impl Scheduler {
    /// Asks once. Not to be dropped midway: Gitea claims before it answers (rule R1).
    pub(super) async fn fetch_pass(&self, versions: &TasksVersion, _: &LeaderPass) -> Outcome {
        let (asked, began) = (versions.ask(), Instant::now());
        let answer = self.rpc.fetch_task(asked.version).await;
        self.metrics.fetch_duration.observe(began.elapsed().as_secs_f64());
        match answer {
            Err(e) => Outcome::Failed(e),
            Ok(fetched) => match fetched.task {
                Some(raw) => {
                    versions.reset();
                    // Here is the one gap that cannot be closed: we may die before the task is on disk. The next start
                    // probes for it and fails it at once (rule R3, `probe`).
                    self.metrics.assignments_unpersisted.inc();
                    failpoint::reached("fetch.answered");
                    self.take(raw, Instant::now()).await;
                    self.metrics.assignments_unpersisted.dec();
                    Outcome::Stored
                }
                // Gitea echoes the version when it was too busy to look; at 0 that cannot be its own version.
                None if asked.version == 0 && fetched.tasks_version == 0 => Outcome::Throttled,
                None => {
                    versions.answered(asked, fetched.tasks_version);
                    Outcome::Empty
                }
            },
        }
    }

    async fn take(&self, raw: SecretBytes, answered: Instant) {
        let now_ms = (unix_seconds() * 1000.0) as u64;
        let assignment = match Assignment::of_task(raw.expose().to_vec(), &self.rules, now_ms) {
            Ok(assignment) => assignment,
            Err(reason) => {
                self.metrics.lost_fetches.inc();
                tracing::error!(reason, "failed to read the id of a task that Gitea gave; Gitea will fail it after ten minutes");
                return;
            }
        };
        let (id, lane) = (assignment.id, assignment.lane);
        if self.ended_before(&assignment).await {
            return;
        }
        if self.store(&assignment).await {
            failpoint::reached("fetch.stored");
            self.metrics.assignments.get_or_create(&LaneLabel { lane: lane.as_str() }).inc();
            let took = answered.elapsed().as_secs_f64();
            self.metrics.assignment_persist_duration.observe(took);
            tracing::info!(event = "received", assignment = %id, backend = %lane, repository = %assignment.repository,
                persist_ms = took * 1000.0, "stored {id} for {lane}");
        }
    }

    /// `true` once it is durable.
    async fn store(&self, assignment: &Assignment) -> bool {
        let sealed = assignment.seal(&self.keys);
        // Before it is queued: a claimed environment whose assignment is queued counts as one whose delivery is to be completed,
        // and that would take the new job out.
        self.replace_served(assignment);
        let (began, mut backoff) = (Instant::now(), Backoff::new(Duration::from_millis(100), Duration::from_secs(10)));
        loop {
            match self.queue.publish(assignment.lane, assignment.task, &sealed).await {
                Ok(Published::Stored) => {
                    self.mirror.queued(assignment, &sealed);
                    return true;
                }
                Ok(Published::Duplicate) => match self.replace_queued(assignment).await {
                    Ok(true) => continue,
                    Ok(false) => return false,
                    Err(e) => tracing::warn!(assignment = %assignment.id, error = %e, "failed to compare a repeated task"),
                },
                Err(QueueError::TooLarge { bytes, limit }) => {
                    self.refuse(assignment, format!("The task has {bytes} bytes; this runner takes {limit} at most.")).await;
                    return false;
                }
                Err(e) => {
                    tracing::error!(assignment = %assignment.id, error = %e,
                        "failed to store a fetched task; will try again. Free disk space or restore the queue now, or the job is lost");
                }
            }
            if began.elapsed() > STORE_LIMIT {
                self.metrics.lost_fetches.inc();
                self.refuse(assignment, "The runner could not store this job: its queue was out of order.".into()).await;
                return false;
            }
            backoff.wait().await;
        }
    }

    /// The same task by its token, and its end is known: delivered twice. Rule R4 would find it over, too, since Gitea is asked
    /// before anything is made; here it does not even take a place in the queue.
    async fn ended_before(&self, assignment: &Assignment) -> bool {
        let task = assignment.task;
        let known = self.mirror.ask(move |mirror| mirror.finished(task)).await.flatten();
        let Some(known) = known.filter(|known| known.token_hash == Some(assignment.token_hash)) else { return false };
        self.metrics.repeated_tasks.inc();
        tracing::warn!(assignment = %assignment.id, result = known.result.as_str(), "Gitea delivered a task that is over; it is not run again");
        match report::heartbeat(&self.rpc, task).await {
            Ok(Wish::Run) => {
                let reason =
                    format!("This job ended before ({}), and was handed out again. It is not run twice.", known.result.as_str());
                self.refuse(assignment, reason).await;
            }
            Ok(_) => {}
            Err(e) => tracing::warn!(assignment = %assignment.id, error = %e, "failed to ask Gitea about a task that is over"),
        }
        true
    }

    /// The queue holds this task id already. The same token: the same job, delivered twice. Another: Gitea was restored from a
    /// backup and gave the id anew, so the old one goes (rule R4). `Ok(true)`: publish again.
    async fn replace_queued(&self, assignment: &Assignment) -> Result<bool, QueueError> {
        let Some(held) = self.queue.get(assignment.task).await? else { return Ok(true) };
        let known = Assignment::open(&held.sealed, &self.keys, &self.rules);
        if known.is_ok_and(|known| known.token_hash == assignment.token_hash) {
            tracing::warn!(assignment = %assignment.id, "Gitea delivered a task twice; the second is ignored");
            return Ok(false);
        }
        tracing::warn!(assignment = %assignment.id, "Gitea gave a known task id anew (a restored backup?); the old job goes first");
        // On disk before the old one goes, or the mirror's copy of it would be taken for a job that the queue has lost.
        self.mirror.finished(assignment.task, mirror::Outcome::Unknown, Some("Gitea gave its id anew"), None);
        self.mirror.flush().await;
        self.queue.cancel(held.lane, assignment.task).await?;
        // We may die before the new one is stored: it is found as one whose answer was lost (rule R3).
        failpoint::reached("fetch.replaced");
        Ok(true)
    }

    /// An environment may still serve the id from before Gitea was restored: it goes first (rule R4).
    fn replace_served(&self, assignment: &Assignment) {
        let Some(claim) = self.claims.get(assignment.id) else { return };
        if claim.token_hash.is_some_and(|hash| hash != assignment.token_hash) && self.claims.supersede(assignment.id) {
            tracing::warn!(assignment = %assignment.id, executor = %claim.name, "the environment of the old job is removed first");
        }
    }

    /// Ends a task that cannot even be stored.
    async fn refuse(&self, assignment: &Assignment, reason: String) {
        let settlement = Settlement {
            verdict: Verdict::Failure,
            reasons: vec![reason],
            steps: assignment.steps,
            known_steps: Vec::new(),
            started_at: std::time::SystemTime::now(),
        };
        if let Err(e) = report::settle(&self.rpc, assignment.task, &settlement).await {
            tracing::error!(assignment = %assignment.id, error = %e, "failed to fail a task that cannot be stored");
        }
    }
}
