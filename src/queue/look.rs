//! A store's file looked at without opening it: whether this version could, and how much waits in it.
//!
//! For `doctor`, while no controller runs. A copy is read in memory, so no lock is taken that a starting controller would meet.

use std::{fs::File, io::Read as _, path::Path};

use redb::{
    Builder, Database, ReadableDatabase as _, ReadableTableMetadata as _, StorageBackend as _, TableDefinition,
    backends::InMemoryBackend,
};

/// A larger file is not read into memory.
const COPY_MOST: u64 = 256 << 20;
/// Of both kinds of file, with the schema under its first key.
const META: TableDefinition<'_, u8, u64> = TableDefinition::new("meta");
const META_SCHEMA: u8 = 0;
/// The layout that `embedded` and `jetstream` write.
const SCHEMA: u64 = 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Looked {
    /// As many assignments wait in it.
    Fine(u64),
    /// There is no file: the first start makes it.
    Missing,
    /// A newer version made it, with this layout.
    Newer(u64),
    /// Too large to be looked at this way; the controller checks it when it starts.
    Large(u64),
    Unreadable(String),
}

/// Of the embedded queue.
pub fn embedded(path: &Path) -> Looked {
    looked(path, |database| count(database, TableDefinition::<i64, &[u8]>::new("tasks")))
}

/// Of what waits for NATS.
pub fn outbox(path: &Path) -> Looked {
    looked(path, |database| count(database, TableDefinition::<u64, &[u8]>::new("outbox")))
}

fn count<K: redb::Key + 'static>(database: &Database, table: TableDefinition<'_, K, &'static [u8]>) -> Result<u64, redb::Error> {
    Ok(database.begin_read()?.open_table(table)?.len()?)
}

fn looked(path: &Path, count: impl FnOnce(&Database) -> Result<u64, redb::Error>) -> Looked {
    let bytes = match read(path) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Looked::Missing,
        Err(Unread::Large(bytes)) => return Looked::Large(bytes),
        Err(Unread::Failed(why)) => return Looked::Unreadable(why),
    };
    let look = || -> Result<Looked, redb::Error> {
        let memory = InMemoryBackend::new();
        memory.set_len(u64::try_from(bytes.len()).unwrap_or(u64::MAX))?;
        memory.write(0, &bytes)?;
        let database = Builder::new().create_with_backend(memory)?;
        let schema = database.begin_read()?.open_table(META)?.get(META_SCHEMA)?.map(|value| value.value());
        Ok(match schema {
            Some(SCHEMA) => Looked::Fine(count(&database)?),
            Some(newer) if newer > SCHEMA => Looked::Newer(newer),
            other => Looked::Unreadable(format!("its layout is {other:?}")),
        })
    };
    // What of redb panics on a damaged file is a fault of the file.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(look)) {
        Ok(Ok(looked)) => looked,
        Ok(Err(error)) => Looked::Unreadable(error.to_string()),
        Err(_panic) => Looked::Unreadable("the database panics when it opens it".into()),
    }
}

enum Unread {
    Large(u64),
    Failed(String),
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Unread> {
    let failed = |e: std::io::Error| Unread::Failed(e.to_string());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let length = file.metadata().map_err(failed)?.len();
    if length > COPY_MOST {
        return Err(Unread::Large(length));
    }
    let mut bytes = Vec::new();
    file.take(COPY_MOST).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}
