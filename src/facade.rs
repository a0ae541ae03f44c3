//! What an environment sees of us: Gitea's RunnerService for its own task, and the three calls of its bridge.
//!
//! It keeps no log and no result: what it acknowledges, Gitea has acknowledged. It decides two things, both in `admit` and
//! `verdict`: who may speak, and whether a SUCCESS counts. Making and removing environments is for others.

use std::{collections::HashMap, sync::Arc, time::Instant};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse as _, Response},
};
use connectrpc::ConnectError;
use http::{HeaderValue, Version, header::CONNECTION};
use tokio::sync::watch;

use self::{
    rate::{OnceASecond, Rates},
    service::Service,
};
use crate::{
    backend::Backend,
    claims::{Claim, Claims, Denied},
    gitea::RunnerRpc,
    identity::PeerId,
    ids::{AssignmentId, BackendKind},
    leader::LeaderPass,
    metrics::{Metrics, ReasonLabel},
    mirror::Mirror,
    names::header,
    proto::{environment::EnvironmentServiceExt, runner::RunnerServiceExt},
    queue::{AssignmentQueue, held::Leases},
};

mod rate;
mod service;
mod verdict;

/// The bridge splits its requests to 1 MiB; anything larger is not from it. Compressed or not.
const MAX_REQUEST_BYTES: usize = 2 << 20;

/// What the facade works with.
#[derive(Clone)]
pub struct Facade {
    pub rpc: RunnerRpc,
    pub claims: Claims,
    pub queue: Arc<dyn AssignmentQueue>,
    pub leases: Leases,
    pub backends: HashMap<BackendKind, Arc<dyn Backend>>,
    pub pass: LeaderPass,
    pub metrics: Metrics,
    pub mirror: Mirror,
    /// Gitea's answer header of the last Declare, handed on to the inner runner.
    pub server_capabilities: watch::Receiver<String>,
}

/// Put into a request's extensions once its sender was admitted.
#[derive(Clone)]
struct Admitted(Arc<Claim>);

impl Facade {
    /// The router to serve behind mTLS, each request with a `PeerId` extension.
    pub fn router(self) -> Router {
        let gate =
            Gate { claims: self.claims.clone(), metrics: self.metrics.clone(), rates: Arc::default(), refusals: Arc::default() };
        let service = Arc::new(Service::new(self));
        let router = connectrpc::Router::new();
        let router = RunnerServiceExt::register(Arc::clone(&service), router);
        let router = EnvironmentServiceExt::register(service, router);
        let limits =
            connectrpc::Limits::default().with_max_request_body_size(MAX_REQUEST_BYTES).with_max_message_size(MAX_REQUEST_BYTES);
        let rpc = router.into_axum_service().with_limits(limits);
        Router::new().nest_service("/api/actions", rpc).layer(from_fn_with_state(gate, admit))
    }
}

#[derive(Clone)]
struct Gate {
    claims: Claims,
    metrics: Metrics,
    rates: Arc<Rates>,
    refusals: Arc<OnceASecond>,
}

/// Every request passes here: certificate, capability, the served environment, not yet over (rule R6).
async fn admit(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let (peer, version) = (request.extensions().get::<PeerId>().cloned(), request.version());
    match gate.judge(&request, peer.as_ref()) {
        Ok(claim) => {
            if !gate.rates.allow(claim.assignment) {
                let _ = gate.metrics.facade_denied.get_or_create(&ReasonLabel { reason: "rate" }).inc();
                return ConnectError::resource_exhausted("too many requests; slow down").into_response();
            }
            request.extensions_mut().insert(Admitted(Arc::new(claim)));
            next.run(request).await
        }
        Err(denied) => {
            gate.metrics.facade_denied.get_or_create(&ReasonLabel { reason: denied.label() }).inc();
            if gate.refusals.may_be_said(Instant::now()) {
                tracing::info!(
                    reason = denied.label(),
                    "refused a request at the facade; others within a second are only counted"
                );
            }
            match denied {
                Denied::NotYet => ConnectError::unavailable(denied.to_string()).into_response(),
                Denied::Connections => {
                    let answer = ConnectError::resource_exhausted(denied.to_string()).into_response();
                    last_answer(answer, version, peer.as_ref())
                }
                _ => last_answer(ConnectError::permission_denied(denied.to_string()).into_response(), version, peer.as_ref()),
            }
        }
    }
}

/// Who is refused has no bucket of its own, so each of its requests costs it a handshake.
fn last_answer(mut answer: Response, version: Version, peer: Option<&PeerId>) -> Response {
    if version < Version::HTTP_2 {
        // The client is told, so that it sends no further request into a closing connection.
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    } else if let Some(peer) = peer {
        peer.connection.cancel();
    }
    answer
}

impl Gate {
    fn judge(&self, request: &Request, peer: Option<&PeerId>) -> Result<Claim, Denied> {
        let peer = peer.ok_or(Denied::Identity)?;
        let text = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
        let assignment: AssignmentId = text(header::ASSIGNMENT).and_then(|t| t.parse().ok()).ok_or(Denied::Assignment)?;
        let capability = text(header::CAPABILITY).ok_or(Denied::Capability)?;
        let claim = self.claims.admit(assignment, &peer.id, capability)?;
        self.claims.connected(assignment, peer.connection_id, &peer.connection)?;
        Ok(claim)
    }
}
