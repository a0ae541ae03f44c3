//! The mirror's file: opened, checked, set aside where it cannot be trusted, and read beside a running controller.
//!
//! It is a copy, so unlike the queue's file a damaged one is renamed and a new one begun; only a file of a newer version is left as
//! it is, since a newer program ran here. One process writes it (a lock file beside it says who), others may read it meanwhile.
//! Blocking.

use std::{
    fs::{self, File, TryLockError},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use redb::{Builder, ConcurrencyMode, Database, Durability, ReadableDatabase as _, TableError, WriteTransaction};

use super::{
    migrate::{self, SCHEMA},
    rows::{self, Failure, META, META_INSTANCE, META_SCHEMA},
};
use crate::{failpoint, files, ids::InstanceId};

pub(super) const CACHE_BYTES: usize = 4 << 20;
/// Files set aside that are kept, the newest.
const KEPT_ASIDE: usize = 3;

/// Why the file was not opened, or not written.
#[derive(Debug)]
pub(super) enum Trouble {
    /// A newer program wrote it, with this layout.
    Newer(u64),
    InUse(String),
    Damaged(String),
    OtherInstance(String),
    /// Disk full, no permission, …: another time.
    Unavailable(String),
}

impl Trouble {
    pub(super) fn of(error: redb::Error) -> Self {
        use io::ErrorKind::{InvalidData, UnexpectedEof};
        let text = error.to_string();
        match error {
            redb::Error::DatabaseAlreadyOpen | redb::Error::LockProtocolMismatch => Trouble::InUse(text),
            redb::Error::Io(error) if !matches!(error.kind(), InvalidData | UnexpectedEof) => Trouble::Unavailable(text),
            redb::Error::PreviousIo | redb::Error::DatabaseClosed | redb::Error::LockPoisoned(_) => Trouble::Unavailable(text),
            _ => Trouble::Damaged(text),
        }
    }

    pub(super) fn of_failure(failure: Failure) -> Self {
        match failure {
            Failure::Store(error) => Trouble::of(error),
            Failure::Row(unreadable) => Trouble::Damaged(unreadable.to_string()),
        }
    }

    fn io(verb: &str, path: &Path, error: &io::Error) -> Self {
        Trouble::Unavailable(format!("{verb} {}: {error}", path.display()))
    }
}

/// What was found where the file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Ours, whole, at the present version.
    Whole,
    /// None.
    Nothing,
    /// One that was set aside; the label of `mirror_rebuilds_total`.
    SetAside(&'static str),
}

/// Opens the file for writing, or begins a new one. Fails only where neither can be.
pub(super) fn open(path: &Path, instance: &InstanceId, now_ms: u64) -> Result<(Database, Found), Trouble> {
    let found = match path.try_exists() {
        Ok(false) => Found::Nothing,
        Ok(true) => match open_checked(path, instance) {
            Ok(database) => return Ok((database, Found::Whole)),
            Err(Trouble::Damaged(why)) => aside(path, "damaged", &why, now_ms)?,
            Err(Trouble::OtherInstance(why)) => aside(path, "instance", &why, now_ms)?,
            Err(trouble) => return Err(trouble),
        },
        Err(error) => return Err(Trouble::io("find", path, &error)),
    };
    begin(path, instance, now_ms)?;
    Ok((open_checked(path, instance)?, found))
}

/// What of redb panics on a damaged file must not take more with it than the file.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T, Trouble>) -> Result<T, Trouble> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(_panic) => Err(Trouble::Damaged("the database panics on it".into())),
    }
}

fn open_checked(path: &Path, instance: &InstanceId) -> Result<Database, Trouble> {
    guarded(|| {
        let database = builder().open(path).map_err(|e| Trouble::of(e.into()))?;
        let (schema, of) = meta(&database)?;
        migrate::walk(&database, schema)?;
        if of != instance.as_str() {
            return Err(Trouble::OtherInstance(format!("it is of the instance {of:?}, this one is {instance}")));
        }
        Ok(database)
    })
}

