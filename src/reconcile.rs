//! Looks after the environments of one backend until they are gone, from facts alone (backend, queue, claims).
//!
//! A pass takes no hint about what changed, so it also repairs whatever a crash left behind. What to do is decided by `plan`; the
//! steps that take time run beside the pass, one at most for each assignment. New environments are the worker's.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    assignment::{Rules, seal::SealKeys},
    backend::{Backend, BackendError, Observed},
    board::{Board, Standing, Told},
    claims::{ClaimPhase, Claims, Stop},
    environment::Target,
    gitea::RunnerRpc,
    identity::binder::Binder,
    ids::{BackendKind, EnvironmentName},
    leader::LeaderPass,
    metrics::{BackendLabel, BackendState, Metrics, ReasonLabel},
    mirror::{Mirror, What},
    plan::{self, Facts, Step},
    queue::{AssignmentQueue, held::Leases},
    slots::Slots,
};

pub mod deliveries;
pub mod mirror;
mod steps;
mod stranded;

/// A pass at least this often, whatever wakes it.
const PERIOD: Duration = Duration::from_secs(1);
/// And at most this often: a burst of changes is one look.
const REST: Duration = Duration::from_millis(10);

/// Steps of one pass that are told one by one.
const TOLD_STEPS: usize = 3;

fn environments_of(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Pod => "environments of pod",
        BackendKind::Vm => "environments of vm",
    }
}

/// What the reconciler of one backend works with.
#[derive(Clone)]
pub struct Reconciler {
    pub backend: Arc<dyn Backend>,
    pub slots: Slots,
    pub rpc: RunnerRpc,
    pub queue: Arc<dyn AssignmentQueue>,
    pub leases: Leases,
    pub claims: Claims,
    pub rules: Rules,
    pub keys: SealKeys,
    pub binder: Binder,
    pub target: Target,
    pub metrics: Metrics,
    pub mirror: Mirror,
    pub board: Board,
    pub pass: LeaderPass,
    pub stop_grace: Duration,
    pub silence_limit: Duration,
    /// Trips when the process ends: what waits for Gitea is left to the next start.
    pub stop: CancellationToken,
}

/// Steps that are being carried out.
pub type Steps = JoinSet<()>;

impl Reconciler {
    /// Repeats passes until `stop`; then the steps under way end at their next safe place.
    pub async fn run(self, mut steps: Steps) {
        let (mut changes, mut failing) = (self.claims.watch(), false);
        while !self.stop.is_cancelled() {
            match self.environments_pass(&mut steps).await {
                Ok(()) => failing = false,
                Err(e) if !failing => {
                    failing = true;
                    tracing::warn!(backend = %self.backend.kind(), error = %e, "failed to list environments; nothing is decided until it works");
                }
                Err(_) => {}
            }
            tokio::time::sleep(REST).await;
            tokio::select! {
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(PERIOD) => {}
                () = self.backend.changed() => {}
                _ = changes.changed() => {}
                Some(done) = steps.join_next(), if !steps.is_empty() => {
                    if let Err(e) = done {
                        tracing::error!(error = %e, "failed to look after an environment: a fault of this program; please report it");
                    }
                }
            }
        }
        while steps.join_next().await.is_some() {}
    }

    /// One look at everything, and the steps that follow from it begun. An error is no facts: nothing was decided.
    pub async fn environments_pass(&self, steps: &mut Steps) -> Result<(), BackendError> {
        let began = Instant::now();
        // Claims and the queue are read before the backend: an environment that is made meanwhile is then one without a
        // claim, and too young to be a stray; the other way round a new claim would look like a vanished environment.
        // The queue comes first of all: the scheduler supersedes an old environment, and only then queues the new job of its id.
        let queued = self.queue.list(self.backend.kind().lane()).await.ok();
        let queued = queued.map(|all| all.into_iter().map(|q| q.task.assignment()).collect::<HashSet<_>>());
        let claims = self.claims.of_backend(self.backend.kind());
        let environments = self.list(began).await?;
        let busy = environments.iter().map(|e| e.assignment).chain(claims.iter().map(|c| c.assignment));
        let facts = Facts {
            busy: busy.filter(|a| self.claims.is_busy(*a)).collect(),
            environments,
            claims,
            queued,
            stop_grace: self.stop_grace,
            silence_limit: self.silence_limit,
            now: Instant::now(),
            wall: SystemTime::now(),
        };
        let planned = plan::plan(&facts);
        self.count(&facts);
        self.tell(began, facts.environments.len(), &planned);
        for step in planned {
            self.begin(step, &facts.environments, steps).await;
        }
        self.metrics.reconcile_duration.observe(began.elapsed().as_secs_f64());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let label = BackendLabel { backend: self.backend.kind().as_str() };
        self.metrics.reconcile_last_success.get_or_create(&label).set(now.as_secs_f64());
        Ok(())
    }

