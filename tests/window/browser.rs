//! The pages in Chromium, over a real run of the demo: `browser.mjs` tells the story, here it is started and believed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::Path,
    process::{Command, Stdio},
};

use crate::support::peers_dir;

#[test]
fn every_page_works_in_a_browser_and_follows_the_demo() {
    let folder = tempfile::Builder::new().prefix("b").rand_bytes(4).tempdir().unwrap();
    crate::support::passable(folder.path());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // With UPDATE_IMAGES=1 the pictures of the documents are made anew.
    let images =
        if std::env::var_os("UPDATE_IMAGES").is_some() { root.join("docs/images") } else { folder.path().join("images") };
    std::fs::create_dir_all(&images).unwrap();
    let out = Command::new("node")
        .arg(root.join("tests/window/browser.mjs"))
        .env("MODULES", peers_dir().join("browser"))
        .env("PROGRAM", env!("CARGO_BIN_EXE_gitea-dynamic-runner"))
        .env("IMAGES", &images)
        .env("TMPDIR", folder.path())
        .env("HOME", folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{said}");
    assert!(out.status.success(), "the story in the browser failed");
    assert!(said.contains("told to its end"), "it was told to its end");
    let pictures =
        std::fs::read_dir(&images).unwrap().filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|e| e == "png"));
    assert!(pictures.count() >= 6, "the pictures are made");
}
