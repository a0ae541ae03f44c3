//! A small HTTP client for Gitea's REST API and its web forms: JSON in, JSON out, every call with a limit.
//!
//! It panics where the answer is not the expected one, and says what came instead.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use base64::Engine as _;
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub(crate) struct Rest {
    client: Client<HttpConnector, Full<Bytes>>,
    origin: String,
    authorization: Option<String>,
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) cookies: Vec<String>,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Rest {
    pub(crate) fn anonymous(origin: &str) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), origin: origin.to_owned(), authorization: None }
    }

    pub(crate) fn with_token(&self, token: &str) -> Self {
        Self { authorization: Some(format!("token {token}")), ..self.clone() }
    }

    pub(crate) fn with_password(&self, user: &str, password: &str) -> Self {
        let pair = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
        Self { authorization: Some(format!("Basic {pair}")), ..self.clone() }
    }

    /// The answer, whatever it is; an error if there is none.
    pub(crate) async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Bytes) -> anyhow::Result<Answer> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.origin));
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body))?;
        tokio::time::timeout(LIMIT, async {
            let answer = self.client.request(request).await?;
            let status = answer.status();
            let cookies = answer.headers().get_all(header::SET_COOKIE).iter().filter_map(|c| c.to_str().ok());
            let cookies = cookies.filter_map(|c| c.split(';').next()).map(str::to_owned).collect();
            Ok(Answer { status, cookies, body: answer.into_body().collect().await?.to_bytes() })
        })
        .await?
    }

    /// A call of the REST API that must succeed; the answer's JSON (null if it has none).
    pub(crate) async fn api(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let answer = self.send(method.clone(), &format!("/api/v1{path}"), &[("content-type", "application/json")], bytes).await;
        let answer = answer.unwrap_or_else(|error| panic!("{method} {path}: {error:#}"));
        assert!(answer.status.is_success(), "{method} {path}: {} {}", answer.status, answer.text());
        serde_json::from_slice(&answer.body).unwrap_or_default()
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        self.api(Method::GET, path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Value {
        self.api(Method::POST, path, Some(body)).await
    }
}
