//! From each older layout of the file to the present one, a step for each version.
//!
//! A step is one write transaction that ends by writing the next version, so a crash leaves the file at one version or the other.
//! Each version has its sample in `migrations/`, and `tests/mirror` walks every one of them up to the present.

use redb::Database;

use super::{
    file::Trouble,
    rows::{Failure, META, META_SCHEMA},
};

/// The layout that this program writes; `migrations/README.md` describes each.
pub const SCHEMA: u64 = 1;

/// What leads from the version at its place (counted from 1) to the next.
type Step = fn(&redb::WriteTransaction) -> Result<(), Failure>;
const STEPS: [Step; SCHEMA as usize - 1] = [];

/// Takes the file to the present version, from whichever it has; answers that.
pub(super) fn walk(database: &Database, found: u64) -> Result<(), Trouble> {
    if found > SCHEMA {
        return Err(Trouble::Newer(found));
    }
    let done = usize::try_from(found).unwrap_or(usize::MAX);
    if done == 0 {
        return Err(Trouble::Damaged("it has the version 0, which never was".into()));
    }
    for (step, version) in STEPS.iter().zip(1u64..).skip(done - 1) {
        let txn = database.begin_write().map_err(|e| Trouble::of(e.into()))?;
        step(&txn).map_err(Trouble::of_failure)?;
        let mut meta = txn.open_table(META).map_err(|e| Trouble::of(e.into()))?;
        let next = version + 1;
        meta.insert(META_SCHEMA, next.to_le_bytes().as_slice()).map_err(|e| Trouble::of(e.into()))?;
        drop(meta);
        txn.commit().map_err(|e| Trouble::of(e.into()))?;
    }
    Ok(())
}
