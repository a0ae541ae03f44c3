//! The dashboard: server-rendered pages, whole without a script.
//!
//! A page is a shell around parts; the script swaps a part when the server has a newer one (`live`). The address is the whole
//! state of a page, so what a stream shows is what a reload would. What is shown is `view`'s.

use askama::Template;
use axum::{
    Router,
    extract::{OriginalUri, Query, State},
    http::{StatusCode, Uri, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};

use super::{
    api::{NO_JOB, Wanted, task_of},
    view::{Job, JobDetails, JobList, Moment, Overview, Reconcilers, Source, look::SLOTS_DRAWN, words::span},
};
use crate::{ids::Lane, mirror::Phase, printable::printable};

/// One of the parts that a page consists of; its id is also that of its element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) id: &'static str,
    pub(super) html: String,
}

/// What a page shows now.
pub(super) struct Page {
    title: String,
    nav: &'static str,
    /// Of the form of filters, which is never swapped: somebody may be typing in it.
    form: Option<Wanted>,
    pub(super) parts: Vec<Part>,
    status: StatusCode,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "page.html")]
struct Shell<'a> {
    page: &'a Page,
    about: &'a super::view::About,
    /// The page's own address, for its stream.
    here: String,
}

impl Tables<'_> {
    /// Jobs that wait and are not in the table.
    fn more(&self) -> u64 {
        let waiting: u64 = self.o.backends.iter().filter_map(|b| Some(b.waiting? + b.starting?)).sum();
        waiting.saturating_sub(self.o.waiting.as_ref().map_or(0, |jobs| jobs.len() as u64))
    }
}

impl Shell<'_> {
    fn options(&self, what: &str, chosen: &str) -> Vec<(&'static str, bool)> {
        let all: Vec<&'static str> = match what {
            "phase" => Phase::ALL.map(Phase::as_str).into(),
            _ => Lane::ALL.map(Lane::as_str).into(),
        };
        all.into_iter().map(|one| (one, one == chosen)).collect()
    }
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "overview.html", block = "sentence")]
struct Sentence<'a> {
    o: &'a Overview,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "overview.html", block = "backends")]
struct Backends<'a> {
    o: &'a Overview,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "overview.html", block = "tables")]
struct Tables<'a> {
    o: &'a Overview,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "overview.html", block = "neighbours")]
struct Neighbours<'a> {
    o: &'a Overview,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "overview.html", block = "age")]
struct Age {
    as_of: Option<Moment>,
    stale: bool,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "jobs.html")]
struct Jobs<'a> {
    list: Option<&'a JobList>,
    /// The link of the next page.
    next: Option<String>,
    filtered: bool,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "job.html")]
struct OneJob<'a> {
    d: &'a JobDetails,
    stations: Vec<Station>,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "reconcilers.html")]
struct Passes<'a> {
    r: &'a Reconcilers,
    now: Moment,
}

#[derive(Template)]
#[template(config = ".askama.toml", path = "nothing.html")]
struct Nothing<'a> {
    text: &'a str,
}

/// One station of a job's timeline.
struct Station {
    name: &'static str,
    what: &'static str,
    at: Option<Moment>,
    /// Since the station before it.
    after: Option<String>,
    /// Its place in a drawing that is 1000 wide: where the time before it begins, and how long that is.
    x: u64,
    width: u64,
}

pub(super) fn router(source: Source) -> Router {
    Router::new()
        .route("/", get(shown))
        .route("/jobs", get(shown))
        .route("/jobs/{id}", get(shown))
        .route("/reconcilers", get(shown))
        .with_state(source)
        .route("/style.css", get(|| async { asset("text/css; charset=utf-8", include_str!("../../web/style.css")) }))
        .route("/icon.svg", get(|| async { asset("image/svg+xml", include_str!("../../web/icon.svg")) }))
        .route("/page.js", get(|| async { asset("text/javascript; charset=utf-8", include_str!("../../web/page.js")) }))
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn shown(State(source): State<Source>, OriginalUri(uri): OriginalUri) -> Response {
    let page = page(&source, &uri).await;
    let here = uri.path_and_query().map_or("/", |p| p.as_str()).to_owned();
    let shell = Shell { page: &page, about: &source.about, here };
    match shell.render() {
        Ok(html) => (page.status, Html(html)).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("failed to render the page: {e}\n")).into_response(),
    }
}

