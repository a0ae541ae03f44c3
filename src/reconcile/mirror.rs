//! Compares the mirror with the facts (queue, backends, claims), and has it show what it does not.
//!
//! It takes no hint about what changed, so a mirror that was deleted, or lost notes, shows all present facts again after one
//! pass; the past it cannot bring back. Jobs that are in the mirror and nowhere else are for `stranded`, from the same look.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio_util::sync::CancellationToken;

use crate::{
    assignment::{Assignment, Rules, seal::SealKeys},
    backend::{Backend, Observed},
    board::{Board, Told},
    claims::Claims,
    gitea::RunnerRpc,
    ids::{AssignmentId, BackendKind, Lane, TaskId},
    leader::LeaderPass,
    metrics::Metrics,
    mirror::{Details, Keep, Mirror, OpenJob, Phase, Seen, What, ms_of},
    queue::AssignmentQueue,
    slots::Slots,
};

/// Between two looks; the second comes sooner, since a start finds the most.
const PERIOD: Duration = Duration::from_secs(5);
const SECOND_LOOK: Duration = Duration::from_secs(2);
/// How often what is too old is removed.
const PRUNE_EVERY: Duration = Duration::from_secs(60);
/// Facts brought back in one pass at most; the next one does the rest.
const REPAIRS_MOST: usize = 500;

/// What the mirror is compared with.
pub struct Keeper {
    pub mirror: Mirror,
    pub backends: HashMap<BackendKind, Arc<dyn Backend>>,
    pub slots: HashMap<BackendKind, Slots>,
    pub queue: Arc<dyn AssignmentQueue>,
    pub claims: Claims,
    pub rpc: RunnerRpc,
    pub rules: Rules,
    pub keys: SealKeys,
    pub keep: Keep,
    pub metrics: Metrics,
    pub board: Board,
    pub pass: LeaderPass,
    /// Trips when the process ends: what waits for Gitea is left to the next start.
    pub stop: CancellationToken,
}

/// One look at everything. The mirror was read first: what it shows has moved on since, never back.
pub struct Facts {
    looked_ms: u64,
    pub(super) open: Vec<OpenJob>,
    pub(super) queued: HashMap<TaskId, Lane>,
    dead: HashMap<TaskId, String>,
    /// Of each assignment the one that counts: claimed before unclaimed, then the oldest.
    pub(super) environments: HashMap<TaskId, Observed>,
    /// Somebody serves it, acts on it, or holds a slot for it.
    pub(super) held: HashSet<TaskId>,
}

impl Facts {
    /// It is in a queue or an environment, or in somebody's hands.
    pub(super) fn present(&self, task: TaskId) -> bool {
        let anywhere = self.queued.contains_key(&task) || self.environments.contains_key(&task);
        anywhere || self.dead.contains_key(&task) || self.held.contains(&task)
    }
}

