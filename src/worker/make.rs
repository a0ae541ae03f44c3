//! Making one environment and offering the task to it; every way in which that can fail ends in a clear answer.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::Workshop;
use crate::{
    assignment::Assignment,
    backend::{Backend, BackendError, Ensured, JobNeeds, Observed},
    claims::{Claim, ClaimPhase, Offered, Verdict},
    drain::New,
    failpoint,
    gitea::report::{self, Wish},
    ids::Nonce,
    metrics::{BackendOutcome, BackendReason},
    mirror::{Outcome, What},
};

/// After a failed create: doubles with each, up to the most.
const CREATE_RETRY_FIRST: Duration = Duration::from_secs(5);
const CREATE_RETRY_MOST: Duration = Duration::from_secs(120);
/// So many creates that failed, and the job fails with the last reason.
const CREATE_TRIES: u32 = 6;

/// How making an environment went.
pub(super) enum Made {
    /// It is served; `reconcile` looks after it from here.
    Offered,
    /// The job is over at Gitea; nothing was made.
    Over,
    /// Not now.
    Later(Duration),
}

impl Workshop {
    pub(super) async fn make(&self, backend: &dyn Backend, assignment: &Assignment, stop: &CancellationToken) -> Made {
        if let Some(made) = self.unwanted(backend, assignment, stop).await {
            return made;
        }
        let existing = match backend.list().await {
            Ok(all) => all.into_iter().find(|e| e.assignment == assignment.id && !e.terminal && e.phase.ended().is_none()),
            Err(e) => return self.not_made(backend, assignment, &e, stop).await,
        };
        if existing.as_ref().is_some_and(|e| e.claimed) {
            // Its delivery was not completed before a crash; `reconcile` does it.
            return Made::Later(super::ALREADY_DELAY);
        }
        if existing.is_none() {
            tracing::debug!(event = "executor_absent", assignment = %assignment.id, backend = %backend.kind(), "no environment yet");
        }
        // What exists goes on though we drain; nothing more is made.
        let permit = self.drain.permit(New::Environment);
        if existing.is_none() && permit.is_none() {
            return Made::Later(Duration::ZERO);
        }
        let nonce = existing.map_or_else(Nonce::random, |e| e.nonce);
        let capability = self.claims.key().capability(assignment.id, &nonce);
        let spec = self.target.spec(backend.kind(), assignment, nonce, capability);
        // We may die after the environment exists and before it is offered: the next start finds it by its metadata and offers
        // it, because its assignment is still queued.
        let (how, environment) = match backend.ensure(&spec, &self.pass).await {
            Ok(made) => made,
            Err(e) => return self.not_made(backend, assignment, &e, stop).await,
        };
        failpoint::reached("worker.made");
        let outcome = match how {
            Ensured::Created => "created",
            Ensured::Adopted => "adopted",
        };
        self.metrics.environment_creates.get_or_create(&BackendOutcome { backend: backend.kind().as_str(), outcome }).inc();
        let event = if how == Ensured::Created { "executor_created" } else { "executor_found" };
        tracing::info!(event, assignment = %assignment.id, backend = %backend.kind(), executor = %environment.name,
            "{outcome} environment {} for {}", environment.name, assignment.id);
        self.mirror.note(assignment.task, What::Created { environment: environment.name.to_string() });
        // Offered before it has an identity, so that its first call cannot come too early.
        self.offer(assignment, &environment);
        drop(permit);
        failpoint::reached("worker.offered");
        if let Err(e) = self.binder.bind(&environment).await {
            self.claims.revoke(assignment.id);
            tracing::warn!(event = "identity_target_pending", assignment = %assignment.id, executor = %environment.name, error = %e,
                "failed to bind an identity; reconcile tries again");
            return Made::Offered;
        }
        self.mirror.note(assignment.task, What::Identity { environment: environment.name.to_string() });
        tracing::info!(event = "identity_bound", assignment = %assignment.id, backend = %backend.kind(), executor = %environment.name,
            "bound {} to {}", assignment.spiffe_id, environment.name);
        tracing::info!(event = "backend_pending", assignment = %assignment.id, backend = %backend.kind(), executor = %environment.name,
            "waiting for {} to take {}", environment.name, assignment.id);
        self.say_made(assignment, &environment).await;
        Made::Offered
    }

