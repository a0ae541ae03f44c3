//! Takes tasks from Gitea, and makes each durable before anything else happens to it.
//!
//! Decides what to declare and when to ask. It starts nothing: what was fetched waits in the queue for a worker.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

pub use self::status::{FetchState, SchedulerStatus};
use self::{fetch::Outcome, registration::Registration, version::TasksVersion};
use crate::{
    assignment::{Rules, seal::SealKeys},
    backoff::Backoff,
    board::{Board, Standing},
    claims::Claims,
    drain::{Drain, New},
    gitea::{RpcError, RpcFault, RunnerRpc},
    ids::BackendKind,
    leader::LeaderPass,
    metrics::{Metrics, ResultLabel},
    mirror::Mirror,
    queue::{AssignmentQueue, QueueHealth},
};

mod fetch;
mod probe;
mod registration;
mod status;
mod version;

/// Between two questions while nothing waits. At the current version Gitea answers without a search, in some 5 ms.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
/// Gitea was too busy to look: it echoed our version.
const THROTTLED_INTERVAL: Duration = Duration::from_millis(200);
/// Gitea ≤ 1.26 hides a job that lost a race until the next push; version 0 always looks.
const FORCED_INTERVAL: Duration = Duration::from_secs(30);
/// How often room is looked at again when there was none.
const ROOM_INTERVAL: Duration = Duration::from_millis(250);
/// Between two looks at what is left to do while draining; its end is seen at once.
const DRAINING_INTERVAL: Duration = Duration::from_secs(1);

/// What the scheduler works with.
pub struct Scheduler {
    pub rpc: RunnerRpc,
    pub queue: Arc<dyn AssignmentQueue>,
    pub claims: Claims,
    pub drain: Drain,
    pub rules: Rules,
    pub keys: SealKeys,
    /// Backends served here, and how many assignments of each may wait.
    pub capacity: HashMap<BackendKind, usize>,
    pub version: String,
    /// `cancelling`, for an inner runner that cleans up after a cancel.
    pub capabilities: Vec<String>,
    pub metrics: Metrics,
    pub mirror: Mirror,
    pub board: Board,
    pub server_capabilities: watch::Sender<String>,
    pub status: watch::Sender<SchedulerStatus>,
}

/// What changes from turn to turn.
struct Turn {
    fetches: JoinSet<Outcome>,
    /// How many questions may be in flight: one while idle, more while tasks come.
    burst: usize,
    next_at: Instant,
    forced_at: Instant,
    /// A backend's label is withdrawn for want of room, so room is looked for at each change.
    withheld: bool,
    /// As of the last turn.
    draining: bool,
    /// `None`: must be declared again.
    declared: Option<Vec<String>>,
    errors: Backoff,
    doubt: Doubt,
    registration: Registration,
}

/// Whether an answer may have been lost, and a task with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    No,
    /// A question failed, and Gitea has not answered since.
    Unanswered,
    /// Gitea answers again: to be looked at before the next question.
    Due,
}

impl Scheduler {
    /// Runs until `stop`; then the questions in flight are still answered and stored.
    pub async fn run(self, stop: CancellationToken, pass: LeaderPass) {
        let this = Arc::new(self);
        if this.drain.since().is_some() {
            // Ready, though Gitea may be away: a drain is often for its sake.
            this.say(FetchState::Draining);
        }
        this.probe_lost_fetches(&stop, &pass).await;
        let versions = Arc::new(TasksVersion::default());
        let mut turn = Turn::new();
        let mut changes = this.claims.watch();
        while !stop.is_cancelled() {
            this.turn(&mut turn, &versions, &pass).await;
            let wake_at = turn.next_at.max(Instant::now() + Duration::from_millis(5));
            let full = turn.fetches.len() >= turn.burst;
            tokio::select! {
                () = stop.cancelled() => break,
                Some(joined) = turn.fetches.join_next() => this.answered(&mut turn, joined),
                () = sleep_until(wake_at), if !full => {}
                // A job that got its environment leaves room for another.
                _ = changes.changed() => if turn.withheld { turn.next_at = Instant::now() },
                () = this.drain.undone(), if turn.draining => turn.next_at = Instant::now(),
            }
        }
        // A task that Gitea gave us on the way out must become durable: nobody is aborted (rule R1).
        while let Some(joined) = turn.fetches.join_next().await {
            this.answered(&mut turn, joined);
        }
    }

