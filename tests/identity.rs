//! Identity against real parts: the embedded authority, the Workload API over Unix sockets, and TLS handshakes over loopback.
//!
//! Certificates that no honest authority issues are forged here with the authority's own key, so that each refusal is of one property.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use axum::{Extension, Router, routing::get};
use bytes::Bytes;
use gitea_dynamic_runner::identity::{
    Identity, IdentityError, PeerId, ServeLimits,
    authority::{Authority, Lifetimes, SocketState, refuse_beside},
    serve,
};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, IsCa, KeyUsagePurpose, SanType};
use rustls::pki_types::ServerName;
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use self::forger::{Forger, trusting, uri};

#[path = "support/forger.rs"]
mod forger;

const TD: &str = "test.example";
const FACADE: &str = "spiffe://test.example/runner-facade";
const JOB: &str = "spiffe://test.example/ci/owner/repo/build";
const OTHER_JOB: &str = "spiffe://test.example/ci-pr/owner/repo/build";
const PATIENCE: Duration = Duration::from_secs(30);

// ---- The parts ------------------------------------------------------------------------------------------------------

/// A controller's node: an authority and a folder for its sockets.
struct Node {
    dir: tempfile::TempDir,
    authority: Authority,
}

impl Node {
    fn new() -> Self {
        Self::with(TD, Lifetimes::default())
    }

    fn with(trust_domain: &str, lifetimes: Lifetimes) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open_with(&dir.path().join("ca"), trust_domain, lifetimes).unwrap();
        Self { dir, authority }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn identity(&self, name: &str, id: &str) -> Identity {
        self.authority.ensure_socket(&self.socket(name), id, None).await.unwrap();
        connect(&self.socket(name), id, PATIENCE).await.unwrap()
    }

    /// Ends the authority, and sees that neither a socket nor a task is left.
    async fn end(self) {
        self.authority.shutdown().await;
        let left: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["ca"], "only the CA stays");
        assert_eq!(self.authority.sockets().await, 0);
        drop(self);
        nothing_runs().await;
    }
}

