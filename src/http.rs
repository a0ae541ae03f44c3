//! The operator's HTTP: `/healthz`, `/readyz`, `/metrics`. Read-only; environments speak to the facade, never to this.
//!
//! Loopback is no proof of anything where jobs run on the same machine, so reading needs a token there.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::get,
};
use base64::Engine as _;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use crate::{metrics::Metrics, secret::Secret};

/// Connections at once; a page needs a handful.
const CONNECTIONS: usize = 64;
/// To send the head of a request, and for a whole connection.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
const CONNECTION_LIMIT: Duration = Duration::from_secs(120);

/// Why the process is not ready, anew at each call; empty if it is.
pub type Reasons = Arc<dyn Fn() -> Vec<String> + Send + Sync>;

#[derive(Clone)]
pub struct Http {
    pub reasons: Reasons,
    pub metrics: Metrics,
    pub access: Access,
}

/// Who may read.
#[derive(Clone)]
pub struct Access {
    pub read_token: Option<Secret>,
    /// Whether someone on loopback may read without a token.
    pub trust_loopback: bool,
    /// Names by which we may be called, beside loopback ones (no DNS rebinding).
    pub hosts: Vec<String>,
}

impl Http {
    pub fn router(self) -> Router {
        let guarded = Router::new()
            .route("/metrics", get(metrics))
            .route_layer(from_fn_with_state(self.access.clone(), may_read))
            .with_state(self.clone());
        let open =
            Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(ready)).with_state(self.clone());
        open.merge(guarded).layer(from_fn_with_state(self.access, right_host))
    }
}

async fn ready(State(http): State<Http>) -> Response {
    let reasons = (http.reasons)();
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready\n{}\n", reasons.join("\n"))).into_response()
}

async fn metrics(State(http): State<Http>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], http.metrics.text()).into_response()
}

/// A browser that was led here under another name shows that name.
async fn right_host(State(access): State<Access>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if port.ends_with(']') { host } else { name });
    let known = matches!(name, "localhost" | "127.0.0.1" | "[::1]" | "") || access.hosts.iter().any(|h| h == name);
    if known {
        return next.run(request).await;
    }
    (StatusCode::MISDIRECTED_REQUEST, "unknown host name; add it to HTTP_HOSTS\n").into_response()
}

async fn may_read(State(access): State<Access>, request: Request, next: Next) -> Response {
    let shown = request.headers().get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
    let allowed = match &access.read_token {
        Some(token) => shown.and_then(presented).is_some_and(|shown| token.matches(shown.expose())),
        None => access.trust_loopback,
    };
    if allowed {
        return next.run(request).await;
    }
    let way_out = "set READ_TOKEN_FILE to a file with a token, and show that token as password (any user name) or as bearer token; \
                   jobs run on this machine, so its loopback is open to them\n";
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Basic realm=\"gitea-dynamic-runner\"")], way_out).into_response()
}

/// The token of `Bearer …`, or the password of `Basic …`.
fn presented(authorization: &str) -> Option<Secret> {
    if let Some(token) = authorization.strip_prefix("Bearer ") {
        return Some(Secret::new(token.trim()));
    }
    let basic = base64::engine::general_purpose::STANDARD.decode(authorization.strip_prefix("Basic ")?.trim()).ok()?;
    let text = zeroize::Zeroizing::new(String::from_utf8(basic).ok()?);
    text.split_once(':').map(|(_, password)| Secret::new(password))
}

/// Serves until `stop`.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((tcp, _)) = accepted else {
            // Out of file descriptors, most likely: a moment later some are free.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let (service, stop) = (TowerToHyperService::new(router.clone()), stop.clone());
        tokio::spawn(async move {
            let mut builder = Builder::new(TokioExecutor::new());
            builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).max_buf_size(64 << 10);
            let connection = builder.serve_connection(TokioIo::new(tcp), service);
            tokio::select! {
                // How a reader's connection ends is his affair.
                _ = tokio::time::timeout(CONNECTION_LIMIT, connection) => {}
                () = stop.cancelled() => {}
            }
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use axum::body::Body;
    use tower::ServiceExt as _;

    use super::*;

    async fn status(access: Access, path: &str, headers: &[(&str, &str)]) -> u16 {
        let http = Http { reasons: Arc::new(|| vec!["because".into()]), metrics: Metrics::new(), access };
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        http.router().oneshot(request.body(Body::empty()).unwrap()).await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn only_who_shows_the_token_reads_and_only_under_a_known_name() {
        let access =
            Access { read_token: Some(Secret::new("t0ken")), trust_loopback: false, hosts: vec!["ci.example.test".into()] };
        let basic = format!("Basic {}", base64::engine::general_purpose::STANDARD.encode("me:t0ken"));
        for (path, headers, expected) in [
            ("/healthz", vec![("host", "127.0.0.1:9180")], 200),
            ("/readyz", vec![("host", "localhost:9180")], 503),
            ("/metrics", vec![("host", "localhost")], 401),
            ("/metrics", vec![("host", "localhost"), ("authorization", "Bearer t0ken")], 200),
            ("/metrics", vec![("host", "ci.example.test"), ("authorization", basic.as_str())], 200),
            ("/metrics", vec![("host", "localhost"), ("authorization", "Bearer wrong")], 401),
            ("/metrics", vec![("host", "evil.example.test"), ("authorization", "Bearer t0ken")], 421),
            ("/nothing", vec![("host", "localhost")], 404),
        ] {
            assert_eq!(status(access.clone(), path, &headers).await, expected, "{path} {headers:?}");
        }
        let none = Access { read_token: None, trust_loopback: false, hosts: vec![] };
        assert_eq!(status(none, "/metrics", &[("host", "localhost")]).await, 401);
    }
}
