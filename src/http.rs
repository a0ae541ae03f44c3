//! The operator's HTTP: `/healthz`, `/readyz`, `/metrics`, the dashboard and `/api/v1`. Environments speak to the facade, never to this.
//!
//! Here are the routes; who may ask for them is `access`'s, how connections are taken `serve`'s. What is shown is put together by
//! `view`, for people in `pages` and `live`, for programs in `api`.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::get,
};

pub use self::{
    access::Access,
    api::{Api, document},
    serve::serve,
};
use crate::metrics::Metrics;

mod access;
mod api;
mod live;
mod pages;
mod serve;
pub mod view;

/// Why the process is not ready, anew at each call; empty if it is.
pub type Reasons = Arc<dyn Fn() -> Vec<String> + Send + Sync>;

#[derive(Clone)]
pub struct Http {
    pub reasons: Reasons,
    pub metrics: Metrics,
    pub access: Access,
    pub api: Api,
}

impl Http {
    pub fn router(self) -> Router {
        // Whoever may read sees these.
        let readable = Router::new()
            .route("/metrics", get(metrics))
            .with_state(self.clone())
            .merge(pages::router(self.api.source.clone()))
            .merge(live::router(self.api.source.clone()))
            .merge(self.api.clone().router())
            .route_layer(from_fn_with_state(self.access.clone(), access::may_read));
        let open =
            Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(ready)).with_state(self.clone());
        open.merge(readable).layer(from_fn_with_state(self.access, access::right_host))
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use axum::{body::Body, extract::Request};
    use base64::Engine as _;
    use tower::ServiceExt as _;

    use super::*;
    use crate::secret::Secret;

    fn closed(hosts: Vec<String>) -> Access {
        Access { read_token: None, admin_token: None, trust_loopback: false, hosts }
    }

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
        let access = Access { read_token: Some(Secret::new("t0ken")), ..closed(vec!["ci.example.test".into()]) };
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
        assert_eq!(status(closed(vec![]), "/metrics", &[("host", "localhost")]).await, 401);
    }
}
