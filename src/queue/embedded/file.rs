//! The queue's file: who may open it, what is done when it fails, and when it is trusted again.
//!
//! A lock file beside it belongs to this process for life; redb's own lock is let go for a moment when the file is opened again.
//! An existing file is never replaced or started empty: what it held are jobs that nothing else knows. Blocking; what the
//! transactions do is for `rows`.

use std::{
    fmt,
    fs::{self, File, TryLockError},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use redb::{Builder, Database, Durability, ReadTransaction, ReadableDatabase, WriteTransaction};

use super::{
    rows,
    stored::{self, Failure, Step},
};
use crate::{
    failpoint, files,
    queue::{QueueError, QueueHealth},
};

/// redb takes 1 GiB unless told; the queue is small, and most of it is read once.
const CACHE_BYTES: usize = 8 << 20;
/// A failed store is opened again at most this often.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Store {
    path: PathBuf,
    /// Held, not read.
    _lock: File,
    min_free_bytes: u64,
    clock: Clock,
    /// Shared by every transaction, exclusive for opening again.
    open: RwLock<Open>,
    trouble: Mutex<Option<Trouble>>,
}

struct Open {
    /// `None` only after a failed attempt to open it again.
    database: Option<Database>,
    /// Whether the leases of the process before this one were taken back.
    taken_over: bool,
}

struct Trouble {
    error: QueueError,
    next_try: Instant,
}

/// Milliseconds since 1970 as they were at open, and from then on by the monotonic clock: a jump of the wall clock neither keeps a
/// lease for ever nor ends all of them.
struct Clock {
    opened_ms: u64,
    opened: Instant,
}

impl Clock {
    fn now_ms(&self) -> u64 {
        self.opened_ms.saturating_add(stored::ms(self.opened.elapsed()))
    }
}

/// Milliseconds since 1970, by the wall clock.
pub(super) fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, stored::ms)
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.path.display())
    }
}

