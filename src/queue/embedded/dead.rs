//! Dead letters: assignments that could not be read, kept for a person to look at.
//!
//! Bounded in number and in bytes, the oldest go first. They hold no job any more: the job was failed at Gitea by whoever
//! rejected the assignment.

use redb::{ReadTransaction, ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use crate::{
    ids::TaskId,
    queue::{
        Dead,
        stored::{Failure, decode, encode, lane_of},
    },
};

/// At most so many are kept, the newest.
const DEAD_KEPT: u64 = 1000;
/// At most so many bytes of payloads are kept; the newest one always.
const DEAD_KEPT_BYTES: u64 = 64 << 20;
/// A longer reason is cut.
const REASON_CHARS: usize = 2000;
const DEAD_VERSION: u8 = 1;

/// A number from the queue's counter to [`DeadRow`].
const DEAD: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("dead");
/// The same number to the sealed assignment.
const DEAD_PAYLOADS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("dead_payloads");

#[derive(Debug, Serialize, Deserialize)]
struct DeadRow {
    lane: u8,
    task: i64,
    reason: String,
    at_ms: u64,
    bytes: u64,
}

/// Makes the tables of a new file.
pub(super) fn found(txn: &WriteTransaction) -> Result<(), Failure> {
    txn.open_table(DEAD)?;
    txn.open_table(DEAD_PAYLOADS)?;
    Ok(())
}

/// `kept_bytes`: of all payloads here, before; gives the same afterwards.
pub(super) fn put(txn: &WriteTransaction, number: u64, letter: Dead, kept_bytes: u64) -> Result<u64, Failure> {
    let mut dead = txn.open_table(DEAD)?;
    let mut payloads = txn.open_table(DEAD_PAYLOADS)?;
    let Dead { lane, task, reason, at_ms, sealed } = letter;
    let reason = reason.chars().take(REASON_CHARS).collect();
    let row = DeadRow { lane: lane.code(), task: task.0, reason, at_ms, bytes: sealed.len() as u64 };
    dead.insert(number, encode(DEAD_VERSION, &row)?.as_slice())?;
    payloads.insert(number, sealed.as_slice())?;
    let mut kept_bytes = kept_bytes.saturating_add(row.bytes);
    let (mut count, mut last_beyond) = (dead.len()?, None);
    for entry in dead.iter()? {
        if count <= DEAD_KEPT && (count <= 1 || kept_bytes <= DEAD_KEPT_BYTES) {
            break;
        }
        let (number, row) = entry?;
        let row: DeadRow = decode(DEAD_VERSION, "a dead letter", row.value())?;
        kept_bytes = kept_bytes.saturating_sub(row.bytes);
        count -= 1;
        last_beyond = Some(number.value());
    }
    if let Some(last) = last_beyond {
        // All at once: one by one, each would rewrite a large payload that lies beside it.
        dead.retain_in(..=last, |_, _| false)?;
        payloads.retain_in(..=last, |_, _| false)?;
    }
    Ok(kept_bytes)
}

/// Newest last.
pub(super) fn all(txn: &ReadTransaction) -> Result<Vec<Dead>, Failure> {
    let payloads = txn.open_table(DEAD_PAYLOADS)?;
    let mut letters = Vec::new();
    for entry in txn.open_table(DEAD)?.iter()? {
        let (number, row) = entry?;
        let DeadRow { lane, task, reason, at_ms, bytes: _ } = decode(DEAD_VERSION, "a dead letter", row.value())?;
        let sealed = payloads.get(number.value())?.map(|bytes| bytes.value().to_vec()).unwrap_or_default();
        letters.push(Dead { lane: lane_of(lane)?, task: TaskId(task), reason, at_ms, sealed });
    }
    Ok(letters)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use redb::{Database, ReadableDatabase as _, backends::InMemoryBackend};

    use super::*;
    use crate::ids::Lane;

    /// What is kept of letters with payloads of these sizes, and the count of bytes that goes with it.
    fn kept(sizes: impl IntoIterator<Item = usize>) -> (Vec<Dead>, u64) {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let txn = database.begin_write().unwrap();
        found(&txn).unwrap();
        let mut bytes = 0;
        for (number, size) in (1..).zip(sizes) {
            let task = TaskId(i64::try_from(number).unwrap());
            let letter = Dead { lane: Lane::Pod, task, reason: "\u{fc}".repeat(3000), at_ms: 1, sealed: vec![7; size] };
            bytes = put(&txn, number, letter, bytes).unwrap();
        }
        txn.commit().unwrap();
        (all(&database.begin_read().unwrap()).unwrap(), bytes)
    }

    fn tasks(letters: &[Dead]) -> Vec<i64> {
        letters.iter().map(|letter| letter.task.0).collect()
    }

    #[test]
    fn the_newest_thousand_are_kept_with_reasons_of_bounded_length() {
        let (letters, bytes) = kept(std::iter::repeat_n(3, 1004));
        assert_eq!(tasks(&letters), (5..=1004).collect::<Vec<_>>());
        assert_eq!(bytes, 3000);
        assert!(letters.iter().all(|letter| letter.reason.chars().count() == REASON_CHARS && letter.sealed == [7; 3]));
    }

    #[test]
    fn large_ones_push_out_the_oldest_but_the_newest_stays() {
        const MIB: usize = 1 << 20;
        let (letters, bytes) = kept([1, 30 * MIB, 30 * MIB, 5 * MIB]);
        assert_eq!((tasks(&letters), bytes), (vec![3, 4], 35 << 20));
        let (letters, bytes) = kept([1, 1, 65 * MIB]);
        assert_eq!((tasks(&letters), bytes), (vec![3], 65 << 20));
    }
}