fn meta(database: &Database) -> Result<(u64, String), Trouble> {
    let txn = database.begin_read().map_err(|e| Trouble::of(e.into()))?;
    let table = match txn.open_table(META) {
        Ok(table) => table,
        Err(TableError::Storage(e)) => return Err(Trouble::of(e.into())),
        Err(e) => return Err(Trouble::Damaged(e.to_string())),
    };
    let get = |name| table.get(name).map_err(|e| Trouble::of(e.into()));
    let schema = get(META_SCHEMA)?.and_then(|v| v.value().try_into().ok().map(u64::from_le_bytes));
    let schema = schema.ok_or_else(|| Trouble::Damaged("it does not say its version".into()))?;
    let instance = get(META_INSTANCE)?.map(|v| String::from_utf8_lossy(v.value()).into_owned());
    Ok((schema, instance.unwrap_or_default()))
}

/// A new file gets its name only when it is whole. A crash in between leaves a `.new` file, which the next one replaces.
fn begin(path: &Path, instance: &InstanceId, now_ms: u64) -> Result<(), Trouble> {
    let new = files::with_suffix(path, ".new");
    files::remove(&new).map_err(|e| Trouble::io("remove", &new, &e))?;
    guarded(|| {
        let database = builder().create(&new).map_err(|e| Trouble::of(e.into()))?;
        write(&database, |txn| rows::found(txn, instance, now_ms))?;
        database.close().map_err(|e| Trouble::of(e.into()))
    })?;
    failpoint::reached("mirror.new");
    fs::rename(&new, path).map_err(|e| Trouble::io("name", path, &e))?;
    files::sync_folder_of(path).map_err(|e| Trouble::io("sync the folder of", path, &e))
}

/// Renames the file, so that somebody may look at it, and keeps the newest few of such.
pub(super) fn aside(path: &Path, label: &'static str, why: &str, now_ms: u64) -> Result<Found, Trouble> {
    let name = files::with_suffix(path, &format!(".bad-{}", now_ms / 1000));
    fs::rename(path, &name).map_err(|e| Trouble::io("set aside", path, &e))?;
    tracing::warn!(aside = %name.display(), why, "set the mirror aside; it is made anew from queue, backends and Gitea, and timelines begin again");
    forget_oldest(path);
    Ok(Found::SetAside(label))
}

fn forget_oldest(path: &Path) {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else { return };
    let prefix = format!("{name}.bad-");
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut bad: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| file.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(&prefix)))
        .collect();
    bad.sort();
    bad.reverse();
    for old in bad.into_iter().skip(KEPT_ASIDE) {
        if let Err(e) = fs::remove_file(&old) {
            tracing::debug!(file = %old.display(), error = %e, "failed to remove an old mirror that was set aside");
        }
    }
}

/// One durable transaction, or none.
pub(super) fn write<T>(database: &Database, change: impl FnOnce(&WriteTransaction) -> Result<T, Failure>) -> Result<T, Trouble> {
    guarded(|| {
        let mut txn = database.begin_write().map_err(|e| Trouble::of(e.into()))?;
        txn.set_durability(Durability::Immediate).map_err(|e| Trouble::of(e.into()))?;
        // Opens at once after a crash, by us and by a reader that may not repair.
        txn.set_quick_repair(true);
        let value = change(&txn).map_err(Trouble::of_failure)?;
        txn.commit().map_err(|e| Trouble::of(e.into()))?;
        Ok(value)
    })
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder.set_concurrency_mode(ConcurrencyMode::SingleWriter);
    // Without it a flipped bit is read as a value, or panics (measured with redb 4.6).
    builder.set_check_integrity_on_open(true);
    builder
}

/// The one who writes, for life; `Err` names the way out.
pub(super) fn lock(path: &Path) -> Result<File, Trouble> {
    let lock_path = files::with_suffix(path, ".lock");
    let file = File::options().create(true).truncate(false).write(true).open(&lock_path);
    let file = file.map_err(|e| Trouble::io("open", &lock_path, &e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Trouble::InUse(format!(
            "a controller runs on this state folder (it holds {}): stop it first, or give another STATE_DIRECTORY",
            lock_path.display()
        ))),
        Err(TryLockError::Error(e)) => Err(Trouble::io("lock", &lock_path, &e)),
    }
}

pub(super) fn newer(path: &Path, version: u64) -> String {
    let path = path.display();
    format!(
        "{path} has the layout {version}, and this program knows {SCHEMA} at most: a newer version ran here. Run that one, or, to go \
         back for good, move the file away (mv {path} {path}.newer): it is a copy, and is made anew. Its timelines are lost then"
    )
}
