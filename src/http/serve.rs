//! How connections of the operator's HTTP are taken: how many at once, how much of a request, and how long.
//!
//! A request is read whole, and is small, before anybody looks at it. When all places are taken, the connection that has owed a whole
//! request for the longest makes room for the newcomer: whoever talks slowly, or not at all, keeps nobody out. What is answered, and to
//! whom, is the router's.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use super::access::{refusal, told};
use crate::metrics::{Metrics, ReasonLabel};

/// Connections at once. A page needs a handful, and one more while it is open.
const CONNECTIONS: usize = 128;
/// Of a request's head: all headers together (more is answered by 431), and how many.
const HEAD_BYTES: usize = 64 << 10;
const HEADERS: usize = 100;
/// Nothing here takes a body; a small one is passed over.
const BODY_BYTES: usize = 4 << 10;
/// To send a head, also for the next request of a connection; and the same again for a body.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
const BODY_LIMIT: Duration = Duration::from_secs(10);
/// A connection takes no more requests after the first, and is closed after both: longer than the longest `?wait=`.
const CONNECTION_LIMIT: Duration = Duration::from_secs(300);
const LAST_ANSWER_LIMIT: Duration = Duration::from_secs(310);
/// The same when the process ends.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// Serves until `stop`; then the answers under way are given, as far as they are ready.
pub async fn serve(listener: TcpListener, router: Router, metrics: Metrics, stop: CancellationToken) {
    let (places, connections) = (Arc::new(Places::new(CONNECTIONS)), TaskTracker::new());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let tcp = match accepted {
            Ok((tcp, _)) => tcp,
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(_) => {
                // Out of file descriptors, most likely: a moment later some are free.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (place, dropped) = places.admit();
        if let Some(reason) = dropped {
            metrics.http_dropped.get_or_create(&ReasonLabel { reason }).inc();
        }
        if let Some(place) = place {
            connections.spawn(connection(tcp, router.clone(), metrics.clone(), Arc::new(place), stop.clone()));
        }
    }
    connections.close();
    connections.wait().await;
}

async fn connection(tcp: TcpStream, router: Router, metrics: Metrics, place: Arc<Place>, stop: CancellationToken) {
    let evicted = place.evicted.clone();
    let service = service_fn(move |request| {
        let (router, metrics, place) = (router.clone(), metrics.clone(), Arc::clone(&place));
        async move {
            let answer = match whole(request).await {
                Ok(request) => {
                    place.answers();
                    router.oneshot(request).await.unwrap_or_else(|never| match never {})
                }
                Err(refusal) => refusal,
            };
            Ok::<_, Infallible>(told(State(metrics), answer).await.map(|body| Tracked { body, place }))
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).max_buf_size(HEAD_BYTES).max_headers(HEADERS);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(tcp), service));
    let ending = async {
        tokio::select! {
            () = stop.cancelled() => STOP_LIMIT,
            () = tokio::time::sleep(CONNECTION_LIMIT) => LAST_ANSWER_LIMIT,
        }
    };
    let limit = tokio::select! {
        // How a reader's connection ends is his affair.
        _ = connection.as_mut() => return,
        () = evicted.cancelled() => return,
        limit = ending => limit,
    };
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = tokio::time::timeout(limit, connection) => {}
        () = evicted.cancelled() => {}
    }
}

/// The request with its body taken off: it has come whole, so nobody waits for the rest of it.
async fn whole(request: Request<Incoming>) -> Result<Request<Body>, Response> {
    let (head, body) = request.into_parts();
    let too_large = || closing(StatusCode::PAYLOAD_TOO_LARGE, "nothing here takes a body\n");
    if body.size_hint().lower() > BODY_BYTES as u64 {
        return Err(too_large());
    }
    if !body.is_end_stream() {
        match tokio::time::timeout(BODY_LIMIT, Limited::new(body, BODY_BYTES).collect()).await {
            Ok(Ok(_)) => {}
            Ok(Err(e)) if e.is::<LengthLimitError>() => return Err(too_large()),
            Ok(Err(_)) => return Err(closing(StatusCode::BAD_REQUEST, "the body is not what its head says\n")),
            Err(_) => return Err(closing(StatusCode::REQUEST_TIMEOUT, "the body did not come in time\n")),
        }
    }
    Ok(Request::from_parts(head, Body::empty()))
}