async fn nothing_runs() {
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    eventually("all tasks have ended", async || tasks() == 0).await;
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

async fn connect(socket: &Path, id: &str, limit: Duration) -> Result<Identity, IdentityError> {
    Identity::connect(&format!("unix://{}", socket.display()), TD, id, limit).await
}

fn limits() -> ServeLimits {
    ServeLimits {
        connections: 64,
        connections_per_peer: 32,
        handshake: Duration::from_secs(10),
        max_age: Duration::from_secs(3600),
    }
}

/// A server behind [`serve`], as the facade is one.
struct Server {
    addr: SocketAddr,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(identity: &Identity, limits: ServeLimits) -> Self {
        let router = Router::new()
            .route("/who", get(|Extension(peer): Extension<PeerId>| async move { peer.id }))
            .route(
                "/close",
                get(|Extension(peer): Extension<PeerId>| async move {
                    peer.connection.cancel();
                    "closing"
                }),
            )
            .route("/hang", get(std::future::pending::<&'static str>));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let task = tokio::spawn(serve(listener, identity.server_config(), router, limits, stop.clone()));
        Self { addr, stop, task }
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(Duration::from_secs(8), self.task).await.expect("serve returns in time").unwrap();
    }
}

type Sender = hyper::client::conn::http1::SendRequest<Empty<Bytes>>;

async fn dial(config: Arc<rustls::ClientConfig>, addr: SocketAddr) -> anyhow::Result<Sender> {
    let connected = async {
        let tcp = TcpStream::connect(addr).await?;
        let name = ServerName::try_from("127.0.0.1")?;
        let tls = tokio_rustls::TlsConnector::from(config).connect(name, tcp).await.context("handshake")?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls)).await?;
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    };
    timeout(PATIENCE, connected).await?
}

async fn ask(sender: &mut Sender, path: &str) -> anyhow::Result<String> {
    let answered = async {
        sender.ready().await?;
        let request = hyper::Request::get(path).header("host", "facade").body(Empty::new())?;
        let body = sender.send_request(request).await?.into_body().collect().await?;
        Ok(String::from_utf8(body.to_bytes().to_vec())?)
    };
    timeout(PATIENCE, answered).await?
}

/// One connection for one question. In TLS 1.3 a client learns of its refusal only with the first answer.
async fn once(config: Arc<rustls::ClientConfig>, addr: SocketAddr) -> anyhow::Result<String> {
    ask(&mut dial(config, addr).await?, "/who").await
}

// ---- Who gets in ----------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_job_reaches_the_facade_and_is_known_by_its_spiffe_id() {
    let node = Node::new();
    let server = Server::start(&node.identity("f", FACADE).await, limits()).await;
    let job = node.identity("j", JOB).await;
    let fork = node.identity("p", OTHER_JOB).await;
    assert_eq!(once(job.client_config(FACADE), server.addr).await.unwrap(), JOB);
    assert_eq!(once(fork.client_config(FACADE), server.addr).await.unwrap(), OTHER_JOB);

    // The same over HTTP/2, through the client that an executor uses.
    let https = hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config((*job.client_config(FACADE)).clone())
        .https_only()
        .enable_all_versions()
        .build();
    let client =
        hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new()).build::<_, Empty<Bytes>>(https);
    let answer = client.get(format!("https://{}/who", server.addr).parse().unwrap()).await.unwrap();
    assert_eq!(answer.version(), hyper::Version::HTTP_2);
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), JOB);

    drop((client, job, fork));
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_refuses_a_server_that_is_not_exactly_the_one_it_wants() {
    let node = Node::new();
    let server = Server::start(&node.identity("x", "spiffe://test.example/somebody-else").await, limits()).await;
    let job = node.identity("j", JOB).await;
    let error = format!("{:#}", once(job.client_config(FACADE), server.addr).await.unwrap_err());
    assert!(error.contains("handshake") && error.contains("not the peer that is expected"), "{error}");
    drop(job);
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_itself_is_no_job_and_the_facade_refuses_it() {
    let node = Node::new();
    let facade = node.identity("f", FACADE).await;
    let server = Server::start(&facade, limits()).await;
    once(facade.client_config(FACADE), server.addr).await.unwrap_err();
    drop(facade);
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_authorities_do_not_trust_each_other() {
    let (node, foreign) = (Node::new(), Node::new());
    let server = Server::start(&node.identity("f", FACADE).await, limits()).await;
    let job = foreign.identity("j", JOB).await;
    let error = format!("{:#}", once(job.client_config(FACADE), server.addr).await.unwrap_err());
    assert!(error.contains("UnknownIssuer") || error.contains("BadSignature"), "{error}");
    drop(job);
    server.end().await;
    node.authority.shutdown().await;
    foreign.authority.shutdown().await;
    drop((node, foreign));
    nothing_runs().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_whole_and_valid_svid_of_a_job_gets_in() {
    let node = Node::new();
    let server = Server::start(&node.identity("f", FACADE).await, limits()).await;
    let forger = Forger::with_the_key_in(&node.dir.path().join("ca"), JOB);
    // The forger's honest work passes: each refusal below has one cause.
    assert_eq!(once(forger.client(|_| {}), server.addr).await.unwrap(), JOB);

    type Change = Box<dyn FnOnce(&mut CertificateParams)>;
    let san = |names: Vec<SanType>| -> Change { Box::new(move |p| p.subject_alt_names = names) };
    let ago = |seconds| SystemTime::now() - Duration::from_secs(seconds);
    let cases: Vec<(&str, Change)> = vec![
        ("expired", Box::new(move |p| (p.not_before, p.not_after) = (ago(600).into(), ago(5).into()))),
        ("not yet valid", Box::new(|p| p.not_before = (SystemTime::now() + Duration::from_secs(300)).into())),
        ("of another trust domain", san(vec![uri("spiffe://other.example/ci/owner/repo/build")])),
        ("without a path", san(vec![uri("spiffe://test.example")])),
        ("the facade's", san(vec![uri(FACADE)])),
        ("two IDs", san(vec![uri(JOB), uri(OTHER_JOB)])),
        ("no ID", san(vec![SanType::DnsName("job.example".try_into().unwrap())])),
        ("no SPIFFE ID", san(vec![uri("https://test.example/ci/owner/repo/build")])),
        ("a CA", Box::new(|p| p.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained))),
        ("no basic constraints", Box::new(|p| p.is_ca = IsCa::NoCa)),
        ("no key usage", Box::new(|p| p.key_usages.clear())),
        ("a key that may sign certificates", Box::new(|p| p.key_usages.push(KeyUsagePurpose::KeyCertSign))),
    ];
    for (what, change) in cases {
        assert!(once(forger.client(change), server.addr).await.is_err(), "let in: {what}");
    }
    let nobody = Arc::new(trusting().with_no_client_auth());
    assert!(once(nobody, server.addr).await.is_err(), "let in: no certificate at all");

    server.end().await;
    node.end().await;
}

// ---- Limits of the accept loop --------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_capped_in_all_and_for_each_peer() {
    let node = Node::new();
    let limits = ServeLimits { connections: 3, connections_per_peer: 2, ..limits() };
    let server = Server::start(&node.identity("f", FACADE).await, limits).await;
    let job = node.identity("j", JOB).await.client_config(FACADE);
    let fork = node.identity("p", OTHER_JOB).await.client_config(FACADE);
    let mut held = Vec::new();
    for config in [&job, &job, &fork] {
        let mut connection = dial(config.clone(), server.addr).await.unwrap();
        ask(&mut connection, "/who").await.unwrap();
        held.push(connection);
        if held.len() == 2 {
            once(job.clone(), server.addr).await.expect_err("a third connection of one peer");
        }
    }
    once(fork.clone(), server.addr).await.expect_err("a fourth connection");
    held.remove(0);
    eventually("a place is free again", async || once(job.clone(), server.addr).await.is_ok()).await;
    drop((held, job, fork));
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_a_connection_closes_it_and_no_other() {
    let node = Node::new();
    let server = Server::start(&node.identity("f", FACADE).await, limits()).await;
    let job = node.identity("j", JOB).await.client_config(FACADE);
    let mut mine = dial(job.clone(), server.addr).await.unwrap();
    let mut other = dial(job, server.addr).await.unwrap();
    ask(&mut other, "/who").await.unwrap();
    // The request that does it still gets its answer.
    assert_eq!(ask(&mut mine, "/close").await.unwrap(), "closing");
    eventually("the connection is closed", async || mine.is_closed()).await;
    assert_eq!(ask(&mut other, "/who").await.unwrap(), JOB);
    drop(other);
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_handshake_is_dropped_and_disturbs_nobody() {
    let node = Node::new();
    let limits = ServeLimits { handshake: Duration::from_millis(500), ..limits() };
    let server = Server::start(&node.identity("f", FACADE).await, limits).await;
    let mut silent = TcpStream::connect(server.addr).await.unwrap();
    let start = Instant::now();
    let job = node.identity("j", JOB).await.client_config(FACADE);
    assert_eq!(once(job, server.addr).await.unwrap(), JOB);
    let read = timeout(PATIENCE, silent.read(&mut [0; 1])).await.expect("dropped in time");
    assert!(matches!(read, Ok(0) | Err(_)), "no byte is sent to it");
    assert!(start.elapsed() >= Duration::from_millis(300), "but it had its time");
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_end_with_their_age_and_a_hanging_request_cannot_hold_the_end_up() {
    let node = Node::new();
    let facade = node.identity("f", FACADE).await;
    let job = node.identity("j", JOB).await.client_config(FACADE);
    let aging = Server::start(&facade, ServeLimits { max_age: Duration::from_millis(300), ..limits() }).await;
    let mut old = dial(job.clone(), aging.addr).await.unwrap();
    ask(&mut old, "/who").await.unwrap();
    eventually("it is closed for its age", async || old.is_closed()).await;
    aging.end().await;

    let server = Server::start(&facade, limits()).await;
    let mut connection = dial(job, server.addr).await.unwrap();
    ask(&mut connection, "/who").await.unwrap();
    let hanging = tokio::spawn(async move { ask(&mut connection, "/hang").await });
    server.end().await;
    hanging.await.unwrap().unwrap_err();
    drop(facade);
    node.end().await;
}

// ---- Time passes ----------------------------------------------------------------------------------------------------

/// New connections one after another while `going` holds; how many there were. None may fail.
async fn handshakes_without_a_failure(job: &Identity, addr: SocketAddr, mut going: impl FnMut() -> bool) -> usize {
    let mut done = 0;
    while going() {
        let answer = once(job.client_config(FACADE), addr).await;
        assert_eq!(answer.with_context(|| format!("handshake {done}")).unwrap(), JOB);
        done += 1;
    }
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn svids_are_renewed_under_load_without_a_failed_handshake() {
    let node = Node::with(TD, Lifetimes { leaf: Duration::from_secs(4), ..Lifetimes::default() });
    let server = Server::start(&node.identity("f", FACADE).await, limits()).await;
    let job = node.identity("j", JOB).await;
    let (mut ends, start) = (std::collections::BTreeSet::new(), Instant::now());
    let done = handshakes_without_a_failure(&job, server.addr, || {
        ends.insert(job.not_after());
        ends.len() < 4 && start.elapsed() < PATIENCE
    });
    let done = done.await;
    assert!(ends.len() >= 4, "renewed three times: {ends:?}");
    assert!(done > 20, "under load: {done}");
    drop(job);
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ca_is_replaced_under_load_without_a_failed_handshake() {
    let life = Lifetimes { ca: Duration::from_secs(9), leaf: Duration::from_secs(4) };
    let opened = Instant::now();
    let node = Node::with(TD, life);
    let server = Server::start(&node.identity("f", FACADE).await, limits()).await;
    let job = node.identity("j", JOB).await;
    let first = node.authority.ca_not_after();
    // Published at 6 s, signing at 7.5 s, the old one gone at 9 s.
    let done = handshakes_without_a_failure(&job, server.addr, || opened.elapsed() < Duration::from_millis(10_500)).await;
    assert!(node.authority.ca_not_after() > first, "a new CA signs");
    let kept = std::fs::read_to_string(node.dir.path().join("ca/ca.pem")).unwrap();
    assert_eq!(kept.matches("BEGIN CERTIFICATE").count(), 1, "the old one is no longer trusted");
    assert!(done > 20, "under load: {done}");
    drop(job);
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_authority_breaks_no_connection_and_goes_on_issuing() {
    let mut node = Node::new();
    let facade = node.identity("f", FACADE).await;
    let server = Server::start(&facade, limits()).await;
    let job = node.identity("j", JOB).await;
    let mut connection = dial(job.client_config(FACADE), server.addr).await.unwrap();
    ask(&mut connection, "/who").await.unwrap();
    let before = job.not_after();

    node.authority.shutdown().await;
    assert_eq!(ask(&mut connection, "/who").await.unwrap(), JOB, "while there is none");
    assert_eq!(once(job.client_config(FACADE), server.addr).await.unwrap(), JOB, "while there is none");
    // A second passes, so that new certificates can be told from old ones.
    eventually("a second has passed", async || SystemTime::now() > before - Duration::from_secs(3598)).await;
    node.authority = Authority::open(&node.dir.path().join("ca"), TD).unwrap();
    for (name, id) in [("f", FACADE), ("j", JOB)] {
        node.authority.ensure_socket(&node.socket(name), id, None).await.unwrap();
    }
    eventually("the job has a new SVID", async || job.not_after() > before).await;
    assert_eq!(ask(&mut connection, "/who").await.unwrap(), JOB);
    assert_eq!(once(job.client_config(FACADE), server.addr).await.unwrap(), JOB);
    let late = node.identity("p", OTHER_JOB).await;
    assert_eq!(once(late.client_config(FACADE), server.addr).await.unwrap(), OTHER_JOB);

    drop((connection, facade, job, late));
    server.end().await;
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_authority_an_svid_works_until_its_end_and_not_longer() {
    let node = Node::with(TD, Lifetimes { leaf: Duration::from_secs(3), ..Lifetimes::default() });
    let facade = node.identity("f", FACADE).await;
    let server = Server::start(&facade, limits()).await;
    let job = node.identity("j", JOB).await;
    let mut connection = dial(job.client_config(FACADE), server.addr).await.unwrap();
    ask(&mut connection, "/who").await.unwrap();
    node.authority.close_socket(&node.socket("j")).await;
    node.authority.close_socket(&node.socket("j")).await;
    let end = job.not_after();
    if SystemTime::now() + Duration::from_millis(500) < end {
        assert_eq!(once(job.client_config(FACADE), server.addr).await.unwrap(), JOB, "the old material stays");
    }
    eventually("the SVID has ended", async || SystemTime::now() > end).await;
    assert_eq!(job.not_after(), end, "nobody renewed it");
    once(job.client_config(FACADE), server.addr).await.expect_err("it has ended");
    eventually("its connection ends with it", async || connection.is_closed()).await;
    drop((facade, job));
    server.end().await;
    node.end().await;
}

// ---- The Workload API -----------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_comes_at_once_also_when_its_socket_is_late() {
    let node = Node::new();
    node.authority.ensure_socket(&node.socket("a"), JOB, None).await.unwrap();
    let start = Instant::now();
    let first = connect(&node.socket("a"), JOB, PATIENCE).await.unwrap();
    let present = start.elapsed();

    let late = async {
        sleep(Duration::from_millis(30)).await;
        node.authority.ensure_socket(&node.socket("b"), JOB, None).await.unwrap();
    };
    let path = node.socket("b");
    let start = Instant::now();
    let (second, ()) = tokio::join!(connect(&path, JOB, PATIENCE), late);
    let late = start.elapsed();
    println!("socket present: {present:?}; 30 ms late: {late:?}");
    assert!(late < Duration::from_millis(30) + present + Duration::from_millis(150), "{late:?} against {present:?}");
    drop((first, second));
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_an_identity_ends_with_its_reason() {
    let node = Node::new();
    let limit = Duration::from_millis(400);
    let reason = async |socket: &Path, id: &str| connect(socket, id, limit).await.err().unwrap().to_string();
    let nobody = reason(&node.socket("none"), JOB).await;
    assert!(nobody.contains("nobody answers"), "{nobody}");
    node.authority.ensure_socket(&node.socket("j"), JOB, None).await.unwrap();
    let other = reason(&node.socket("j"), OTHER_JOB).await;
    assert!(other.contains("other identities only"), "{other}");
    let foreign = reason(&node.socket("j"), "spiffe://other.example/ci/o/r/j").await;
    assert!(foreign.contains("not in the trust domain"), "{foreign}");
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_workload_api_answers_as_specified() {
    let node = Node::new();
    node.authority.ensure_socket(&node.socket("j"), JOB, None).await.unwrap();
    let endpoint = format!("unix://{}", node.socket("j").display());

    let client = spiffe::WorkloadApiClient::connect_to(&endpoint).await.unwrap();
    let context = client.fetch_x509_context().await.unwrap();
    assert_eq!(context.default_svid().unwrap().spiffe_id().to_string(), JOB);
    let bundles = client.fetch_x509_bundles().await.unwrap();
    let bundle = bundles.get(&spiffe::TrustDomain::new(TD).unwrap()).unwrap();
    assert_eq!(bundle.authorities().len(), 1);
    drop(client);

    let path = node.socket("j");
    let channel = tonic::transport::Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .unwrap();
    let mut raw = tonic::client::Grpc::new(channel);
    let mut call = async |method: &'static str, header: Option<&'static str>| {
        let mut request = tonic::Request::new(());
        if let Some(value) = header {
            request.metadata_mut().insert("workload.spiffe.io", value.parse().unwrap());
        }
        raw.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        raw.server_streaming(request, http::uri::PathAndQuery::from_static(method), codec).await.map(|_| ()).unwrap_err()
    };
    for header in [None, Some("false")] {
        let status = call("/SpiffeWorkloadAPI/FetchX509SVID", header).await;
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert_eq!(status.message(), "security header missing from request");
    }
    let status = call("/SpiffeWorkloadAPI/FetchJWTSVID", Some("true")).await;
    assert_eq!(status.code(), tonic::Code::Unimplemented);
    drop(raw);
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_socket_takes_a_bounded_number_of_connections() {
    let node = Node::new();
    node.authority.ensure_socket(&node.socket("j"), JOB, None).await.unwrap();
    let mut open = Vec::new();
    let refused = loop {
        let mut stream = tokio::net::UnixStream::connect(node.socket("j")).await.unwrap();
        // A served connection greets with its HTTP/2 settings; a refused one is closed.
        match timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap() {
            Ok(1) => open.push(stream),
            _ => break open.len(),
        }
        assert!(open.len() < 100, "no bound");
    };
    assert_eq!(refused, 16);
    drop(open);
    let job = connect(&node.socket("j"), JOB, PATIENCE).await.unwrap();
    drop(job);
    node.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_is_made_once_and_again_when_it_is_gone() {
    let node = Node::new();
    let socket = node.socket("j");
    // What a killed process left behind.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    drop(std::os::unix::net::UnixListener::bind(node.socket("j~")).unwrap());
    let ensure = async |id| node.authority.ensure_socket(&socket, id, None).await;
    assert_eq!(ensure(JOB).await.unwrap(), SocketState::Created);
    assert_eq!(ensure(JOB).await.unwrap(), SocketState::Adopted);
    assert!(ensure(OTHER_JOB).await.unwrap_err().to_string().contains("close it first"));
    std::fs::remove_file(&socket).unwrap();
    assert_eq!(ensure(JOB).await.unwrap(), SocketState::Created);
    drop(connect(&socket, JOB, PATIENCE).await.unwrap());

    let foreign = ensure("spiffe://other.example/ci/o/r/j").await.unwrap_err().to_string();
    assert!(foreign.contains("not an ID of a workload in test.example"), "{foreign}");
    let long = node.socket(&"x".repeat(100));
    let long = node.authority.ensure_socket(&long, JOB, None).await.unwrap_err().to_string();
    assert!(long.contains("choose a shorter STATE_DIRECTORY"), "{long}");

    node.authority.shutdown().await;
    let late = ensure(JOB).await.unwrap_err().to_string();
    assert!(late.contains("shutting down"), "{late}");
    node.end().await;
}

#[test]
fn the_ca_is_kept_closed_and_a_damaged_one_is_not_used() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let (ca, file) = (dir.path().join("ca"), dir.path().join("ca/ca.pem"));
    let error = |td: &str| Authority::open(&ca, td).err().unwrap().to_string();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    drop(Authority::open(&ca, TD).unwrap());
    let first = std::fs::read(&file).unwrap();
    assert_eq!((mode(&ca), mode(&file)), (0o700, 0o600));
    drop(Authority::open(&ca, TD).unwrap());
    assert_eq!(std::fs::read(&file).unwrap(), first, "the same CA after a restart");

    assert!(error("other.example").contains("TRUST_DOMAIN says spiffe://other.example"), "{}", error("other.example"));
    let cut = first.len() / 2;
    for damaged in [&b""[..], b"nonsense", &first[..cut]] {
        std::fs::write(&file, damaged).unwrap();
        let text = error(TD);
        assert!(text.contains("put it back from a backup, or move it away"), "{text}");
        assert_eq!(std::fs::read(&file).unwrap(), damaged, "nothing is overwritten");
    }
    // Somebody else's key beside our certificate.
    let foreign = tempfile::tempdir().unwrap();
    drop(Authority::open(foreign.path(), TD).unwrap());
    let (ours, theirs) = (String::from_utf8(first).unwrap(), std::fs::read_to_string(foreign.path().join("ca.pem")).unwrap());
    let begin = "-----BEGIN PRIVATE KEY-----";
    let mixed = format!("{}{begin}{}", ours.split(begin).next().unwrap(), theirs.split(begin).nth(1).unwrap());
    std::fs::write(&file, mixed).unwrap();
    assert!(error(TD).contains("the key is not the certificate's"));

    assert!(error(&"a".repeat(60)).contains("choose a shorter one"));
    assert!(error("Not A Domain").contains("is not a trust domain"));
    assert!(refuse_beside(None).is_ok());
    assert!(refuse_beside(Some("unix:///agent.sock")).unwrap_err().to_string().contains("unset it"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ca_that_ended_while_nothing_ran_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let short = Lifetimes { ca: Duration::from_secs(1), ..Lifetimes::default() };
    let first = Authority::open_with(dir.path(), TD, short).unwrap().ca_not_after();
    eventually("it has ended", async || SystemTime::now() > first).await;
    let node = Node { authority: Authority::open(dir.path(), TD).unwrap(), dir: tempfile::tempdir().unwrap() };
    assert!(node.authority.ca_not_after() > first + Duration::from_secs(3600));
    drop(node.identity("j", JOB).await);
    node.authority.shutdown().await;
    drop(node);
    nothing_runs().await;
}

// ---- Other users ----------------------------------------------------------------------------------------------------

const CHILD_SOCKET: &str = "IDENTITY_TEST_SOCKET";

#[test]
#[ignore = "runs only as the child of a_socket_is_only_for_its_user"]
fn child_asks_for_an_identity() {
    let socket = PathBuf::from(std::env::var_os(CHILD_SOCKET).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match runtime.block_on(connect(&socket, JOB, Duration::from_secs(2))) {
        Ok(_) => println!("child: given"),
        Err(error) => println!("child: refused: {error}"),
    }
}

/// Runs this binary again as `uid`, and returns what it says.
async fn as_user(uid: u32, program: &Path, socket: &Path) -> String {
    let output = tokio::process::Command::new(program)
        .args(["--exact", "child_asks_for_an_identity", "--ignored", "--nocapture"])
        .env(CHILD_SOCKET, socket)
        .uid(uid)
        .gid(uid)
        .kill_on_drop(true)
        .output();
    let output = timeout(PATIENCE, output).await.unwrap().unwrap();
    String::from_utf8_lossy(&output.stdout).lines().find(|l| l.contains("child: ")).unwrap_or("nothing said").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_is_only_for_its_user() {
    use std::os::unix::fs::PermissionsExt as _;
    if !nix::unistd::geteuid().is_root() {
        println!("not root: other users cannot be played");
        return;
    }
    let node = Node::new();
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let program_dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(program_dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let program = program_dir.path().join("child");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let socket = node.socket("j");
    node.authority.ensure_socket(&socket, JOB, Some(64_001)).await.unwrap();

    let theirs = as_user(64_001, &program, &socket).await;
    assert!(theirs.contains("child: given"), "{theirs}");
    let stranger = as_user(64_002, &program, &socket).await;
    assert!(stranger.contains("child: refused") && stranger.contains("for this user"), "{stranger}");
    // Root is let in everywhere; a socket of our own is for nobody else.
    drop(connect(&socket, JOB, PATIENCE).await.unwrap());
    node.authority.close_socket(&socket).await;
    node.authority.ensure_socket(&socket, JOB, None).await.unwrap();
    let stranger = as_user(64_001, &program, &socket).await;
    assert!(stranger.contains("child: refused"), "{stranger}");

    // A folder that the user can write is no place for its socket.
    let open = node.socket("open");
    std::fs::create_dir(&open).unwrap();
    std::os::unix::fs::chown(&open, Some(64_001), None).unwrap();
    let error = node.authority.ensure_socket(&open.join("j"), JOB, Some(64_001)).await.unwrap_err().to_string();
    assert!(error.contains("only the controller writes"), "{error}");
    std::fs::remove_dir(&open).unwrap();
    node.end().await;
}
