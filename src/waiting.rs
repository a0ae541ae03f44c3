//! Cares for assignments that have no claim yet: heartbeats to Gitea, and rows in the job's log that say why it waits.
//!
//! Until `start` the controller is the job's reporter (rule R7). Here a user's cancel is seen before anything is made, and then
//! nothing is.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use tokio_util::sync::CancellationToken;

use crate::{
    assignment::{Assignment, Rules, seal::SealKeys},
    board::{Board, Told},
    claims::{Claims, Stop, Verdict},
    drain::Drain,
    failpoint,
    gitea::{
        RpcError, RunnerRpc,
        report::{self, Settlement, Wish},
    },
    ids::{AssignmentId, BackendKind, Lane, TaskId},
    leader::LeaderPass,
    metrics::{Metrics, ReasonLabel},
    mirror::{Mirror, Outcome},
    queue::{AssignmentQueue, QueueError, held::Leases},
    slots::Slots,
};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(2);
/// Of one task. Gitea gives it up after ten minutes without a word, and a cancel is to reach us in seconds.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// With many waiting, so that all together send no more than this many heartbeats a second.
const HEARTBEATS_PER_SECOND: f64 = 10.0;
/// A place in the queue is told again only when it changed, and not more often than this.
const ROW_EVERY: Duration = Duration::from_secs(30);
/// A job that waits less is not told that it waits.
const ROW_AFTER: Duration = Duration::from_secs(2);

pub struct Waiting {
    pub rpc: RunnerRpc,
    pub queue: Arc<dyn AssignmentQueue>,
    pub leases: Leases,
    pub claims: Claims,
    pub drain: Drain,
    pub rules: Rules,
    pub keys: SealKeys,
    pub slots: HashMap<BackendKind, Slots>,
    pub metrics: Metrics,
    pub mirror: Mirror,
    pub board: Board,
    pub pass: LeaderPass,
}

/// What is remembered of one waiting assignment between two looks.
struct Seen {
    since: Instant,
    heartbeat: Option<Instant>,
    row: Option<(Row, Instant)>,
}

/// What the last row said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// So many jobs were before it.
    Place(usize),
    Draining,
}

/// Between looks.
#[derive(Default)]
pub struct Memory(HashMap<AssignmentId, Seen>);

