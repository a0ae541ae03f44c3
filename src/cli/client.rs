//! Asks the running controller, over its HTTP: where it listens and which token is shown follow from the controller's own settings.
//!
//! Every call has a limit, and every error says what to do. What the answers mean is for the commands.

use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client as Pool, rt::TokioExecutor};
use serde::de::DeserializeOwned;

use crate::{
    config::{Faults, Reader, process_environment},
    gitea::connect::{Connector, Proxies},
    printable::printable,
    secret::Secret,
};

/// To connect, and to be answered.
const LIMIT: Duration = Duration::from_secs(10);
const ANSWER_BYTES: usize = 16 << 20;

/// Where the controller is.
#[derive(Args)]
pub(super) struct At {
    /// Where the controller answers; else HTTP_LISTEN says it.
    #[arg(long, global = true, value_name = "URL")]
    url: Option<String>,
}

impl At {
    pub(super) fn is_given(&self) -> bool {
        self.url.is_some()
    }
}

/// What a call is for, and so whose token is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Reading,
    Draining,
}

/// Why there is no answer; each says the way out.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Settings(#[from] Faults),
    /// It may be starting just now.
    #[error("no controller answers at {url} ({why}): is it running? HTTP_LISTEN or --url says where it listens")]
    Away { url: String, why: String },
    /// It answered, and will not.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Missing(String),
}

pub(super) struct Client {
    base: String,
    pool: Pool<Connector, Empty<Bytes>>,
    /// The variable that names its file, and the token.
    token: Option<(&'static str, Secret)>,
    what: For,
}

impl Client {
    pub(super) fn new(at: &At, what: For) -> Result<Self, Fault> {
        let mut read = Reader::new(process_environment());
        let base = match &at.url {
            Some(url) => url.trim_end_matches('/').to_owned(),
            None => {
                let mut listens = read.address("HTTP_LISTEN", "127.0.0.1:9180");
                if listens.ip().is_unspecified() {
                    let loopback = if listens.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() };
                    listens.set_ip(loopback);
                }
                format!("http://{listens}")
            }
        };
        let uri = base.parse::<Uri>().ok().filter(|uri| uri.host().is_some() && uri.scheme().is_some());
        if uri.is_none() {
            read.fault(format!("--url {base}: an address as http://127.0.0.1:9180"));
        }
        let names = match what {
            // The admin's token may read, too.
            For::Reading => ["READ_TOKEN_FILE", "ADMIN_TOKEN_FILE"].as_slice(),
            For::Draining => ["ADMIN_TOKEN_FILE"].as_slice(),
        };
        let set = names.iter().find(|name| read.optional(name).is_some());
        let token = set.and_then(|name| Some((*name, read.secret_file(name)?)));
        let uri = read.finish(uri)?.unwrap_or_default();
        let tls = crate::gitea::tls::towards_gitea(&base, None).map_err(|e| Fault::Refused(e.to_string()))?;
        // It is near, or behind a proxy of its own: never by way of Gitea's.
        let (connector, _) = Connector::new(&uri, &tls, &Proxies::none());
        Ok(Self { base, pool: Pool::builder(TokioExecutor::new()).build(connector), token, what })
    }

    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// The JSON of a call that must succeed; `patience` beyond the usual limit, for one that waits on purpose.
    pub(super) async fn call<T: DeserializeOwned>(&self, method: Method, path: &str, patience: Duration) -> Result<T, Fault> {
        let (status, body) = self.ask(method, path, patience).await?;
        if !status.is_success() {
            return Err(self.refused(status, &body));
        }
        serde_json::from_slice(&body)
            .map_err(|e| Fault::Refused(format!("what answers at {} is no controller of this version: {e}", self.base)))
    }

    async fn ask(&self, method: Method, path: &str, patience: Duration) -> Result<(StatusCode, Bytes), Fault> {
        let away = |why: String| Fault::Away { url: self.base.clone(), why: printable(&why) };
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some((_, token)) = &self.token {
            let mut shown = header::HeaderValue::from_str(&format!("Bearer {}", token.expose()))
                .map_err(|_| Fault::Refused("the token has characters that no header may have: make another".into()))?;
            shown.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, shown);
        }
        let request = request.body(Empty::new()).map_err(|e| away(e.to_string()))?;
        let asked = async {
            let answer = self.pool.request(request).await.map_err(|e| away(root_cause(&e)))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_BYTES).collect().await.map_err(|e| away(e.to_string()))?;
            Ok((status, body.to_bytes()))
        };
        tokio::time::timeout(LIMIT + patience, asked).await.map_err(|_| away("no answer in time".into()))?
    }

    fn refused(&self, status: StatusCode, body: &[u8]) -> Fault {
        let text = String::from_utf8_lossy(&body[..body.len().min(600)]);
        let said = text.lines().map(|line| printable(line.trim())).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
        let file = if self.what == For::Reading { "READ_TOKEN_FILE" } else { "ADMIN_TOKEN_FILE" };
        match (status, &self.token) {
            (StatusCode::UNAUTHORIZED, None) => {
                Fault::Refused(format!("{} wants a token: set {file} as the controller has it", self.base))
            }
            (StatusCode::UNAUTHORIZED, Some((shown, _))) => Fault::Refused(format!(
                "{} does not take the token of {shown}: set {file} to the file that the controller has (it reads it at its start)",
                self.base
            )),
            (StatusCode::NOT_FOUND, _) => Fault::Missing(said),
            _ => Fault::Refused(format!("{} answers {status}: {said}", self.base)),
        }
    }
}

/// The innermost is what a person understands: "connection refused".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
