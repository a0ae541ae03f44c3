//! Stories of the bridge's other half: what reaches Gitea through it, how, and what never does.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex},
};

use axum::{
    body::Body,
    extract::Request,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::StreamExt as _;
use gitea_dynamic_runner::proto::runner::Task;
use hyper_util::rt::TokioIo;

use super::world::{LIMIT, Setup, TASK, World};

const BIG: usize = 50 << 20;

/// What Gitea was asked, as it saw it.
type Seen = Arc<Mutex<Vec<String>>>;

struct Stage {
    world: World,
    seen: Seen,
    bridge: String,
    token: String,
    _runtime: tokio::runtime::Runtime,
}

/// A Gitea below `/sub`, and a runner that waits while the story uses its bridge.
fn stage() -> Stage {
    let seen = Seen::default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let gitea = listener.local_addr().unwrap();
    let notes = seen.clone();
    let router = axum::Router::new().fallback(move |request: Request| gitea_answers(request, notes.clone()));
    runtime.spawn(async move { axum::serve(listener, router).await });
    let mut setup = Setup::new("waits");
    setup.gitea_url = format!("http://{gitea}/sub/");
    let context = serde_json::json!({ "server_url": "https://git.example.test/sub/" });
    let context = serde_json::from_value::<buffa_types::google::protobuf::Struct>(context).unwrap();
    let task = Task { id: TASK, context: context.into(), ..Default::default() };
    setup.facade.known().task = buffa::Message::encode_to_vec(&task);
    let world = setup.start();
    let (bridge, token) = world.bridge();
    Stage { world, seen, bridge, token, _runtime: runtime }
}

async fn gitea_answers(mut request: Request, seen: Seen) -> Response {
    let head = format!("{} {}\n{:?}", request.method(), request.uri(), request.headers());
    seen.lock().unwrap().push(head.clone());
    match request.uri().path() {
        "/sub/echo" => Body::from_stream(request.into_body().into_data_stream()).into_response(),
        "/sub/big" => {
            let chunks =
                futures::stream::iter((0..BIG / 65536).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(&[7; 65536]))));
            Body::from_stream(chunks).into_response()
        }
        "/sub/count" => {
            let chunks = request.into_body().into_data_stream();
            chunks.fold(0, |sum, chunk| async move { sum + chunk.unwrap().len() }).await.to_string().into_response()
        }
        "/sub/redirect" => {
            let to = request.uri().query().unwrap().to_owned();
            (StatusCode::FOUND, [(header::LOCATION, to)]).into_response()
        }
        "/sub/upgrade" => {
            let upgraded = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded.await.unwrap()));
                tokio::io::copy(&mut from, &mut to).await.unwrap();
            });
            (StatusCode::SWITCHING_PROTOCOLS, [(header::UPGRADE, "echo"), (header::CONNECTION, "upgrade")]).into_response()
        }
        _ => head.into_response(),
    }
}

impl Stage {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.bridge).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// One request, the whole answer.
    fn ask(&self, head: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(format!("{head}\r\nHost: bridge\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }

    fn end(mut self) {
        self.world.go();
        assert_eq!(self.world.ended().code(), Some(0));
    }
}

/// The most memory that the executor ever used, in KiB.
pub(crate) fn peak_memory(world: &World) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Reads until `wanted` was read, and answers everything so far.
fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(wanted) {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "the end after {:?}", String::from_utf8_lossy(&read));
        read.push(byte[0]);
    }
    String::from_utf8_lossy(&read).into_owned()
}

