//! The Gitea that the official runner sees, on 127.0.0.1: RPCs answered from the spool, everything else passed on.
//!
//! Rows and states are taken at once and answered at once; when Gitea gets them is the delivery's business. Who knows the
//! token of `.runner` is the runner (design, "Bridge"): it is asked for on every RPC but Ping, before a body is read.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use connectrpc::{
    ConnectError, ConnectRpcService, Encodable, ErrorCode, Limits, PreEncoded, RequestContext, Response as RpcResponse,
    ServiceRequest, ServiceResult, handler_fn,
};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service as _;

use super::{
    path::{Door, door},
    proxy::{Body, BoxError, Proxy, plain},
    spool::SharedSpool,
    stop::Stop,
};
use crate::{
    names,
    proto::{
        self,
        ping::{PingRequest, PingResponse, PingService, PingServiceExt},
        runner::{
            DeclareRequest, DeclareResponse, FetchTaskRequest, FetchTaskResponse, RegisterRequest, RegisterResponse, Runner,
            RunnerService, RunnerServiceExt, TaskResult, TaskState, UpdateLogRequest, UpdateLogResponse, UpdateTaskRequest,
            UpdateTaskResponse,
        },
    },
    secret::{Secret, SecretBytes},
};

const TOKEN: &str = "x-runner-token";
/// A runner that could not report for long sends all its rows in one request.
const MAX_REQUEST: usize = 64 << 20;
/// The runner, and what its steps do at the same time through the proxy.
const CONNECTIONS: usize = 512;

/// What the runner is told and asked.
pub(super) struct Bridge {
    pub(super) task_id: i64,
    /// The raw Task, as the runner shall get it.
    pub(super) task: SecretBytes,
    /// What `.runner` says.
    pub(super) runner: RunnerIdentity,
    /// `X-Gitea-Actions-Capabilities`, as Gitea gave it.
    pub(super) server_capabilities: String,
    pub(super) spool: Arc<SharedSpool>,
    pub(super) stop: Stop,
    /// Set by the first UpdateTask or UpdateLog: the runner has the task.
    pub(super) reported: AtomicBool,
}

/// The identity of the official runner towards the bridge; it means nothing anywhere else.
#[derive(Debug, Clone)]
pub(super) struct RunnerIdentity {
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) token: Secret,
}

type Rpc = ConnectRpcService<connectrpc::Router>;

struct Doors {
    rpc: Rpc,
    token: Secret,
    proxy: Arc<Proxy>,
}

/// Serves until `closing`, then closes every connection.
pub(super) async fn serve(listener: TcpListener, bridge: Arc<Bridge>, proxy: Arc<Proxy>, closing: CancellationToken) {
    let doors = Arc::new(Doors { token: bridge.runner.token.clone(), rpc: rpc(bridge), proxy: proxy.clone() });
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let connections = TaskTracker::new();
    while let Some(permit) = closing.run_until_cancelled(room.clone().acquire_owned()).await {
        let Ok(permit) = permit else { break };
        let stream = match closing.run_until_cancelled(listener.accept()).await {
            Some(Ok((stream, _))) => stream,
            Some(Err(error)) => {
                // Out of file descriptors, mostly: the runner tries again, and so do we.
                tracing::warn!(%error, "accept a connection of the job");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
            None => break,
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "set TCP_NODELAY");
        }
        let doors = doors.clone();
        let serve = hyper::server::conn::http1::Builder::new()
            .half_close(true)
            .serve_connection(
                TokioIo::new(stream),
                hyper::service::service_fn(move |request| {
                    let doors = doors.clone();
                    async move { Ok::<_, Infallible>(doors.answer(request).await) }
                }),
            )
            .with_upgrades();
        connections.spawn(closing.clone().run_until_cancelled_owned(async move {
            if let Err(error) = serve.await {
                tracing::debug!(%error, "a connection of the job ended");
            }
            drop(permit);
        }));
    }
    connections.close();
    connections.wait().await;
    proxy.closed().await;
}

impl Doors {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        match door(request.method(), request.uri()) {
            Door::Ping => self.call(request).await,
            Door::Rpc if self.has_token(&request) => self.call(request).await,
            Door::Rpc => unregistered(),
            Door::Gitea => self.proxy.forward(request).await,
            Door::Hidden => plain(StatusCode::NOT_FOUND, "not found"),
            Door::NoTunnel => plain(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not served here"),
            Door::Refused(reason) => plain(StatusCode::BAD_REQUEST, reason),
        }
    }

    fn has_token(&self, request: &Request<Incoming>) -> bool {
        request.headers().get(TOKEN).and_then(|token| token.to_str().ok()).is_some_and(|token| self.token.matches(token))
    }

