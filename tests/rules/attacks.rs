//! Attacks on the operator's HTTP: each is refused or cut off, the service stays up, memory stays, and a running job ends green.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use gitea_dynamic_runner::demo::forge::{ForgeConfig, JobId};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, TestRunner},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use crate::{
    support::{
        controller::{ADMIN_TOKEN, READ_TOKEN},
        story,
    },
    world::World,
};

/// The controller gives ten seconds to a head, and to a body.
const CUT_OFF: Duration = Duration::from_secs(13);
/// An answer to somebody who asks properly, whatever others do.
const ANSWER: Duration = Duration::from_secs(5);
/// Resident memory may grow by so much in an attack, in KiB.
const GROWTH: u64 = 24 << 10;

/// A controller with one running job.
async fn attacked() -> (World, JobId) {
    let mut world = World::prepare(1, ForgeConfig::default(), vec![("HTTP_HOSTS", "ci.example.test".to_owned())]).await;
    world.controller.start_again().await;
    let job = world.push(world.counting("running"));
    world.counts("running", job).await;
    (world, job)
}

/// The end of every attack.
async fn unharmed(world: World, job: JobId, began_with: u64) {
    let now = resident(&world);
    println!("resident memory: {began_with} KiB before, {now} KiB after");
    assert!(now < began_with + GROWTH, "memory grew from {began_with} to {now} KiB");
    world.gate.open();
    world.ends_green(job).await;
    let log = world.controller.log();
    assert!(!log.contains("panicked"), "{log}");
    for secret in [READ_TOKEN, ADMIN_TOKEN, "a-wrong-token"] {
        assert!(!log.contains(secret), "{secret} is in the log");
    }
    world.no_environment(Duration::from_secs(20)).await;
}

/// KiB.
fn resident(world: &World) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.controller.pid())).unwrap();
    let row = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    row.trim().trim_end_matches(" kB").parse().unwrap()
}

fn address(world: &World) -> SocketAddr {
    world.controller.setting("HTTP_LISTEN").parse().unwrap()
}

/// What came back until the other side closed; `None`: it did neither answer whole nor close in time.
async fn asked(to: SocketAddr, bytes: &[u8], limit: Duration) -> Option<Vec<u8>> {
    timeout(limit, async {
        let mut tcp = TcpStream::connect(to).await.unwrap();
        // The other side may close in the midst of it, and that is an answer, too.
        tcp.write_all(bytes).await.ok();
        rest(&mut tcp).await
    })
    .await
    .ok()
}

/// The same of one who says that nothing more will come.
async fn asked_and_left(to: SocketAddr, bytes: &[u8], limit: Duration) -> Option<Vec<u8>> {
    timeout(limit, async {
        let mut tcp = TcpStream::connect(to).await.unwrap();
        tcp.write_all(bytes).await.ok();
        tcp.shutdown().await.ok();
        rest(&mut tcp).await
    })
    .await
    .ok()
}

async fn rest(tcp: &mut TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    tcp.read_to_end(&mut answer).await.ok();
    answer
}

/// 0: closed without an answer.
fn status(answer: &[u8]) -> u16 {
    let text = String::from_utf8_lossy(&answer[..answer.len().min(12)]).into_owned();
    text.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok()).unwrap_or_default()
}

