//! Dead letters: assignments that could not be read, kept for a person to look at.
//!
//! Bounded in number and in bytes, the oldest go first. They hold no job any more: the job was failed at Gitea by whoever
//! rejected the assignment.

use redb::{ReadTransaction, ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use super::stored::{Failure, decode, encode, lane_of};
use crate::{ids::TaskId, queue::Dead};

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
    while dead.len()? > DEAD_KEPT || (dead.len()? > 1 && kept_bytes > DEAD_KEPT_BYTES) {
        let Some((number, row)) = dead.pop_first()? else { break };
        let row: DeadRow = decode(DEAD_VERSION, "a dead letter", row.value())?;
        payloads.remove(number.value())?;
        kept_bytes = kept_bytes.saturating_sub(row.bytes);
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