    /// Asks all who may object, Gitea last and closest to the create (rule R4).
    async fn unwanted(&self, backend: &dyn Backend, assignment: &Assignment, stop: &CancellationToken) -> Option<Made> {
        let over = |settled: bool| Some(if settled { Made::Over } else { Made::Later(Duration::ZERO) });
        let needs = JobNeeds { trust: assignment.trust, needs_docker: assignment.needs_docker.clone() };
        if let Some(reason) = backend.refuses(&needs) {
            tracing::info!(assignment = %assignment.id, backend = %backend.kind(), reason, "refused a job");
            return over(self.fail(assignment, vec![reason], stop).await);
        }
        match self.wish(assignment.task, stop).await {
            None => Some(Made::Later(Duration::ZERO)),
            Some(Wish::Run) if !self.claims.stop_pending(assignment.id) => None,
            Some(Wish::Run | Wish::Cancelled) => {
                let reason = "The job was cancelled before it had an environment.".into();
                over(self.settle(assignment, Verdict::Cancelled, vec![reason], stop).await)
            }
            Some(wish @ (Wish::Final(_) | Wish::Gone)) => {
                tracing::info!(assignment = %assignment.id, ?wish, "the job is over at Gitea, or not there any more; no environment is made");
                let reason = Some("over at Gitea before it had an environment");
                self.mirror.finished(assignment.task, Outcome::of(wish.result()), reason, Some(assignment.token_hash));
                Some(Made::Over)
            }
        }
    }

    fn offer(&self, assignment: &Assignment, environment: &Observed) {
        let offered = self.claims.offer(Claim {
            assignment: assignment.id,
            backend: environment.backend,
            name: environment.name.clone(),
            nonce: environment.nonce.clone(),
            spiffe_id: assignment.spiffe_id.clone(),
            steps: assignment.steps,
            phase: ClaimPhase::Offered { raw: assignment.raw.clone() },
            offered_at: Instant::now(),
            heard_at: Instant::now(),
            fetched_at: assignment.fetched_at(),
            token_hash: Some(assignment.token_hash),
            stop: None,
            superseded: false,
            known_steps: Vec::new(),
        });
        if offered == Offered::AnotherServes {
            tracing::warn!(assignment = %assignment.id, executor = %environment.name, "another environment serves already");
        }
    }

    /// For the user who looks at the job's page at Gitea. Failing costs only these rows.
    async fn say_made(&self, assignment: &Assignment, environment: &Observed) {
        let waited = assignment.fetched_at().elapsed();
        let rows = [
            format!(
                "Environment {} was made for this job ({}), {:.1} s after Gitea handed it out.",
                environment.name,
                environment.backend,
                waited.unwrap_or_default().as_secs_f64()
            ),
            format!("Its identity is {}.", assignment.spiffe_id),
        ];
        let lock = self.claims.report_lock(assignment.id);
        let _reporting = lock.lock().await;
        // After `start` the environment is the reporter, and the rows' place in the log is its own (rule R7).
        if !matches!(self.claims.get(assignment.id).map(|c| c.phase), Some(ClaimPhase::Offered { .. })) {
            return;
        }
        if let Err(e) = report::say(&self.rpc, assignment.task, &rows).await {
            tracing::debug!(assignment = %assignment.id, error = %e, "failed to write status rows into the job's log");
        }
    }

    async fn not_made(
        &self,
        backend: &dyn Backend,
        assignment: &Assignment,
        error: &BackendError,
        stop: &CancellationToken,
    ) -> Made {
        let kind = backend.kind().as_str();
        self.metrics.environment_creates.get_or_create(&BackendOutcome { backend: kind, outcome: "failed" }).inc();
        self.metrics.infra_failures.get_or_create(&BackendReason { backend: kind, reason: "create" }).inc();
        let tries = self.claims.count_create_failure(assignment.id);
        let permanent = matches!(error, BackendError::Permanent(_));
        if permanent || tries >= CREATE_TRIES {
            tracing::error!(assignment = %assignment.id, backend = kind, error = %error, tries, "failed to make an environment; the job fails");
            let reason = format!("No environment could be made for this job: {error}.");
            return match self.fail(assignment, vec![reason], stop).await {
                true => Made::Over,
                false => Made::Later(Duration::ZERO),
            };
        }
        self.mirror.note(assignment.task, What::Returned { reason: format!("no environment could be made: {error}") });
        let delay = (CREATE_RETRY_FIRST * 2u32.pow(tries.min(6) - 1)).min(CREATE_RETRY_MOST);
        tracing::warn!(event = "backend_retry", assignment = %assignment.id, backend = kind, error = %error,
            retry_delay = delay.as_secs(), "failed to make an environment; will try again");
        Made::Later(delay)
    }
}
