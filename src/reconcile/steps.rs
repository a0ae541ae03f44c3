//! The steps that a plan names, carried out. Each may be cut off by a crash at any line; the comments say what the next pass does.

use std::time::{Duration, Instant, SystemTime};

use super::Reconciler;
use crate::{
    assignment::Assignment,
    backend::{BackendError, Gone, Mark, Observed, Phase},
    backoff::Backoff,
    claims::{Claim, ClaimPhase, Verdict},
    failpoint,
    gitea::report::{self, Settlement},
    ids::{AssignmentId, EnvironmentName},
    metrics::{BackendOutcome, BackendReason, ResultLabel},
    mirror::{Outcome, What},
    plan::{self, Ending, NoStart, Removal},
};

const AGAIN_DELAY: Duration = Duration::from_secs(2);

#[derive(Clone, Copy)]
enum Until {
    /// Nothing of it runs; its metadata stays.
    Halted,
    /// Nothing of it is left.
    Gone,
}

impl Reconciler {
    /// After a restart: its slot is counted, its identity served again, and it is offered or goes on as claimed.
    pub(super) async fn adopt(&self, environment: &Observed) {
        let assignment = environment.assignment;
        let Some(_busy) = self.claims.begin(assignment) else { return };
        self.slots.restore(assignment);
        let known = match environment.claimed {
            true => None,
            false => match self.queued(assignment).await {
                Some(known) => Some(known),
                // Not readable just now. It keeps its slot; the next pass looks again.
                None => return,
            },
        };
        if let Err(e) = self.binder.bind(environment).await {
            tracing::warn!(assignment = %assignment, executor = %environment.name, error = %e, "failed to bind an identity; will try again");
            return;
        }
        let remembered = if environment.claimed { self.remembered(environment).await } else { (None, None) };
        let phase = match &known {
            Some(known) => ClaimPhase::Offered { raw: known.raw.clone() },
            None => ClaimPhase::Claimed,
        };
        self.claims.offer(Claim {
            assignment,
            backend: environment.backend,
            name: environment.name.clone(),
            nonce: environment.nonce.clone(),
            spiffe_id: environment.spiffe_id.clone(),
            steps: environment.steps,
            phase,
            offered_at: Instant::now(),
            heard_at: Instant::now(),
            fetched_at: known.as_ref().map(Assignment::fetched_at).or(remembered.0).unwrap_or(environment.created_at),
            token_hash: known.as_ref().map(|k| k.token_hash).or(remembered.1),
            stop: None,
            superseded: false,
            known_steps: Vec::new(),
        });
        if let Some(known) = known.as_ref().filter(|_| environment.phase == Phase::Pending) {
            self.finish_making(environment, known).await;
        }
        self.metrics.recovered_jobs.get_or_create(&ResultLabel { result: "reattached" }).inc();
        tracing::info!(event = "executor_found", assignment = %assignment, backend = %environment.backend, executor = %environment.name,
            claimed = environment.claimed, "environment {} goes on", environment.name);
    }

    /// Whoever made it may have died halfway: made again under its own name, which adopts what is there.
    async fn finish_making(&self, environment: &Observed, known: &Assignment) {
        let nonce = environment.nonce.clone();
        let capability = self.claims.key().capability(known.id, &nonce);
        let spec = self.target.spec(environment.backend, known, nonce, capability);
        if let Err(e) = self.backend.ensure(&spec, &self.pass).await {
            tracing::warn!(assignment = %known.id, executor = %environment.name, error = %e,
                "failed to finish an environment that a crash left half made; it is replaced when it does not start");
        }
    }

