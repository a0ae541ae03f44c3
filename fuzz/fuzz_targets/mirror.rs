//! Any bytes as a row of the mirror: read or refused, and nothing else.
#![no_main]

use gitea_dynamic_runner::mirror::read_any_row;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    read_any_row(data);
    // Most bytes fail at the version; these get past it.
    let mut row = vec![1];
    row.extend_from_slice(data);
    read_any_row(&row);
});
