//! Gitea's runner protocol, spoken as a client: Connect unary over HTTP, binary protobuf.
//!
//! The controller speaks it to Gitea, and the executor's bridge to the facade, which answers as Gitea does. What to send when
//! is for the callers; here are only the calls, their time limits, and errors sorted by what a caller does about them.

use std::{path::Path, sync::Arc, time::Duration};

use connectrpc::client::{CallOptions, ClientBody, ClientConfig, ServiceTransport, UnaryResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioTimer},
};

use self::connect::{Connector, Proxies};
pub use self::error::{RpcError, RpcFault};
use crate::{
    proto::{self, runner as wire},
    secret::Secret,
};

pub mod backlog;
pub mod connect;
mod error;
pub mod look;
pub mod register;
pub mod report;
pub mod tls;

/// Longest answer that is read: a task with all its secrets and needs, as large as what the queue takes.
const MAX_ANSWER_BYTES: usize = 48 << 20;
/// How Gitea is told to bound FetchTask. Within it Gitea gives the claim back when we are gone (measured on 1.27).
const FETCH_SERVER_LIMIT: Duration = Duration::from_secs(15);
/// How much longer we listen: a lost answer is a lost job (rule R1), so we never hang up first.
const FETCH_EXTRA: Duration = Duration::from_secs(10);
/// UpdateLog of 20 MB took Gitea 2.1 s, and UpdateTask waits for a lock that all jobs of a run share.
const CALL_LIMIT: Duration = Duration::from_secs(30);

pub type Transport = ServiceTransport<Client<Connector, ClientBody>>;

/// One party's way to a RunnerService. Clones share connections.
#[derive(Clone)]
pub struct RunnerRpc {
    client: wire::RunnerServiceClient<Transport>,
    transport: Transport,
    config: ClientConfig,
}

/// An answer to FetchTask.
#[derive(Debug)]
pub struct Fetched {
    /// The raw `runner.v1.Task`, unknown fields and all.
    pub task: Option<crate::secret::SecretBytes>,
    pub tasks_version: i64,
}

/// An answer to Declare.
#[derive(Debug, Clone, Default)]
pub struct Declared {
    /// The header `X-Gitea-Actions-Capabilities`, empty on Gitea ≤ 1.26.
    pub server_capabilities: String,
}

/// Why a client could not be made; a fault of the configuration.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClientFault(pub String);

impl RunnerRpc {
    /// To Gitea itself: `url` is its ROOT_URL, `ca_file` an extra PEM bundle, `credentials` the runner's UUID and token.
    pub fn to_gitea(url: &str, ca_file: Option<&Path>, credentials: Option<(&str, &Secret)>) -> Result<Self, ClientFault> {
        Self::to_gitea_through(&Proxies::none(), url, ca_file, credentials)
    }

    /// As [`Self::to_gitea`], through the proxy that `proxies` name for `url`, if any.
    pub fn to_gitea_through(
        proxies: &Proxies,
        url: &str,
        ca_file: Option<&Path>,
        credentials: Option<(&str, &Secret)>,
    ) -> Result<Self, ClientFault> {
        let mut headers = HeaderMap::new();
        if let Some((uuid, token)) = credentials {
            headers.insert("x-runner-uuid", header_value("GITEA_RUNNER_UUID", uuid)?);
            let mut token = header_value("GITEA_RUNNER_TOKEN", token.expose())?;
            token.set_sensitive(true);
            headers.insert("x-runner-token", token);
        }
        let tls = tls::towards_gitea(url, ca_file)?;
        Self::connecting(proxies, url, &tls, headers)
    }

    /// To anyone who speaks the protocol below `<url>/api/actions`, with these headers on every request. Always direct.
    pub fn over_tls(url: &str, tls: Arc<rustls::ClientConfig>, headers: HeaderMap) -> Result<Self, ClientFault> {
        Self::connecting(&Proxies::none(), url, &tls, headers)
    }

