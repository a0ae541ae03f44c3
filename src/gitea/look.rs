//! Plain questions to Gitea's web side (GET only): what `doctor` asks before and beside the runner protocol.
//!
//! They go the same way as everything else towards Gitea (proxy, CA). What an answer means is the caller's.

use std::{
    error::Error as _,
    path::Path,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};

use super::{
    ClientFault,
    connect::{Connector, Proxies},
    tls,
};
use crate::secret::Secret;

const LIMIT: Duration = Duration::from_secs(10);
const MAX_BYTES: usize = 4 << 20;

/// An answer, with the times between which it was made.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    /// The header `Date`, as it came.
    pub date: Option<String>,
    pub location: Option<String>,
    pub body: Bytes,
    pub asked: SystemTime,
    pub answered: SystemTime,
}

/// A way to one origin.
pub struct Web {
    client: Client<Connector, Empty<Bytes>>,
    proxy_authorization: Option<HeaderValue>,
}

impl Web {
    /// For addresses that begin as `url`.
    pub fn towards(proxies: &Proxies, url: &str, ca_file: Option<&Path>) -> Result<Self, ClientFault> {
        let origin: Uri = url.parse().map_err(|e| ClientFault(format!("{url:?} is no URL: {e}")))?;
        let tls = tls::towards_gitea(url, ca_file)?;
        let (connector, proxy_authorization) = Connector::new(&origin, &tls, proxies);
        Ok(Self { client: Client::builder(TokioExecutor::new()).build(connector), proxy_authorization })
    }

    /// # Errors
    /// Every cause of it, in the words of who found it.
    pub async fn get(&self, url: &str, token: Option<&Secret>) -> Result<Answer, String> {
        let mut request = Request::get(url).header(header::ACCEPT, "application/json");
        if let Some(authorization) = &self.proxy_authorization {
            request = request.header(header::PROXY_AUTHORIZATION, authorization);
        }
        if let Some(token) = token {
            let mut value = HeaderValue::from_str(&format!("token {}", token.expose()))
                .map_err(|_| "the token holds characters that no HTTP header may hold".to_owned())?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        let request = request.body(Empty::new()).map_err(|e| e.to_string())?;
        let asked = SystemTime::now();
        let ask = async {
            let answer = self.client.request(request).await.map_err(|e| words(&e))?;
            let answered = SystemTime::now();
            let text = |name| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
            let (status, date, location) = (answer.status(), text(header::DATE), text(header::LOCATION));
            let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await.map_err(|e| e.to_string())?.to_bytes();
            Ok(Answer { status, date, location, body, asked, answered })
        };
        tokio::time::timeout(LIMIT, ask).await.unwrap_or_else(|_| Err(format!("no answer within {} s", LIMIT.as_secs())))
    }
}

/// An error with what caused it; each cause once.
fn words(error: &hyper_util::client::legacy::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
