//! A reverse proxy with TLS before a server, as people put one before Gitea: a private authority's certificate, and a sub-path.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::body::{Bytes, Incoming};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_rustls::TlsAcceptor;

type Body = BoxBody<Bytes, hyper::Error>;

/// Ends when dropped.
pub(crate) struct Front {
    port: u16,
    prefix: &'static str,
    upstream: Arc<AtomicU16>,
    folder: PathBuf,
    task: JoinHandle<()>,
}

impl Front {
    /// What is asked below `prefix` (`/git`) goes to the upstream without it; everything else is answered 404.
    pub(crate) async fn start(folder: &Path, prefix: &'static str) -> Self {
        super::nats::certify(folder);
        let chain = CertificateDer::pem_file_iter(folder.join("server.pem")).unwrap().collect::<Result<Vec<_>, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let tls = TlsAcceptor::from(Arc::new(tls.with_no_client_auth().with_single_cert(chain, key).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let upstream = Arc::new(AtomicU16::new(0));
        let task = tokio::spawn(serve(listener, tls, prefix, Arc::clone(&upstream)));
        Self { port, prefix, upstream, folder: folder.to_owned(), task }
    }

    pub(crate) fn url(&self) -> String {
        format!("https://127.0.0.1:{}{}", self.port, self.prefix)
    }

    pub(crate) fn ca_file(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    pub(crate) fn lead_to(&self, port: u16) {
        self.upstream.store(port, Ordering::Relaxed);
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, tls: TlsAcceptor, prefix: &'static str, upstream: Arc<AtomicU16>) {
    let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build_http();
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        let (tls, client, upstream) = (tls.clone(), client.clone(), Arc::clone(&upstream));
        connections.spawn(async move {
            // Whoever does not trust us hangs up.
            let Ok(stream) = tls.accept(tcp).await else { return };
            let service = hyper::service::service_fn(move |request| {
                pass(client.clone(), request, prefix, upstream.load(Ordering::Relaxed))
            });
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
        });
    }
}

async fn pass(
    client: Client<hyper_util::client::legacy::connect::HttpConnector, Incoming>,
    mut request: Request<Incoming>,
    prefix: &str,
    upstream: u16,
) -> Result<Response<Body>, std::convert::Infallible> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let Some(rest) = path.strip_prefix(prefix).filter(|rest| rest.starts_with('/')) else {
        return Ok(answer(StatusCode::NOT_FOUND));
    };
    *request.uri_mut() = format!("http://127.0.0.1:{upstream}{rest}").parse().unwrap();
    // Without it Gitea takes the scheme that the proxy speaks for the one that people see.
    request.headers_mut().insert("x-forwarded-proto", http::HeaderValue::from_static("https"));
    match client.request(request).await {
        Ok(answer) => Ok(answer.map(|body| body.boxed())),
        Err(_) => Ok(answer(StatusCode::BAD_GATEWAY)),
    }
}

fn answer(status: StatusCode) -> Response<Body> {
    Response::builder().status(status).body(Full::from("not here").map_err(|never| match never {}).boxed()).unwrap()
}