async fn is_up(world: &World) {
    let request = format!(
        "GET /metrics HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {READ_TOKEN}\r\nConnection: close\r\n\r\n",
        address(world)
    );
    let answer = asked(address(world), request.as_bytes(), ANSWER).await.expect("who asks properly is answered");
    assert_eq!(status(&answer), 200, "{}", String::from_utf8_lossy(&answer));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_token_name_and_page_nobody_reads_or_drains_and_no_token_is_told() {
    story(Duration::from_secs(90), async {
        let (world, job) = attacked().await;
        let (to, before) = (address(&world), resident(&world));
        let host = format!("Host: {to}");
        let (admin, reader) = (format!("Authorization: Bearer {ADMIN_TOKEN}"), format!("Authorization: Bearer {READ_TOKEN}"));
        let wrong = "Authorization: Bearer a-wrong-token";
        let origin = format!("Origin: http://{to}");
        for (line, headers, expected) in [
            ("GET /metrics", vec![host.as_str()], 401),
            ("GET /metrics", vec![&host, wrong], 401),
            ("GET /metrics", vec![&host, "Authorization: Basic YTpi"], 401),
            ("GET /metrics", vec![&host, "Authorization: Basic \u{fffd}"], 401),
            ("GET /metrics?token=may-read", vec![&host], 401),
            ("GET /api/v1/drain", vec![&host, wrong], 401),
            ("POST /api/v1/drain", vec![&host], 401),
            ("POST /api/v1/drain", vec![&host, wrong], 401),
            ("POST /api/v1/drain", vec![&host, &reader], 403),
            ("DELETE /api/v1/drain", vec![&host, &reader], 403),
            ("POST /api/v1/drain", vec![&host, &admin, "Origin: http://evil.test"], 403),
            ("POST /api/v1/drain", vec![&host, &admin, "Origin: null"], 403),
            ("POST /api/v1/drain", vec![&host, &admin, &origin, "Sec-Fetch-Site: cross-site"], 403),
            ("OPTIONS /api/v1/drain", vec![&host, "Origin: http://evil.test", "Access-Control-Request-Method: POST"], 403),
            ("POST /api/v1/drain", vec!["Host: evil.test", &admin], 421),
            ("GET /metrics", vec!["Host: evil.test", &reader], 421),
            ("GET /healthz", vec!["Host: evil.test"], 421),
            ("GET /metrics", vec!["Host: localhost.evil.test", &reader], 421),
            ("GET /metrics", vec![&reader], 400),
            ("GET /metrics", vec!["Host:", &reader], 421),
            ("GET /metrics", vec![&host, "Host: evil.test", &reader], 400),
            ("GET /metrics", vec![&host, &host, &reader], 400),
            ("GET http://evil.test/metrics", vec![&host, &reader], 400),
            ("GET http://evil.test/metrics", vec!["Host: evil.test", &reader], 421),
            ("CONNECT evil.test:80", vec![&host], 400),
            ("GET /metrics", vec!["Host: ci.example.test", &reader], 200),
            ("GET /metrics", vec!["Host: LOCALHOST.:1", &reader], 200),
            ("GET /metrics", vec![&host, &admin], 200),
            ("GET /metrics", vec![&host, &reader, "Origin: http://evil.test"], 200),
        ] {
            let request = format!("{line} HTTP/1.1\r\n{}\r\nConnection: close\r\n\r\n", headers.join("\r\n"));
            let answer = asked(to, request.as_bytes(), ANSWER).await.unwrap();
            let text = String::from_utf8_lossy(&answer).to_lowercase();
            assert_eq!(status(&answer), expected, "{request}{text}");
            assert!(!text.contains("access-control-"), "nothing is granted to other sites: {text}");
            assert!(
                text.contains("x-content-type-options: nosniff") && text.contains("content-security-policy: default-src 'none'")
            );
            for secret in [ADMIN_TOKEN, READ_TOKEN, "a-wrong-token"] {
                assert!(!text.contains(secret), "{text}");
            }
        }
        assert_eq!(world.controller.metric("drain_state").await, Some(0.0), "nobody drained");
        assert!(world.controller.metric("http_denied_total{reason=\"token\"}").await >= Some(8.0));
        unharmed(world, job, before).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_slow_connections_keep_nobody_out() {
    const MANY: usize = 10_000;
    story(Duration::from_secs(110), async {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let wanted = (MANY as u64 + 500).min(hard);
        setrlimit(Resource::RLIMIT_NOFILE, wanted.max(soft), hard).unwrap();
        let (world, job) = attacked().await;
        let (to, before, began) = (address(&world), resident(&world), Instant::now());
        // Half of a head each, kept open; some say nothing at all. From several sources, for one has too few ports.
        let slow = async {
            let mut held = Vec::with_capacity(MANY);
            for n in 0..MANY {
                let socket = TcpSocket::new_v4().unwrap();
                socket.bind(SocketAddr::from(([127, 0, 1, u8::try_from(n % 50 + 1).unwrap()], 0))).unwrap();
                let mut tcp = timeout(Duration::from_secs(20), socket.connect(to)).await.expect("it takes connections").unwrap();
                if n % 4 != 0 {
                    tcp.write_all(b"POST /api/v1/drain HTTP/1.1\r\nHost: loc").await.ok();
                }
                held.push(tcp);
            }
            held
        };
        let (mut asked, mut slowest) = (0, Duration::ZERO);
        let mut slow = std::pin::pin!(slow);
        let held = loop {
            tokio::select! {
                held = slow.as_mut() => break held,
                () = tokio::time::sleep(Duration::from_millis(50)) => {
                    let began = Instant::now();
                    is_up(&world).await;
                    (asked, slowest) = (asked + 1, slowest.max(began.elapsed()));
                }
            }
        };
        is_up(&world).await;
        let dropped = world.controller.metric("http_dropped_total{reason=\"slow\"}").await.unwrap();
        println!(
            "{MANY} slow connections in {:?}: {dropped} dropped, {asked} proper questions between, the slowest answered in {slowest:?}",
            began.elapsed()
        );
        assert!(dropped > MANY as f64 * 0.9, "{dropped}");
        let files = std::fs::read_dir(format!("/proc/{}/fd", world.controller.pid())).unwrap().count();
        assert!(files < 400, "{files} open files");
        drop(held);
        unharmed(world, job, before).await;
    })
    .await;
}

/// What an attacker sends after the head, piece by piece, until the other side has had enough; how long that took, and its answer.
async fn drips(to: SocketAddr, head: &str, piece: &[u8], pause: Duration) -> (Duration, u16, usize) {
    let (began, mut sent) = (Instant::now(), 0);
    let mut tcp = TcpStream::connect(to).await.unwrap();
    tcp.write_all(head.as_bytes()).await.ok();
    let (mut read, mut write) = tcp.split();
    let mut answer = Vec::new();
    let drip = async {
        while write.write_all(piece).await.is_ok() {
            sent += piece.len();
            if sent > 200 << 20 {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        std::future::pending::<()>().await
    };
    let closed = timeout(CUT_OFF, async {
        tokio::select! {
            _ = read.read_to_end(&mut answer) => {}
            () = drip => {}
        }
    });
    assert!(closed.await.is_ok(), "still open after {CUT_OFF:?}: {head:?}");
    (began.elapsed(), status(&answer), sent)
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_and_bodies_that_are_too_large_or_too_slow_are_cut_off() {
    story(Duration::from_secs(90), async {
        let (world, job) = attacked().await;
        let (to, before) = (address(&world), resident(&world));
        let megabyte = vec![b'a'; 1 << 20];
        let head = |line: &str, more: &str| format!("{line} HTTP/1.1\r\nHost: {to}\r\n{more}");
        let many: String = (0..2000).map(|n| format!("x-{n}: y\r\n")).collect();
        let never = Duration::from_secs(600);
        let post = format!("Authorization: Bearer {ADMIN_TOKEN}\r\n");
        let attacks = [
            ("a header of 100 MB", head("GET /healthz", "x: "), megabyte.clone(), Duration::ZERO, [431, 0]),
            ("an address of 100 MB", "GET /".to_owned(), megabyte.clone(), Duration::ZERO, [431, 414]),
            ("2000 headers", head("GET /healthz", &format!("{many}\r\n")), b"".to_vec(), never, [431, 0]),
            (
                "a body of 100 MB",
                head("POST /api/v1/drain", &format!("{post}Content-Length: 104857600\r\n\r\n")),
                megabyte.clone(),
                Duration::ZERO,
                [413, 0],
            ),
            (
                "a body without end",
                head("POST /api/v1/drain", &format!("{post}Transfer-Encoding: chunked\r\n\r\n")),
                b"400\r\n".iter().chain(&[b'a'; 1024]).chain(b"\r\n").copied().collect(),
                Duration::ZERO,
                [413, 0],
            ),
            ("a slow head", head("GET /healthz", "x: "), b"a".to_vec(), Duration::from_millis(500), [0, 408]),
            ("no head", String::new(), b"".to_vec(), never, [0, 408]),
            (
                "a slow body",
                head("POST /api/v1/drain", &format!("{post}Content-Length: 4000\r\n\r\n")),
                b"a".to_vec(),
                Duration::from_millis(500),
                [408, 408],
            ),
            ("no body", head("GET /metrics", "Content-Length: 4000\r\n\r\n"), b"".to_vec(), never, [408, 408]),
            ("a second request that never comes", head("GET /healthz", "\r\n"), b"".to_vec(), never, [200, 200]),
        ];
        let all = attacks.into_iter().map(|(name, head, piece, pause, expected)| async move {
            let (took, status, sent) = drips(to, &head, &piece, pause).await;
            println!("{name}: {status} after {took:?}, {sent} bytes were taken");
            assert!(expected.contains(&status), "{name}: {status}");
            assert!(sent < 16 << 20, "{name}: {sent} bytes were taken");
        });
        futures::future::join_all(all).await;
        assert_eq!(world.controller.metric("drain_state").await, Some(0.0), "half a request is none");
        is_up(&world).await;
        unharmed(world, job, before).await;
    })
    .await;
}

/// Requests that nearly are some, and bytes that are none.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let token = prop_oneof![
        Just("GET".to_owned()),
        Just("POST".to_owned()),
        Just("/api/v1/drain".to_owned()),
        Just("/api/v1/drain?wait=\u{0}".to_owned()),
        Just("/healthz/../metrics".to_owned()),
        Just("http://[::1]:x/".to_owned()),
        Just("HTTP/1.1".to_owned()),
        Just("HTTP/9.9".to_owned()),
        Just("\r\n".to_owned()),
        Just("\r\n\r\n".to_owned()),
        Just("\n".to_owned()),
        Just("Host: localhost\r\n".to_owned()),
        Just("Host: [::1\r\n".to_owned()),
        Just("Authorization: Basic =\r\n".to_owned()),
        Just("Authorization: Bearer \r\n".to_owned()),
        Just("Origin: \u{7f}\r\n".to_owned()),
        Just("Content-Length: 18446744073709551616\r\n".to_owned()),
        Just("Content-Length: 5\r\nContent-Length: 6\r\n".to_owned()),
        Just("Transfer-Encoding: chunked\r\n".to_owned()),
        Just("Transfer-Encoding: gzip\r\n".to_owned()),
        Just("Expect: 100-continue\r\n".to_owned()),
        Just("Upgrade: h2c\r\n".to_owned()),
        Just("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned()),
        Just("FFFFFFFFFFFFFFFFF\r\n".to_owned()),
        ".{0,20}",
        Just(" ".to_owned()),
    ];
    prop_oneof![
        1 => prop::collection::vec(any::<u8>(), 0..400),
        4 => prop::collection::vec(token, 0..12).prop_map(|tokens| tokens.concat().into_bytes()),
        2 => (prop::collection::vec(any::<u8>(), 0..40), "[A-Za-z-]{1,12}").prop_map(|(value, name)| {
            let mut request = format!("GET /readyz HTTP/1.1\r\nHost: localhost\r\n{name}: ").into_bytes();
            request.extend(value);
            request.extend(b"\r\n\r\n");
            request
        }),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn any_bytes_get_an_answer_or_a_close_and_nothing_panics() {
    story(Duration::from_secs(90), async {
        let (world, job) = attacked().await;
        let (to, before) = (address(&world), resident(&world));
        let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
        let cases: Vec<Vec<u8>> = (0..2000).map(|_| bytes().new_tree(&mut runner).unwrap().current()).collect();
        let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
        for some in cases.chunks(50) {
            let answers = some.iter().map(|case| async move {
                let answer = asked_and_left(to, case, CUT_OFF).await;
                answer.unwrap_or_else(|| panic!("neither answered nor closed: {:?}", String::from_utf8_lossy(case)))
            });
            for answer in futures::future::join_all(answers).await {
                *statuses.entry(status(&answer)).or_default() += 1;
            }
        }
        println!("answers to {} cases (0: closed): {statuses:?}", cases.len());
        assert!(statuses.keys().all(|status| *status < 500), "{statuses:?}");
        is_up(&world).await;
        unharmed(world, job, before).await;
    })
    .await;
}
