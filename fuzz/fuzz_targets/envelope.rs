//! Any bytes as an envelope, and any task through one: an envelope opens to what was sealed, or says why not.
//!
//! Good seeds: `tests/fixtures/envelopes` and `tests/fixtures/gitea-tasks`.
#![no_main]

use gitea_dynamic_runner::assignment::{Assignment, Rules, seal::SealKeys};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let rules = Rules { trust_domain: "ci.example".into(), vm_label: "vm".into() };
    let keys = SealKeys::parse(&"1".repeat(64)).expect("a good key");
    // Whether it opens does not matter here, only that it answers.
    drop(Assignment::open(data, &keys, &rules));
    if let Ok(made) = Assignment::of_task(data.to_vec(), &rules, 1) {
        let opened = Assignment::open(&made.seal(&keys), &keys, &rules).expect("what was sealed opens");
        assert_eq!(format!("{opened:?}"), format!("{made:?}"));
        assert_eq!(opened.raw.expose(), made.raw.expose());
    }
});