    /// Declares what there is room for, and asks as often as is allowed.
    async fn turn(self: &Arc<Self>, turn: &mut Turn, versions: &Arc<TasksVersion>, pass: &LeaderPass) {
        if Instant::now() < turn.next_at {
            return;
        }
        turn.draining = self.drain.since().is_some();
        if turn.draining {
            return self.draining_turn(turn, versions, pass).await;
        }
        let Some(labels) = self.room().await else {
            turn.next_at = Instant::now() + ROOM_INTERVAL * 4;
            return;
        };
        turn.withheld = labels.len() <= self.capacity.len();
        if let Err(e) = self.declare(turn, versions, labels).await {
            return self.failed(turn, &e);
        }
        if turn.doubt == Doubt::Due && !self.probe_again(turn, pass).await {
            return;
        }
        if turn.forced_at <= Instant::now() {
            versions.reset();
            turn.forced_at = Instant::now() + FORCED_INTERVAL;
        }
        while turn.fetches.len() < turn.burst {
            let Some(permit) = self.drain.permit(New::Fetch) else { return };
            let (this, versions, pass) = (Arc::clone(self), Arc::clone(versions), *pass);
            turn.fetches.spawn(async move {
                let outcome = this.fetch_pass(&versions, &pass).await;
                drop(permit);
                outcome
            });
        }
    }

    /// Nothing is fetched. Gitea is told once who we are, for environments that are still to start learn from its answer what it can;
    /// and what a failed question may have lost is looked for, since Gitea holds it for running (rule R3).
    async fn draining_turn(&self, turn: &mut Turn, versions: &TasksVersion, pass: &LeaderPass) {
        turn.next_at = Instant::now() + DRAINING_INTERVAL;
        if turn.declared.is_none()
            && let Some(labels) = self.room().await
            && let Err(e) = self.declare(turn, versions, labels).await
        {
            self.failed(turn, &e);
        } else if turn.doubt != Doubt::No {
            self.probe_again(turn, pass).await;
        }
        self.say(FetchState::Draining);
    }

    /// Tells Gitea what we serve, unless it knows.
    async fn declare(&self, turn: &mut Turn, versions: &TasksVersion, labels: Vec<String>) -> Result<(), RpcError> {
        if turn.declared.as_ref() == Some(&labels) {
            return Ok(());
        }
        let declared = self.rpc.declare(&self.version, &labels, &self.capabilities).await?;
        self.server_capabilities.send_replace(declared.server_capabilities);
        tracing::debug!(?labels, "declared labels");
        // A job that waits for a label is invisible at the current version (rule R2).
        versions.reset();
        self.status.send_modify(|status| status.declared = Some(labels.clone()));
        turn.declared = Some(labels);
        turn.registration.confirmed();
        Ok(())
    }

    /// Rule R3 again, after a failed question. `false`: not done yet, and nothing may be asked.
    async fn probe_again(&self, turn: &mut Turn, pass: &LeaderPass) -> bool {
        if !turn.fetches.is_empty() {
            // What they bring is not stored yet, and would be taken for lost.
            return false;
        }
        match self.probe_pass(pass).await {
            Ok(lost) => {
                if lost > 0 {
                    tracing::warn!(lost, "failed tasks whose answers were lost between Gitea and us");
                }
                turn.doubt = Doubt::No;
                true
            }
            Err(e) => {
                tracing::warn!(error = %e, "failed to probe for lost tasks; will try again before fetching");
                turn.next_at = Instant::now() + turn.errors.step();
                false
            }
        }
    }