    async fn call(&self, request: Request<Incoming>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path().strip_prefix("/api/actions").unwrap_or_default().parse();
        let Ok(path) = path else { return plain(StatusCode::NOT_FOUND, "not found") };
        parts.uri = path;
        let Ok(answer) = self.rpc.clone().call(Request::from_parts(parts, body)).await;
        answer.map(|body| body.map_err(|never| match never {}).boxed_unsync())
    }
}

fn rpc(bridge: Arc<Bridge>) -> Rpc {
    let router = PingServiceExt::register(bridge.clone(), connectrpc::Router::new());
    let router = RunnerServiceExt::register(bridge.clone(), router);
    // `Register` collides with the generated trait's own method (see `proto/runner.proto`).
    let register = handler_fn(move |_: RequestContext, request: RegisterRequest| {
        let runner = bridge.runner(request.version, request.labels);
        async move { RpcResponse::ok(RegisterResponse { runner: runner.into(), ..Default::default() }) }
    });
    let router = router.route("runner.v1.RunnerService", "Register", register);
    let limits = Limits::default()
        .with_max_request_body_size(MAX_REQUEST)
        .with_max_message_size(MAX_REQUEST)
        .with_element_memory_limit(4 * MAX_REQUEST);
    ConnectRpcService::new(router).with_limits(limits)
}

/// The words that the official runner knows (`gitea.md` §2.3).
fn unregistered() -> Response<Body> {
    let words = r#"{"code":"unauthenticated","message":"unregistered runner"}"#;
    let body = Full::new(words.into()).map_err(|never: Infallible| -> BoxError { match never {} }).boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = StatusCode::UNAUTHORIZED;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

impl Bridge {
    fn runner(&self, version: String, labels: Vec<String>) -> Runner {
        let RunnerIdentity { uuid, name, token } = self.runner.clone();
        Runner { id: 1, uuid, name, token: token.expose().to_owned(), version, labels, ..Default::default() }
    }

    /// The runner has its task; Gitea says the same about another runner's task.
    fn claim(&self, task_id: i64) -> Result<(), ConnectError> {
        if task_id != self.task_id {
            return Err(ConnectError::new(ErrorCode::PermissionDenied, "invalid runner for task"));
        }
        self.reported.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl PingService for Bridge {
    async fn ping<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, PingRequest>,
    ) -> ServiceResult<impl Encodable<PingResponse> + Send + use<'a>> {
        RpcResponse::ok(PingResponse { data: format!("Hello, {}!", request.data), ..Default::default() })
    }
}

impl RunnerService for Bridge {
    async fn declare<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, DeclareRequest>,
    ) -> ServiceResult<impl Encodable<DeclareResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let mut runner = self.runner(request.version, request.labels);
        runner.token.clear();
        let answer = RpcResponse::new(DeclareResponse { runner: runner.into(), ..Default::default() });
        match HeaderValue::from_str(&self.server_capabilities) {
            Ok(value) if !value.is_empty() => {
                Ok(answer.with_header(HeaderName::from_static(names::header::SERVER_CAPABILITIES), value))
            }
            _ => Ok(answer),
        }
    }

    /// The same task until the runner reports on it: the answer may get lost on the way.
    async fn fetch_task<'a>(
        &'a self,
        _: RequestContext,
        _: ServiceRequest<'_, FetchTaskRequest>,
    ) -> ServiceResult<impl Encodable<FetchTaskResponse> + Send + use<'a>> {
        let bytes = if self.reported.load(Ordering::Relaxed) {
            buffa::Message::encode_to_vec(&FetchTaskResponse { tasks_version: 1, ..Default::default() })
        } else {
            proto::answer_with_task(self.task.expose(), 1)
        };
        RpcResponse::ok(PreEncoded::<FetchTaskResponse>::from_bytes_unchecked(bytes))
    }

    async fn update_task<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, UpdateTaskRequest>,
    ) -> ServiceResult<impl Encodable<UpdateTaskResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let state = request.state.into_option().unwrap_or_default();
        self.claim(state.id)?;
        let stopping = self.stop.seen().is_some();
        // A verdict is answered by itself. Otherwise only CANCELLED stops every build of the runner (`gitea.md` §4.5).
        let result = if state.result == TaskResult::RESULT_UNSPECIFIED && stopping {
            TaskResult::RESULT_CANCELLED.into()
        } else {
            state.result
        };
        let sent_outputs = {
            let mut spool = self.spool.lock();
            spool.take_state(state, request.outputs);
            spool.output_keys()
        };
        self.spool.wake();
        let state = TaskState { id: self.task_id, result, ..Default::default() };
        RpcResponse::ok(UpdateTaskResponse { state: state.into(), sent_outputs, ..Default::default() })
    }

    async fn update_log<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, UpdateLogRequest>,
    ) -> ServiceResult<impl Encodable<UpdateLogResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        self.claim(request.task_id)?;
        let ack_index = self.spool.lock().take_rows(request.index, request.rows, request.no_more);
        self.spool.wake();
        RpcResponse::ok(UpdateLogResponse { ack_index, ..Default::default() })
    }
}
