//! The file read by another process than the controller, which may write it meanwhile, or have died over it.
//!
//! Changes nothing. A file that a crash left open for writing may not be read as it is, so its repair is made in memory.

use std::{fs, io::Read as _, path::Path};

use redb::{
    Builder, ConcurrencyMode, Database, ReadOnlyDatabase, ReadTransaction, ReadableDatabase as _, StorageBackend as _,
    backends::InMemoryBackend,
};

use super::{
    file::{CACHE_BYTES, Trouble, guarded, newer},
    migrate::SCHEMA,
    read::Snapshot,
    rows::{META, META_SCHEMA},
};

/// A larger file is not read into memory.
const COPY_MOST: u64 = 512 << 20;

pub struct Reader(Opened);

enum Opened {
    File(ReadOnlyDatabase),
    /// Of a file whose writer died.
    Copy(Database),
}

impl Reader {
    /// # Errors
    /// A text for the operator, with the way out.
    pub fn open(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let reader = match guarded(|| opened(path)) {
            Ok(opened) => Self(opened),
            Err(Trouble::Unavailable(why)) if !path.exists() => {
                return Err(format!(
                    "there is no mirror at {shown} ({why}): is STATE_DIRECTORY right, and has a controller run there?"
                ));
            }
            Err(Trouble::Unavailable(why) | Trouble::InUse(why)) => return Err(format!("read {shown}: {why}")),
            Err(Trouble::Damaged(why) | Trouble::OtherInstance(why)) => {
                return Err(format!(
                    "{shown} cannot be read ({why}): a controller sets it aside at its next start, and makes it anew"
                ));
            }
            Err(Trouble::Newer(version)) => return Err(newer(path, version)),
        };
        match reader.schema() {
            Ok(SCHEMA) => Ok(reader),
            Ok(older) if older < SCHEMA => {
                Err(format!("{shown} has the older layout {older}: start the controller once, it brings it to layout {SCHEMA}"))
            }
            Ok(version) => Err(newer(path, version)),
            Err(why) => Err(format!("{shown} cannot be read ({why})")),
        }
    }

    fn schema(&self) -> Result<u64, String> {
        let table = self.begin()?.open_table(META).map_err(|e| e.to_string())?;
        let value = table.get(META_SCHEMA).map_err(|e| e.to_string())?;
        value.and_then(|v| v.value().try_into().ok().map(u64::from_le_bytes)).ok_or_else(|| "it does not say its version".into())
    }

    fn begin(&self) -> Result<ReadTransaction, String> {
        let begun = match &self.0 {
            Opened::File(database) => database.begin_read(),
            Opened::Copy(database) => database.begin_read(),
        };
        begun.map_err(|e| e.to_string())
    }

    pub fn snapshot(&self) -> Result<Snapshot, String> {
        self.begin().map(Snapshot)
    }
}

fn opened(path: &Path) -> Result<Opened, Trouble> {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES).set_concurrency_mode(ConcurrencyMode::SingleWriter);
    match builder.open_read_only(path) {
        Ok(database) => Ok(Opened::File(database)),
        Err(redb::DatabaseError::RepairAborted) => copied(path),
        Err(e) => Err(Trouble::of(e.into())),
    }
}

fn copied(path: &Path) -> Result<Opened, Trouble> {
    let read = || {
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(COPY_MOST).read_to_end(&mut bytes)?;
        let memory = InMemoryBackend::new();
        memory.set_len(u64::try_from(bytes.len()).unwrap_or(u64::MAX))?;
        memory.write(0, &bytes)?;
        Ok(memory)
    };
    let memory = read().map_err(|e: std::io::Error| Trouble::of(redb::Error::Io(e)))?;
    Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(memory).map(Opened::Copy).map_err(|e| Trouble::of(e.into()))
}