/// What is at this address now. Any address has an answer.
pub(super) async fn page(source: &Source, uri: &Uri) -> Page {
    let now = Moment::now();
    let mut page = match uri.path() {
        "/" => overview(source, now).await,
        "/jobs" => jobs(source, uri, now).await,
        "/reconcilers" => {
            let seen = source.reconcilers().await;
            Page::of("Reconcilers", "reconcilers", vec![part("passes", &Passes { r: &seen, now })])
        }
        path => match path.strip_prefix("/jobs/").and_then(task_of) {
            Some(task) => job(source, task, now).await,
            None => Page::nothing(StatusCode::NOT_FOUND, "There is no such page."),
        },
    };
    let (as_of, stale) = source.stamp(now);
    page.parts.push(part("age", &Age { as_of, stale, now }));
    page
}

async fn overview(source: &Source, now: Moment) -> Page {
    let o = source.overview().await;
    let parts = vec![
        part("sentence", &Sentence { o: &o }),
        part("backends", &Backends { o: &o, now }),
        part("tables", &Tables { o: &o, now }),
        part("neighbours", &Neighbours { o: &o, now }),
    ];
    Page::of("Overview", "overview", parts)
}

async fn jobs(source: &Source, uri: &Uri, now: Moment) -> Page {
    let wanted = match Query::<Wanted>::try_from_uri(uri) {
        Ok(Query(wanted)) => wanted,
        Err(_) => return Page::nothing(StatusCode::BAD_REQUEST, "The address has a parameter that makes no sense."),
    };
    let filter = match wanted.filter() {
        Ok(filter) => filter,
        Err(why) => return Page::nothing(StatusCode::BAD_REQUEST, &why),
    };
    let list = source.jobs(filter).await;
    let next = list.as_ref().and_then(|list| list.next.clone()).map(|after| wanted.link(&after));
    let filtered = !(wanted.phase.is_empty() && wanted.backend.is_empty() && wanted.repository.is_empty());
    let parts = vec![part("jobs", &Jobs { list: list.as_ref(), next, filtered, now })];
    Page { form: Some(wanted), ..Page::of("Jobs", "jobs", parts) }
}

async fn job(source: &Source, task: crate::ids::TaskId, now: Moment) -> Page {
    match source.job(task).await {
        Some(Some(d)) => {
            let title = printable(&format!("Job {task}: {} {}", d.job.repository, d.job.job_key));
            Page::of(&title, "job", vec![part("job", &OneJob { stations: stations(&d.job, now), d: &d, now })])
        }
        Some(None) => Page::nothing(StatusCode::NOT_FOUND, NO_JOB),
        None => Page::nothing(StatusCode::SERVICE_UNAVAILABLE, "Unknown: the mirror does not answer now. Jobs go on."),
    }
}

fn part(id: &'static str, template: &impl Template) -> Part {
    // A template fails only where writing into a string does.
    Part { id, html: template.render().unwrap_or_else(|e| format!("failed to render: {e}")) }
}

impl Page {
    fn of(title: &str, nav: &'static str, parts: Vec<Part>) -> Self {
        Self { title: title.into(), nav, form: None, parts, status: StatusCode::OK }
    }

    fn nothing(status: StatusCode, text: &str) -> Self {
        Self { status, ..Self::of("Nothing to see", "", vec![part("nothing", &Nothing { text })]) }
    }
}

impl Wanted {
    fn link(&self, after: &str) -> String {
        let pairs =
            [("phase", &self.phase), ("backend", &self.backend), ("repository", &self.repository), ("limit", &self.limit)];
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.extend_pairs(pairs.iter().filter(|(_, value)| !value.is_empty()));
        format!("/jobs?{}", query.append_pair("after", after).finish())
    }
}

