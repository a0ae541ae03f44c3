//! Who we are and who the peer is: X.509-SVIDs from the Workload API, and TLS that accepts only SPIFFE IDs.
//!
//! Knows names and certificates, not jobs: whether a peer may see a task is the facade's question.

use std::{sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

pub mod authority;
pub mod binder;

/// Our own X.509-SVID, kept fresh from a Workload API; clones share it.
#[derive(Clone)]
pub struct Identity {}

/// The peer of a connection, put into the extensions of each of its requests by [`serve`].
#[derive(Debug, Clone)]
pub struct PeerId {
    /// `spiffe://…`, exactly one URI SAN, verified.
    pub id: String,
    pub not_after: std::time::SystemTime,
    /// Cancel it to close this connection gracefully.
    pub connection: CancellationToken,
}

#[derive(Debug, Clone)]
pub struct ServeLimits {
    pub connections: usize,
    pub connections_per_peer: usize,
    pub handshake: Duration,
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
    pub async fn connect(endpoint: &str, trust_domain: &str, wanted: &str, limit: Duration) -> Result<Self, IdentityError> {
        let _ = (trust_domain, wanted);
        Err(IdentityError::NoIdentity { endpoint: endpoint.into(), seconds: limit.as_secs(), reason: "not built".into() })
    }

    /// TLS 1.3 only; accepts peers of our trust domain whose ID is a job's (`/ci/` or `/ci-pr/`).
    pub fn server_config(&self) -> Arc<rustls::ServerConfig> {
        unimplemented!()
    }

    /// TLS 1.3 only; the server must be exactly `peer`.
    pub fn client_config(&self, peer: &str) -> Arc<rustls::ClientConfig> {
        let _ = peer;
        unimplemented!()
    }
}

/// Accepts mTLS connections and serves `router` on them, each request with a [`PeerId`] extension, until `shutdown`.
pub async fn serve(
    listener: tokio::net::TcpListener,
    tls: Arc<rustls::ServerConfig>,
    router: axum::Router,
    limits: ServeLimits,
    shutdown: CancellationToken,
) {
    let _ = (listener, tls, router, limits, shutdown);
}