    fn connecting(proxies: &Proxies, url: &str, tls: &rustls::ClientConfig, mut headers: HeaderMap) -> Result<Self, ClientFault> {
        let base = format!("{}/api/actions", url.trim_end_matches('/'));
        let base: Uri = base.parse().map_err(|e| ClientFault(format!("{url:?} is no URL: {e}")))?;
        if !matches!(base.scheme_str(), Some("http" | "https")) || base.host().is_none() {
            return Err(ClientFault(format!("{url:?} is no http:// or https:// URL")));
        }
        let (connector, proxy_authorization) = Connector::new(&base, tls, proxies);
        if let Some(authorization) = proxy_authorization {
            headers.insert(http::header::PROXY_AUTHORIZATION, authorization);
        }
        let transport = ServiceTransport::new(
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(Duration::from_secs(30))
                // The facade allows an environment four connections, and the pool opens more than it needs in a race.
                .pool_max_idle_per_host(2)
                .build::<_, ClientBody>(connector),
        );
        let config = ClientConfig::new(base)
            .with_default_max_message_size(MAX_ANSWER_BYTES)
            .with_default_element_memory_limit(4 * MAX_ANSWER_BYTES)
            .with_default_headers(headers);
        Ok(Self { client: wire::RunnerServiceClient::new(transport.clone(), config.clone()), transport, config })
    }

    /// The connection below, for services beside RunnerService.
    pub fn parts(&self) -> (Transport, ClientConfig) {
        (self.transport.clone(), self.config.clone())
    }

    /// Says which labels and capabilities we have. Overwrites what the server knew: leaving a capability out withdraws it.
    pub async fn declare(&self, version: &str, labels: &[String], capabilities: &[String]) -> Result<Declared, RpcError> {
        let request = wire::DeclareRequest {
            version: version.into(),
            labels: labels.to_vec(),
            capabilities: capabilities.to_vec(),
            ..Default::default()
        };
        let answer = limited(CALL_LIMIT, self.client.declare_with_options(request, lasting(CALL_LIMIT))).await?;
        let header = answer.headers().get(crate::names::header::SERVER_CAPABILITIES);
        Ok(Declared { server_capabilities: header.and_then(|h| h.to_str().ok()).unwrap_or_default().to_owned() })
    }

    /// Asks for a task. A claim is made by Gitea before it answers, so this future must not be dropped (rule R1).
    pub async fn fetch_task(&self, tasks_version: i64) -> Result<Fetched, RpcError> {
        let request = wire::FetchTaskRequest { tasks_version, ..Default::default() };
        let call = self.client.fetch_task_with_options(request, lasting(FETCH_SERVER_LIMIT));
        let answer = limited(FETCH_SERVER_LIMIT + FETCH_EXTRA, call).await?;
        let tasks_version = answer.view().tasks_version;
        let task = proto::task_of_answer(answer.into_view().bytes()).map_err(|e| RpcError::malformed(e.to_string()))?;
        Ok(Fetched { task: task.map(crate::secret::SecretBytes::new), tasks_version })
    }

    /// Reports a state, and learns whether the job shall go on. Idempotent.
    pub async fn update_task(
        &self,
        request: wire::UpdateTaskRequest,
        headers: &[(&'static str, &'static str)],
    ) -> Result<wire::UpdateTaskResponse, RpcError> {
        let mut options = lasting(CALL_LIMIT);
        for (name, value) in headers {
            options = options.with_header(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        Ok(limited(CALL_LIMIT, self.client.update_task_with_options(request, options)).await?.into_owned())
    }

    /// Sends log rows; answers how many rows Gitea holds. Idempotent: rows that it holds already are passed over.
    pub async fn update_log(&self, request: wire::UpdateLogRequest) -> Result<i64, RpcError> {
        let answer = limited(CALL_LIMIT, self.client.update_log_with_options(request, lasting(CALL_LIMIT))).await?;
        Ok(answer.view().ack_index)
    }
}

/// The server is told the limit; we keep our own around the call, because a hung connection obeys no header.
fn lasting(limit: Duration) -> CallOptions {
    CallOptions::default().with_header(
        HeaderName::from_static("connect-timeout-ms"),
        HeaderValue::from(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)),
    )
}

async fn limited<V>(
    limit: Duration,
    call: impl Future<Output = Result<UnaryResponse<V>, connectrpc::ConnectError>>,
) -> Result<UnaryResponse<V>, RpcError> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(RpcError::from),
        Err(_) => Err(RpcError::timed_out(limit)),
    }
}

fn header_value(what: &str, text: &str) -> Result<HeaderValue, ClientFault> {
    HeaderValue::from_str(text.trim()).map_err(|_| ClientFault(format!("{what} holds characters that no HTTP header may hold")))
}
