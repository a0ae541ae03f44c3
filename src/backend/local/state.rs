//! What the local backend keeps on disk, and where.
//!
//! Below `private/` (0700) lies all that is believed: one record an environment, its keeper's word, its end. Below `env/` and `sock/` (0711) lies
//! what jobs may touch; nothing there is ever believed. Deciding what the files mean is `local`'s business.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::cgroup::CgroupDir;
pub(super) use crate::files::Durable;
use crate::{backend::BackendError, files, ids::EnvironmentName, process::ProcessIdentity};

/// The form of [`Record`]; a newer one is refused, not guessed at.
pub(super) const RECORD_VERSION: u8 = 1;

/// How a file's name ends while it is being written.
const NEW: &str = ".new";
/// Older ones are nobody's any more.
const UNFINISHED: Duration = Duration::from_secs(3600);

/// `private/environments/<name>.json`: the environment's metadata. Only the controller writes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) version: u8,
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) annotations: BTreeMap<String, String>,
    /// The slot's own uid; none where environments are not isolated.
    pub(super) uid: Option<u32>,
    /// Unix milliseconds.
    pub(super) created_ms: u64,
    /// Unix milliseconds.
    pub(super) deadline_ms: u64,
    /// The boot that it was made in: no process outlives it.
    pub(super) boot: String,
    /// The systemd unit in which its keeper was started, or was about to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unit: Option<String>,
}

/// `<name>.keeper`: who keeps the environment. Only its keeper writes it, holding `<name>.lock`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct KeeperRecord {
    pub(super) keeper: ProcessIdentity,
    pub(super) init: Option<ProcessIdentity>,
    pub(super) started: bool,
    pub(super) cgroups: Vec<CgroupDir>,
}

/// `<name>.status`: how the executor ended. Only its keeper writes it, once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Status {
    pub(super) text: String,
}

/// The paths below `STATE_DIRECTORY`.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) state: PathBuf,
}

impl Layout {
    pub(super) fn environments(&self) -> PathBuf {
        self.state.join("private/environments")
    }
    pub(super) fn logs(&self) -> PathBuf {
        self.state.join("private/logs")
    }
    pub(super) fn env_root(&self) -> PathBuf {
        self.state.join("env")
    }
    pub(super) fn env(&self, name: &EnvironmentName) -> PathBuf {
        self.env_root().join(name.as_str())
    }
    pub(super) fn record(&self, name: &EnvironmentName) -> PathBuf {
        self.environments().join(format!("{name}.json"))
    }
    pub(super) fn keeper(&self, name: &EnvironmentName) -> PathBuf {
        self.environments().join(format!("{name}.keeper"))
    }
    pub(super) fn status(&self, name: &EnvironmentName) -> PathBuf {
        self.environments().join(format!("{name}.status"))
    }
    pub(super) fn lock(&self, name: &EnvironmentName) -> PathBuf {
        self.environments().join(format!("{name}.lock"))
    }
    pub(super) fn log(&self, name: &EnvironmentName) -> PathBuf {
        self.logs().join(format!("{name}.log"))
    }

    /// Short, because a socket's path has at most 107 bytes (unix(7)); the nonce alone is unique.
    pub(super) fn socket(&self, name: &EnvironmentName) -> PathBuf {
        let short = name.parts().map(|(_, _, nonce)| nonce.to_string()).unwrap_or_else(|| name.to_string());
        self.state.join("sock").join(format!("{short}.sock"))
    }

    /// Where a keeper that systemd starts is given its order. Nobody but root gets into that folder.
    pub(super) fn order_socket(&self, name: &EnvironmentName) -> PathBuf {
        self.state.join("private").join(self.socket(name).file_name().unwrap_or_default())
    }

    /// Makes the folders, each with its exact mode.
    pub(super) fn create(&self) -> io::Result<()> {
        for (folder, mode) in [("", None), ("private", Some(0o700)), ("env", Some(0o711)), ("sock", Some(0o711))] {
            make_folder(&self.state.join(folder), mode)?;
        }
        make_folder(&self.environments(), Some(0o700))?;
        make_folder(&self.logs(), Some(0o700))?;
        self.sweep()
    }

