//! The JSON answers below `/api/v1`, and the document that describes them.
//!
//! The same types as on the pages (`view`). A parameter that makes no sense is told with what would; an answer that the mirror
//! cannot give now is 503, never an empty list.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use serde::{Deserialize, Serialize};
use utoipa::{
    IntoParams, Modify, OpenApi, ToSchema,
    openapi::security::{Http, HttpAuthScheme, SecurityScheme},
};

use super::drain;
use super::view::{Environment, JobDetails, JobList, Lane, Overview, Queue, Reconcilers, Source};
use crate::{
    ids::{self, TaskId},
    mirror::{Filter, Phase},
    queue::AssignmentQueue,
};

/// Jobs of one answer at most, and where nothing is asked for.
const LIMIT_MOST: usize = 200;
const LIMIT: usize = 50;
/// Of a text that is looked for.
const TEXT_MOST: usize = 300;

#[derive(Clone)]
pub struct Api {
    pub source: Source,
    pub queue: Arc<dyn AssignmentQueue>,
}

/// What went wrong, with the way out.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Problem {
    pub(super) error: String,
}

pub(super) fn problem(status: StatusCode, error: impl Into<String>) -> Response {
    (status, Json(Problem { error: error.into() })).into_response()
}

pub(super) fn unknown() -> Response {
    problem(
        StatusCode::SERVICE_UNAVAILABLE,
        "the mirror does not answer now, so this is not known; jobs go on. Ask again in some seconds",
    )
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "gitea-dynamic-runner",
        description = "What the controller knows of jobs, slots and neighbours, for programs. Read-only but for the drain.",
        license(name = "MIT OR Apache-2.0")
    ),
    paths(overview, jobs, job, environments, queue, reconcilers, drain::show, drain::begin, drain::undo),
    components(schemas(Problem)),
    modifiers(&Tokens),
    security(("bearer" = []), ("basic" = []))
)]
struct Document;

/// The token of READ_TOKEN_FILE or ADMIN_TOKEN_FILE, in either way.
struct Tokens;

impl Modify for Tokens {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let components = openapi.components.get_or_insert_default();
        for (name, scheme) in [("bearer", HttpAuthScheme::Bearer), ("basic", HttpAuthScheme::Basic)] {
            components.add_security_scheme(name, SecurityScheme::Http(Http::new(scheme)));
        }
    }
}

/// As it is served, for whoever makes a client.
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

impl Api {
    pub fn router(self) -> Router {
        Router::new()
            .route("/api/v1/overview", get(overview))
            .route("/api/v1/jobs", get(jobs))
            .route("/api/v1/jobs/{id}", get(job))
            .route("/api/v1/environments", get(environments))
            .route("/api/v1/queue", get(queue))
            .route("/api/v1/reconcilers", get(reconcilers))
            .route("/api/v1/openapi.json", get(|| async { Json(document()) }))
            .route(
                "/api/{*rest}",
                get(async || problem(StatusCode::NOT_FOUND, "there is no such path; /api/v1/openapi.json tells which there are")),
            )
            .with_state(self)
    }
}

/// How everything stands, on one page.
#[utoipa::path(get, path = "/api/v1/overview", responses((status = 200, body = Overview), (status = 401, body = String, content_type = "text/plain")))]
async fn overview(State(api): State<Api>) -> Response {
    Json(api.source.overview().await).into_response()
}

/// Which jobs.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(default)]
pub(super) struct Wanted {
    /// `queued`, `starting`, `claimed`, `finished`, `dead` or `lost`; empty: all.
    #[param(inline, schema_with = phases)]
    pub(super) phase: String,
    /// `pod`, `vm` or `refused`; empty: all.
    #[param(inline, schema_with = lanes)]
    pub(super) backend: String,
    /// `owner/name`; empty: all.
    #[param(max_length = 300)]
    pub(super) repository: String,
    /// The `next` of the page before.
    #[param(pattern = r"^([0-9]{1,15}-[0-9]{1,15})?$")]
    pub(super) after: String,
    /// 1 to 200; 50 if it is left out.
    #[param(value_type = Option<u16>, minimum = 1, maximum = 200)]
    pub(super) limit: String,
}

fn words(all: Vec<&'static str>) -> utoipa::openapi::schema::Object {
    utoipa::openapi::ObjectBuilder::new().schema_type(utoipa::openapi::Type::String).enum_values(Some(all)).build()
}

fn phases() -> utoipa::openapi::schema::Object {
    words(std::iter::once("").chain(Phase::ALL.map(Phase::as_str)).collect())
}

fn lanes() -> utoipa::openapi::schema::Object {
    words(std::iter::once("").chain(ids::Lane::ALL.map(ids::Lane::as_str)).collect())
}