const STATIONS: [(&str, &str); 10] = [
    ("fetched", "Gitea handed it out"),
    ("durable", "it is on disk here, and cannot be lost any more"),
    ("slot", "it got a slot"),
    ("created", "its environment was made"),
    ("identity", "the environment could prove who it is"),
    ("claimed", "the job was started, for good"),
    ("first step", "its first step began"),
    ("done", "Gitea has its result"),
    ("acknowledged", "it left the queue for good"),
    ("gone", "nothing of its environment is left; the slot is free"),
];

/// In the order of time; what is not known comes where it belongs.
fn stations(job: &Job, now: Moment) -> Vec<Station> {
    let t = &job.times;
    let at = [t.fetched, t.durable, t.slot, t.created, t.identity, t.claimed, t.first_step, t.ended, t.acknowledged, t.gone];
    let mut all: Vec<_> = STATIONS.iter().zip(at).map(|((name, what), at)| (*name, *what, at)).collect();
    // The delivery is acknowledged right after the start, long before the job is done.
    all.sort_by_key(|(name, _, at)| (at.is_none(), *at, STATIONS.iter().position(|(n, _)| n == name)));
    let open = matches!(job.phase.as_str(), "queued" | "starting" | "claimed");
    let first = all.iter().filter_map(|(.., at)| *at).min().unwrap_or(now).0;
    let last = if open { now.0 } else { all.iter().filter_map(|(.., at)| *at).max().unwrap_or(now).0 };
    let whole = last.saturating_sub(first).max(1);
    let place = |ms: u64| ms.saturating_sub(first).min(whole) * 1000 / whole;
    let mut before: Option<Moment> = None;
    let mut stations = Vec::new();
    for (name, what, at) in all {
        let after = at.zip(before).map(|(at, before)| span(at.0.saturating_sub(before.0)));
        let (x, end) = (before.map_or(0, |b| place(b.0)), at.map_or(0, |at| place(at.0)));
        stations.push(Station { name, what, at, after, x, width: end.saturating_sub(x) });
        before = at.or(before);
    }
    stations
}

/// Words of the templates.
mod shown {
    use super::{Job, printable};

    pub(super) fn text(text: impl AsRef<str>) -> String {
        printable(text.as_ref())
    }

    /// What people call the job; its key, and its name where that says more.
    pub(super) fn name(job: &Job) -> String {
        let told = match (job.job_key.as_str(), job.job_name.as_str()) {
            ("", "") => "unknown".to_owned(),
            (key, name) if key == name || name.is_empty() => key.to_owned(),
            ("", name) => name.to_owned(),
            (key, name) => format!("{key} ({name})"),
        };
        printable(&told)
    }

    /// A shape for each state, so that colour is never alone.
    pub(super) fn shape(state: impl AsRef<str>) -> &'static str {
        match state.as_ref() {
            "waiting" => "◷",
            "starting" => "◔",
            "running" => "▶",
            "success" | "fine" => "✔",
            "failure" => "✖",
            "cancelled" | "skipped" => "⊘",
            "infrastructure" | "trouble" => "▲",
            state if state.starts_with("needs you") => "▲",
            _ => "?",
        }
    }

    /// The class that gives a state its colour.
    pub(super) fn class(state: impl AsRef<str>) -> &'static str {
        match state.as_ref() {
            "success" | "fine" => "good",
            "running" | "starting" => "busy",
            "failure" | "infrastructure" | "trouble" => "bad",
            state if state.starts_with("needs you") => "bad",
            _ => "calm",
        }
    }

    pub(super) fn neighbour(name: impl AsRef<str>) -> String {
        match name.as_ref() {
            "gitea" => "Gitea".into(),
            name @ ("pod" | "vm") => format!("{name} backend"),
            name => name.into(),
        }
    }
}
