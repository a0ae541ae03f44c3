//! Everything that is no RPC goes to Gitea as it came, and comes back as it came: git, LFS, REST, artifacts, packages.
//!
//! The destination is fixed: Gitea's origin and path prefix. Bodies stream in both directions, upgrades are tunnelled, no
//! credential is added and no redirect followed. Which requests may come here at all is decided in `path`.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header, uri::PathAndQuery};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::gitea::{
    ClientFault,
    connect::{Connector, Proxies},
};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// What the bridge answers with.
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Until Gitea's answer begins. It counts from the request's first byte, and a large push takes its time.
const ANSWER_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Meant for one connection only (RFC 9110 §7.6.1), and what clients wrongly send besides.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHORIZATION,
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

pub(super) struct Proxy {
    client: Client<Connector, Incoming>,
    gitea: Origin,
    /// Where Gitea says that it is (its ROOT_URL), if that is another place than the one it is reached at.
    announced: Option<Origin>,
    bridge: String,
    proxy_authorization: Option<HeaderValue>,
    tunnels: TaskTracker,
    closing: CancellationToken,
}

/// Scheme and host of a URL, and its path without the last slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    uri: Uri,
    prefix: String,
}

impl Origin {
    /// `None` if `url` is no http or https URL with a host.
    pub(super) fn new(url: &str) -> Option<Self> {
        let uri: Uri = url.trim().parse().ok()?;
        let known = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        known.then(|| Self { prefix: uri.path().trim_end_matches('/').to_owned(), uri })
    }

    fn port(&self) -> u16 {
        self.uri.port_u16().unwrap_or(if self.uri.scheme_str() == Some("https") { 443 } else { 80 })
    }

    /// Whether both are the same place, written one way or another.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.uri.scheme() == other.uri.scheme() && self.same_host(other) && self.prefix == other.prefix
    }

    fn same_host(&self, other: &Self) -> bool {
        let host = |origin: &Self| origin.uri.host().map(str::to_ascii_lowercase);
        host(self) == host(other) && self.port() == other.port()
    }

    /// The part of `path` below the prefix.
    fn below<'a>(&self, path: &'a str) -> Option<&'a str> {
        path.strip_prefix(&self.prefix).filter(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#']))
    }
}

impl Proxy {
    /// `gitea` is `GITEA_URL`, `announced` the task's `server_url`, `bridge` our own address without a last slash.
    pub(super) fn new(
        gitea: &str,
        announced: Option<Origin>,
        bridge: &str,
        tls: &rustls::ClientConfig,
        proxies: &Proxies,
        closing: CancellationToken,
    ) -> Result<Self, ClientFault> {
        let origin =
            Origin::new(gitea).ok_or_else(|| ClientFault(format!("GITEA_URL {gitea:?} is no http:// or https:// URL")))?;
        let (connector, proxy_authorization) = Connector::new(&origin.uri, tls, proxies);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_max_idle_per_host(16)
            .build(connector);
        let tunnels = TaskTracker::new();
        Ok(Self { client, gitea: origin, announced, bridge: bridge.to_owned(), proxy_authorization, tunnels, closing })
    }

