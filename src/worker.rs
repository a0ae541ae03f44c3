//! Makes environments for waiting assignments: one worker for each backend, independent of the others.
//!
//! A slot first, then a lease: a full pool leaves its assignments in the queue, in order. What becomes of an environment once it
//! is offered is `reconcile`'s.

use std::{sync::Arc, time::Duration};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    assignment::{Assignment, OpenFault, Rules, seal::SealKeys},
    backend::Backend,
    backoff::Backoff,
    claims::{Claims, Verdict},
    drain::Drain,
    environment::Target,
    failpoint,
    gitea::{
        RunnerRpc,
        report::{self, Settlement, Wish},
    },
    identity::binder::Binder,
    ids::{Lane, TaskId},
    leader::LeaderPass,
    metrics::Metrics,
    mirror::{Mirror, Outcome, What},
    queue::{AssignmentQueue, Lease, held::Leases},
    slots::{Bound, Reservation, Slots},
};

mod make;

/// One wait for an assignment; short, because a stop is only seen between two.
const LEASE_WAIT: Duration = Duration::from_secs(2);
/// Well below the lease time of a minute.
const EXTEND_EVERY: Duration = Duration::from_secs(20);
/// An assignment whose environment exists already comes back after this, to find it claimed or gone.
const ALREADY_DELAY: Duration = Duration::from_secs(10);
/// An envelope that a newer binary or another key sealed is not thrown away.
const UNREADABLE_DELAY: Duration = Duration::from_secs(60);

/// What all workers work with.
#[derive(Clone)]
pub struct Workshop {
    pub rpc: RunnerRpc,
    pub queue: Arc<dyn AssignmentQueue>,
    pub leases: Leases,
    pub claims: Claims,
    pub drain: Drain,
    pub rules: Rules,
    pub keys: SealKeys,
    pub binder: Binder,
    pub metrics: Metrics,
    pub mirror: Mirror,
    pub pass: LeaderPass,
    pub target: Target,
}

/// The worker of one backend, until `stop`. What it has begun is finished or given back to the queue.
pub async fn worker(shop: Workshop, backend: Arc<dyn Backend>, slots: Slots, stop: CancellationToken) {
    let mut making = JoinSet::new();
    while !stop.is_cancelled() {
        let slot = async {
            shop.drain.undone().await;
            slots.reserve().await
        };
        let reservation = tokio::select! {
            reservation = slot => reservation,
            () = stop.cancelled() => break,
            Some(made) = making.join_next() => {
                report_panic(made);
                continue;
            }
        };
        // It may have waited for its slot for days.
        if shop.drain.since().is_some() {
            continue;
        }
        if let Some(lease) = next_lease(&shop, backend.kind().lane(), &stop).await {
            tracing::info!(event = "capacity_acquired", assignment = %lease.task.assignment(), backend = %backend.kind(),
                "a slot for {}", lease.task.assignment());
            let (shop, backend, slots, stop) = (shop.clone(), Arc::clone(&backend), slots.clone(), stop.clone());
            making.spawn(async move { worker_pass(&shop, backend.as_ref(), &slots, reservation, lease, &stop).await });
        }
    }
    while let Some(made) = making.join_next().await {
        report_panic(made);
    }
}

/// Ends, with their reason, the assignments that no backend can serve. They need no slot.
pub async fn refusals(shop: Workshop, stop: CancellationToken) {
    while !stop.is_cancelled() {
        if let Some(lease) = next_lease(&shop, Lane::Refused, &stop).await {
            refusals_pass(&shop, lease, &stop).await;
        }
    }
}

/// Keeps the leases that we hold.
pub async fn extend_leases(queue: Arc<dyn AssignmentQueue>, leases: Leases, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EXTEND_EVERY) => {}
        }
        if let Err(e) = leases.extend_pass(queue.as_ref()).await {
            tracing::warn!(error = %e, "failed to extend leases; a lost one is served on by its id");
        }
    }
}