impl Store {
    pub(super) fn open(path: &Path, min_free_bytes: u64) -> Result<Self, QueueError> {
        let lock = lock_beside(path)?;
        create_if_missing(path)?;
        let clock = Clock { opened_ms: wall_ms(), opened: Instant::now() };
        let open = RwLock::new(Open { database: None, taken_over: false });
        let store = Self { path: path.to_owned(), _lock: lock, min_free_bytes, clock, open, trouble: Mutex::new(None) };
        match store.reopen() {
            // A full disk does not keep a controller from starting: it can be looked at, and takes no jobs.
            Err(error @ QueueError::Unavailable(_)) if store.is_open() => store.note(error),
            opened => opened?,
        }
        Ok(store)
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// One durable transaction, or none.
    pub(super) fn write<T>(&self, change: impl FnOnce(&WriteTransaction) -> Result<Step<T>, Failure>) -> Result<T, QueueError> {
        self.recover()?;
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let done = open.database.as_ref().map(|database| write_to(database, change));
        drop(open);
        self.settle(done)
    }

    /// Reading works on where writing has failed, so it waits for no repair.
    pub(super) fn read<T>(&self, look: impl FnOnce(&ReadTransaction) -> Result<T, Failure>) -> Result<T, QueueError> {
        if !self.is_open() {
            self.recover()?;
        }
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let done = open.database.as_ref().map(|database| look(&database.begin_read()?));
        drop(open);
        self.settle(done)
    }

    /// Unfit after a failed write until one succeeds, and while the disk is nearly full. Tries to recover, since nobody else
    /// does once fetching has stopped.
    pub(super) fn health(&self) -> QueueHealth {
        if let Err(error) = self.recover() {
            return QueueHealth::Unfit(error.to_string());
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match free_bytes(folder) {
            Ok(free) if free < self.min_free_bytes => QueueHealth::Unfit(format!(
                "{} MiB are free at {}, {} MiB are needed to take jobs: free some space, the controller goes on by itself",
                free >> 20,
                folder.display(),
                self.min_free_bytes >> 20
            )),
            Ok(_) => QueueHealth::Fine,
            Err(error) => QueueHealth::Unfit(format!("read the free space at {}: {error}", folder.display())),
        }
    }

    fn is_open(&self) -> bool {
        self.open.read().unwrap_or_else(PoisonError::into_inner).database.is_some()
    }

    fn trouble(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle<T>(&self, done: Option<Result<T, Failure>>) -> Result<T, QueueError> {
        let error = match done {
            Some(Ok(value)) => return Ok(value),
            Some(Err(Failure::Refused(error))) => return Err(error),
            Some(Err(Failure::Row(what))) => damaged(&self.path, &what),
            Some(Err(Failure::Store(error))) => store_error(&self.path, error),
            None => QueueError::Unavailable(format!("{} could not be opened again", self.path.display())),
        };
        self.note(error.clone());
        Err(error)
    }

    /// After this nothing is written before the file was opened again. Also called where a transaction panicked.
    pub(super) fn note(&self, error: QueueError) {
        let mut trouble = self.trouble();
        if trouble.is_none() {
            tracing::warn!(%error, "queue failed");
        }
        *trouble = Some(Trouble { error, next_try: Instant::now() + REOPEN_PAUSE });
    }

    /// Opens the file again if it failed before and the pause is over.
    fn recover(&self) -> Result<(), QueueError> {
        match &mut *self.trouble() {
            None => return Ok(()),
            Some(trouble) if trouble.next_try > Instant::now() => return Err(trouble.error.clone()),
            // Others who come meanwhile get the known error instead of a second attempt.
            Some(trouble) => trouble.next_try = Instant::now() + REOPEN_PAUSE,
        }
        match self.reopen() {
            Ok(()) => {
                tracing::info!("queue works again");
                *self.trouble() = None;
                Ok(())
            }
            Err(error) => {
                self.note(error.clone());
                Err(error)
            }
        }
    }

    /// Opens, checks all of the file, and proves that it can be written.
    fn reopen(&self) -> Result<(), QueueError> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.database = None;
        let (now, leases_end) = (self.clock.now_ms(), !open.taken_over);
        let database = open.database.insert(open_checked(&self.path)?);
        match write_to(database, |txn| rows::take_over(txn, now, leases_end)) {
            Ok(()) => {
                open.taken_over = true;
                Ok(())
            }
            Err(Failure::Store(error)) => Err(store_error(&self.path, error)),
            Err(Failure::Row(what)) => Err(damaged(&self.path, &what)),
            Err(Failure::Refused(error)) => Err(error),
        }
    }
}

fn write_to<T>(database: &Database, change: impl FnOnce(&WriteTransaction) -> Result<Step<T>, Failure>) -> Result<T, Failure> {
    let mut txn = database.begin_write()?;
    txn.set_durability(Durability::Immediate)?;
    txn.set_two_phase_commit(true);
    match change(&txn)? {
        Step::Commit(value) => {
            txn.commit()?;
            Ok(value)
        }
        Step::Unchanged(value) => {
            txn.abort()?;
            Ok(value)
        }
    }
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    // Without it a flipped bit is read as a value, or panics (measured with redb 4.6).
    builder.set_check_integrity_on_open(true);
    builder
}

fn lock_beside(path: &Path) -> Result<File, QueueError> {
    let lock_path = files::with_suffix(path, ".lock");
    let lock = File::options().create(true).truncate(false).write(true).open(&lock_path);
    let lock = lock.map_err(|error| unavailable("open", &lock_path, &error))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(in_use(path)),
        Err(TryLockError::Error(error)) => Err(unavailable("lock", &lock_path, &error)),
    }
}

/// A new file gets its name only when it is whole, so that an empty or half-made one under this name was never ours.
/// A crash in between leaves the `.new` file, which the next start replaces.
fn create_if_missing(path: &Path) -> Result<(), QueueError> {
    if path.try_exists().map_err(|error| unavailable("find", path, &error))? {
        return Ok(());
    }
    let new = files::with_suffix(path, ".new");
    files::remove(&new).map_err(|error| unavailable("remove", &new, &error))?;
    let database = builder().create(&new).map_err(|error| store_error(&new, error.into()))?;
    match write_to(&database, rows::found) {
        Ok(()) => {}
        Err(Failure::Store(error)) => return Err(store_error(&new, error)),
        Err(Failure::Row(what)) => return Err(QueueError::Unavailable(what)),
        Err(Failure::Refused(error)) => return Err(error),
    }
    database.close().map_err(|error| store_error(&new, error.into()))?;
    failpoint::reached("queue.new");
    fs::rename(&new, path).map_err(|error| unavailable("name", path, &error))?;
    files::sync_folder_of(path).map_err(|error| unavailable("sync the folder of", path, &error))
}

fn open_checked(path: &Path) -> Result<Database, QueueError> {
    // Nothing of ours is changed by a panic in there; the file is.
    match catch_unwind(AssertUnwindSafe(|| builder().open(path))) {
        Ok(Ok(database)) => Ok(database),
        Ok(Err(error)) => Err(store_error(path, error.into())),
        Err(_panic) => Err(damaged(path, "the database panics when it opens it")),
    }
}

fn store_error(path: &Path, error: redb::Error) -> QueueError {
    use io::ErrorKind::{InvalidData, QuotaExceeded, StorageFull, UnexpectedEof};
    match error {
        redb::Error::DatabaseAlreadyOpen | redb::Error::LockProtocolMismatch => in_use(path),
        redb::Error::Io(error) => match error.kind() {
            InvalidData | UnexpectedEof => damaged(path, &error.to_string()),
            StorageFull | QuotaExceeded => QueueError::Unavailable(format!(
                "no space is left to write {} ({error}): free some space, the controller goes on by itself",
                path.display()
            )),
            _ => unavailable("read or write", path, &error),
        },
        error @ (redb::Error::PreviousIo | redb::Error::DatabaseClosed | redb::Error::LockPoisoned(_)) => {
            QueueError::Unavailable(format!("use {}: {error}", path.display()))
        }
        error => damaged(path, &error.to_string()),
    }
}

fn damaged(path: &Path, what: &str) -> QueueError {
    let path = path.display();
    QueueError::Damaged(format!(
        "{path} cannot be trusted ({what}). It holds the jobs that were taken from Gitea and not started yet. If an older version \
         of this program reads it, run that one. Else move it away (mv {path} {path}.bad) and start again: the queue is then \
         empty, and jobs that Gitea still shows as running without a log must be cancelled and run again there"
    ))
}

fn in_use(path: &Path) -> QueueError {
    QueueError::InUse(format!(
        "another controller runs on this state folder (it holds the lock of {}): stop that one, or give this one another STATE_DIRECTORY",
        path.display()
    ))
}

fn unavailable(verb: &str, path: &Path, error: &io::Error) -> QueueError {
    QueueError::Unavailable(format!("{verb} {}: {error}", path.display()))
}

/// Bytes that this user may still write on the file system of `folder`.
fn free_bytes(folder: &Path) -> nix::Result<u64> {
    let stats = nix::sys::statvfs::statvfs(folder)?;
    Ok(stats.blocks_available().saturating_mul(stats.fragment_size()))
}