    async fn list(&self, began: Instant) -> Result<Vec<Observed>, BackendError> {
        let kind = self.backend.kind();
        let listed = self.backend.list().await;
        match &listed {
            Ok(_) => self.board.neighbour(kind.as_str(), Standing::Fine),
            Err(e) => {
                self.board.neighbour(kind.as_str(), Standing::Trouble(e.to_string()));
                self.board.pass(environments_of(kind), began.elapsed(), Err(e.to_string()));
            }
        }
        listed
    }

    fn tell(&self, began: Instant, environments: usize, planned: &[Step]) {
        let changed = (!planned.is_empty()).then(|| {
            let more = planned.len().saturating_sub(TOLD_STEPS);
            let told: Vec<_> = planned.iter().take(TOLD_STEPS).map(Step::to_string).collect();
            told.join("; ") + &if more > 0 { format!("; and {more} more") } else { String::new() }
        });
        let told = Told { saw: format!("{environments} environment(s)"), changed };
        self.board.pass(environments_of(self.backend.kind()), began.elapsed(), Ok(told));
    }

    /// Quick steps at once, the others beside the pass. Those hold their assignment from here on, so that nobody takes it for
    /// forgotten before they run.
    async fn begin(&self, step: Step, environments: &[Observed], steps: &mut Steps) {
        let find = |name: &EnvironmentName| environments.iter().find(|e| &e.name == name).cloned();
        match step {
            Step::Stop(assignment) => {
                tracing::info!(assignment = %assignment, "the environment reached its time limit; asking the job to stop");
                self.metrics.cancellations.get_or_create(&ReasonLabel { reason: "deadline" }).inc();
                self.claims.stop(assignment, Stop::Deadline);
            }
            Step::CompleteDelivery(assignment) => {
                match self.leases.complete(self.queue.as_ref(), self.backend.kind().lane(), assignment.task()).await {
                    Ok(()) => self.mirror.note(assignment.task(), What::Acknowledged),
                    Err(e) => {
                        tracing::warn!(assignment = %assignment, error = %e, "failed to complete a delivery; the next pass tries again");
                    }
                }
            }
            Step::Adopt(name) => {
                if let Some(environment) = find(&name) {
                    self.adopt(&environment).await;
                }
            }
            Step::Remove { name, assignment, why } => {
                let (this, environment) = (self.clone(), find(&name));
                let Some(busy) = self.claims.begin(assignment) else { return };
                steps.spawn(async move {
                    this.remove(name, environment, assignment, why).await;
                    drop(busy);
                });
            }
            Step::MakeAgain { name, assignment, why } => {
                let (this, environment) = (self.clone(), find(&name));
                let Some(busy) = self.claims.begin(assignment) else { return };
                steps.spawn(async move {
                    this.make_again(name, environment, assignment, why).await;
                    drop(busy);
                });
            }
            Step::Settle { name, assignment, why } => {
                let (this, environment) = (self.clone(), find(&name));
                let Some(busy) = self.claims.begin(assignment) else { return };
                steps.spawn(async move {
                    this.settle(name, environment, assignment, why).await;
                    drop(busy);
                });
            }
        }
    }

    fn count(&self, facts: &Facts) {
        let backend = self.backend.kind().as_str();
        let gauge = |state, n: usize| {
            let _ = self
                .metrics
                .jobs_inflight
                .get_or_create(&BackendState { backend, state })
                .set(i64::try_from(n).unwrap_or(i64::MAX));
        };
        let all = &facts.environments;
        gauge("offered", all.iter().filter(|e| !e.claimed && !e.terminal).count());
        gauge("running", all.iter().filter(|e| e.claimed && !e.terminal).count());
        gauge("leaving", all.iter().filter(|e| e.terminal).count());
        let silent = facts
            .claims
            .iter()
            .filter(|claim| matches!(claim.phase, ClaimPhase::Claimed))
            .map(|claim| facts.now.saturating_duration_since(claim.heard_at));
        let longest = silent.max().unwrap_or_default().as_secs_f64();
        let _ = self.metrics.environment_silence.get_or_create(&BackendLabel { backend }).set(longest);
        let slots = |state, n: usize| {
            let _ = self
                .metrics
                .capacity_slots
                .get_or_create(&BackendState { backend, state })
                .set(i64::try_from(n).unwrap_or(i64::MAX));
        };
        slots("used", self.slots.active().len());
        slots("free", self.slots.free());
    }
}
