//! Jobs that the mirror has as waiting or running, and that are in no queue and no environment: nobody else would end them.
//!
//! Only what two looks in a row find nowhere is touched, and Gitea is asked first (rule R4). One that certainly never had an
//! environment is queued again from its sealed envelope. One that may have been started is failed with a reason: rather failed
//! than run twice.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use super::mirror::{Facts, Keeper};
use crate::{
    assignment::Assignment,
    board::Told,
    claims::Verdict,
    failpoint,
    gitea::report::{self, Settlement, Wish},
    ids::TaskId,
    leader::LeaderPass,
    metrics::ResultLabel,
    mirror::{Job, OpenJob, Outcome, Phase, What},
    queue::Published,
};

const NO_COPY: &str = "The runner's queue lost this job before it ran, and no copy of it is left. Please run it again.";
const MAY_HAVE_RUN: &str = "The runner's queue lost this job, and its environment is gone: the job may have been started, so it is not run \
                            again by itself. Please run it again.";
const GONE: &str = "The environment of this job is gone, with all that the runner knew of it, while no controller was there. The job \
                    is not run again by itself. Please run it again.";

impl Keeper {
    /// `suspects`: what the look before this one found nowhere.
    pub async fn stranded_pass(&self, facts: &Facts, suspects: &mut HashSet<TaskId>, _: &LeaderPass) {
        let (began, mut ended) = (Instant::now(), Vec::new());
        let nowhere: Vec<&OpenJob> = facts.open.iter().filter(|open| !facts.present(open.task)).collect();
        for open in nowhere.iter().filter(|open| suspects.contains(&open.task)) {
            if self.stop.is_cancelled() {
                return;
            }
            if let Some(result) = self.stranded(open).await {
                ended.push(format!("{} {result}", open.task.assignment()));
            }
        }
        let told = Told {
            saw: format!("{} job(s) that are nowhere", nowhere.len()),
            changed: (!ended.is_empty()).then(|| ended.join(", ")),
        };
        self.board.pass("stranded jobs", began.elapsed(), Ok(told));
        *suspects = nowhere.iter().map(|open| open.task).collect();
    }

    /// What came of it; `None`: nothing yet.
    async fn stranded(&self, open: &OpenJob) -> Option<&'static str> {
        let (task, id) = (open.task, open.task.assignment());
        let _busy = self.claims.begin(id)?;
        // It may have come back since the look: a restored Gitea gives an id anew.
        if self.claims.get(id).is_some() || !matches!(self.queue.get(task).await, Ok(None)) {
            return None;
        }
        let wish = match report::heartbeat(&self.rpc, task).await {
            Ok(wish) => wish,
            Err(e) => {
                tracing::debug!(assignment = %id, error = %e, "failed to ask Gitea about a stranded job; will again");
                return None;
            }
        };
        let result = match wish {
            Wish::Run => match self.envelope_of(open).await {
                Some((assignment, sealed)) => self.republish(&assignment, &sealed).await,
                None => self.fail(open).await,
            },
            Wish::Cancelled => {
                let reason = "The job was cancelled, and the runner's queue had lost it.";
                self.end(open, Verdict::Cancelled, reason).await.then(|| {
                    self.mirror.finished(task, Outcome::Cancelled, Some(reason), open.job.details.token_hash);
                    "cancelled"
                })
            }
            Wish::Final(_) | Wish::Gone => {
                self.mirror.finished(task, Outcome::of(wish.result()), Some("over at Gitea"), open.job.details.token_hash);
                Some("over")
            }
        };
        if let Some(result) = result {
            self.metrics.stranded.get_or_create(&ResultLabel { result }).inc();
            if result != "republished" {
                self.claims.forget(id);
            }
        }
        result
    }

    /// The copy of a job that certainly was not started: it has no environment, and an environment's row stays until it is
    /// confirmed gone without a start.
    async fn envelope_of(&self, open: &OpenJob) -> Option<(Assignment, Vec<u8>)> {
        if !may_wait(&open.job) {
            return None;
        }
        let task = open.task;
        let sealed = self.mirror.ask(move |mirror| mirror.payload(task)).await.flatten()?;
        match Assignment::open(&sealed, &self.keys, &self.rules) {
            Ok(assignment) if assignment.task == task && assignment.lane == open.job.lane => Some((assignment, sealed)),
            Ok(_) => None,
            Err(e) => {
                tracing::warn!(assignment = %task.assignment(), error = %e, "failed to open the mirror's copy of a stranded job");
                None
            }
        }
    }

    async fn republish(&self, assignment: &Assignment, sealed: &[u8]) -> Option<&'static str> {
        // We may die after it is queued and before the mirror knows: then it is simply found in the queue.
        match self.queue.publish(assignment.lane, assignment.task, sealed).await {
            Ok(Published::Stored) => {
                tracing::warn!(assignment = %assignment.id, backend = %assignment.lane,
                    "a job was in the mirror and in no queue and no environment (was the queue lost?); queued it again from the mirror's copy");
                failpoint::reached("stranded.republished");
                self.mirror.note(assignment.task, What::Republished { reason: "the queue had lost it".into() });
                Some("republished")
            }
            Ok(Published::Duplicate) => None,
            Err(e) => {
                tracing::warn!(assignment = %assignment.id, error = %e, "failed to queue a stranded job again; will try again");
                None
            }
        }
    }

    async fn fail(&self, open: &OpenJob) -> Option<&'static str> {
        let reason = match (&open.job.phase, &open.job.environment) {
            (Phase::Claimed, _) => GONE,
            (_, Some(_)) => MAY_HAVE_RUN,
            (_, None) => NO_COPY,
        };
        tracing::warn!(assignment = %open.task.assignment(), backend = %open.job.lane, reason,
            "a job was in the mirror and in no queue and no environment; it fails");
        if !self.end(open, Verdict::Failure, reason).await {
            return None;
        }
        self.mirror.note(open.task, What::Lost { reason: reason.into(), token_hash: open.job.details.token_hash });
        Some("failed")
    }

    /// `true` once Gitea has its end.
    async fn end(&self, open: &OpenJob, verdict: Verdict, reason: &str) -> bool {
        let lock = self.claims.report_lock(open.task.assignment());
        let _reporting = lock.lock().await;
        let received = std::time::UNIX_EPOCH + Duration::from_millis(open.job.received_ms);
        let settlement = Settlement {
            verdict,
            reasons: vec![reason.into()],
            steps: open.job.details.steps,
            known_steps: Vec::new(),
            started_at: received,
        };
        report::settle_until(&self.rpc, open.task, &settlement, &self.stop).await
    }
}

fn may_wait(job: &Job) -> bool {
    matches!(job.phase, Phase::Queued | Phase::Starting) && job.environment.is_none()
}