#[test]
fn tricky_paths_reach_neither_gitea_nor_an_rpc() {
    let stage = stage();
    for (request, status) in [
        ("POST //api/actions/runner.v1.RunnerService/FetchTask", "404"),
        ("POST /api/./actions/runner.v1.RunnerService/FetchTask", "404"),
        ("POST /api/%61ctions/runner.v1.RunnerService/FetchTask", "404"),
        ("POST /api%2Factions/runner.v1.RunnerService/FetchTask", "404"),
        ("POST /api/actions/runner.v1.RunnerService/Other", "404"),
        ("GET /api/actions/", "404"),
        ("GET /api/actions%2f..", "400"),
        ("GET /x/../api/actions/", "400"),
        ("GET /x/%2e%2e/%2e%2e/admin", "400"),
        ("GET http://127.0.0.1:1/api/v1/version", "400"),
        ("CONNECT 127.0.0.1:1", "405"),
    ] {
        let answer = stage.ask(&format!("{request} HTTP/1.1"));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
    }
    let wrong = stage.ask("POST /api/actions/runner.v1.RunnerService/FetchTask HTTP/1.1\r\nx-runner-token: wrong");
    assert!(wrong.starts_with("HTTP/1.1 401 ") && wrong.contains(r#""message":"unregistered runner""#), "{wrong}");
    let none = stage.ask("POST /api/actions/runner.v1.RunnerService/UpdateLog HTTP/1.1");
    assert!(none.starts_with("HTTP/1.1 401 "), "{none}");
    let json = "content-type: application/json\r\ncontent-length: 2\r\n";
    let call = |path: &str, token: &str| {
        let mut stream = stage.connect();
        let head = format!("POST /api/actions/{path} HTTP/1.1\r\nHost: b\r\nConnection: close\r\n{token}{json}\r\n{{}}");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(call("ping.v1.PingService/Ping", "").contains("Hello, !"));
    let token = format!("x-runner-token: {}\r\n", stage.token);
    let registered = call("runner.v1.RunnerService/Register", &token);
    assert!(registered.contains(r#""uuid":"gitea-task-7""#), "{registered}");
    assert_eq!(stage.seen(), Vec::<String>::new(), "nothing of all this is for Gitea");
    stage.end();
}

#[test]
fn a_request_reaches_gitea_as_it_came_and_brings_no_credential_of_ours() {
    let stage = stage();
    let answer = stage.ask(
        "PUT /o/r%2Fx//raw/a%20b?q=%2e%2e&x HTTP/1.1\r\nAuthorization: Basic am9i\r\nx-runner-token: t\r\nTE: trailers\r\n\
         Connection: x-hop\r\nx-hop: 1\r\nProxy-Authorization: Basic x\r\nx-kept: 2",
    );
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let seen = stage.seen().join("\n");
    assert!(seen.starts_with("PUT /sub/o/r%2Fx//raw/a%20b?q=%2e%2e&x\n"), "{seen}");
    for kept in [r#""authorization": "Basic am9i""#, r#""x-kept": "2""#, r#""host": "127.0.0.1:"#] {
        assert!(seen.contains(kept), "{kept} in {seen}");
    }
    for dropped in ["x-runner-token", "x-hop", "proxy-authorization", "\"te\"", "canary", "x-ci-"] {
        assert!(!seen.contains(dropped), "{dropped} in {seen}");
    }
    stage.end();
}

#[test]
fn redirects_to_gitea_lead_back_to_the_bridge_and_others_are_left_alone() {
    let stage = stage();
    for (to, expected) in [
        ("https://git.example.test/sub/o/r", format!("http://{}/o/r", stage.bridge)),
        ("/sub/o/r", "/o/r".into()),
        ("https://git.example.test/other", "https://git.example.test/other".into()),
        ("https://storage.example.test/sub/x", "https://storage.example.test/sub/x".into()),
        ("//evil.example.test/sub/x", "//evil.example.test/sub/x".into()),
        ("relative", "relative".into()),
    ] {
        let answer = stage.ask(&format!("GET /redirect?{to} HTTP/1.1"));
        assert!(answer.starts_with("HTTP/1.1 302 ") && answer.contains(&format!("location: {expected}\r\n")), "{to}: {answer}");
    }
    assert_eq!(stage.seen().len(), 6, "no redirect was followed");
    stage.end();
}

#[test]
fn fifty_megabytes_stream_both_ways_in_bounded_memory() {
    let stage = stage();
    let before = peak_memory(&stage.world);
    let mut stream = stage.connect();
    stream.write_all(b"GET /big HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let body = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    assert_eq!(answer.len() - body, BIG);
    let mut stream = stage.connect();
    stream.write_all(format!("POST /count HTTP/1.0\r\nContent-Length: {BIG}\r\n\r\n").as_bytes()).unwrap();
    for _ in 0..BIG / 65536 {
        stream.write_all(&[7; 65536]).unwrap();
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with(&BIG.to_string()), "{answer}");
    let grown = peak_memory(&stage.world) - before;
    assert!(grown < 16 << 10, "{grown} KiB more for {BIG} bytes");
    stage.end();
}

#[test]
fn the_first_byte_comes_back_before_the_last_is_sent() {
    let stage = stage();
    let mut stream = stage.connect();
    stream.write_all(b"POST /echo HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").unwrap();
    read_until(&mut stream, "5\r\nfirst\r\n");
    stream.write_all(b"4\r\nlast\r\n0\r\n\r\n").unwrap();
    read_until(&mut stream, "4\r\nlast\r\n0\r\n\r\n");
    stage.end();
}

#[test]
fn an_upgrade_becomes_a_tunnel() {
    let stage = stage();
    let mut stream = stage.connect();
    stream.write_all(b"GET /upgrade HTTP/1.1\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n").unwrap();
    let head = read_until(&mut stream, "\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 101 ") && head.to_lowercase().contains("upgrade: echo"), "{head}");
    stream.write_all(b"through the tunnel").unwrap();
    read_until(&mut stream, "through the tunnel");
    stream.shutdown(Shutdown::Write).unwrap();
    stage.end();
}

#[test]
fn a_gitea_that_is_not_there_is_a_502() {
    let mut world = Setup::new("waits").start();
    let (bridge, _) = world.bridge();
    let mut stream = TcpStream::connect(bridge).unwrap();
    stream.write_all(b"GET /x HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 502 "), "{answer}");
    world.go();
    assert_eq!(world.ended().code(), Some(0));
}
