//! Connections towards Gitea: direct, or through the proxy that `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` name.
//!
//! The controller's client and the environment's bridge both use it. There is one destination for the life of a connector, so the
//! way is chosen once. TLS is `gitea::tls`'s; what is sent is the callers'.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::{
    legacy::connect::{Connected, Connection, HttpConnector, proxy::Tunnel},
    proxy::matcher::Matcher,
};
use tower::Service;

use crate::names::env;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Https = HttpsConnector<HttpConnector>;

/// How long TCP may take; TLS and the proxy's answer come on top, bounded by [`HANDSHAKE_LIMIT`].
const TCP_LIMIT: Duration = Duration::from_secs(10);
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

/// Which proxies the environment's variables name, and for whom.
#[derive(Clone)]
pub struct Proxies(Arc<Matcher>);

impl Proxies {
    /// `variable` looks a variable up; the upper-case spelling goes first.
    pub fn read(variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let first = |names: &[&str]| names.iter().find_map(|name| variable(name)).unwrap_or_default();
        let matcher = Matcher::builder().http(first(&env::HTTP_PROXY)).https(first(&env::HTTPS_PROXY)).no(first(&env::NO_PROXY));
        Self(Arc::new(matcher.build()))
    }

    /// Always direct.
    pub fn none() -> Self {
        Self::read(&|_| None)
    }
}

#[derive(Clone)]
pub struct Connector(Way);

#[derive(Clone)]
enum Way {
    Direct(Https),
    /// CONNECT through the proxy, then TLS with Gitea.
    Tunnel(HttpsConnector<Tunnel<Https>>),
    /// The proxy gets the request in absolute form.
    Forward {
        proxy: Uri,
        connector: Https,
    },
}

impl Connector {
    /// Also answers the `Proxy-Authorization` that each request needs (absolute form only).
    pub fn new(gitea: &Uri, tls: &rustls::ClientConfig, proxies: &Proxies) -> (Self, Option<HeaderValue>) {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(TCP_LIMIT));
        let direct = with_tls(tls, tcp);
        let Some(proxy) = proxies.0.intercept(gitea) else {
            return (Self(Way::Direct(direct)), None);
        };
        let auth = proxy.basic_auth().cloned();
        if gitea.scheme_str() == Some("https") {
            let tunnel = Tunnel::new(proxy.uri().clone(), direct);
            let tunnel = if let Some(auth) = auth { tunnel.with_auth(auth) } else { tunnel };
            (Self(Way::Tunnel(with_tls(tls, tunnel))), None)
        } else {
            (Self(Way::Forward { proxy: proxy.uri().clone(), connector: direct }), auth)
        }
    }
}

fn with_tls<C>(tls: &rustls::ClientConfig, connector: C) -> HttpsConnector<C> {
    HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_or_http().enable_http1().wrap_connector(connector)
}

impl Service<Uri> for Connector {
    type Response = Link;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Link, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        // All inner connectors are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, gitea: Uri) -> Self::Future {
        let way = self.0.clone();
        Box::pin(async move {
            let connect = async {
                Ok(match way {
                    Way::Direct(mut connector) => Link { io: Box::new(connector.call(gitea).await?), absolute_form: false },
                    Way::Tunnel(mut connector) => Link { io: Box::new(connector.call(gitea).await?), absolute_form: false },
                    Way::Forward { proxy, mut connector } => {
                        Link { io: Box::new(connector.call(proxy).await?), absolute_form: true }
                    }
                })
            };
            tokio::time::timeout(TCP_LIMIT + HANDSHAKE_LIMIT, connect).await?
        })
    }
}

/// A connection, whichever way it went.
pub struct Link {
    io: Box<dyn Io>,
    absolute_form: bool,
}

trait Io: Read + Write + Connection + Send + Unpin {}
impl<T: Read + Write + Connection + Send + Unpin> Io for T {}

impl Connection for Link {
    fn connected(&self) -> Connected {
        self.io.connected().proxy(self.absolute_form)
    }
}

impl Read for Link {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl Write for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_choose_the_way() {
        let proxied = |url: &'static str, pairs: &'static [(&str, &str)]| {
            let proxies =
                Proxies::read(&|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()));
            proxies.0.intercept(&Uri::from_static(url)).map(|proxy| proxy.uri().to_string())
        };
        let both =
            &[("HTTP_PROXY", "http://plain.test:1"), ("https_proxy", "http://tls.test:2"), ("NO_PROXY", "near.test,127.0.0.0/8")];
        assert_eq!(proxied("http://git.test/", both).as_deref(), Some("http://plain.test:1/"));
        assert_eq!(proxied("https://git.test/", both).as_deref(), Some("http://tls.test:2/"));
        assert_eq!(proxied("https://git.near.test/", both), None);
        assert_eq!(proxied("http://127.0.0.1:3000/", both), None);
        assert_eq!(proxied("http://git.test/", &[("HTTP_PROXY", "")]), None);
    }
}