fn report_panic(made: Result<(), tokio::task::JoinError>) {
    if let Err(e) = made {
        tracing::error!(error = %e, "failed to make an environment: a fault of this program; please report it");
    }
}

/// Not cut off by `stop`: a lease may be ours before the answer is.
async fn next_lease(shop: &Workshop, lane: Lane, stop: &CancellationToken) -> Option<Lease> {
    match shop.queue.lease(lane, LEASE_WAIT).await {
        Ok(lease) => lease,
        Err(e) => {
            tracing::warn!(error = %e, backend = %lane, "failed to lease an assignment; will try again");
            tokio::select! {
                () = tokio::time::sleep(LEASE_WAIT) => {}
                () = stop.cancelled() => {}
            }
            None
        }
    }
}

/// One assignment, from its lease to an offered environment, or to its end.
async fn worker_pass(
    shop: &Workshop,
    backend: &dyn Backend,
    slots: &Slots,
    reservation: Reservation,
    lease: Lease,
    stop: &CancellationToken,
) {
    let id = lease.task.assignment();
    if shop.drain.since().is_some() {
        // The drain began while we waited for it.
        return shop.give_back(lease, Duration::ZERO).await;
    }
    let Some(_busy) = shop.claims.begin(id) else { return shop.give_back(lease, ALREADY_DELAY).await };
    let assignment = match shop.open(&lease).await {
        None => return shop.give_back(lease, UNREADABLE_DELAY).await,
        Some(Opened::Dead) => return,
        Some(Opened::Served(assignment)) => assignment,
    };
    if reservation.bind(id) == Bound::Already {
        // After a restart an environment is offered without a lease (rule R5); its `start` takes the assignment out by id.
        return shop.give_back(lease, ALREADY_DELAY).await;
    }
    failpoint::reached("worker.leased");
    shop.mirror.note(assignment.task, What::Slot);
    shop.leases.hold(lease);
    match shop.make(backend, &assignment, stop).await {
        make::Made::Offered => {}
        make::Made::Over => {
            failpoint::reached("worker.over");
            shop.over(assignment.lane, assignment.task).await;
            shop.claims.forget(id);
            slots.release(id);
        }
        make::Made::Later(delay) => {
            if let Err(e) = shop.leases.release(shop.queue.as_ref(), assignment.task, delay).await {
                tracing::warn!(assignment = %id, error = %e, "failed to give an assignment back; its lease runs out");
            }
            slots.release(id);
            let reason = match shop.drain.since() {
                Some(_) => "the controller drains: nothing new is started",
                None => "no environment could be made now",
            };
            shop.mirror.note(assignment.task, What::Returned { reason: reason.into() });
        }
    }
}

async fn refusals_pass(shop: &Workshop, lease: Lease, stop: &CancellationToken) {
    let id = lease.task.assignment();
    let Some(_busy) = shop.claims.begin(id) else { return shop.give_back(lease, ALREADY_DELAY).await };
    match shop.open(&lease).await {
        None => shop.give_back(lease, UNREADABLE_DELAY).await,
        Some(Opened::Dead) => {}
        Some(Opened::Served(assignment)) => {
            let (lane, task) = (lease.lane, lease.task);
            shop.leases.hold(lease);
            let reason = assignment.refusal.clone().unwrap_or_else(|| "No backend serves this job.".into());
            if shop.fail(&assignment, vec![reason.clone()], stop).await {
                tracing::info!(assignment = %id, reason, "failed a job that cannot be served");
                failpoint::reached("refused.settled");
                shop.over(lane, task).await;
                shop.claims.forget(id);
            }
        }
    }
}

/// An opened lease.
enum Opened {
    Served(Box<Assignment>),
    /// It went to the dead letters; nothing more to do with the lease.
    Dead,
}

