//! The operator's HTTP: `/healthz`, `/readyz`, `/metrics`, the dashboard and `/api/v1`. Environments speak to the facade, never to this.
//!
//! Here are the routes; who may ask for them is `access`'s, how connections are taken `serve`'s. What is shown is put together by
//! `view`, for people in `pages` and `live`, for programs in `api`.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    middleware::{from_fn_with_state, map_response_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};

pub use self::{
    access::Access,
    api::{Api, document},
    drain::{Draining, Progress},
    serve::serve,
};
use crate::metrics::Metrics;

mod access;
mod api;
mod drain;
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
    pub draining: Draining,
}

impl Http {
    pub fn router(self) -> Router {
        // Whoever may read sees these.
        let readable = Router::new()
            .route("/metrics", get(metrics))
            .route("/api/v1/drain", get(drain::show))
            .with_state(self.clone())
            .merge(pages::router(self.api.source.clone()))
            .merge(live::router(self.api.source.clone()))
            .merge(self.api.clone().router())
            .route_layer(from_fn_with_state(self.access.clone(), access::may_read));
        let draining = Router::new()
            .route("/api/v1/drain", post(drain::begin).delete(drain::undo))
            .with_state(self.clone())
            .route_layer(from_fn_with_state(self.access.clone(), access::may_drain));
        let open =
            Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(ready)).with_state(self.clone());
        open.merge(readable)
            .merge(draining)
            .layer(from_fn_with_state(self.access, access::at_home))
            .layer(map_response_with_state(self.metrics, access::told))
    }
}

async fn ready(State(http): State<Http>) -> Response {
    let reasons = (http.reasons)();
    if !reasons.is_empty() {
        return (StatusCode::SERVICE_UNAVAILABLE, format!("not ready\n{}\n", reasons.join("\n"))).into_response();
    }
    match http.draining.since() {
        // A wanted state is no fault.
        Some(since) => format!("ready\ndraining since {since}: nothing new is fetched or started\n").into_response(),
        None => "ready\n".into_response(),
    }
}

async fn metrics(State(http): State<Http>) -> Response {
    let _ = http.metrics.drain_state.set(http.draining.state());
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

    async fn answer(access: Access, method: &str, path: &str, headers: &[(&str, &str)]) -> Response {
        let folder = tempfile::tempdir().unwrap();
        let drain = crate::drain::Drain::open(folder.path()).unwrap();
        let queue = crate::queue::embedded::EmbeddedQueue::open(&folder.path().join("queue.redb")).unwrap();
        let claims = crate::claims::Claims::new(crate::claims::CapabilityKey::random());
        let (queue, metrics, instance) = (Arc::new(queue), Metrics::new(), crate::ids::InstanceId::of_uuid("x"));
        let mirror = folder.path().join("mirror.redb");
        let source = view::Source {
            mirror: crate::mirror::Mirror::open(&mirror, instance.clone(), metrics.clone()).unwrap(),
            claims: claims.clone(),
            board: Default::default(),
            operation: Arc::new(view::Operation::default),
            capacity: Default::default(),
            about: view::About {
                version: "v",
                instance,
                gitea_url: "http://gitea.test".into(),
                kinds: Default::default(),
                vm_label: "vm".into(),
                unisolated: false,
            },
        };
        let draining = Draining::new(drain, claims, queue.clone(), Arc::new(|| Some(Default::default())));
        let api = Api { source, queue };
        let http = Http { reasons: Arc::new(|| vec!["because".into()]), metrics, access, api, draining };
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        http.router().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    async fn status(access: Access, path: &str, headers: &[(&str, &str)]) -> u16 {
        answer(access, "GET", path, headers).await.status().as_u16()
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

    #[tokio::test]
    async fn only_who_shows_the_admins_token_drains_and_no_page_of_another_site_makes_him() {
        let tokens =
            || Access { read_token: Some(Secret::new("reader")), admin_token: Some(Secret::new("admin")), ..closed(vec![]) };
        let (admin, reader) = (("authorization", "Bearer admin"), ("authorization", "Bearer reader"));
        let host = ("host", "localhost:9180");
        for (access, method, headers, expected) in [
            (tokens(), "POST", vec![host, admin], 200),
            (tokens(), "DELETE", vec![host, admin], 200),
            (tokens(), "GET", vec![host, admin], 200),
            (tokens(), "GET", vec![host, reader], 200),
            (tokens(), "GET", vec![host], 401),
            (tokens(), "POST", vec![host], 401),
            (tokens(), "POST", vec![host, reader], 403),
            (tokens(), "DELETE", vec![host, reader], 403),
            (tokens(), "PUT", vec![host, admin], 405),
            (tokens(), "POST", vec![host, admin, ("origin", "http://localhost:9180")], 200),
            (tokens(), "POST", vec![host, admin, ("origin", "http://evil.test")], 403),
            (tokens(), "POST", vec![host, admin, ("origin", "null")], 403),
            (tokens(), "POST", vec![host, admin, ("sec-fetch-site", "cross-site")], 403),
            (tokens(), "POST", vec![("host", "evil.test"), admin], 421),
            (tokens(), "POST", vec![admin], 400),
            (tokens(), "POST", vec![host, host, admin], 400),
            (Access { read_token: Some(Secret::new("reader")), ..closed(vec![]) }, "POST", vec![host, reader], 403),
            (Access { trust_loopback: true, ..closed(vec![]) }, "POST", vec![host], 403),
            (Access { trust_loopback: true, ..closed(vec![]) }, "GET", vec![host], 200),
        ] {
            let answer = answer(access, method, "/api/v1/drain", &headers).await;
            assert_eq!(answer.status().as_u16(), expected, "{method} {headers:?}");
            assert!(!answer.headers().keys().any(|name| name.as_str().starts_with("access-control")));
            assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
            assert!(answer.headers()["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
        }
        for (wait, expected) in [("0", 200), ("300", 200), ("301", 400), ("-1", 400), ("1.5", 400), ("", 400), ("1&wait=2", 400)]
        {
            let path = format!("/api/v1/drain?wait={wait}");
            assert_eq!(answer(tokens(), "GET", &path, &[host, reader]).await.status().as_u16(), expected, "{wait}");
        }
    }
}
