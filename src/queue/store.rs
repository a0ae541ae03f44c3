//! A file with jobs that nothing else knows: who may open it, what is done when it fails, and when it is trusted again.
//!
//! A lock file beside it belongs to this process for life; redb's own lock is let go for a moment when the file is opened again.
//! An existing file is never replaced or started empty. Blocking; the tables are its user's ([`Kind`]).

use std::{
    fmt,
    fs::{self, File, TryLockError},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use redb::{Builder, Database, Durability, ReadTransaction, ReadableDatabase, WriteTransaction};

use super::{
    QueueError, QueueHealth, StoreUse,
    stored::{self, Failure, Step},
};
use crate::{failpoint, files};

/// With less space free than this no job is taken from Gitea (rule R1).
pub const MIN_FREE_BYTES: u64 = 512 << 20;
/// redb takes 1 GiB unless told; the queue is small, and most of it is read once.
const CACHE_BYTES: usize = 8 << 20;
/// A failed store is opened again at most this often.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

/// What one kind of file has of its own.
pub(super) struct Kind {
    /// Makes the tables of a new file.
    pub(super) found: fn(&WriteTransaction) -> Result<Step<()>, Failure>,
    /// Checks that the file is one of ours and every row readable, and writes, which proves that it can be written. It is given the
    /// time in milliseconds, and whether this process opens the file for the first time.
    pub(super) take_over: fn(&WriteTransaction, u64, bool) -> Result<Step<()>, Failure>,
    /// A sentence for the operator of a damaged file.
    pub(super) holds: &'static str,
    /// What is so after he moved it away.
    pub(super) without: &'static str,
}

pub(super) struct Store {
    path: PathBuf,
    kind: &'static Kind,
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
    /// Whether this process has had it open before.
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
    pub(super) fn open(path: &Path, kind: &'static Kind, min_free_bytes: u64) -> Result<Self, QueueError> {
        let lock = lock_beside(path)?;
        create_if_missing(path, kind)?;
        let clock = Clock { opened_ms: wall_ms(), opened: Instant::now() };
        let open = RwLock::new(Open { database: None, taken_over: false });
        let store = Self { path: path.to_owned(), kind, _lock: lock, min_free_bytes, clock, open, trouble: Mutex::new(None) };
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

    /// Runs on a blocking thread, to its end, also when the caller is dropped meanwhile.
    pub(super) async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Store) -> Result<T, QueueError> + Send + 'static,
    ) -> Result<T, QueueError> {
        let store = Arc::clone(self);
        match tokio::task::spawn_blocking(move || work(&store)).await {
            Ok(done) => done,
            Err(error) => {
                // Only a panic comes here, or the runtime's end. The file is opened and checked again before the next write.
                let error = QueueError::Unavailable(format!("run a transaction: {error}"));
                self.note(error.clone());
                Err(error)
            }
        }
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

    /// The file may grow until as little is free as no job is taken with.
    pub(super) fn used(&self) -> Option<StoreUse> {
        let used = fs::metadata(&self.path).ok()?.len();
        let free = free_bytes(self.path.parent()?).ok()?;
        Some(StoreUse { used, limit: used.saturating_add(free.saturating_sub(self.min_free_bytes)) })
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
            Some(Err(Failure::Row(what))) => damaged(&self.path, self.kind, &what),
            Some(Err(Failure::Newer { found, known })) => newer(&self.path, found, known),
            Some(Err(Failure::Store(error))) => store_error(&self.path, self.kind, error),
            None => QueueError::Unavailable(format!("{} could not be opened again", self.path.display())),
        };
        self.note(error.clone());
        Err(error)
    }

    /// After this nothing is written before the file was opened again.
    fn note(&self, error: QueueError) {
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
        let (now, first) = (self.clock.now_ms(), !open.taken_over);
        let database = open.database.insert(open_checked(&self.path, self.kind)?);
        match write_to(database, |txn| (self.kind.take_over)(txn, now, first)) {
            Ok(()) => {
                open.taken_over = true;
                Ok(())
            }
            Err(Failure::Store(error)) => Err(store_error(&self.path, self.kind, error)),
            Err(Failure::Row(what)) => Err(damaged(&self.path, self.kind, &what)),
            Err(Failure::Newer { found, known }) => Err(newer(&self.path, found, known)),
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
fn create_if_missing(path: &Path, kind: &Kind) -> Result<(), QueueError> {
    if path.try_exists().map_err(|error| unavailable("find", path, &error))? {
        return Ok(());
    }
    let new = files::with_suffix(path, ".new");
    files::remove(&new).map_err(|error| unavailable("remove", &new, &error))?;
    let database = builder().create(&new).map_err(|error| store_error(&new, kind, error.into()))?;
    match write_to(&database, kind.found) {
        Ok(()) => {}
        Err(Failure::Store(error)) => return Err(store_error(&new, kind, error)),
        Err(Failure::Row(what)) => return Err(QueueError::Unavailable(what)),
        Err(Failure::Newer { found, known }) => return Err(newer(&new, found, known)),
        Err(Failure::Refused(error)) => return Err(error),
    }
    database.close().map_err(|error| store_error(&new, kind, error.into()))?;
    failpoint::reached("queue.new");
    fs::rename(&new, path).map_err(|error| unavailable("name", path, &error))?;
    files::sync_folder_of(path).map_err(|error| unavailable("sync the folder of", path, &error))
}

fn open_checked(path: &Path, kind: &Kind) -> Result<Database, QueueError> {
    // Nothing of ours is changed by a panic in there; the file is.
    match catch_unwind(AssertUnwindSafe(|| builder().open(path))) {
        Ok(Ok(database)) => Ok(database),
        Ok(Err(error)) => Err(store_error(path, kind, error.into())),
        Err(_panic) => Err(damaged(path, kind, "the database panics when it opens it")),
    }
}

fn store_error(path: &Path, kind: &Kind, error: redb::Error) -> QueueError {
    use io::ErrorKind::{InvalidData, QuotaExceeded, StorageFull, UnexpectedEof};
    match error {
        redb::Error::DatabaseAlreadyOpen | redb::Error::LockProtocolMismatch => in_use(path),
        redb::Error::Io(error) => match error.kind() {
            InvalidData | UnexpectedEof => damaged(path, kind, &error.to_string()),
            StorageFull | QuotaExceeded => QueueError::Unavailable(format!(
                "no space is left to write {} ({error}): free some space, the controller goes on by itself",
                path.display()
            )),
            _ => unavailable("read or write", path, &error),
        },
        error @ (redb::Error::PreviousIo | redb::Error::DatabaseClosed | redb::Error::LockPoisoned(_)) => {
            QueueError::Unavailable(format!("use {}: {error}", path.display()))
        }
        error => damaged(path, kind, &error.to_string()),
    }
}

fn damaged(path: &Path, kind: &Kind, what: &str) -> QueueError {
    let (path, Kind { holds, without, .. }) = (path.display(), kind);
    QueueError::Damaged(format!(
        "{path} cannot be trusted ({what}). {holds} If an older version of this program reads it, run that one. Else move it away \
         (mv {path} {path}.bad) and start again: {without}"
    ))
}

/// Nothing of it was changed, so the program that wrote it goes on where it was.
fn newer(path: &Path, found: u64, known: u64) -> QueueError {
    QueueError::Newer(format!(
        "{} has the layout {found}, which a newer version of this program has made; this one knows {known}. Run that version again; to go \
         back for good, first let all jobs end under it, then move the file away",
        path.display()
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