impl Workshop {
    /// `None`: it cannot be opened now, and must not be thrown away.
    async fn open(&self, lease: &Lease) -> Option<Opened> {
        match Assignment::open(&lease.sealed, &self.keys, &self.rules) {
            Ok(assignment) if assignment.task == lease.task => Some(Opened::Served(Box::new(assignment))),
            Ok(assignment) => {
                self.bury(lease, &format!("the envelope is of task {}", assignment.task), None).await;
                Some(Opened::Dead)
            }
            Err(OpenFault::Refused { reason, task }) => {
                self.bury(lease, &reason, task.or(Some(lease.task))).await;
                Some(Opened::Dead)
            }
            Err(fault) => {
                tracing::error!(task = %lease.task, error = %fault, "failed to open a waiting assignment; it stays in the queue");
                None
            }
        }
    }

    /// A dead letter; the job is failed where its id can be read.
    async fn bury(&self, lease: &Lease, reason: &str, task: Option<TaskId>) {
        tracing::error!(task = %lease.task, reason, "failed to take an assignment at its word; it goes to the dead letters");
        if let Some(task) = task {
            let settlement = Settlement {
                verdict: Verdict::Failure,
                reasons: vec![format!("The runner could not read this job in its queue ({reason}). Please run it again.")],
                steps: 0,
                known_steps: Vec::new(),
                started_at: std::time::SystemTime::now(),
            };
            if let Err(e) = report::settle(&self.rpc, task, &settlement).await {
                tracing::warn!(task = %task, error = %e, "failed to fail an unreadable job; Gitea will after ten minutes");
            }
        }
        failpoint::reached("worker.unreadable");
        if let Err(e) = self.queue.reject(lease.clone(), reason).await {
            return tracing::warn!(task = %lease.task, error = %e, "failed to write a dead letter; it comes back");
        }
        self.mirror.note(lease.task, What::Dead { reason: reason.into() });
    }

    async fn give_back(&self, lease: Lease, delay: Duration) {
        let task = lease.task;
        if let Err(e) = self.queue.release(lease, delay).await {
            tracing::warn!(task = %task, error = %e, "failed to give an assignment back; its lease runs out");
        }
    }

    /// Out of the queue, after Gitea took its end (rule R9). Failing only delays: it comes back, and is found over.
    async fn over(&self, lane: Lane, task: TaskId) {
        if let Err(e) = self.leases.complete(self.queue.as_ref(), lane, task).await {
            tracing::warn!(task = %task, error = %e, "failed to take an ended assignment out of the queue; it comes back");
        }
    }

    /// `true` once Gitea has it.
    async fn fail(&self, assignment: &Assignment, reasons: Vec<String>, stop: &CancellationToken) -> bool {
        self.settle(assignment, Verdict::Failure, reasons, stop).await
    }

    async fn settle(&self, assignment: &Assignment, verdict: Verdict, reasons: Vec<String>, stop: &CancellationToken) -> bool {
        let lock = self.claims.report_lock(assignment.id);
        let _reporting = lock.lock().await;
        let (steps, started_at) = (assignment.steps, assignment.fetched_at());
        let settlement = Settlement { verdict, reasons, steps, known_steps: Vec::new(), started_at };
        let settled = report::settle_until(&self.rpc, assignment.task, &settlement, stop).await;
        if settled {
            let reason = settlement.reasons.first().map(String::as_str);
            self.mirror.finished(assignment.task, Outcome::from(verdict), reason, Some(assignment.token_hash));
        }
        settled
    }

    /// Rule R4: what does Gitea want of the job, just before anything is made for it? Waits for an answer; `None` on `stop`, and where
    /// nothing is to be made any more.
    async fn wish(&self, task: TaskId, stop: &CancellationToken) -> Option<Wish> {
        let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(15));
        loop {
            match report::heartbeat(&self.rpc, task).await {
                Ok(wish) => return Some(wish),
                Err(e) => {
                    tracing::warn!(task = %task, error = %e, "failed to ask Gitea whether task {task} still wants to run; will ask again");
                }
            }
            tokio::select! {
                () = backoff.wait() => {}
                () = stop.cancelled() => return None,
                () = self.drain.begun() => return None,
            }
        }
    }
}
