//! The container image: built without a registry, and what it does without a shell, without a user, and without anything to write to.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use http::Method;
use nix::{sys::signal, unistd::Pid};

use crate::{
    machine::text,
    support::{eventually, free_port, rest::Rest},
};

/// Megabytes; the binary is nearly all of it. `docs/systemd.md` says what it is.
const SIZE: u64 = 40;
const IMAGE: &str = "localhost/gdr:test";
const LIMIT: Duration = Duration::from_secs(30);

/// The static program: `tests/run.sh systemd` builds it.
fn static_program() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target"), PathBuf::from);
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
        command.args([script, "--tag", IMAGE, "--binary"]).arg(static_program()).arg("--").args(self.storage());
        let said = command.stdin(Stdio::null()).output().unwrap();
        assert!(said.status.success(), "{}", text(&said.stderr));
    }

    fn podman(&self) -> Command {
        let mut podman = Command::new("podman");
        podman.args(self.storage()).args(["--cgroup-manager=cgroupfs", "--runtime=runc"]).stdin(Stdio::null());
        podman
    }

    /// Without rights, on a root that cannot be written to.
    fn container(&self, options: &[&str], arguments: &[&str]) -> Command {
        let mut podman = self.podman();
        podman.args(["run", "--rm", "--pull=never", "--read-only", "--cap-drop=all", "--ulimit=nofile=1024:1024"]);
        // A container that runs the tests may not raise what podman would raise.
        podman.arg("--ulimit=nproc=1024:1024").args(options).arg(IMAGE).args(arguments);
        podman
    }

    fn run(&self, options: &[&str], arguments: &[&str]) -> Output {
        let mut alone = vec!["--network=none"];
        alone.extend(options);
        self.container(&alone, arguments).output().unwrap()
    }
}

#[tokio::test]
async fn the_image_is_one_static_file_that_serves_as_nobody_and_ends_when_asked() {
    let engine = Engine { folder: tempfile::Builder::new().prefix("i").rand_bytes(4).tempdir().unwrap() };
    engine.build();
    let inspect = engine.podman().args(["image", "inspect", "--format={{.Size}} {{.Config.User}}", IMAGE]).output().unwrap();
    let facts = text(&inspect.stdout);
    let (size, user) = facts.split_once(' ').unwrap();
    let size: u64 = size.parse().unwrap();
    println!("image: {:.1} MB, user {user}", size as f64 / 1e6);
    assert!(size <= SIZE * 1_000_000 && user == "65532:65532", "{facts}");

    let version = engine.run(&[], &["--version"]);
    assert_eq!(text(&version.stdout), concat!("gitea-dynamic-runner ", env!("CARGO_PKG_VERSION")), "{}", text(&version.stderr));
    // There is no runner in it, and it says so before a job finds out.
    let checked = engine.run(&[], &["check-config", "--standalone"]);
    assert_eq!(checked.status.code(), Some(78), "{}", text(&checked.stderr));
    assert!(text(&checked.stderr).contains("no official runner was found"), "{}", text(&checked.stderr));
    assert!(!engine.run(&["--entrypoint=/bin/sh"], &[]).status.success(), "there is no shell");
    serves_and_ends(&engine).await;
}

/// As process 1 of its container it answers, says that Gitea is away, and ends in order.
async fn serves_and_ends(engine: &Engine) {
    let state = engine.folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    chown(&state, Some(65532), Some(65532)).unwrap();
    let (http, nobody) = (free_port(), free_port());
    let options = [
        "--network=host".to_owned(),
        format!("--volume={}:/var/lib/gitea-dynamic-runner", state.display()),
        format!("--env=GITEA_URL=http://127.0.0.1:{nobody}"),
        format!("--env=HTTP_LISTEN=127.0.0.1:{http}"),
        "--env=RUNNER_FACADE_LISTEN=127.0.0.1:0".to_owned(),
        "--env=GITEA_RUNNER_UUID=00000000-0000-4000-8000-000000000000".to_owned(),
        "--env=GITEA_RUNNER_TOKEN=of-a-test".to_owned(),
        "--env=LOCAL_UNISOLATED=1".to_owned(),
        "--env=RUNNER_BIN=/gitea-dynamic-runner".to_owned(),
    ];
    let log = std::fs::File::create(engine.folder.path().join("log")).unwrap();
    let mut command = engine.container(&options.each_ref().map(String::as_str), &[]);
    let mut container = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
    let rest = Rest::anonymous(&format!("http://127.0.0.1:{http}"));
    let said = eventually("it says why it is not ready", LIMIT, async || {
        assert_eq!(container.try_wait().unwrap(), None, "{}", std::fs::read_to_string(engine.folder.path().join("log")).unwrap());
        let answer = rest.send(Method::GET, "/readyz", &[], "".into()).await.ok()?;
        answer.text().contains("gitea: ").then(|| answer.text())
    })
    .await;
    assert!(said.starts_with("not ready"), "{said}");
    let asked = Instant::now();
    signal::kill(Pid::from_raw(container.id().try_into().unwrap()), signal::SIGTERM).unwrap();
    let status = eventually("the container ends", LIMIT, async || container.try_wait().unwrap()).await;
    assert!(status.success(), "{status}: {}", std::fs::read_to_string(engine.folder.path().join("log")).unwrap());
    println!("ended {:.1} s after SIGTERM", asked.elapsed().as_secs_f64());
}
