//! What stories with the whole controller share: a server ([`gitea`]), a controller ([`controller`]), and a gate that jobs wait at.
//!
//! Everything started here is stopped by the process id that was recorded for it, and listens on loopback only. A wait is always
//! for a condition and always has a limit ([`eventually`]).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{
    collections::HashMap,
    net::TcpListener,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

pub(crate) mod controller;
pub(crate) mod doctor;
pub(crate) mod front;
pub(crate) mod gitea;
pub(crate) mod nats;
pub(crate) mod official;
pub(crate) mod rest;
pub(crate) mod small_disk;
pub(crate) mod standin;

/// Asks again until there is an answer; panics with `what` after `limit`.
pub(crate) async fn eventually<T>(what: &str, limit: Duration, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The whole of a story, so that a hanging call ends in a panic, which cleans up, and not in the test runner's kill.
pub(crate) async fn story(limit: Duration, tell: impl Future<Output = ()>) {
    assert!(tokio::time::timeout(limit, tell).await.is_ok(), "the story took longer than {limit:?}");
}

/// Where `tests/run.sh` keeps neighbours.
pub(crate) fn peers_dir() -> PathBuf {
    if let Some(folder) = std::env::var_os("PEERS_DIR") {
        return folder.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache"));
    cache.join("gitea-dynamic-runner/peers")
}

/// A port of 127.0.0.1 that was free a moment ago.
///
/// Below those that the kernel gives to connections, which would otherwise take one before its server listens on it.
pub(crate) fn free_port() -> u16 {
    let mut any = std::iter::repeat_with(|| rand::random_range(20_000..32_000));
    any.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

pub(crate) fn am_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// A place that jobs call at from their steps. It tells them to wait until it is opened, and counts the calls by name.
///
/// A port and not a file: a job's environment may have other users and mounts, but it has this loopback.
pub(crate) struct Gate {
    port: u16,
    state: Arc<Mutex<GateState>>,
}

#[derive(Default)]
struct GateState {
    open: bool,
    calls: HashMap<String, usize>,
}

impl Gate {
    pub(crate) async fn new() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(GateState::default()));
        tokio::spawn(Self::serve(listener, Arc::clone(&state)));
        Self { port, state }
    }

    /// A call is a line with a name; the answer is `go` or `wait`.
    async fn serve(listener: tokio::net::TcpListener, state: Arc<Mutex<GateState>>) {
        use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};
        while let Ok((stream, _)) = listener.accept().await {
            let state = Arc::clone(&state);
            tokio::spawn(async move {
                let (read, mut write) = stream.into_split();
                let mut name = String::new();
                let mut call = tokio::io::BufReader::new(read.take(200));
                if call.read_line(&mut name).await.is_err() {
                    return;
                }
                let open = {
                    let mut state = state.lock().unwrap();
                    *state.calls.entry(name.trim().to_owned()).or_default() += 1;
                    state.open
                };
                // A job that was killed in mid-call needs no answer.
                write.write_all(if open { b"go\n" } else { b"wait\n" }).await.ok();
            });
        }
    }

    /// A bash condition for a step: calls as `name`, true once the gate is open.
    pub(crate) fn ask(&self, name: &str) -> String {
        let port = self.port;
        format!(r#"( exec 3<>/dev/tcp/127.0.0.1/{port}; echo "{name}" >&3; read -r answer <&3; [ "$answer" = go ] ) 2>/dev/null"#)
    }

    /// A bash line that waits at the gate.
    pub(crate) fn wait(&self, name: &str) -> String {
        format!("until {}; do sleep 0.2; done", self.ask(name))
    }

    /// A bash line that only leaves its name.
    pub(crate) fn sign(&self, name: &str) -> String {
        format!("{} || true", self.ask(name))
    }

    pub(crate) fn open(&self) {
        self.state.lock().unwrap().open = true;
    }

    pub(crate) fn calls(&self, name: &str) -> usize {
        self.state.lock().unwrap().calls.get(name).copied().unwrap_or_default()
    }

    pub(crate) async fn called(&self, name: &str, limit: Duration) {
        eventually(&format!("a call of {name:?} at the gate"), limit, async || (self.calls(name) > 0).then_some(())).await;
    }
}

/// A folder that other users may pass through, but not list.
pub(crate) fn passable(folder: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o711)).unwrap();
}
