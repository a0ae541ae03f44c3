//! The messages of Gitea's runner protocol and of our own bridge, generated from `proto/` (see `tests/proto.rs`).
//!
//! Beside them only what the generated code cannot do: take a Task out of an answer, and put it into one, byte for byte.

#[allow(warnings, clippy::all, clippy::unwrap_used, reason = "generated code")]
#[rustfmt::skip]
mod generated;

pub use generated::{environment::v1 as environment, ping::v1 as ping, runner::v1 as runner};

/// An answer to FetchTask that is no protobuf message.
#[derive(Debug, thiserror::Error)]
#[error("answer is no FetchTaskResponse")]
pub struct NotAnAnswer;

/// The raw bytes of `FetchTaskResponse.task` (field 1), if there is one.
///
/// Decoding and encoding again would lose fields that this version does not know.
pub fn task_of_answer(mut answer: &[u8]) -> Result<Option<Vec<u8>>, NotAnAnswer> {
    let mut task: Option<Vec<u8>> = None;
    while !answer.is_empty() {
        let key = varint(&mut answer).ok_or(NotAnAnswer)?;
        let value = match key & 7 {
            0 => varint(&mut answer).map(|_| &[][..]),
            1 => take(&mut answer, 8),
            2 => varint(&mut answer).and_then(|len| take(&mut answer, usize::try_from(len).ok()?)),
            5 => take(&mut answer, 4),
            _ => None,
        }
        .ok_or(NotAnAnswer)?;
        if key == (1 << 3 | 2) {
            // Protobuf merges a message field that comes twice, and concatenation is that merge.
            task.get_or_insert_default().extend_from_slice(value);
        }
    }
    Ok(task)
}

/// A FetchTaskResponse around a raw Task.
pub fn answer_with_task(task: &[u8], tasks_version: i64) -> Vec<u8> {
    let mut answer = Vec::with_capacity(task.len() + 24);
    answer.push(1 << 3 | 2);
    put_varint(&mut answer, task.len() as u64);
    answer.extend_from_slice(task);
    answer.push(2 << 3);
    put_varint(&mut answer, tasks_version.cast_unsigned());
    answer
}

fn varint(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let (first, rest) = from.split_first()?;
        *from = rest;
        value |= u64::from(first & 0x7f).checked_shl(shift).unwrap_or(0);
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn put_varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    into.push(value.to_le_bytes()[0]);
}

fn take<'a>(from: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(len)?;
    *from = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_survives_byte_for_byte() {
        // Field 99 is one that no version knows.
        let task = [8, 71, 0x9a, 0x06, 2, b'h', b'i'];
        let answer = answer_with_task(&task, 300);
        assert_eq!(task_of_answer(&answer).unwrap().unwrap(), task);
        assert!(task_of_answer(&[0x10, 5]).unwrap().is_none());
        for cut in 1..task.len() + 2 {
            assert!(task_of_answer(&answer[..cut]).is_err(), "{cut}");
        }
    }
}
