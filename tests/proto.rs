//! The committed code in `src/proto/generated` is what the `.proto` files say.
//!
//! `UPDATE_PROTO=1 cargo test --test proto` writes it anew; so nobody who builds the project needs a generator.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, fs, path::Path};

use protox::prost::Message as _;

const FILES: [&str; 3] = ["runner.proto", "ping.proto", "environment.proto"];

fn generate(into: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let set = protox::compile(FILES, [root.join("proto")]).unwrap();
    let descriptor = into.join("set.bin");
    fs::write(&descriptor, set.encode_to_vec()).unwrap();
    connectrpc_build::Config::new()
        .descriptor_set(&descriptor)
        .files(&FILES)
        .out_dir(into)
        .file_per_package(true)
        .emit_rerun_directives(false)
        .include_file("mod.rs")
        .compile()
        .unwrap();
    fs::remove_file(descriptor).unwrap();
}

fn read_all(folder: &Path) -> BTreeMap<String, String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), fs::read_to_string(e.path()).unwrap()))
        .collect()
}

#[test]
fn the_committed_code_is_what_the_proto_files_say() {
    let fresh = tempfile::tempdir().unwrap();
    generate(fresh.path());
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/proto/generated");
    if std::env::var_os("UPDATE_PROTO").is_some() {
        fs::create_dir_all(&committed).unwrap();
        for (name, text) in read_all(fresh.path()) {
            fs::write(committed.join(name), text).unwrap();
        }
    }
    let (fresh, committed) = (read_all(fresh.path()), read_all(&committed));
    assert_eq!(fresh.keys().collect::<Vec<_>>(), committed.keys().collect::<Vec<_>>());
    for (name, text) in &fresh {
        assert!(text == &committed[name], "{name} is out of date: run UPDATE_PROTO=1 cargo test --test proto");
    }
}