    /// When a running job was fetched and the hash of its token, which its environment does not tell: from the mirror, where that has it.
    async fn remembered(&self, environment: &Observed) -> (Option<SystemTime>, Option<[u8; 32]>) {
        let (task, name) = (environment.assignment.task(), environment.name.to_string());
        let job = self.mirror.ask(move |mirror| mirror.job(task)).await.flatten();
        match job.filter(|job| job.environment.as_ref() == Some(&name)) {
            Some(job) => (job.times.fetched.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms)), job.details.token_hash),
            None => (None, None),
        }
    }

    async fn queued(&self, assignment: AssignmentId) -> Option<Assignment> {
        let held = self.queue.get(assignment.task()).await.ok()??;
        match Assignment::open(&held.sealed, &self.keys, &self.rules) {
            Ok(known) => Some(known),
            Err(e) => {
                tracing::error!(assignment = %assignment, error = %e, "failed to open the assignment of an environment");
                None
            }
        }
    }

    pub(super) async fn remove(
        &self,
        name: EnvironmentName,
        environment: Option<Observed>,
        assignment: AssignmentId,
        why: Removal,
    ) {
        let serves = self.claims.get(assignment).is_some_and(|c| c.name == name);
        if serves {
            self.claims.revoke(assignment);
        }
        if !matches!(why, Removal::Terminal) {
            let reason = why.label();
            self.metrics.orphans_collected.get_or_create(&BackendReason { backend: self.backend.kind().as_str(), reason }).inc();
            tracing::info!(assignment = %assignment, executor = %name, reason, "removing environment {name}");
        }
        if !self.until(Until::Gone, &name).await {
            return;
        }
        failpoint::reached("remove.gone");
        self.left(&name, environment.as_ref(), assignment, why);
        self.unbind(environment.as_ref()).await;
        // A duplicate has no slot of its own.
        if why != Removal::Duplicate {
            self.slots.release(assignment);
            tracing::debug!(assignment = %assignment, executor = %name, "environment is gone; its slot is free");
        }
        if why == Removal::Terminal {
            self.claims.forget(assignment);
        }
    }

    /// Tells the mirror that an environment is gone; of one that nobody started, that its job may still be.
    fn left(&self, name: &EnvironmentName, environment: Option<&Observed>, assignment: AssignmentId, why: Removal) {
        let environment_name = name.to_string();
        let what = match environment {
            Some(environment) if why == Removal::Stray && !environment.claimed => {
                What::MadeAgain { environment: environment_name, reason: "nobody waited for its environment".into(), attempts: 0 }
            }
            _ => What::Gone { environment: environment_name },
        };
        self.mirror.note(assignment.task(), what);
    }

    pub(super) async fn make_again(
        &self,
        name: EnvironmentName,
        environment: Option<Observed>,
        assignment: AssignmentId,
        why: NoStart,
    ) {
        // `start` may have come after the plan was made.
        if self.claims.get(assignment).is_some_and(|c| c.name != name || !matches!(c.phase, ClaimPhase::Offered { .. })) {
            return;
        }
        let claim = self.claims.revoke(assignment);
        if !self.until(Until::Gone, &name).await {
            return;
        }
        self.unbind(environment.as_ref()).await;
        failpoint::reached("again.gone");
        let how = match &why {
            NoStart::Ended(how) | NoStart::Unfit(how) => how.clone(),
            NoStart::ClaimTimeout => "it did not take the job within 4 minutes".into(),
            NoStart::Vanished => "it vanished".into(),
        };
        let offered_at = claim.as_ref().map_or_else(Instant::now, |c| c.offered_at);
        let attempts = self.claims.count_attempt(assignment, offered_at);
        let given_up = plan::given_up(&why, attempts.ended, attempts.since.elapsed());
        let attempts = attempts.ended;
        let (environment_name, reason) = (name.to_string(), how.clone());
        self.mirror.note(assignment.task(), What::MadeAgain { environment: environment_name, reason, attempts });
        let backend = self.backend.kind().as_str();
        self.metrics.infra_failures.get_or_create(&BackendReason { backend, reason: "no_start" }).inc();
        tracing::warn!(event = "claim_timeout", assignment = %assignment, backend, executor = %name, attempts, how,
            "environment {name} ended before it took its job");
        if let Some(given_up) = given_up {
            let reason = format!("{given_up}; of the last one: {how}. [no_start]");
            let steps = claim.map_or(environment.map_or(0, |e| e.steps), |c| c.steps);
            if self.report(assignment, Verdict::Failure, reason, steps, None).await {
                self.complete(assignment).await;
                self.claims.forget(assignment);
            }
        } else {
            let row = format!("Environment {name} ended before it took the job ({how}); making another one.");
            let lock = self.claims.report_lock(assignment);
            let _reporting = lock.lock().await;
            if let Err(e) = report::say(&self.rpc, assignment.task(), &[row]).await {
                tracing::debug!(assignment = %assignment, error = %e, "failed to write a status row into the job's log");
            }
            if let Err(e) = self.leases.release(self.queue.as_ref(), assignment.task(), AGAIN_DELAY * attempts).await {
                tracing::warn!(assignment = %assignment, error = %e, "failed to give an assignment back; its lease runs out");
            }
        }
        self.slots.release(assignment);
    }

    /// The environment will not end the job any more, so the controller does.
    pub(super) async fn settle(
        &self,
        name: EnvironmentName,
        environment: Option<Observed>,
        assignment: AssignmentId,
        why: Ending,
    ) {
        // Its own terminal report may have come after the plan was made, or its task id may be another job's by now.
        let over = |c: &Claim| c.name != name || c.superseded || matches!(c.phase, ClaimPhase::Terminal);
        if self.claims.get(assignment).is_some_and(|c| over(&c)) {
            return;
        }
        let claim = self.claims.revoke(assignment);
        if !self.until(Until::Halted, &name).await {
            return;
        }
        failpoint::reached("settle.halted");
        if self.given_anew(assignment, claim.as_ref()).await {
            tracing::warn!(assignment = %assignment, executor = %name, "Gitea gave the task id anew; the old job is not reported on");
            return self.away(&name, environment.as_ref(), assignment).await;
        }
        let backend = self.backend.kind().as_str();
        let (verdict, reason) = (why.verdict(), why.to_string());
        let outcome = match verdict {
            Verdict::Failure => "failure",
            Verdict::Cancelled => "cancelled",
        };
        tracing::warn!(assignment = %assignment, backend, executor = %name, reason, outcome, "ending job {assignment} in its environment's place");
        let steps = claim.as_ref().map_or(environment.as_ref().map_or(0, |e| e.steps), |c| c.steps);
        // We may die before Gitea took it, or before the mark: the next start finds it halted and without the mark, and
        // settles again, which Gitea bears.
        if !self.report(assignment, verdict, reason, steps, claim.as_ref()).await {
            return;
        }
        failpoint::reached("settle.reported");
        self.metrics.jobs_completed.get_or_create(&BackendOutcome { backend, outcome }).inc();
        if verdict == Verdict::Failure {
            self.metrics.infra_failures.get_or_create(&BackendReason { backend, reason: why.label() }).inc();
        }
        match self.backend.mark(&name, Mark::Terminal, &self.pass).await {
            Ok(()) | Err(BackendError::NotFound) => {}
            Err(e) => tracing::warn!(executor = %name, error = %e, "failed to mark an environment; it is removed all the same"),
        }
        failpoint::reached("settle.marked");
        self.complete(assignment).await;
        self.away(&name, environment.as_ref(), assignment).await;
    }

    /// The end of a settled job's environment.
    async fn away(&self, name: &EnvironmentName, environment: Option<&Observed>, assignment: AssignmentId) {
        if self.until(Until::Gone, name).await {
            self.unbind(environment).await;
            self.mirror.note(assignment.task(), What::Gone { environment: name.to_string() });
            self.slots.release(assignment);
            self.claims.forget(assignment);
        }
    }

    /// Whether the queue holds another job under this id (rule R4): Gitea was restored, and gave the id again.
    async fn given_anew(&self, assignment: AssignmentId, claim: Option<&Claim>) -> bool {
        let Some(old) = claim.and_then(|c| c.token_hash) else { return false };
        self.queued(assignment).await.is_some_and(|known| known.token_hash != old)
    }

    async fn report(
        &self,
        assignment: AssignmentId,
        verdict: Verdict,
        reason: String,
        steps: u32,
        claim: Option<&Claim>,
    ) -> bool {
        let lock = self.claims.report_lock(assignment);
        let _reporting = lock.lock().await;
        let settlement = Settlement {
            verdict,
            reasons: vec![reason.clone()],
            steps,
            known_steps: claim.map(|c| c.known_steps.clone()).unwrap_or_default(),
            started_at: claim.map_or_else(std::time::SystemTime::now, |c| c.fetched_at),
        };
        let settled = report::settle_until(&self.rpc, assignment.task(), &settlement, &self.stop).await;
        if settled {
            self.mirror.finished(assignment.task(), Outcome::from(verdict), Some(&reason), claim.and_then(|c| c.token_hash));
        }
        settled
    }

    /// Out of the queue, if it is there still; only after Gitea took the end (rule R9).
    async fn complete(&self, assignment: AssignmentId) {
        if let Err(e) = self.leases.complete(self.queue.as_ref(), self.backend.kind().lane(), assignment.task()).await {
            tracing::warn!(assignment = %assignment, error = %e, "failed to take an ended assignment out of the queue; it comes back and is found over");
        }
    }

    async fn unbind(&self, environment: Option<&Observed>) {
        if let Some(environment) = environment {
            self.binder.unbind(environment).await;
        }
    }

    /// Asks the backend until it is so; `false` only on `stop`.
    async fn until(&self, what: Until, name: &EnvironmentName) -> bool {
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));
        let mut failures = 0u32;
        loop {
            let gone = match what {
                Until::Halted => self.backend.ensure_halted(name, &self.pass).await,
                Until::Gone => self.backend.ensure_gone(name, &self.pass).await,
            };
            match gone {
                Ok(Gone::Gone) | Err(BackendError::NotFound) => return true,
                Ok(Gone::Leaving) => {}
                Err(e) => {
                    failures += 1;
                    if failures.is_power_of_two() {
                        tracing::warn!(executor = %name, error = %e, failures, "failed to remove environment {name}; will try again");
                    }
                }
            }
            tokio::select! {
                () = backoff.wait() => {}
                () = self.stop.cancelled() => return false,
            }
        }
    }
}
