//! `/api/v1/drain`: begins, undoes and shows a drain.
//!
//! What it counts are facts (slots, claims, permits, the queue); what is unknown is null, never zero. What a drain does is for the
//! rooms that ask `drain` before they begin something.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::Semaphore, time::Instant};
use utoipa::{IntoParams, ToSchema};

use super::{
    Http,
    api::{Problem, problem},
    view::Moment,
};
use crate::{
    claims::{ClaimPhase, Claims},
    drain::{Drain, New},
    ids::{AssignmentId, BackendKind},
    queue::AssignmentQueue,
};

/// The longest `?wait=`, and how many may wait at once: each holds a connection.
const MAX_WAIT: Duration = Duration::from_secs(300);
const WAITERS: usize = 16;
/// Between two looks while one waits.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The queue's server may be away; then what only it knows is unknown.
const QUEUE_LIMIT: Duration = Duration::from_secs(2);

/// The assignments that hold a slot; `None` until they were counted after a start.
type Held = Arc<dyn Fn() -> Option<BTreeSet<AssignmentId>> + Send + Sync>;

/// What the endpoint works with.
#[derive(Clone)]
pub struct Draining {
    drain: Drain,
    claims: Claims,
    queue: Arc<dyn AssignmentQueue>,
    held: Held,
    waiters: Arc<Semaphore>,
}

/// How far a drain is. A count that is `None` is unknown right now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// Nothing new is fetched or started.
    pub draining: bool,
    #[schema(format = DateTime)]
    pub since: Option<String>,
    /// Draining, and nothing is left that runs or was begun before.
    pub drained: bool,
    /// Jobs stored here without an environment: they start when the drain is undone.
    pub waiting: Option<usize>,
    /// Environments that are made, or have not started their job yet.
    pub starting: Option<usize>,
    pub running: Option<usize>,
    /// Environments whose job is over, and that are not gone yet.
    pub leaving: Option<usize>,
    /// Questions to Gitea for a job that are not answered and stored yet.
    pub fetching: usize,
}

impl Draining {
    pub fn new(drain: Drain, claims: Claims, queue: Arc<dyn AssignmentQueue>, held: Held) -> Self {
        Self { drain, claims, queue, held, waiters: Arc::new(Semaphore::new(WAITERS)) }
    }

    /// 0: all is as ever, 1: draining, 2: drained; the metric `drain_state`. From memory alone.
    pub(super) fn state(&self) -> i64 {
        let drained = self.is_drained();
        i64::from(self.drain.since().is_some()) + i64::from(drained)
    }

    pub(super) fn since(&self) -> Option<String> {
        self.drain.since().map(shown)
    }

    /// The wish is looked at first, then what was begun, then what has a slot: who begins something asks in the other order, so
    /// nothing slips between the looks.
    fn is_drained(&self) -> bool {
        let (draining, begun) = (self.drain.since().is_some(), self.begun());
        draining && begun == 0 && (self.held)().is_some_and(|held| held.is_empty())
    }

    fn begun(&self) -> usize {
        self.drain.under_way(New::Fetch) + self.drain.under_way(New::Environment)
    }

    async fn progress(&self) -> Progress {
        let (since, drained, fetching) = (self.drain.since(), self.is_drained(), self.drain.under_way(New::Fetch));
        let queued = self.queued().await;
        let held = (self.held)();
        let phases: HashMap<AssignmentId, ClaimPhase> =
            BackendKind::ALL.into_iter().flat_map(|kind| self.claims.of_backend(kind)).map(|c| (c.assignment, c.phase)).collect();
        let count = |wanted: &dyn Fn(AssignmentId, &BTreeSet<AssignmentId>) -> bool| {
            let (held, queued) = (held.as_ref()?, queued.as_ref()?);
            Some(held.iter().filter(|id| wanted(**id, queued)).count())
        };
        let runs = |id: &AssignmentId| matches!(phases.get(id), Some(ClaimPhase::Claimed));
        let starts = |id: AssignmentId, queued: &BTreeSet<AssignmentId>| match phases.get(&id) {
            Some(ClaimPhase::Offered { .. }) => true,
            Some(ClaimPhase::Claimed | ClaimPhase::Terminal) => false,
            None => queued.contains(&id),
        };
        Progress {
            draining: since.is_some(),
            since: since.map(shown),
            drained,
            waiting: held.as_ref().zip(queued.as_ref()).map(|(held, queued)| queued.difference(held).count()),
            starting: count(&starts),
            running: held.as_ref().map(|held| held.iter().filter(|id| runs(id)).count()),
            leaving: count(&|id, queued| !runs(&id) && !starts(id, queued)),
            fetching,
        }
    }