    pub(super) async fn forward(&self, mut request: Request<Incoming>) -> Response<Body> {
        let upgrade = request.headers().get(header::UPGRADE).cloned().filter(|_| asks_upgrade(request.headers()));
        let client_side = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        let Some(target) = self.target(request.uri()) else {
            return plain(StatusCode::BAD_REQUEST, "the target is no path");
        };
        *request.uri_mut() = target;
        *request.version_mut() = Version::HTTP_11;
        self.clean_request(request.headers_mut(), upgrade);
        let mut answer = match tokio::time::timeout(ANSWER_LIMIT, self.client.request(request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                let reason = causes(&error);
                tracing::info!(%reason, "Gitea did not answer a request of the job");
                return plain(StatusCode::BAD_GATEWAY, &format!("Gitea did not answer: {reason}"));
            }
            Err(_) => return plain(StatusCode::GATEWAY_TIMEOUT, "Gitea did not answer in time"),
        };
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(client_side) = client_side else {
                return plain(StatusCode::BAD_GATEWAY, "Gitea switched protocols without being asked");
            };
            let upgraded = answer.headers().get(header::UPGRADE).cloned();
            self.tunnel(client_side, hyper::upgrade::on(&mut answer));
            self.clean_answer(answer.headers_mut(), upgraded);
        } else {
            self.clean_answer(answer.headers_mut(), None);
        }
        answer.map(|body| body.map_err(BoxError::from).boxed_unsync())
    }

    /// The raw path and query, below Gitea's own prefix.
    fn target(&self, asked: &Uri) -> Option<Uri> {
        let path = asked.path_and_query().map_or("/", PathAndQuery::as_str);
        let mut parts = self.gitea.uri.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::try_from(format!("{}{path}", self.gitea.prefix)).ok()?);
        Uri::from_parts(parts).ok()
    }

    fn clean_request(&self, headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
        strip_hop_by_hop(headers);
        // The client writes Gitea's own name; hyper has answered `Expect` itself; the bridge's token is for nobody else.
        for name in ["host", "expect", "x-runner-token", "x-runner-uuid"] {
            headers.remove(name);
        }
        put_upgrade(headers, upgrade);
        if let Some(authorization) = &self.proxy_authorization {
            headers.insert(header::PROXY_AUTHORIZATION, authorization.clone());
        }
    }

    fn clean_answer(&self, headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
        strip_hop_by_hop(headers);
        put_upgrade(headers, upgrade);
        for name in [header::LOCATION, header::CONTENT_LOCATION] {
            let mapped = headers.get(&name).and_then(|value| value.to_str().ok()).and_then(|value| self.through_bridge(value));
            if let Some(mapped) = mapped.and_then(|value| HeaderValue::from_str(&value).ok()) {
                headers.insert(name, mapped);
            }
        }
    }

    /// A place at Gitea, as it is reached through the bridge; `None` for every other place.
    fn through_bridge(&self, location: &str) -> Option<String> {
        if location.starts_with('/') && !location.starts_with("//") {
            // Gitea writes its prefix into its paths, and the bridge adds it again.
            return Some(self.gitea.below(location)?.to_owned()).filter(|path| path.starts_with('/'));
        }
        let asked = Origin::new(location)?;
        let path_and_on = location.splitn(4, '/').nth(3).map_or_else(String::new, |rest| format!("/{rest}"));
        [Some(&self.gitea), self.announced.as_ref()]
            .into_iter()
            .flatten()
            .find(|origin| origin.same_host(&asked))
            .and_then(|origin| origin.below(&path_and_on))
            .map(|rest| format!("{}{rest}", self.bridge))
    }

    fn tunnel(&self, client: hyper::upgrade::OnUpgrade, gitea: hyper::upgrade::OnUpgrade) {
        let closing = self.closing.clone();
        self.tunnels.spawn(closing.run_until_cancelled_owned(async move {
            // Our own answer must be out before the client's side is ready; both become ready or neither.
            if let Ok((client, gitea)) = tokio::try_join!(client, gitea) {
                let (mut client, mut gitea) = (TokioIo::new(client), TokioIo::new(gitea));
                if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut gitea).await {
                    tracing::debug!(%error, "a tunnel ended");
                }
            }
        }));
    }

    /// Waits until no tunnel is left; `closing` must be cancelled before.
    pub(super) async fn closed(&self) {
        self.tunnels.close();
        self.tunnels.wait().await;
    }
}

/// A short answer of the bridge's own.
pub(super) fn plain(status: StatusCode, text: &str) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("{text}\n"))).map_err(|never| match never {}).boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

fn asks_upgrade(headers: &HeaderMap) -> bool {
    connection_names(headers).any(|name| name.eq_ignore_ascii_case("upgrade"))
}

fn connection_names(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok()).flat_map(|v| v.split(',')).map(str::trim)
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_names(headers).filter_map(|name| name.parse().ok()).collect();
    // Length and host belong to the message whatever `Connection` says.
    for name in named.iter().filter(|name| **name != header::CONTENT_LENGTH && **name != header::HOST).chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn put_upgrade(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
}

/// An error and what caused it, for people.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text.chars().take(300).collect()
}
