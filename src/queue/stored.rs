//! What the code of every table in a file shares: how a row is spelled, and how a transaction ends.

use std::time::Duration;

use serde::{Serialize, de::DeserializeOwned};

use crate::{ids::Lane, queue::QueueError};

/// Why a transaction was not made.
#[derive(Debug)]
pub(super) enum Failure {
    /// The store failed; whether it can go on is seen by opening it again.
    Store(redb::Error),
    /// What is stored makes no sense to this version.
    Row(String),
    /// A newer version wrote it: the layout it has, and the newest that this version knows.
    Newer { found: u64, known: u64 },
    /// The caller may not; nothing is wrong with the store.
    Refused(QueueError),
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Store(error.into())
    }
}

/// What to do with the transaction.
pub(super) enum Step<T> {
    Commit(T),
    /// Nothing was changed: no commit, so no fsync.
    Unchanged(T),
}

pub(super) fn encode<T: Serialize>(version: u8, value: &T) -> Result<Vec<u8>, Failure> {
    postcard::to_extend(value, vec![version]).map_err(|error| Failure::Row(format!("encode a row: {error}")))
}

pub(super) fn decode<T: DeserializeOwned>(version: u8, what: &str, bytes: &[u8]) -> Result<T, Failure> {
    match bytes.split_first() {
        Some((found, rest)) if *found == version => {
            postcard::from_bytes(rest).map_err(|error| Failure::Row(format!("row of {what} is unreadable: {error}")))
        }
        found => Err(Failure::Row(format!("row of {what} has version {:?}, this program reads {version}", found.map(|f| f.0)))),
    }
}

/// Whether a file is what this program's version writes; `what` it should be (`an outbox`).
pub(super) fn check_schema(found: Option<u64>, wanted: u64, what: &str) -> Result<(), Failure> {
    match found {
        Some(schema) if schema == wanted => Ok(()),
        Some(found) if found > wanted => Err(Failure::Newer { found, known: wanted }),
        Some(other) => Err(Failure::Row(format!("schema {other} is not {wanted}, the one of this program's version"))),
        None => Err(Failure::Row(format!("it is a database, but not {what}"))),
    }
}

pub(super) fn lane_of(code: u8) -> Result<Lane, Failure> {
    Lane::from_code(code).ok_or_else(|| Failure::Row(format!("lane {code} is unknown to this program")))
}

/// Whole milliseconds.
pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
