//! Whether new work is begun: an operator may ask that nothing new is fetched or started, while what runs goes on.
//!
//! The wish is a file, so that it outlives restarts, and it is on disk before anybody is told. Whoever begins something new asks for
//! a [`Permit`] first; what was permitted is counted until it is done. What is not begun stays where it waits: that is for the rooms
//! that ask. It touches its one file in the way of `files`.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, watch};

use crate::{
    failpoint,
    files::{self, Durable},
};

/// Its name in the private folder.
pub const FILE: &str = "drain.json";

/// What a permit is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum New {
    /// A question to Gitea, until what it brought is stored.
    Fetch,
    /// An environment, until it is offered.
    Environment,
}

/// The right to begin one new thing, until dropped.
#[must_use = "what is begun is counted while its permit lives"]
pub struct Permit {
    drain: Drain,
    new: New,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct State {
    since: Option<SystemTime>,
    fetches: usize,
    environments: usize,
}

/// A shared handle.
#[derive(Clone)]
pub struct Drain {
    /// A permit is given and a drain begun under its one lock: nothing is begun after a drain was.
    state: watch::Sender<State>,
    file: Arc<PathBuf>,
    /// One at a time changes the file, and what is remembered of it: the last of a POST and a DELETE wins, whole.
    writing: Arc<Mutex<()>>,
}

/// The file. Unknown fields are a later version's, and are passed over.
#[derive(Serialize, Deserialize)]
struct Stored {
    since_ms: u64,
}

impl Drain {
    /// Reads the wish of earlier runs. One that cannot be understood is one to drain: what waits keeps waiting, and the way out is
    /// one command.
    pub fn open(private: &Path) -> io::Result<Self> {
        let file = private.join(FILE);
        let since = match std::fs::read(&file) {
            Ok(bytes) => Some(serde_json::from_slice(&bytes).map_or_else(|_| written_at(&file), |stored: Stored| stored.since())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        let state = watch::Sender::new(State { since, ..State::default() });
        Ok(Self { state, file: Arc::new(file), writing: Arc::default() })
    }

    /// Nothing new is begun from before its return on, also after a restart; answers since when. A repeated one changes nothing.
    /// Not dropped midway by who is dropped: the file and what is remembered of it stay the same.
    pub async fn begin(&self) -> io::Result<SystemTime> {
        let this = self.clone();
        in_full(async move {
            let _writing = this.writing.lock().await;
            if let Some(since) = this.since() {
                return Ok(since);
            }
            let stored = Stored { since_ms: unix_ms(SystemTime::now()) };
            let (file, text) = (Arc::clone(&this.file), serde_json::to_vec(&stored)?);
            blocking(move || files::write_private(&file, &text, Durable::Disk)).await?;
            // We may die here, and nobody was told: the next start drains, as was asked.
            failpoint::reached("drain.written");
            this.state.send_modify(|state| state.since = Some(stored.since()));
            Ok(stored.since())
        })
        .await
    }

    /// New work is begun again, also after a restart. A repeated one changes nothing.
    pub async fn undo(&self) -> io::Result<()> {
        let this = self.clone();
        in_full(async move {
            let _writing = this.writing.lock().await;
            let file = Arc::clone(&this.file);
            blocking(move || files::remove(&file).and_then(|()| files::sync_folder_of(&file))).await?;
            // We may die here, and nobody was told: the next start begins new work, as was asked.
            failpoint::reached("drain.removed");
            this.state.send_modify(|state| state.since = None);
            Ok(())
        })
        .await
    }

    /// Since when nothing new is begun; `None`: all is as ever.
    pub fn since(&self) -> Option<SystemTime> {
        self.state.borrow().since
    }

    /// `None`: nothing new is to be begun.
    pub fn permit(&self, new: New) -> Option<Permit> {
        let mut given = false;
        self.state.send_if_modified(|state| {
            given = state.since.is_none();
            *state.count(new) += usize::from(given);
            given
        });
        given.then(|| Permit { drain: self.clone(), new })
    }

    /// How many permits for this are used right now.
    pub fn under_way(&self, new: New) -> usize {
        let mut state = *self.state.borrow();
        *state.count(new)
    }

    /// Waits until a drain begins; at once during one.
    pub async fn begun(&self) {
        self.until(|since| since.is_some()).await;
    }

    /// Waits until no drain is; at once without one.
    pub async fn undone(&self) {
        self.until(|since| since.is_none()).await;
    }

    async fn until(&self, wanted: impl Fn(Option<SystemTime>) -> bool) {
        let mut changes = self.state.subscribe();
        if changes.wait_for(|state| wanted(state.since)).await.is_err() {
            // We hold the sender ourselves, so it is never closed.
            std::future::pending().await
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.drain.state.send_modify(|state| *state.count(self.new) -= 1);
    }
}

impl State {
    fn count(&mut self, new: New) -> &mut usize {
        match new {
            New::Fetch => &mut self.fetches,
            New::Environment => &mut self.environments,
        }
    }
}

impl Stored {
    fn since(&self) -> SystemTime {
        // Bounded, so that no file makes a time that cannot be told.
        SystemTime::UNIX_EPOCH + Duration::from_millis(self.since_ms.min(LAST_MS))
    }
}

/// The end of the year 9999.
const LAST_MS: u64 = 253_402_300_799_000;

fn unix_ms(at: SystemTime) -> u64 {
    u64::try_from(at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(LAST_MS)
}

fn written_at(file: &Path) -> SystemTime {
    tracing::warn!(file = %file.display(), "failed to understand the file that says to drain; draining. `drain --undo` ends it");
    std::fs::metadata(file).and_then(|facts| facts.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// To its end, even if the caller goes away.
async fn in_full<T: Send + 'static>(deed: impl Future<Output = io::Result<T>> + Send + 'static) -> io::Result<T> {
    tokio::spawn(deed).await.map_err(io::Error::other)?
}

async fn blocking<T: Send + 'static>(deed: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(deed).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_drain_permits_nothing_new_outlives_a_restart_and_is_undone_once_and_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let drain = Drain::open(folder.path()).unwrap();
        assert!(drain.begun().now_or_never().is_none());
        let fetch = drain.permit(New::Fetch).unwrap();
        let environment = drain.permit(New::Environment).unwrap();
        let since = drain.begin().await.unwrap();
        assert!(drain.permit(New::Fetch).is_none() && drain.permit(New::Environment).is_none());
        assert_eq!((drain.under_way(New::Fetch), drain.under_way(New::Environment)), (1, 1));
        drop((fetch, environment));
        assert_eq!((drain.under_way(New::Fetch), drain.under_way(New::Environment)), (0, 0));
        assert_eq!(drain.begin().await.unwrap(), since, "a repeated one changes nothing");
        let again = Drain::open(folder.path()).unwrap();
        assert_eq!(again.since(), Some(since));
        assert!(again.undone().now_or_never().is_none());
        again.undo().await.unwrap();
        again.undo().await.unwrap();
        assert!(again.permit(New::Fetch).is_some());
        assert_eq!(Drain::open(folder.path()).unwrap().since(), None);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_understood_drains_until_it_is_undone() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{", "null", r#"{"since_ms":-1}"#, r#"{"since_ms":18446744073709551615}"#, "\u{0}\u{0}"] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            let drain = Drain::open(folder.path()).unwrap();
            assert!(drain.since().is_some(), "{text:?}");
            drain.undo().await.unwrap();
            assert_eq!(Drain::open(folder.path()).unwrap().since(), None);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn many_who_drain_and_undo_at_once_leave_file_and_memory_of_one_mind() {
        let folder = tempfile::tempdir().unwrap();
        let drain = Drain::open(folder.path()).unwrap();
        for _ in 0..20 {
            let deeds = (0..8).map(|n| {
                let drain = drain.clone();
                tokio::spawn(async move {
                    // Some go away before their answer.
                    let limit = Duration::from_micros(if n % 3 == 0 { 50 } else { 20_000_000 });
                    let deed = async { if n % 2 == 0 { drain.begin().await.map(drop) } else { drain.undo().await } };
                    if let Ok(done) = tokio::time::timeout(limit, deed).await {
                        done.unwrap();
                    }
                })
            });
            for deed in deeds.collect::<Vec<_>>() {
                deed.await.unwrap();
            }
            let _writing = drain.writing.lock().await;
            assert_eq!(Drain::open(folder.path()).unwrap().since(), drain.since());
        }
    }

    #[tokio::test]
    async fn nothing_is_permitted_after_a_drain_was_answered() {
        let folder = tempfile::tempdir().unwrap();
        let drain = Drain::open(folder.path()).unwrap();
        for _ in 0..20 {
            let askers: Vec<_> = (0..4)
                .map(|_| {
                    let drain = drain.clone();
                    std::thread::spawn(move || while drain.permit(New::Fetch).is_some() {})
                })
                .collect();
            drain.begin().await.unwrap();
            assert!(drain.permit(New::Environment).is_none());
            for asker in askers {
                asker.join().unwrap();
            }
            assert_eq!(drain.under_way(New::Fetch), 0);
            drain.undo().await.unwrap();
        }
    }
}