    /// Waits for the lock on all records (held for one look and one write).
    pub(super) fn lock_all(&self) -> io::Result<Flock<File>> {
        let file = open_lock(&self.environments().join(".all"))?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e.into())
    }

    pub(super) fn read_record(&self, name: &EnvironmentName) -> io::Result<Option<Record>> {
        let path = self.record(name);
        let record: Option<Record> = read_json(&path)?;
        match record {
            Some(record) if record.version != RECORD_VERSION => {
                Err(unreadable(&path, "it is of another version: run the binary that wrote it"))
            }
            Some(record) if record.name != name.as_str() => Err(unreadable(&path, "it is of another environment")),
            other => Ok(other),
        }
    }

    /// A newer version's environments are not ours to serve or to remove. Of such a record only its version is read.
    pub(super) fn refuse_newer(&self) -> Result<(), BackendError> {
        #[derive(Deserialize)]
        struct Version {
            version: u8,
        }
        let transient = |e: io::Error| BackendError::Transient(e.to_string());
        for entry in fs::read_dir(self.environments()).map_err(transient)? {
            let path = entry.map_err(transient)?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            // One that cannot be read is told where it is looked at.
            if let Ok(Some(Version { version })) = read_json(&path)
                && version > RECORD_VERSION
            {
                return Err(BackendError::Newer(format!(
                    "the environment's record {} has the layout {version}, which a newer version of this program has made; this one knows \
                     {RECORD_VERSION}. Run that version again; to go back for good, first let all jobs end under it",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    /// Removes all files of an environment, also half written ones; its lock and its record last.
    pub(super) fn remove_records(&self, name: &EnvironmentName) -> io::Result<()> {
        let last = [self.lock(name), self.record(name)];
        let prefix = format!("{name}.");
        for entry in fs::read_dir(self.environments())? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&prefix) && !last.contains(&entry.path()) {
                unlink(&entry.path())?;
            }
        }
        last.iter().try_for_each(|path| unlink(path))
    }

    /// Removes what a writer that was killed in the middle left behind, once nobody can still be writing it.
    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.environments())? {
            let entry = entry?;
            let old = || Some(entry.metadata().ok()?.modified().ok()?.elapsed().ok()? > UNFINISHED);
            if entry.file_name().to_string_lossy().ends_with(NEW) && old() == Some(true) {
                unlink(&entry.path())?;
            }
        }
        Ok(())
    }

    /// The names of all records, of whatever instance.
    pub(super) fn names(&self) -> io::Result<Vec<EnvironmentName>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.environments())? {
            let file = entry?.file_name();
            let Some(name) = file.to_str().and_then(|file| file.strip_suffix(".json")) else { continue };
            names.push(
                name.parse()
                    .map_err(|_| unreadable(&self.environments().join(&file), "its name is no environment's: move it away"))?,
            );
        }
        Ok(names)
    }
}

/// `None` if there is no such file; an error if it is there and cannot be understood.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| unreadable(path, &e.to_string())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io::Error::new(e.kind(), format!("read {}: {e}", path.display()))),
    }
}

/// Whole or not at all: a reader never sees half of it. Keeper and controller may write the same file.
pub(super) fn write_json<T: Serialize>(path: &Path, value: &T, durable: Durable) -> io::Result<()> {
    let beside = files::with_suffix(path, &format!(".{}{NEW}", std::process::id()));
    files::write_by(&beside, path, &serde_json::to_vec_pretty(value)?, durable)
}

/// A missing file is removed already.
pub(super) fn unlink(path: &Path) -> io::Result<()> {
    files::remove(path).map_err(|e| io::Error::new(e.kind(), format!("remove {}: {e}", path.display())))
}

pub(super) fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

pub(super) fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

pub(super) fn from_unix_ms(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

fn make_folder(path: &Path, mode: Option<u32>) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("make folder {}: {e}", path.display()));
    let existed = path.is_dir();
    fs::create_dir_all(path).map_err(named)?;
    // The state folder itself is the operator's: its mode is only chosen when it is new.
    match mode.or((!existed).then_some(0o711)) {
        Some(mode) => fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(named),
        None => Ok(()),
    }
}

fn unreadable(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("cannot read the environment's record {}: {why}", path.display()))
}
