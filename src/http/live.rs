//! What makes a page follow: one stream of server-sent events for each open page, with the parts that changed.
//!
//! The parts are rendered as for a reload, so a page that follows and one that is loaded anew show the same. A stream is bounded
//! by its connection; the browser then asks again and says what it saw last. Streams are few, and what one more asks is refused.

use std::{
    collections::HashMap,
    convert::Infallible,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::{Query, State},
    http::{HeaderMap, StatusCode, Uri},
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
    routing::get,
};
use futures::stream;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    pages::{self, Part},
    view::Source,
};

/// Streams at once: a quarter of the connections, so that they never keep anybody else out.
const STREAMS: usize = 32;
/// Between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// A page is told at least so often that it is not forgotten.
const BEAT: Duration = Duration::from_secs(3);

#[derive(Clone)]
struct Live {
    source: Source,
    places: Arc<Semaphore>,
    /// Makes the ids of what was sent; another after a restart, so that a page is then sent whole.
    hasher: RandomState,
}

#[derive(Deserialize)]
struct Asked {
    /// The address of the page.
    page: String,
}

pub(super) fn router(source: Source) -> Router {
    let live = Live { source, places: Arc::new(Semaphore::new(STREAMS)), hasher: RandomState::new() };
    Router::new().route("/live", get(follow)).with_state(live)
}

async fn follow(State(live): State<Live>, Query(asked): Query<Asked>, headers: HeaderMap) -> Response {
    let Some(uri) = asked.page.parse::<Uri>().ok().filter(|uri| uri.authority().is_none() && uri.path().starts_with('/')) else {
        return (StatusCode::BAD_REQUEST, "page: the path of a page, as /jobs?phase=queued\n").into_response();
    };
    let Ok(place) = Arc::clone(&live.places).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages follow already; this one is right when it is loaded\n")
            .into_response();
    };
    let seen = headers.get("last-event-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let state = Following {
        live,
        uri,
        shown: HashMap::new(),
        seen,
        told: Instant::now(),
        waiting: Vec::new(),
        first: true,
        _place: place,
    };
    let events = stream::unfold(state, |mut state| async move {
        let event = state.next().await;
        Some((Ok::<_, Infallible>(event), state))
    });
    Sse::new(events).into_response()
}

/// One page that follows.
struct Following {
    live: Live,
    uri: Uri,
    shown: HashMap<&'static str, String>,
    /// The id of the last event that the browser had, from the stream before this one.
    seen: Option<String>,
    told: Instant,
    /// Changed parts that were not sent yet, in the page's order from the last to the first.
    waiting: Vec<Event>,
    first: bool,
    _place: OwnedSemaphorePermit,
}

impl Following {
    /// The next event; looks once a period, and beats where nothing changes.
    async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.waiting.pop() {
                self.told = Instant::now();
                return event;
            }
            if !std::mem::take(&mut self.first) {
                tokio::time::sleep(PERIOD).await;
            }
            self.look().await;
            if self.waiting.is_empty() && self.told.elapsed() >= BEAT {
                self.told = Instant::now();
                return Event::default().event("beat").data("");
            }
        }
    }

    async fn look(&mut self) {
        let parts = pages::page(&self.live.source, &self.uri).await.parts;
        let id = format!("{:x}", self.live.hasher.hash_one(parts.iter().map(|p| (p.id, &p.html)).collect::<Vec<_>>()));
        if self.seen.take().is_some_and(|seen| seen == id) {
            self.shown = parts.into_iter().map(|part| (part.id, part.html)).collect();
            return;
        }
        let mut changed: Vec<Part> = parts.into_iter().filter(|part| self.shown.get(part.id) != Some(&part.html)).collect();
        let last = changed.len().saturating_sub(1);
        for (n, part) in changed.drain(..).enumerate() {
            let data = serde_json::json!({ "id": part.id, "html": part.html }).to_string();
            let event = Event::default().event("part").data(data).retry(Duration::from_secs(1));
            // Only with the last one the browser has seen all.
            self.waiting.push(if n == last { event.id(id.clone()) } else { event });
            self.shown.insert(part.id, part.html);
        }
        self.waiting.reverse();
    }
}
