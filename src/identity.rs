//! Who we are and who the peer is: X.509-SVIDs from the Workload API, and TLS that accepts only SPIFFE IDs.
//!
//! `source` keeps our SVID fresh, `tls` checks peers with it, `serve` is the accept loop, `authority` is the Workload API
//! of a node that has no SPIRE. Knows names and certificates, not jobs: whether a peer may see a task is the facade's question.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{ClientConfig, ConfigBuilder, ServerConfig, WantsVerifier, version::TLS13};
use tokio_util::sync::CancellationToken;

pub mod authority;
pub mod binder;
mod serve;
mod source;
mod tls;

pub use serve::serve;

/// Our own X.509-SVID, kept fresh from a Workload API; clones share it.
///
/// The task that keeps it fresh ends with the last clone and the last TLS configuration made of it.
#[derive(Clone)]
pub struct Identity {
    current: Arc<tls::Current>,
    server: ConfigBuilder<ServerConfig, WantsVerifier>,
    client: ConfigBuilder<ClientConfig, WantsVerifier>,
}

/// The peer of a connection, put into the extensions of each of its requests by [`serve()`].
#[derive(Debug, Clone)]
pub struct PeerId {
    /// `spiffe://…`, exactly one URI SAN, verified.
    pub id: String,
    pub not_after: SystemTime,
    /// Tells this connection from others of the process.
    pub connection_id: u64,
    /// Cancel it to close this connection gracefully; cancelled when it has ended.
    pub connection: CancellationToken,
}

/// What [`serve()`] lets its peers take.
#[derive(Debug, Clone)]
pub struct ServeLimits {
    /// Connections in all, past their handshake.
    pub connections: usize,
    /// Connections of one SPIFFE ID.
    pub connections_per_peer: usize,
    /// Longest handshake.
    pub handshake: Duration,
    /// Longest life of a connection; the peer's certificate may end it sooner.
    pub max_age: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("no identity from {endpoint} within {seconds} s: {reason}")]
    NoIdentity { endpoint: String, seconds: u64, reason: String },
    #[error("{0}")]
    Config(String),
}

impl Identity {
    /// Waits at most `limit` for the SVID of exactly `wanted` from the Workload API at `endpoint` (`unix:///…`).
    ///
    /// A refusal ("no identity issued") is waited out too: an entry reaches an agent seconds after it was made.
    pub async fn connect(endpoint: &str, trust_domain: &str, wanted: &str, limit: Duration) -> Result<Self, IdentityError> {
        let opening = source::Opening::parse(endpoint, trust_domain, wanted)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls13 = |e: rustls::Error| IdentityError::Config(format!("the TLS library offers no TLS 1.3: {e}"));
        let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]).map_err(tls13)?;
        let client = ClientConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]).map_err(tls13)?;
        let current = source::connect(opening, provider, limit).await?;
        Ok(Self { current, server, client })
    }

    /// TLS 1.3 only; accepts peers of our trust domain whose ID is a job's (`/ci/` or `/ci-pr/`).
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::new(tls::server(self.server.clone(), self.current.clone()))
    }

    /// TLS 1.3 only; the server must be exactly `peer`. ALPN is left empty, for the connector to set.
    pub fn client_config(&self, peer: &str) -> Arc<ClientConfig> {
        Arc::new(tls::client(self.client.clone(), self.current.clone(), peer))
    }

    /// When our present certificate ends; later than now, unless the Workload API has been silent for too long.
    pub fn not_after(&self) -> SystemTime {
        self.current.not_after()
    }
}

/// Sleeps until the wall clock shows `at`.
///
/// Certificates end by the wall clock, but a timer stands still while a machine is suspended: so it looks every 30 s.
async fn wall_clock(at: SystemTime) {
    while let Ok(left) = at.duration_since(SystemTime::now()) {
        tokio::time::sleep(left.clamp(Duration::from_millis(1), Duration::from_secs(30))).await;
    }
}