    /// The labels that there is room for (rule R1); `None`: nothing may be fetched now.
    async fn room(&self) -> Option<Vec<String>> {
        if let QueueHealth::Unfit(reason) = self.queue.health().await {
            self.say(FetchState::Held(format!("the queue cannot take more: {reason}")));
            return None;
        }
        let mut labels = vec!["self-hosted".to_owned()];
        let mut backends: Vec<_> = self.capacity.iter().collect();
        backends.sort();
        for (backend, capacity) in backends {
            match self.queue.depth(backend.lane()).await {
                Ok(depth) if depth.ready + depth.delayed < *capacity as u64 => labels.push(self.label(*backend)),
                Ok(_) => {}
                Err(e) => {
                    self.say(FetchState::Held(format!("the queue does not answer: {e}")));
                    return None;
                }
            }
        }
        Some(labels)
    }

    fn label(&self, backend: BackendKind) -> String {
        match backend {
            BackendKind::Pod => "pod".into(),
            BackendKind::Vm => self.rules.vm_label.clone(),
        }
    }

    fn answered(&self, turn: &mut Turn, joined: Result<Outcome, tokio::task::JoinError>) {
        let now = Instant::now();
        let most = self.capacity.values().sum::<usize>().max(1);
        let result = match joined {
            Ok(Outcome::Stored) => {
                turn.burst = (turn.burst * 2).min(most);
                turn.next_at = now;
                "task"
            }
            Ok(Outcome::Empty) => {
                turn.burst = 1;
                turn.next_at = now + IDLE_INTERVAL.mul_f64(0.9 + rand::random::<f64>() * 0.2);
                "empty"
            }
            Ok(Outcome::Throttled) => {
                turn.next_at = now + THROTTLED_INTERVAL;
                "throttled"
            }
            Ok(Outcome::Failed(e)) => return self.failed(turn, &e),
            // A panic is a fault of ours; the task, if there was one, is found by the next start's probe (rule R3).
            Err(e) => {
                tracing::error!(error = %e, "failed to fetch: a fault of this program; please report it");
                turn.next_at = now + turn.errors.step();
                "error"
            }
        };
        self.metrics.fetch_requests.get_or_create(&ResultLabel { result }).inc();
        self.metrics.fetch_last_success.set(unix_seconds());
        turn.errors.reset();
        if turn.doubt == Doubt::Unanswered {
            turn.doubt = Doubt::Due;
        }
        turn.registration.confirmed();
        self.say(FetchState::Asking);
    }

    /// Backs off, whatever it was: one poisoned job makes every FetchTask fail, and must not be hammered on.
    fn failed(&self, turn: &mut Turn, error: &RpcError) {
        (turn.burst, turn.withheld) = (1, false);
        turn.doubt = Doubt::Unanswered;
        let unregistered = error.fault == RpcFault::Unregistered;
        let result = if unregistered { "unregistered" } else { "error" };
        self.metrics.fetch_requests.get_or_create(&ResultLabel { result }).inc();
        if unregistered {
            turn.declared = None;
            turn.next_at = Instant::now() + turn.registration.doubted(Instant::now());
            let state = if turn.registration.is_lost() {
                FetchState::Parked("Gitea does not know this runner".into())
            } else {
                FetchState::Failing(error.to_string())
            };
            self.say(state);
        } else {
            turn.next_at = Instant::now() + turn.errors.step();
            tracing::warn!(error = %error, "failed to ask Gitea for tasks; will ask again");
            self.say(FetchState::Failing(error.to_string()));
        }
    }

    fn say(&self, state: FetchState) {
        match &state {
            FetchState::Asking => self.board.neighbour("gitea", Standing::Fine),
            FetchState::Failing(why) | FetchState::Parked(why) => self.board.neighbour("gitea", Standing::Trouble(why.clone())),
            FetchState::Starting | FetchState::Held(_) | FetchState::Draining => {}
        }
        self.status.send_if_modified(|status| {
            status.last_answer = if state == FetchState::Asking { Some(SystemTime::now()) } else { status.last_answer };
            let changed = status.state != state;
            status.state = state;
            changed
        });
    }
}

impl Turn {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            fetches: JoinSet::new(),
            burst: 1,
            next_at: now,
            forced_at: now + FORCED_INTERVAL,
            withheld: false,
            draining: false,
            declared: None,
            errors: Backoff::new(Duration::from_secs(1), Duration::from_secs(30)),
            doubt: Doubt::No,
            registration: Registration::default(),
        }
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