impl Keeper {
    /// Looks until `stop`.
    pub async fn run(self) {
        let (mut suspects, mut pruned, mut period) = (HashSet::new(), None::<Instant>, SECOND_LOOK);
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            if let Some(facts) = self.look().await {
                self.mirror_pass(&facts).await;
                self.stranded_pass(&facts, &mut suspects, &self.pass).await;
                if pruned.is_none_or(|at| at.elapsed() >= PRUNE_EVERY) {
                    pruned = Some(Instant::now());
                    self.mirror.note(TaskId(0), What::Reconciled(self.keep.clone()));
                }
            } else {
                let why = "the mirror, the queue or a backend does not answer, so nothing was concluded";
                self.board.pass("mirror", began.elapsed(), Err(why.into()));
            }
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(period) => period = PERIOD,
            }
        }
    }

    /// `None`: something does not answer now, so nothing may be concluded.
    pub async fn look(&self) -> Option<Facts> {
        let looked_ms = ms_of(SystemTime::now());
        self.mirror.flush().await;
        let open = self.mirror.ask(|mirror| mirror.open_jobs()).await?;
        let mut queued = HashMap::new();
        for lane in Lane::ALL {
            queued.extend(self.queue.list(lane).await.ok()?.into_iter().map(|q| (q.task, lane)));
        }
        let mut held: HashSet<TaskId> = self.claims.busy().into_iter().map(AssignmentId::task).collect();
        held.extend(self.slots.values().flat_map(Slots::active).map(AssignmentId::task));
        for kind in BackendKind::ALL {
            held.extend(self.claims.of_backend(kind).into_iter().map(|claim| claim.assignment.task()));
        }
        let mut environments: HashMap<TaskId, Observed> = HashMap::new();
        for backend in self.backends.values() {
            let mut all = backend.list().await.ok()?;
            all.sort_by_key(|e| (e.terminal, !e.claimed, e.created_at));
            for environment in all {
                environments.entry(environment.assignment.task()).or_insert(environment);
            }
        }
        let mut facts = Facts { looked_ms, open, queued, dead: HashMap::new(), environments, held };
        // Reading the dead letters may cost the store much, and hardly ever is one of ours among them.
        if facts.open.iter().any(|open| !facts.present(open.task)) {
            facts.dead = self.queue.dead().await.ok()?.into_iter().map(|dead| (dead.task, dead.reason)).collect();
        }
        Some(facts)
    }

    /// Notes what the mirror does not show. Repeating it notes nothing.
    pub async fn mirror_pass(&self, facts: &Facts) {
        let began = Instant::now();
        let open: HashMap<TaskId, &OpenJob> = facts.open.iter().map(|open| (open.task, open)).collect();
        let environments = facts.environments.values().filter(|e| !e.terminal).map(|e| e.assignment.task());
        let tasks: HashSet<TaskId> = facts.queued.keys().copied().chain(environments).collect();
        let mut repairs = 0;
        for task in tasks {
            if repairs >= REPAIRS_MOST {
                break;
            }
            // Who acts on it notes what he does.
            if self.claims.is_busy(task.assignment()) {
                continue;
            }
            let environment = facts.environments.get(&task).filter(|e| !e.terminal);
            let shown = match open.get(&task) {
                Some(open) => shows(open, environment, facts.held.contains(&task)),
                None => self.is_over(task, environment).await,
            };
            if !shown {
                repairs += usize::from(self.repair(facts, task, environment, open.contains_key(&task)).await);
            }
        }
        for (task, reason) in &facts.dead {
            if open.contains_key(task) && !facts.queued.contains_key(task) && !facts.environments.contains_key(task) {
                self.mirror.note(*task, What::Dead { reason: reason.clone() });
            }
        }
        self.compare_slots().await;
        let saw = format!(
            "{} open job(s), {} queued, {} environment(s)",
            facts.open.len(),
            facts.queued.len(),
            facts.environments.len()
        );
        let changed = (repairs > 0).then(|| format!("brought back what the mirror did not show of {repairs} job(s)"));
        self.board.pass("mirror", began.elapsed(), Ok(Told { saw, changed }));
    }

    /// Whether a job without an open row needs none: its row says that it is over, and what is queued is no other job.
    async fn is_over(&self, task: TaskId, environment: Option<&Observed>) -> bool {
        let Some(row) = self.mirror.ask(move |mirror| mirror.job(task)).await.flatten() else { return false };
        if environment.is_some() || row.phase.is_open() {
            return true;
        }
        match (self.envelope(task).await, row.details.token_hash) {
            (Some((queued, _)), Some(known)) => queued.token_hash == known,
            _ => true,
        }
    }

    async fn envelope(&self, task: TaskId) -> Option<(Assignment, Vec<u8>)> {
        let held = self.queue.get(task).await.ok()??;
        let assignment = Assignment::open(&held.sealed, &self.keys, &self.rules).ok()?;
        Some((assignment, held.sealed))
    }

    /// `false`: there is nothing better to show than what is shown.
    async fn repair(&self, facts: &Facts, task: TaskId, environment: Option<&Observed>, has_row: bool) -> bool {
        let claimed = environment.is_some_and(|e| e.claimed);
        // Of a claimed one the envelope may be another job's by now (rule R4).
        let envelope = if claimed { None } else { self.envelope(task).await };
        // Its envelope cannot be opened now (another seal key, say); the row is as good as it can be.
        if has_row && envelope.is_none() && environment.is_none() {
            return false;
        }
        let phase = match environment {
            Some(_) if claimed => Phase::Claimed,
            Some(_) => Phase::Starting,
            None => Phase::Queued,
        };
        let lane = environment.map(|e| e.backend.lane()).or_else(|| facts.queued.get(&task).copied());
        let Some(lane) = lane else { return false };
        self.metrics.mirror_repairs.inc();
        let shown = environment.map(|e| Details {
            repository: e.repository.clone(),
            job_key: e.job_key.clone(),
            steps: e.steps,
            ..Details::default()
        });
        let seen = Seen {
            looked_ms: facts.looked_ms,
            lane,
            phase,
            environment: environment.map(|e| (e.name.to_string(), ms_of(e.created_at))),
            fetched_ms: envelope.as_ref().map(|(assignment, _)| assignment.fetched_at_ms),
            details: envelope.as_ref().map(|(assignment, _)| Details::of(assignment)),
            shown: shown.unwrap_or_default(),
            sealed: envelope.map(|(_, sealed)| sealed),
        };
        self.mirror.note(task, What::Seen(Box::new(seen)));
        true
    }

    async fn compare_slots(&self) {
        let Some(known) = self.mirror.ask(|mirror| mirror.slots()).await else { return };
        for (kind, slots) in &self.slots {
            let held: HashSet<i64> = slots.active().into_iter().map(|id| id.task().0).collect();
            let shown: HashSet<i64> =
                known.iter().filter(|(lane, ..)| *lane == kind.lane()).map(|(_, _, slot)| slot.task).collect();
            if held != shown {
                let held = held.into_iter().map(TaskId).collect();
                self.mirror.note(TaskId(0), What::Slots { lane: kind.lane(), held });
            }
        }
    }
}

/// Whether an open row shows what is there.
fn shows(open: &OpenJob, environment: Option<&Observed>, held: bool) -> bool {
    let job = &open.job;
    match environment {
        Some(e) if e.claimed => job.phase == Phase::Claimed && job.environment.as_deref() == Some(e.name.as_str()),
        Some(e) => job.phase == Phase::Starting && job.environment.as_deref() == Some(e.name.as_str()),
        // A claimed job that is still queued is looked after by those who complete it.
        None if job.phase == Phase::Claimed => true,
        None if job.phase == Phase::Starting && !held => false,
        None => job.environment.is_none() && open.has_payload && job.details.token_hash.is_some(),
    }
}