impl Waiting {
    /// Looks until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let (mut memory, mut failing) = (Memory::default(), false);
        loop {
            match self.waiting_pass(&mut memory, &stop).await {
                Ok(()) => failing = false,
                Err(e) => {
                    self.board.pass("waiting jobs", Duration::ZERO, Err(e.to_string()));
                    if !failing {
                        tracing::warn!(error = %e, "failed to look at the waiting assignments; will try again");
                    }
                    failing = true;
                    self.keep_alive(&mut memory).await;
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
    }

    /// One look at all that waits.
    pub async fn waiting_pass(&self, memory: &mut Memory, stop: &CancellationToken) -> Result<(), QueueError> {
        let (began, mut all) = (Instant::now(), Vec::new());
        for lane in Lane::ALL {
            let waiting: Vec<_> = self.queue.list(lane).await?.into_iter().map(|q| q.task).collect();
            let held = lane.backend().and_then(|b| self.slots.get(&b)).map(Slots::active).unwrap_or_default();
            let without: Vec<_> = waiting.iter().copied().filter(|t| !held.contains(&t.assignment())).collect();
            all.extend(waiting.into_iter().map(|task| (lane, task, without.iter().position(|t| *t == task))));
        }
        self.count().await;
        memory.0.retain(|id, _| all.iter().any(|(_, task, _)| task.assignment() == *id));
        let heartbeat = HEARTBEAT.max(Duration::from_secs_f64(all.len() as f64 / HEARTBEATS_PER_SECOND));
        let told = Told { saw: format!("{} assignment(s) without a start", all.len()), changed: None };
        self.board.pass("waiting jobs", began.elapsed(), Ok(told));
        for (lane, task, place) in all {
            if stop.is_cancelled() {
                return Ok(());
            }
            let seen = memory.0.entry(task.assignment()).or_insert(Seen { since: Instant::now(), heartbeat: None, row: None });
            if seen.heartbeat.is_none_or(|at| at.elapsed() >= heartbeat) {
                seen.heartbeat = Some(Instant::now());
                self.heartbeat(lane, task, stop).await;
            }
            if let (Some(place), Some(backend)) = (place, lane.backend()) {
                self.tell_place(backend, task, place, seen).await;
            }
        }
        Ok(())
    }

    /// While the queue's server is away: Gitea would give up what waits there after ten minutes. What it answers is for the next look.
    async fn keep_alive(&self, memory: &mut Memory) {
        let heartbeat = HEARTBEAT.max(Duration::from_secs_f64(memory.0.len() as f64 / HEARTBEATS_PER_SECOND));
        for (id, seen) in &mut memory.0 {
            if seen.heartbeat.is_none_or(|at| at.elapsed() >= heartbeat) && self.claims.get(*id).is_none() {
                seen.heartbeat = Some(Instant::now());
                if let Err(RpcError { message, .. }) = report::heartbeat(&self.rpc, id.task()).await {
                    tracing::debug!(assignment = %id, error = message, "failed to send a heartbeat; will again");
                }
            }
        }
    }

    async fn heartbeat(&self, lane: Lane, task: TaskId, stop: &CancellationToken) {
        match report::heartbeat(&self.rpc, task).await {
            Ok(Wish::Run) => {}
            Ok(wish) => self.unwanted(lane, task, wish, stop).await,
            Err(RpcError { message, .. }) => {
                tracing::debug!(task = %task, error = message, "failed to send a heartbeat; will again")
            }
        }
    }

    /// Gitea does not want the job any more. Where somebody is making its environment, he is told; else it ends here.
    async fn unwanted(&self, lane: Lane, task: TaskId, wish: Wish, stop: &CancellationToken) {
        let id = task.assignment();
        let Some(_busy) = self.claims.begin(id).filter(|_| self.claims.get(id).is_none()) else {
            return self.claims.stop(id, Stop::Cancelled);
        };
        let label = if wish == Wish::Cancelled { "user" } else { "gitea" };
        self.metrics.cancellations.get_or_create(&ReasonLabel { reason: label }).inc();
        tracing::info!(assignment = %id, ?wish, "a waiting job is not wanted any more; no environment is made");
        if wish == Wish::Cancelled && !self.settle(task, stop).await {
            return;
        }
        failpoint::reached("waiting.settled");
        self.mirror.finished(task, Outcome::of(wish.result()), Some("not wanted any more while it waited"), None);
        // Only now, after Gitea took the end (rule R9). Dying before this, the next look finds it over again.
        if let Err(e) = self.leases.complete(self.queue.as_ref(), lane, task).await {
            tracing::warn!(assignment = %id, error = %e, "failed to take a cancelled assignment out of the queue; will try again");
        }
        self.claims.forget(id);
    }

    async fn settle(&self, task: TaskId, stop: &CancellationToken) -> bool {
        let held = self.queue.get(task).await.ok().flatten();
        let known = held.and_then(|held| Assignment::open(&held.sealed, &self.keys, &self.rules).ok());
        let lock = self.claims.report_lock(task.assignment());
        let _reporting = lock.lock().await;
        let settlement = Settlement {
            verdict: Verdict::Cancelled,
            reasons: vec!["The job was cancelled before it had an environment.".into()],
            steps: known.as_ref().map_or(0, |k| k.steps),
            known_steps: Vec::new(),
            started_at: known.as_ref().map_or_else(SystemTime::now, Assignment::fetched_at),
        };
        report::settle_until(&self.rpc, task, &settlement, stop).await
    }

    /// So that the job's page at Gitea answers why it waits. Failing costs only the row.
    async fn tell_place(&self, backend: BackendKind, task: TaskId, place: usize, seen: &mut Seen) {
        let Some(slots) = self.slots.get(&backend) else { return };
        let now = if self.drain.since().is_some() { Row::Draining } else { Row::Place(place) };
        let due = match seen.row {
            None => seen.since.elapsed() >= ROW_AFTER,
            Some((Row::Place(told), at)) if now != Row::Draining => told != place && at.elapsed() >= ROW_EVERY,
            Some((told, _)) => told != now,
        };
        if !due {
            return;
        }
        let lock = self.claims.report_lock(task.assignment());
        let _reporting = lock.lock().await;
        // Somebody may have made its environment meanwhile, and `start` may have passed the log on (rule R7).
        if self.claims.get(task.assignment()).is_some() || slots.active().contains(&task.assignment()) {
            return;
        }
        seen.row = Some((now, Instant::now()));
        let row = match now {
            Row::Place(_) => {
                tracing::info!(event = "capacity_wait", assignment = %task.assignment(), backend = %backend, before = place,
                    "{} waits for a {backend} slot", task.assignment());
                let (active, capacity) = (slots.active().len(), slots.capacity());
                format!("Waiting for a {backend} slot: {active} of {capacity} are in use, {place} job(s) before this one.")
            }
            Row::Draining => "Waiting: this runner is draining, so nothing new is started until its operator ends that.".into(),
        };
        if let Err(e) = report::say(&self.rpc, task, &[row]).await {
            tracing::debug!(task = %task, error = %e, "failed to write a status row into the job's log");
        }
    }

    async fn count(&self) {
        for lane in Lane::ALL {
            let Ok(depth) = self.queue.depth(lane).await else { continue };
            for (state, n) in [("ready", depth.ready), ("delayed", depth.delayed), ("leased", depth.leased)] {
                let label = crate::metrics::LaneState { lane: lane.as_str(), state };
                let _ = self.metrics.queue_depth.get_or_create(&label).set(i64::try_from(n).unwrap_or(i64::MAX));
            }
        }
    }
}
