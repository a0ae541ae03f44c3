//! Our SVID, fetched and kept fresh from a Workload API.
//!
//! The `spiffe` crate holds the stream and reconnects; here is what it leaves open: a socket that appears a moment late, a reason
//! when nothing comes, and a stream that hangs without an end (no keepalive on a Unix socket): after three quarters of a
//! certificate's life without an update the source is made anew. Old material stays in use until its own end.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, SystemTime},
};

use rustls::crypto::CryptoProvider;
use spiffe::{
    SpiffeId, TrustDomain, X509Source, X509Svid,
    x509_source::{MetricsErrorKind, MetricsRecorder, SvidPicker},
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{
    IdentityError,
    tls::{Current, Material},
    wall_clock,
};

const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// How often a source that hangs or has ended is made anew, and how long each try may take.
const RENEW_EVERY: Duration = Duration::from_secs(30);

/// What is asked of which Workload API.
pub(super) struct Opening {
    endpoint: String,
    trust_domain: TrustDomain,
    wanted: SpiffeId,
}

impl Opening {
    pub(super) fn parse(endpoint: &str, trust_domain: &str, wanted: &str) -> Result<Self, IdentityError> {
        let trust_domain = TrustDomain::new(trust_domain)
            .map_err(|e| IdentityError::Config(format!("TRUST_DOMAIN {trust_domain:?} is not a trust domain: {e}")))?;
        let id = SpiffeId::new(wanted).map_err(|e| IdentityError::Config(format!("{wanted:?} is not a SPIFFE ID: {e}")))?;
        if !id.is_member_of(&trust_domain) {
            return Err(IdentityError::Config(format!(
                "{wanted} is not in the trust domain {trust_domain}: set one to fit the other"
            )));
        }
        Ok(Self { endpoint: endpoint.to_owned(), trust_domain, wanted: id })
    }

    async fn open(&self, limit: Duration) -> Result<X509Source, IdentityError> {
        let start = Instant::now();
        wait_for_socket(&self.endpoint, limit).await;
        let last = Arc::new(LastError::default());
        X509Source::builder()
            .endpoint(&self.endpoint)
            .picker(Exactly(self.wanted.clone()))
            .reconnect_backoff(BACKOFF.0, BACKOFF.1)
            .initial_sync_timeout(limit.saturating_sub(start.elapsed()).max(Duration::from_millis(1)))
            .metrics(last.clone())
            .build()
            .await
            .map_err(|e| self.failed(limit, format_args!("{e}{}", last.explain())))
    }

    fn failed(&self, limit: Duration, reason: impl std::fmt::Display) -> IdentityError {
        let reason = format!("{reason} (wanted: {})", self.wanted);
        IdentityError::NoIdentity { endpoint: self.endpoint.clone(), seconds: limit.as_secs(), reason }
    }
}

/// Opens the source, takes the first material, and starts the task that keeps it fresh.
pub(super) async fn connect(
    opening: Opening,
    provider: Arc<CryptoProvider>,
    limit: Duration,
) -> Result<Arc<Current>, IdentityError> {
    let source = opening.open(limit).await?;
    // Subscribed before the first look, so that no update falls between the two.
    let updates = source.updated();
    let first = Material::build(&source.state(), &provider, &opening.trust_domain)
        .map_err(|e| opening.failed(limit, format_args!("the answer is not usable: {e}")))?;
    let stop = CancellationToken::new();
    let current = Arc::new(Current::new(first, provider, opening.trust_domain.clone(), stop.clone().drop_guard()));
    let follower = Follower { current: Arc::downgrade(&current), opening, source, updates };
    tokio::spawn(stop.run_until_cancelled_owned(follower.follow()));
    Ok(current)
}

struct Follower {
    current: Weak<Current>,
    opening: Opening,
    source: X509Source,
    updates: spiffe::x509_source::X509SourceUpdates,
}

impl Follower {
    /// Ends with the last user of the identity: whoever spawns it drops it then.
    async fn follow(mut self) {
        let mut due = self.due();
        loop {
            tokio::select! {
                update = self.updates.changed() => match update {
                    Ok(_) => {
                        self.take();
                        due = self.due();
                        continue;
                    }
                    Err(_) => due = due.min(SystemTime::now() + jitter(Duration::from_millis(500))),
                },
                () = wall_clock(due) => {}
            }
            wall_clock(due).await;
            self.renew().await;
            due = self.due().max(SystemTime::now() + jitter(RENEW_EVERY));
        }
    }

    /// A source that was silent for three quarters of its certificate's life hangs.
    fn due(&self) -> SystemTime {
        let now = SystemTime::now();
        let end = self.current.upgrade().map_or(now, |c| c.not_after());
        now + end.duration_since(now).unwrap_or_default().mul_f64(0.75)
    }

    fn take(&self) {
        let Some(current) = self.current.upgrade() else { return };
        match current.replace(&self.source.state()) {
            Ok(()) => tracing::debug!(spiffe_id = %self.opening.wanted, "took a new SVID"),
            Err(error) => tracing::warn!(
                spiffe_id = %self.opening.wanted, %error,
                "the Workload API took our SVID back or sent an unusable one; the old one stays in use until it ends"
            ),
        }
    }

    async fn renew(&mut self) {
        tracing::warn!(endpoint = %self.opening.endpoint, "the Workload API has been silent for too long; connecting anew");
        match self.opening.open(RENEW_EVERY).await {
            Ok(source) => {
                self.updates = source.updated();
                self.source = source;
                self.take();
            }
            Err(error) => tracing::warn!(%error, "still no new SVID; the old one stays in use until it ends"),
        }
    }
}

fn jitter(full: Duration) -> Duration {
    full.mul_f64(rand::random_range(0.9..=1.0))
}

/// A job and its socket start side by side: looking every few milliseconds costs less than one failed connect and its backoff.
async fn wait_for_socket(endpoint: &str, limit: Duration) {
    let Some(path) = endpoint.strip_prefix("unix:") else { return };
    let start = Instant::now();
    while start.elapsed() < limit && !Path::new(path).exists() {
        let pause = if start.elapsed() < Duration::from_secs(2) { 5 } else { 100 };
        sleep(Duration::from_millis(pause)).await;
    }
}

/// Picks the SVID of this ID alone: an agent may give a workload several, in no order.
struct Exactly(SpiffeId);

impl SvidPicker for Exactly {
    fn pick_svid(&self, svids: &[Arc<X509Svid>]) -> Option<usize> {
        svids.iter().position(|svid| svid.spiffe_id() == &self.0)
    }
}

/// What went wrong last: the source itself only says that its time was up.
#[derive(Default)]
struct LastError(Mutex<Option<MetricsErrorKind>>);

impl MetricsRecorder for LastError {
    fn record_update(&self) {}

    fn record_reconnect(&self) {}

    fn record_error(&self, kind: MetricsErrorKind) {
        // The general kind follows each special one, and says less.
        if kind != MetricsErrorKind::InitialSyncFailed {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(kind);
        }
    }
}

impl LastError {
    fn explain(&self) -> &'static str {
        match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(MetricsErrorKind::ClientCreation) => {
                "; nobody answers there, or hangs up at once: is the agent or controller running, and is the socket for this user?"
            }
            Some(MetricsErrorKind::StreamConnect | MetricsErrorKind::StreamError) => {
                "; it was refused: is the entry registered, and is it for this user and socket?"
            }
            Some(MetricsErrorKind::NoSuitableSvid) => "; it gives other identities only",
            _ => "",
        }
    }
}
