//! The stand-in's listener and its paths: the protocol with the ordered faults in front, and a tiny upstream beside it.
//!
//! Each connection has a token of its own to cut it, because an answer can only be lost by losing its connection.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State as Shared},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse as _, Response},
    routing::{any, get},
};
use connectrpc::{ConnectError, Limits, handler_fn};
use http::StatusCode;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use super::{
    Inner,
    faults::{Fault, Method, Seen},
    rpc::Service,
};
use crate::proto::runner::{RegisterRequest, RegisterResponse};

/// Gitea has no limit of its own; a log of 20 MB in one call is known to work.
const MAX_BODY: usize = 64 << 20;
const MAX_CONNECTIONS: usize = 1024;
/// Of an echoed body, the part that is shown.
const MAX_ECHO: usize = 64 << 10;

/// Cuts the connection that a request came by.
#[derive(Clone)]
struct Connection(CancellationToken);

pub(super) fn router(inner: &Arc<Inner>) -> Router {
    let service = Arc::new(Service(inner.clone()));
    let register = service.clone();
    let handler = handler_fn::<_, _, RegisterRequest, RegisterResponse, _>(move |_, request| {
        let service = register.clone();
        async move { service.register(&request) }
    });
    let limits = Limits::default().with_max_request_body_size(MAX_BODY).with_max_message_size(MAX_BODY);
    let protocol = connectrpc::Router::new().route("runner.v1.RunnerService", "Register", handler);
    let protocol = crate::proto::runner::RunnerServiceExt::register(service.clone(), protocol);
    let protocol = crate::proto::ping::PingServiceExt::register(service, protocol);
    Router::new()
        .nest_service("/api/actions", protocol.into_axum_service().with_limits(limits))
        .route("/api/v1/version", get(|| async { page(&json!({"version": "1.27.3"})) }))
        .route("/echo/{*rest}", any(echo))
        .layer(from_fn_with_state(inner.clone(), admit))
}

/// Accepts until told to stop; then every connection is cut.
pub(super) async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::debug!(%error, "stand-in forge could not accept");
                    continue;
                }
            },
        };
        let (cut, router) = (CancellationToken::new(), router.clone());
        let connection = Connection(cut.clone());
        let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(connection.clone());
            router.clone().oneshot(request)
        });
        connections.spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            let served = http.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                served = served => if let Err(error) = served {
                    tracing::debug!(%error, "connection to the stand-in forge ended early");
                },
                () = cut.cancelled() => {}
            }
        });
    }
    connections.shutdown().await;
}

/// Records the request, and lets a fault strike that is on order.
async fn admit(Shared(inner): Shared<Arc<Inner>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, MAX_BODY).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let path = parts.uri.path().to_owned();
    let method = Method::of_path(&path);
    let patience = parts.headers.get("connect-timeout-ms").and_then(|value| value.to_str().ok()?.parse().ok());
    let patience = patience.map(Duration::from_millis);
    inner.record().add(Seen { method, path: path.clone(), at: Instant::now(), bytes: body.len(), patience });
    let connection = parts.extensions.get::<Connection>().cloned();
    let request = Request::from_parts(parts, Body::from(body));
    let Some(method) = method else {
        if path.starts_with("/api/actions/") {
            return (StatusCode::NOT_FOUND, "404 page not found\n").into_response();
        }
        return next.run(request).await;
    };
    let fault = inner.faults().strike(method);
    match fault {
        None => next.run(request).await,
        Some(Fault::Fail { code, message }) => ConnectError::new(code, message).into_response(),
        Some(Fault::Page(status)) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
            (status, axum::response::Html("<html><body>a page of a proxy</body></html>")).into_response()
        }
        Some(Fault::Delay(time)) => {
            tokio::time::sleep(time).await;
            next.run(request).await
        }
        Some(Fault::LoseAnswer) => {
            let answer = next.run(request).await;
            drop(answer);
            lose(connection).await
        }
        Some(Fault::LoseRequest) => lose(connection).await,
    }
}

/// Never answers: the connection's task ends, and this future with it.
async fn lose(connection: Option<Connection>) -> Response {
    if let Some(Connection(cut)) = connection {
        cut.cancel();
    }
    std::future::pending().await
}

/// Shows what arrived, so that a test sees what a proxy in between has made of it.
async fn echo(request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, MAX_BODY).await.unwrap_or_default();
    let headers: Vec<_> =
        parts.headers.iter().map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes()))).collect();
    page(&json!({
        "method": parts.method.as_str(),
        "path": parts.uri.path(),
        "query": parts.uri.query(),
        "headers": headers,
        "size": body.len(),
        "body": String::from_utf8_lossy(&body[..body.len().min(MAX_ECHO)]),
    }))
}

fn page(value: &Value) -> Response {
    ([(http::header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
