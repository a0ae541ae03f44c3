//! The container image: built without a registry, and what it does without a shell, without a user, and without anything to write to.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use crate::machine::text;

/// Megabytes; the binary is nearly all of it. `docs/systemd.md` says it, too.
const SIZE: u64 = 40;

/// The static program: `tests/run.sh systemd` builds it.
fn static_program() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target"), PathBuf::from);
    let program = target.join(format!("{}-unknown-linux-musl/release/gitea-dynamic-runner", std::env::consts::ARCH));
    assert!(program.exists(), "{} is missing: run `tests/run.sh systemd`", program.display());
    program
}

/// An engine with storage of its own.
struct Engine {
    folder: tempfile::TempDir,
}

impl Engine {
    fn storage(&self) -> Vec<String> {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        ["--root".into(), at("root"), "--runroot".into(), at("run"), "--storage-driver".into(), "vfs".into()].to_vec()
    }

    fn build(&self) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/build-image.sh");
        let mut command = Command::new("bash");
        command.args([script, "--tag", "localhost/gdr:test", "--binary"]).arg(static_program()).arg("--").args(self.storage());
        let said = command.stdin(Stdio::null()).output().unwrap();
        assert!(said.status.success(), "{}", text(&said.stderr));
    }

    fn podman(&self, arguments: &[&str]) -> Output {
        Command::new("podman").args(self.storage()).args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Without network and rights, on a root that cannot be written to.
    fn run(&self, options: &[&str], arguments: &[&str]) -> Output {
        let mut all =
            vec!["run", "--rm", "--pull=never", "--network=none", "--cgroups=disabled", "--read-only", "--cap-drop=all"];
        all.extend(options);
        all.push("localhost/gdr:test");
        all.extend(arguments);
        self.podman(&all)
    }
}

#[test]
fn the_image_is_one_static_file_that_runs_as_nobody() {
    let engine = Engine { folder: tempfile::Builder::new().prefix("i").rand_bytes(4).tempdir().unwrap() };
    engine.build();
    let facts =
        engine.podman(&["image", "inspect", "--format={{.Size}} {{.Config.User}} {{len .RootFS.Layers}}", "localhost/gdr:test"]);
    let facts = text(&facts.stdout);
    let (size, rest) = facts.split_once(' ').unwrap();
    println!("image: {} MB", size.parse::<u64>().unwrap() / 1_000_000);
    assert!(size.parse::<u64>().unwrap() <= SIZE * 1_000_000, "{size}");
    assert!(rest.starts_with("65532:65532"), "{facts}");

    let version = engine.run(&[], &["--version"]);
    assert_eq!(text(&version.stdout), concat!("gitea-dynamic-runner ", env!("CARGO_PKG_VERSION")), "{}", text(&version.stderr));
    // Its settings are checked in there, and told apart from a crash.
    let checked = engine.run(&["--env=GITEA_URL=https://git.example.invalid"], &["check-config", "--standalone"]);
    assert_eq!(checked.status.code(), Some(78), "{}", text(&checked.stderr));
    assert!(text(&checked.stderr).contains("no official runner was found"), "{}", text(&checked.stderr));
    assert!(!engine.run(&["--entrypoint=/bin/sh"], &[]).status.success(), "there is no shell");
}