    /// What the queue holds for the backends; `None`: it does not say.
    async fn queued(&self) -> Option<BTreeSet<AssignmentId>> {
        let look = async {
            let mut all = BTreeSet::new();
            for kind in BackendKind::ALL {
                all.extend(self.queue.list(kind.lane()).await.ok()?.into_iter().map(|queued| queued.task.assignment()));
            }
            Some(all)
        };
        tokio::time::timeout(QUEUE_LIMIT, look).await.ok().flatten()
    }
}

/// How long the answer may wait for the end.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Wait {
    /// Whole seconds; left out, the answer comes at once.
    #[param(value_type = Option<u16>, minimum = 0, maximum = 300)]
    wait: Option<String>,
}

/// How far a drain is; with `wait`, when it is drained, undone, or the time is over.
#[utoipa::path(get, path = "/api/v1/drain", params(Wait), responses((status = 200, body = Progress), (status = 400, body = Problem),
    (status = 401, body = String, content_type = "text/plain"), (status = 429, body = Problem)))]
pub(super) async fn show(State(http): State<Http>, wait: Result<Query<Wait>, QueryRejection>) -> Response {
    let draining = &http.draining;
    let Ok(Query(Wait { wait })) = wait else { return no_time() };
    if let Some(text) = wait {
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        let seconds = text.parse().ok().filter(|seconds| digits && *seconds <= MAX_WAIT.as_secs());
        let Some(seconds) = seconds else { return no_time() };
        let Ok(_waiting) = draining.waiters.try_acquire() else {
            return problem(StatusCode::TOO_MANY_REQUESTS, "too many wait for the end of the drain already: ask without `wait`");
        };
        let until = Instant::now() + Duration::from_secs(seconds);
        while draining.state() == 1 && Instant::now() < until {
            tokio::time::sleep_until(until.min(Instant::now() + LOOK_EVERY)).await;
        }
    }
    Json(draining.progress().await).into_response()
}

fn no_time() -> Response {
    problem(StatusCode::BAD_REQUEST, format!("wait: whole seconds from 0 to {}", MAX_WAIT.as_secs()))
}

/// Begin nothing new, also after a restart. Repeating it changes nothing.
#[utoipa::path(post, path = "/api/v1/drain", responses((status = 200, body = Progress), (status = 401, body = String, content_type = "text/plain"),
    (status = 403, body = String, content_type = "text/plain"), (status = 500, body = Problem)))]
pub(super) async fn begin(State(http): State<Http>) -> Response {
    let draining = &http.draining;
    let new = draining.drain.since().is_none();
    if let Err(e) = draining.drain.begin().await {
        return not_kept(&e);
    }
    if new {
        tracing::info!(event = "drain_begun", "draining: nothing new is fetched or started, what runs goes on");
    }
    Json(draining.progress().await).into_response()
}

/// Fetch and start jobs again. Repeating it changes nothing.
#[utoipa::path(delete, path = "/api/v1/drain", responses((status = 200, body = Progress), (status = 401, body = String, content_type = "text/plain"),
    (status = 403, body = String, content_type = "text/plain"), (status = 500, body = Problem)))]
pub(super) async fn undo(State(http): State<Http>) -> Response {
    let draining = &http.draining;
    let was = draining.drain.since().is_some();
    if let Err(e) = draining.drain.undo().await {
        return not_kept(&e);
    }
    if was {
        tracing::info!(event = "drain_undone", "not draining any more: jobs are fetched and started again");
    }
    Json(draining.progress().await).into_response()
}

/// To the second, as people ask.
fn shown(at: SystemTime) -> String {
    Moment(Moment::from(at).0 / 1000 * 1000).rfc()
}

/// Nobody must believe that it was done.
fn not_kept(error: &std::io::Error) -> Response {
    tracing::error!(error = %error, "failed to keep a wish to drain or not to; free disk space or repair the state directory");
    let text = format!("not done: the state directory could not be written ({error}); mend that, and ask again");
    problem(StatusCode::INTERNAL_SERVER_ERROR, text)
}
