//! A certificate authority of our own, for one node: a Workload API socket for each environment.
//!
//! The path of the socket is the identity; who may use it is its folder's matter and SO_PEERCRED's. The CA lives in `ca`, the
//! protocol in `workload_api`. The authority must not run beside another one: a real SPIRE agent is the better choice
//! wherever there is one (`refuse_beside`). Knows no jobs: which environment gets which ID is the backend's decision.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use spiffe::{SpiffeId, TrustDomain};
use tokio::{net::UnixListener, sync::Mutex, task::JoinHandle, time::timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::IdentityError;
use crate::{failpoint, files, spiffe_name::MAX_TRUST_DOMAIN};

mod ca;
mod workload_api;

/// One line for the log at start.
pub const ONE_NODE: &str = "the embedded identity authority is meant for one node: its CA is a file here; for more nodes set SPIFFE_ENDPOINT_SOCKET to a SPIRE agent";

/// Longest path of a Unix socket, in bytes (`sun_path` less its end).
const MAX_SOCKET_PATH: usize = 107;
/// How long the end of a socket may take before its task is cut.
const CLOSING: Duration = Duration::from_secs(2);

/// How long certificates live.
#[derive(Debug, Clone, Copy)]
pub struct Lifetimes {
    /// Of the CA. Its successor is published at two thirds and signs from five sixths on.
    pub ca: Duration,
    /// Of an SVID; a new one is sent at half of it.
    pub leaf: Duration,
}

impl Default for Lifetimes {
    fn default() -> Self {
        Self { ca: Duration::from_secs(90 * 24 * 3600), leaf: Duration::from_secs(3600) }
    }
}

/// What [`Authority::ensure_socket`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    Created,
    Adopted,
}

/// Clones share one CA and its sockets. With the last clone the streams end; only `shutdown` removes the socket files too.
#[derive(Clone)]
pub struct Authority {
    inner: Arc<Inner>,
}

struct Inner {
    issuer: Arc<ca::Issuer>,
    trust_domain: TrustDomain,
    sockets: Mutex<Sockets>,
    stop: CancellationToken,
    _stop_with_us: DropGuard,
}

#[derive(Default)]
struct Sockets {
    served: HashMap<PathBuf, Served>,
    rotation: Option<JoinHandle<()>>,
}

struct Served {
    spiffe_id: String,
    peer_uid: Option<u32>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Refuses the embedded authority where `SPIFFE_ENDPOINT_SOCKET` (given as `endpoint`) names another one.
pub fn refuse_beside(endpoint: Option<&str>) -> Result<(), IdentityError> {
    match endpoint.filter(|value| !value.is_empty()) {
        None => Ok(()),
        Some(value) => Err(config(format!(
            "SPIFFE_ENDPOINT_SOCKET={value} names an identity authority already: unset it to use the embedded one, or leave the embedded one off"
        ))),
    }
}

fn config(text: String) -> IdentityError {
    IdentityError::Config(text)
}

impl Authority {
    /// Opens or makes the CA kept in `dir` (0700, the key 0600), so that a restart breaks no running job.
    pub fn open(dir: &Path, trust_domain: &str) -> Result<Self, IdentityError> {
        Self::open_with(dir, trust_domain, Lifetimes::default())
    }

    /// Whether the CA kept in `dir` can be used, and until when; `None`: there is none yet. Makes and changes nothing.
    pub fn look(dir: &Path, trust_domain: &str) -> Result<Option<SystemTime>, IdentityError> {
        let td = TrustDomain::new(trust_domain)
            .map_err(|e| config(format!("TRUST_DOMAIN {trust_domain:?} is not a trust domain: {e}")))?;
        ca::look(dir, &td).map_err(|e| config(format!("{e:#}")))
    }

