//! The accept loop of an mTLS server: handshakes aside, limits on everything, and each request told who its peer is.
//!
//! Leaves to its user what a peer may do. No protocol upgrades: an upgraded stream would outlive its connection's token and age.

use std::{
    collections::HashMap,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use super::{PeerId, ServeLimits, tls, wall_clock};

/// Handshakes at a time. They do not count as connections, so that strangers cannot take the places of jobs.
static CONNECTION_IDS: AtomicU64 = AtomicU64::new(0);
const HANDSHAKES: usize = 64;
/// How long a connection that is told to close may finish its requests.
const CLOSING: Duration = Duration::from_secs(5);
/// How long a request's head may take, and the pause before the first one. Also ends idle HTTP/1 connections.
const HEAD: Duration = Duration::from_secs(30);
const STREAMS_PER_CONNECTION: u32 = 64;

/// Accepts mTLS connections and serves `router` on them, each request with a [`PeerId`] extension, until `shutdown`.
///
/// Returns when all connections are closed: at most `CLOSING` and a moment after `shutdown`, whatever the peers do.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    router: axum::Router,
    limits: ServeLimits,
    shutdown: CancellationToken,
) {
    let server = Arc::new(Server {
        tls: TlsAcceptor::from(tls),
        router,
        handshakes: Arc::new(Semaphore::new(HANDSHAKES)),
        connections: Arc::new(Semaphore::new(limits.connections)),
        peers: Arc::default(),
        refusals: Mutex::default(),
        limits,
        shutdown,
    });
    let mut tasks = JoinSet::new();
    let mut pause = Duration::ZERO;
    loop {
        tokio::select! {
            () = server.shutdown.cancelled() => break,
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => report(ended),
            accepted = accept(&server.handshakes, &listener, pause) => match accepted {
                Ok((tcp, from, permit)) => {
                    pause = Duration::ZERO;
                    tasks.spawn(server.clone().connection(tcp, from, permit));
                }
                // Mostly "too many open files": at once again would only burn the CPU.
                Err(error) => {
                    pause = (pause * 2).clamp(Duration::from_millis(5), Duration::from_secs(1)).mul_f64(rand::random_range(0.8..=1.0));
                    tracing::warn!(%error, pause_ms = pause.as_millis(), "accept a connection");
                }
            },
        }
    }
    drop(listener);
    let drained = timeout(CLOSING + Duration::from_secs(1), async {
        while let Some(ended) = tasks.join_next().await {
            report(ended);
        }
    });
    if drained.await.is_err() {
        tasks.shutdown().await;
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection ended in a bug; please report it");
    }
}

/// Cancel-safe: a connection is taken last.
async fn accept(
    handshakes: &Arc<Semaphore>,
    listener: &TcpListener,
    pause: Duration,
) -> std::io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    sleep(pause).await;
    let permit = handshakes.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (tcp, from) = listener.accept().await?;
    Ok((tcp, from, permit))
}

struct Server {
    tls: TlsAcceptor,
    router: axum::Router,
    handshakes: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    peers: Arc<Mutex<HashMap<String, usize>>>,
    refusals: Mutex<Refusals>,
    limits: ServeLimits,
    shutdown: CancellationToken,
}

impl Server {
    async fn connection(self: Arc<Self>, tcp: TcpStream, from: SocketAddr, handshake: OwnedSemaphorePermit) {
        let admitted = tokio::select! {
            () = self.shutdown.cancelled() => return,
            admitted = self.admit(tcp) => admitted,
        };
        drop(handshake);
        match admitted {
            Ok((stream, peer, places)) => {
                self.talk(stream, peer).await;
                drop(places);
            }
            Err(reason) => self.refused(from, &reason),
        }
    }

    /// The handshake, then a place among all connections and one among the peer's own.
    async fn admit(&self, tcp: TcpStream) -> Result<(TlsStream<TcpStream>, PeerId, Places), String> {
        tcp.set_nodelay(true).map_err(|e| e.to_string())?;
        let stream = match timeout(self.limits.handshake, self.tls.accept(tcp)).await {
            Ok(done) => done.map_err(|e| e.to_string())?,
            Err(_) => return Err("the handshake took too long".into()),
        };
        let leaf = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let (id, not_after) = leaf.and_then(tls::peer).ok_or("no SPIFFE ID")?;
        let all = self.connections.clone().try_acquire_owned().map_err(|_| "too many connections")?;
        let own = PeerPlace::take(&self.peers, &id, self.limits.connections_per_peer)
            .ok_or_else(|| format!("too many connections of {id}"))?;
        let connection_id = CONNECTION_IDS.fetch_add(1, Ordering::Relaxed);
        let peer = PeerId { id, not_after, connection_id, connection: self.shutdown.child_token() };
        Ok((stream, peer, Places { _all: all, _own: own }))
    }

    async fn talk(&self, stream: TlsStream<TcpStream>, peer: PeerId) {
        let close = peer.connection.clone();
        // Whoever remembers the connection sees that it has ended.
        let _ended = close.clone().drop_guard();
        // A certificate is checked at the handshake alone, so a connection must not outlive it.
        let end = peer.not_after.min(SystemTime::now() + self.limits.max_age);
        let spoke = Arc::new(AtomicBool::new(false));
        let service = service_fn({
            let (router, spoke) = (self.router.clone(), spoke.clone());
            move |mut request: hyper::Request<Incoming>| {
                spoke.store(true, Ordering::Relaxed);
                request.extensions_mut().insert(peer.clone());
                router.clone().oneshot(request)
            }
        });
        let builder = http();
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            // How a connection ends is the client's business; its requests have their own answers.
            _ = connection.as_mut() => return,
            () = close.cancelled() => {}
            () = wall_clock(end) => {}
            () = silent(&spoke) => {}
        }
        connection.as_mut().graceful_shutdown();
        if timeout(CLOSING, connection).await.is_err() {
            tracing::debug!("cut a connection that did not close in time");
        }
    }

    fn refused(&self, from: SocketAddr, reason: &str) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((total, unsaid)) = refusals.count() {
            tracing::debug!(%from, reason, total, unsaid, "refused a connection");
        }
    }
}

fn http() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .max_concurrent_streams(STREAMS_PER_CONNECTION);
    builder
}

/// Ready when the peer has sent no request in time: HTTP's own limits begin only after the first bytes have told the version.
async fn silent(spoke: &AtomicBool) {
    sleep(HEAD).await;
    if spoke.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

struct Places {
    _all: OwnedSemaphorePermit,
    _own: PeerPlace,
}

/// One of a peer's connections; free again when dropped.
struct PeerPlace {
    peers: Arc<Mutex<HashMap<String, usize>>>,
    id: String,
}

impl PeerPlace {
    fn take(peers: &Arc<Mutex<HashMap<String, usize>>>, id: &str, limit: usize) -> Option<Self> {
        let mut taken = peers.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.get(id).copied().unwrap_or(0);
        if count >= limit {
            return None;
        }
        taken.insert(id.to_owned(), count + 1);
        Some(Self { peers: peers.clone(), id: id.to_owned() })
    }
}

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let mut taken = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.id);
            }
        }
    }
}

/// Counts refusals, and lets one a second be said.
#[derive(Default)]
struct Refusals {
    total: u64,
    unsaid: u64,
    last: Option<Instant>,
}

impl Refusals {
    /// The total and how many were left out since the last one, where this one may be said.
    fn count(&mut self) -> Option<(u64, u64)> {
        self.total += 1;
        if self.last.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(Instant::now());
        Some((self.total, std::mem::take(&mut self.unsaid)))
    }
}