/// What is left of the request is not read.
fn closing(status: StatusCode, way_out: &'static str) -> Response {
    let mut response = refusal(status, "body", way_out);
    response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    response
}

/// Who is connected.
struct Places {
    limit: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// Since when each owes a whole request (a number that grows); `None`: it is being answered.
    connections: BTreeMap<u64, (Option<u64>, CancellationToken)>,
    /// The same, the longest first.
    owing: BTreeMap<u64, u64>,
}

/// One connection's, until dropped.
struct Place {
    places: Arc<Places>,
    id: u64,
    /// It makes room for another.
    evicted: CancellationToken,
}

impl Places {
    fn new(limit: usize) -> Self {
        Self { limit, table: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing panics while holding it.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place, unless all are being answered; and whether somebody was dropped for it, or the newcomer was: the label of
    /// `http_dropped_total`.
    fn admit(self: &Arc<Self>) -> (Option<Place>, Option<&'static str>) {
        let mut table = self.lock();
        let mut dropped = None;
        if table.connections.len() >= self.limit {
            let Some((_, slowest)) = table.owing.pop_first() else { return (None, Some("full")) };
            if let Some((_, evicted)) = table.connections.remove(&slowest) {
                evicted.cancel();
            }
            dropped = Some("slow");
        }
        let (id, evicted) = (table.number(), CancellationToken::new());
        table.connections.insert(id, (None, evicted.clone()));
        table.owes(id);
        (Some(Place { places: Arc::clone(self), id, evicted }), dropped)
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn owes(&mut self, id: u64) {
        let since = self.number();
        if let Some((owing @ None, _)) = self.connections.get_mut(&id) {
            *owing = Some(since);
            self.owing.insert(since, id);
        }
    }

    fn answers(&mut self, id: u64) {
        if let Some(since) = self.connections.get_mut(&id).and_then(|(owing, _)| owing.take()) {
            self.owing.remove(&since);
        }
    }
}

impl Place {
    /// Its request is here.
    fn answers(&self) {
        self.places.lock().answers(self.id);
    }

    /// Its answer is given; it may send the next request.
    fn owes(&self) {
        self.places.lock().owes(self.id);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.places.lock();
        table.answers(self.id);
        table.connections.remove(&self.id);
    }
}

/// An answer's body, which tells when it is over.
struct Tracked {
    body: Body,
    place: Arc<Place>,
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.place.owes();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn who_owes_a_request_for_the_longest_makes_room_and_who_is_answered_never_does() {
        let places = Arc::new(Places::new(3));
        let admit = || {
            let (place, dropped) = places.admit();
            (place.map(Arc::new), dropped)
        };
        let [first, second, third] = [(); 3].map(|()| admit().0.unwrap());
        first.answers();
        let (fourth, dropped) = admit();
        assert_eq!(dropped, Some("slow"));
        assert!(second.evicted.is_cancelled() && !third.evicted.is_cancelled());
        // Its answer was the last to end, so it has owed the shortest.
        first.owes();
        let (fifth, _) = admit();
        assert!(third.evicted.is_cancelled() && !first.evicted.is_cancelled());
        // What was dropped changes nothing when it ends.
        second.answers();
        second.owes();
        drop((second, third));
        assert_eq!(places.lock().connections.len(), 3);
        for place in [&first, fourth.as_ref().unwrap(), fifth.as_ref().unwrap()] {
            place.answers();
        }
        let (none, dropped) = admit();
        assert!(none.is_none() && dropped == Some("full"));
        drop(first);
        assert!(admit().0.is_some());
        drop((fourth, fifth));
        let table = places.lock();
        assert!(table.connections.is_empty() && table.owing.is_empty());
    }
}