    /// As [`Authority::open`], with other lifetimes.
    pub fn open_with(dir: &Path, trust_domain: &str, lifetimes: Lifetimes) -> Result<Self, IdentityError> {
        let td = TrustDomain::new(trust_domain)
            .map_err(|e| config(format!("TRUST_DOMAIN {trust_domain:?} is not a trust domain: {e}")))?;
        if td.as_str().len() > MAX_TRUST_DOMAIN {
            return Err(config(format!(
                "TRUST_DOMAIN {td} is longer than {MAX_TRUST_DOMAIN} bytes, so that IDs of jobs would not fit into SPIRE's 255: choose a shorter one"
            )));
        }
        let issuer = ca::Issuer::open(dir, &td, lifetimes).map_err(|e| config(format!("{e:#}")))?;
        let stop = CancellationToken::new();
        let inner = Inner {
            issuer: Arc::new(issuer),
            trust_domain: td,
            sockets: Mutex::default(),
            _stop_with_us: stop.clone().drop_guard(),
            stop,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Serves the Workload API at `socket`, giving `spiffe_id` to peers of `peer_uid` (and root); `None`: of our own uid.
    /// Idempotent: a socket that is served already is left alone. Its folder must not be writable for the peer.
    pub async fn ensure_socket(
        &self,
        socket: &Path,
        spiffe_id: &str,
        peer_uid: Option<u32>,
    ) -> Result<SocketState, IdentityError> {
        let id = SpiffeId::new(spiffe_id).map_err(|e| config(format!("{spiffe_id:?} is not a SPIFFE ID: {e}")))?;
        if !id.is_member_of(&self.inner.trust_domain) || id.path().is_empty() {
            return Err(config(format!("{spiffe_id} is not an ID of a workload in {}", self.inner.trust_domain)));
        }
        let mut sockets = self.inner.sockets.lock().await;
        if self.inner.stop.is_cancelled() {
            return Err(config("the identity authority is shutting down".into()));
        }
        if let Some(served) = sockets.served.get(socket) {
            if served.spiffe_id != spiffe_id || served.peer_uid != peer_uid {
                return Err(config(format!("{} serves {} already: close it first", socket.display(), served.spiffe_id)));
            }
            if !served.task.is_finished() && is_socket(socket) {
                return Ok(SocketState::Adopted);
            }
            // The file or the task is gone: made again below.
            end(sockets.served.remove(socket), socket).await;
        }
        let listener = publish(socket, peer_uid)?;
        let stop = self.inner.stop.child_token();
        let api = workload_api::Api { issuer: self.inner.issuer.clone(), spiffe_id: id, stop: stop.clone() };
        let uid = peer_uid.unwrap_or_else(|| nix::unistd::geteuid().as_raw());
        let task = tokio::spawn(workload_api::serve(listener, api, uid));
        sockets.served.insert(socket.to_owned(), Served { spiffe_id: spiffe_id.to_owned(), peer_uid, stop, task });
        if sockets.rotation.is_none() {
            let rotation = self.inner.issuer.clone().rotation();
            let stop = self.inner.stop.clone();
            sockets.rotation = Some(tokio::spawn(async move {
                stop.run_until_cancelled(rotation).await;
            }));
        }
        Ok(SocketState::Created)
    }

    /// Ends the streams of `socket` and removes it. No socket: nothing to do.
    pub async fn close_socket(&self, socket: &Path) {
        let served = self.inner.sockets.lock().await.served.remove(socket);
        end(served, socket).await;
    }

    /// Ends everything, within a few seconds whatever the clients do. The CA stays in its folder.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        let mut sockets = std::mem::take(&mut *self.inner.sockets.lock().await);
        let ends = sockets.served.drain().map(|(path, served)| async move { end(Some(served), &path).await });
        futures::future::join_all(ends).await;
        if let Some(rotation) = sockets.rotation {
            // It waits for nothing but the token; a panic in it was said when it happened.
            drop(timeout(CLOSING, rotation).await);
        }
    }

    /// How many sockets are served now.
    pub async fn sockets(&self) -> usize {
        self.inner.sockets.lock().await.served.len()
    }

    /// When the certificate that signs now ends. Its successor takes over before.
    pub fn ca_not_after(&self) -> SystemTime {
        self.inner.issuer.not_after()
    }
}

/// Removes the file first, so that nobody connects to a socket that is ending. Also removes one that a dead process left.
async fn end(served: Option<Served>, socket: &Path) {
    if is_socket(socket)
        && let Err(error) = fs::remove_file(socket)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(socket = %socket.display(), %error, "remove a Workload API socket");
    }
    let Some(mut served) = served else { return };
    served.stop.cancel();
    if timeout(CLOSING, &mut served.task).await.is_err() {
        served.task.abort();
    }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

/// Binds beside `socket` and renames, so that whoever sees the path can connect. What a dead process left there is replaced.
fn publish(socket: &Path, peer_uid: Option<u32>) -> Result<UnixListener, IdentityError> {
    let mut beside = socket.as_os_str().to_owned();
    beside.push("~");
    let beside = PathBuf::from(beside);
    if beside.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(config(format!(
            "the socket path {} is longer than {} bytes, which Linux does not take: choose a shorter STATE_DIRECTORY",
            socket.display(),
            MAX_SOCKET_PATH - 1
        )));
    }
    let failed = |what: &str, e: io::Error| config(format!("{what} {}: {e}", socket.display()));
    folder_is_ours(socket, peer_uid)?;
    // A crash between bind and rename leaves this name; the next one that wants it takes it away.
    files::remove(&beside).map_err(|e| failed("clear the way for", e))?;
    let listener = UnixListener::bind(&beside).map_err(|e| failed("bind", e))?;
    let mode = if peer_uid.is_some() { 0o666 } else { 0o600 };
    fs::set_permissions(&beside, fs::Permissions::from_mode(mode)).map_err(|e| failed("set the mode of", e))?;
    failpoint::reached("identity.bound");
    fs::rename(&beside, socket).map_err(|e| failed("publish", e))?;
    Ok(listener)
}

/// A peer that can write the folder could put a link in the place of the socket, and have us change a file of its choice.
fn folder_is_ours(socket: &Path, peer_uid: Option<u32>) -> Result<(), IdentityError> {
    let Some(folder) = socket.parent() else { return Err(config(format!("{} is no path of a socket", socket.display()))) };
    let meta = fs::metadata(folder).map_err(|e| config(format!("look at {}: {e}", folder.display())))?;
    let ours = nix::unistd::geteuid().as_raw();
    let theirs = peer_uid.filter(|uid| *uid != ours);
    let open = meta.mode() & 0o002 != 0 && meta.mode() & 0o1000 == 0;
    if theirs.is_some() && (open || theirs == Some(meta.uid())) {
        return Err(config(format!(
            "{} can be written by the user that the socket is for: put the socket into a folder that only the controller writes",
            folder.display()
        )));
    }
    Ok(())
}