impl Wanted {
    /// # Errors
    /// What makes no sense, with what would.
    pub(super) fn filter(&self) -> Result<Filter, String> {
        let phase = one_of("phase", &self.phase, &Phase::ALL, Phase::as_str)?;
        let lane = one_of("backend", &self.backend, &ids::Lane::ALL, ids::Lane::as_str)?;
        if self.repository.chars().count() > TEXT_MOST {
            return Err(format!("repository: at most {TEXT_MOST} characters"));
        }
        let repository = Some(self.repository.clone()).filter(|text| !text.is_empty());
        let after = match self.after.split_once('-') {
            None if self.after.is_empty() => None,
            Some((ms, task)) if number(ms) && number(task) => ms.parse().ok().zip(task.parse().ok().map(TaskId)),
            _ => return Err("after: give the `next` of the page before, as it came".into()),
        };
        let limit = match self.limit.as_str() {
            "" => LIMIT,
            text => {
                let limit = if number(text) { text.parse().ok() } else { None };
                limit.filter(|n| (1..=LIMIT_MOST).contains(n)).ok_or_else(|| format!("limit: a number from 1 to {LIMIT_MOST}"))?
            }
        };
        Ok(Filter { phase, lane, repository, after, limit, ..Filter::default() })
    }
}

fn number(text: &str) -> bool {
    (1..=15).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())
}

fn one_of<T: Copy>(name: &str, text: &str, all: &[T], spelled: fn(T) -> &'static str) -> Result<Option<T>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let known = all.iter().copied().find(|one| spelled(*one) == text).map(Some);
    known.ok_or_else(|| format!("{name}: one of {}", all.iter().map(|one| spelled(*one)).collect::<Vec<_>>().join(", ")))
}

/// Jobs, the newest first.
#[utoipa::path(get, path = "/api/v1/jobs", params(Wanted), responses(
    (status = 200, body = JobList), (status = 400, body = Problem), (status = 401, body = String, content_type = "text/plain"), (status = 503, body = Problem)))]
async fn jobs(State(api): State<Api>, wanted: Result<Query<Wanted>, axum::extract::rejection::QueryRejection>) -> Response {
    let filter = match wanted {
        Ok(Query(wanted)) => wanted.filter(),
        Err(e) => Err(e.to_string()),
    };
    match filter {
        Ok(filter) => api.source.jobs(filter).await.map_or_else(unknown, |list| Json(list).into_response()),
        Err(why) => problem(StatusCode::BAD_REQUEST, why),
    }
}

/// A task id as 71 or gitea-task-71.
pub(super) fn task_of(id: &str) -> Option<TaskId> {
    let digits = id.strip_prefix("gitea-task-").unwrap_or(id);
    if number(digits) { digits.parse().ok().map(TaskId) } else { None }
}

/// One job with its timeline and events.
#[utoipa::path(get, path = "/api/v1/jobs/{id}",
    params(("id" = String, Path, description = "Its number at Gitea, as 71 or gitea-task-71", pattern = "^(gitea-task-)?[0-9]{1,15}$", example = "1")),
    responses((status = 200, body = JobDetails), (status = 401, body = String, content_type = "text/plain"), (status = 404, body = Problem), (status = 503, body = Problem)))]
async fn job(State(api): State<Api>, Path(id): Path<String>) -> Response {
    let none = || problem(StatusCode::NOT_FOUND, NO_JOB);
    let Some(task) = task_of(&id) else { return none() };
    match api.source.job(task).await {
        Some(Some(job)) => Json(job).into_response(),
        Some(None) => none(),
        None => unknown(),
    }
}

pub(super) const NO_JOB: &str =
    "there is no such job here: it was never taken, ended more than 30 days ago, or the mirror was made anew";

/// Environments that exist.
#[utoipa::path(get, path = "/api/v1/environments", responses(
    (status = 200, body = Vec<Environment>), (status = 401, body = String, content_type = "text/plain"), (status = 503, body = Problem)))]
async fn environments(State(api): State<Api>) -> Response {
    api.source.environments().await.map_or_else(unknown, |all| Json(all).into_response())
}

/// What waits, as the queue itself has it.
#[utoipa::path(get, path = "/api/v1/queue", responses((status = 200, body = Queue), (status = 401, body = String, content_type = "text/plain")))]
async fn queue(State(api): State<Api>) -> Response {
    let oldest = api.source.oldest().await.unwrap_or_default();
    let mut lanes = Vec::new();
    for lane in ids::Lane::ALL {
        let depth = api.queue.depth(lane).await.ok();
        lanes.push(Lane {
            lane: lane.as_str().into(),
            ready: depth.as_ref().map(|d| d.ready),
            delayed: depth.as_ref().map(|d| d.delayed),
            leased: depth.as_ref().map(|d| d.leased),
            oldest_waiting: oldest.get(&lane).copied(),
        });
    }
    Json(Queue { standing: api.source.neighbour("queue"), lanes }).into_response()
}

/// The parts that look again and again, and what they did by themselves.
#[utoipa::path(get, path = "/api/v1/reconcilers", responses((status = 200, body = Reconcilers), (status = 401, body = String, content_type = "text/plain")))]
async fn reconcilers(State(api): State<Api>) -> Response {
    Json(api.source.reconcilers().await).into_response()
}
