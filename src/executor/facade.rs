//! The controller's facade, seen from inside the environment: Gitea's RunnerService and our own three calls, over mTLS.
//!
//! Each request carries assignment and capability (rule R6). When to call and what to do about an error is for the callers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use connectrpc::{ConnectError, ErrorCode};
use http::{HeaderMap, HeaderValue};

use crate::{
    gitea::{ClientFault, Fetched, RpcError, RpcFault, RunnerRpc, Transport},
    ids::AssignmentId,
    names::header,
    proto::{
        environment::{EnvironmentServiceClient, HelloRequest, PollRequest, StartRequest, StopReason},
        runner as wire,
    },
    secret::Secret,
};

/// Hello, Start and Poll are small; Start waits for the queue's and the backend's confirmation.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// A job's stop must be noticed soon, so a poll that hangs is given up early.
const POLL_LIMIT: Duration = Duration::from_secs(5);
/// A facade that has just been restarted may not know its environments yet, and denies what it will serve a moment later.
const DENIED_FOR: Duration = Duration::from_secs(15);

#[derive(Clone)]
pub struct Facade {
    runner: RunnerRpc,
    environment: EnvironmentServiceClient<Transport>,
}

impl Facade {
    /// `tls` must accept only the facade's own SPIFFE ID.
    pub fn new(
        url: &str,
        tls: Arc<rustls::ClientConfig>,
        assignment: AssignmentId,
        capability: &Secret,
    ) -> Result<Self, ClientFault> {
        let value = |what: &str, text: &str| {
            HeaderValue::from_str(text).map_err(|_| ClientFault(format!("{what} holds characters that no HTTP header may hold")))
        };
        let mut headers = HeaderMap::new();
        headers.insert(header::ASSIGNMENT, value("assignment", &assignment.to_string())?);
        let mut capability = value("capability", capability.expose())?;
        capability.set_sensitive(true);
        headers.insert(header::CAPABILITY, capability);
        let runner = RunnerRpc::over_tls(url, tls, headers)?;
        let (transport, config) = runner.parts();
        Ok(Self { runner, environment: EnvironmentServiceClient::new(transport, config) })
    }

    /// Answers Gitea's `X-Gitea-Actions-Capabilities`.
    pub async fn hello(&self) -> Result<String, RpcError> {
        let request = HelloRequest { version: env!("CARGO_PKG_VERSION").into(), ..Default::default() };
        Ok(limited(CALL_LIMIT, self.environment.hello(request)).await?.into_owned().server_capabilities)
    }

    /// The environment's task. May be repeated: only `start` binds.
    pub async fn fetch_task(&self) -> Result<Fetched, RpcError> {
        self.runner.fetch_task(0).await
    }

    /// The point of no return (rule R5); idempotent. Answers *k*, the rows already in the log.
    pub async fn start(&self) -> Result<i64, RpcError> {
        Ok(limited(CALL_LIMIT, self.environment.start(StartRequest::default())).await?.into_owned().log_offset)
    }

    /// Whether the job shall stop. A reason of a newer controller counts as a cancel.
    pub async fn poll(&self) -> Result<StopReason, RpcError> {
        let answer = limited(POLL_LIMIT, self.environment.poll(PollRequest::default())).await?.into_owned();
        Ok(answer.stop.as_known().unwrap_or(StopReason::STOP_REASON_CANCELLED))
    }

    pub async fn update_log(&self, request: wire::UpdateLogRequest) -> Result<i64, RpcError> {
        self.runner.update_log(request).await
    }

    pub async fn update_task(
        &self,
        request: wire::UpdateTaskRequest,
        headers: &[(&'static str, &'static str)],
    ) -> Result<wire::UpdateTaskResponse, RpcError> {
        self.runner.update_task(request, headers).await
    }
}

/// Tells a denial for good from one of a facade that is not ready.
#[derive(Default)]
pub(super) struct Denials {
    since: Option<Instant>,
}

impl Denials {
    /// Whether the facade will never again take anything from this environment.
    pub(super) fn is_final(&mut self, error: &RpcError) -> bool {
        match error.fault {
            RpcFault::TaskGone | RpcFault::NotOurTask => true,
            RpcFault::Denied => self.since.get_or_insert_with(Instant::now).elapsed() >= DENIED_FOR,
            _ => {
                self.answered();
                false
            }
        }
    }

    pub(super) fn answered(&mut self) {
        self.since = None;
    }
}

async fn limited<T>(limit: Duration, call: impl Future<Output = Result<T, ConnectError>>) -> Result<T, RpcError> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(RpcError::from),
        Err(_) => {
            let message = format!("no answer within {} s", limit.as_secs());
            Err(RpcError::from(ConnectError::new(ErrorCode::DeadlineExceeded, message)))
        }
    }
}
