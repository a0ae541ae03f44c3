//! What can still be read of a task that is no whole protobuf message: its id, so that the job can be failed with a reason, and
//! its workflow, so that the failed job lists its steps.
//!
//! Walks the top-level fields until the damage. Fields of `runner.v1.Task`: 1 is the id, 2 the workflow payload.

use buffa::encoding::{Tag, WireType, decode_varint, skip_field};

use crate::ids::TaskId;

#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) id: Option<TaskId>,
    pub(super) payload: Option<&'a [u8]>,
}

pub(super) fn fields(raw: &[u8]) -> Found<'_> {
    let mut found = Found::default();
    let mut rest = raw;
    // Each turn takes at least one byte, so it ends.
    while let Ok(tag) = Tag::decode(&mut rest) {
        let taken = match (tag.field_number(), tag.wire_type()) {
            (1, WireType::Varint) => decode_varint(&mut rest).map(|id| found.id = super::task_id(id.cast_signed())).is_ok(),
            (2, WireType::LengthDelimited) => take_bytes(&mut rest).map(|text| found.payload = Some(text)).is_some(),
            _ => skip_field(tag, &mut rest).is_ok(),
        };
        if !taken {
            break;
        }
    }
    found
}

fn take_bytes<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = usize::try_from(decode_varint(rest).ok()?).ok()?;
    let (taken, after) = rest.split_at_checked(len)?;
    *rest = after;
    Some(taken)
}
