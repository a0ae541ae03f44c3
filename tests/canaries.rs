//! Where secrets are: those of a job, and our own. Canaries are put into each, and then everything is searched for them.
//!
//! While a job waits they are in clear nowhere; while it runs, inside its own environment only; afterwards nowhere. Where a secret must be
//! (the registration in the controller's own variables, keys in their own files) that one place is named, and no other counts.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use gitea_dynamic_runner::{
    demo::forge::{JobSpec, JobStatus},
    process,
};
use support::{
    eventually,
    standin::{Environment, LIMIT, StandIn},
};

mod support;

const TOKEN: &str = "canary-token-5d1c9be7a204";
const RUNTIME: &str = "canary-runtime-0b7f3e91c6d8";
const SECRET: &str = "canary-secret-e2a84f60d913";

/// A text, and how a failure calls it.
type Canary = (&'static str, String);

fn of_the_job() -> Vec<Canary> {
    vec![("task token", TOKEN.into()), ("runtime token", RUNTIME.into()), ("secret", SECRET.into())]
}

/// With canaries for everything that Gitea gives to a job in confidence.
fn job(script: &str) -> JobSpec {
    let mut spec = JobSpec::new("canary", &["self-hosted", "pod"]).run(script).secret("PASSWORD", SECRET);
    spec = spec.context("token", TOKEN).context("gitea_runtime_token", RUNTIME);
    for (name, from) in [("PASSWORD", "secrets.PASSWORD"), ("TOKEN", "github.token"), ("RUNTIME", "github.gitea_runtime_token")] {
        spec.env.insert(name.into(), format!("${{{{ {from} }}}}"));
    }
    spec
}

const WAITS: &str = "echo ready; until [ -e $HOME/go ]; do sleep 0.1; done; printf '%s' \"$PASSWORD\" | wc -c";

fn go(environment: &Environment) {
    fs::write(environment.folder.join("home/go"), "").unwrap();
}

/// Our own secrets, as they lie in the state folder, each with the file that may have it.
fn of_the_controller(system: &StandIn) -> Vec<(Canary, PathBuf)> {
    let private = system.state().join("private");
    let key = |name: &str| fs::read_to_string(private.join(name)).unwrap().trim().to_owned();
    let ca = fs::read_to_string(private.join("ca/ca.pem")).unwrap();
    let (_, pem) = ca.split_once("PRIVATE KEY-----\n").unwrap();
    let first_line = pem.lines().next().unwrap().to_owned();
    vec![
        (("seal key", key("seal.key")), private.join("seal.key")),
        (("capability key", key("capability.key")), private.join("capability.key")),
        (("CA key", first_line), private.join("ca/ca.pem")),
    ]
}

/// Where the canaries are, of all that a search must look at: files of the state folder, log, pages, what the forge shows, and
/// the command lines and variables of every process of this machine.
async fn found(system: &StandIn, canaries: &[Canary]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut look = |place: String, bytes: &[u8]| {
        for (name, _) in canaries.iter().filter(|(_, text)| contains(bytes, text)) {
            found.insert(format!("{name} in {place}"));
        }
    };
    for file in files(&system.state()) {
        // One that is gone between two looks holds nothing any more.
        look(file.display().to_string(), &fs::read(&file).unwrap_or_default());
        look(format!("the name of {}", file.display()), file.as_os_str().as_encoded_bytes());
    }
    look("the log".into(), system.log().as_bytes());
    let pages = ["/metrics", "/readyz", "/healthz", "/", "/jobs", "/jobs/1", "/reconcilers", "/api/v1/overview", "/api/v1/jobs"];
    for page in pages.into_iter().chain(["/api/v1/jobs/1", "/api/v1/environments", "/api/v1/queue", "/api/v1/drain"]) {
        look(page.into(), system.page(page).await.as_bytes());
    }
    for row in process::table().unwrap().into_iter().filter(|row| row.pid != std::process::id()) {
        for file in ["cmdline", "environ"] {
            let uid = process::uids_of(row.pid).unwrap().map_or(0, |(real, _)| real);
            look(
                format!("{file} of uid {uid} pid {}", row.pid),
                &fs::read(format!("/proc/{}/{file}", row.pid)).unwrap_or_default(),
            );
        }
    }
    found
}

fn contains(bytes: &[u8], text: &str) -> bool {
    assert!(text.len() >= 16, "too short to be searched for");
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => files(&entry.path()),
        Ok(kind) if kind.is_file() => vec![entry.path()],
        _ => Vec::new(),
    };
    entries.flat_map(of).collect()
}

/// All that is left after taking away what lies inside one environment: its folder, and processes of its uid.
fn outside(found: BTreeSet<String>, of: &Environment) -> BTreeSet<String> {
    let (folder, uid) = (format!("{}/", of.folder.display()), format!(" of uid {} ", of.uid));
    found
        .into_iter()
        .filter(|place| !(place.contains(&folder) || place.contains(" in environ") && place.contains(&uid)))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_job_waits_its_secrets_are_in_clear_nowhere() {
    let Some(system) = StandIn::as_root(1).await else { return };
    let blocker = system.push(JobSpec::new("blocker", &["self-hosted", "pod"]).run(WAITS));
    system.says(blocker, "ready").await;
    let waiting = system.push(job(WAITS));
    let queued = async || system.job(waiting).task.filter(|_| !system.job(waiting).log.is_empty());
    eventually("the job waits in the queue", LIMIT, queued).await;
    // A search that finds nothing must be able to find something: the same search sees this.
    let control = system.state().join("private/control");
    fs::write(&control, format!("xx{SECRET}yy{TOKEN}zz{RUNTIME}")).unwrap();
    assert_eq!(found(&system, &of_the_job()).await.len(), 3);
    // The mirror has the waiting job's copy, sealed; and it is among what is searched.
    assert!(files(&system.state()).iter().any(|file| file.ends_with("private/mirror.redb")));
    fs::remove_file(&control).unwrap();
    assert_eq!(found(&system, &of_the_job()).await, BTreeSet::new());
    go(&system.environment(blocker));
    system.says(waiting, "ready").await;
    go(&system.environment(waiting));
    assert_eq!(system.ended(waiting).await.status, JobStatus::Success);
    assert_eq!(found(&system, &of_the_job()).await, BTreeSet::new(), "afterwards");
    system.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_job_runs_its_secrets_are_only_inside_its_own_environment_and_afterwards_nowhere() {
    let Some(system) = StandIn::as_root(2).await else { return };
    let beside = system.push(JobSpec::new("beside", &["self-hosted", "pod"]).run(WAITS));
    system.says(beside, "ready").await;
    let running = system.push(job(WAITS));
    system.says(running, "ready").await;
    let (own, other) = (system.environment(running), system.environment(beside));
    let mut canaries = of_the_job();
    canaries.push(("capability", own.variables["CI_RUNNER_CAPABILITY"].clone()));
    let registration = fs::read_to_string(own.folder.join("work/runner/.runner")).unwrap();
    let registration: serde_json::Value = serde_json::from_str(&registration).unwrap();
    canaries.push(("bridge token", registration["token"].as_str().unwrap().to_owned()));
    let places = found(&system, &canaries).await;
    for name in ["task token", "runtime token", "secret", "capability", "bridge token"] {
        assert!(places.iter().any(|place| place.starts_with(name)), "the search is blind for the {name}: {places:#?}");
    }
    assert_eq!(outside(places.clone(), &own), BTreeSet::new());
    // The capability is the executor's alone, and in no file.
    let executors = format!("capability in environ of uid {} pid {}", own.uid, own.pid);
    assert_eq!(places.iter().filter(|place| place.starts_with("capability")).collect::<Vec<_>>(), [&executors]);
    for environment in [&own, &other] {
        go(environment);
    }
    for id in [running, beside] {
        let view = system.ended(id).await;
        assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
    }
    assert_eq!(found(&system, &canaries).await, BTreeSet::new(), "afterwards");
    system.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registration_and_the_keys_are_in_no_environment_log_page_or_command_line() {
    let Some(system) = StandIn::as_root(1).await else { return };
    let id = system.push(job(WAITS));
    system.says(id, "ready").await;
    let own = system.environment(id);
    let kept = of_the_controller(&system);
    let canaries: Vec<Canary> = kept.iter().map(|(canary, _)| canary.clone()).collect();
    let expected = kept.iter().map(|((name, _), file)| format!("{name} in {}", file.display())).collect();
    assert_eq!(found(&system, &canaries).await, expected);
    for (_, file) in &kept {
        let meta = fs::metadata(file).unwrap();
        assert_eq!((meta.mode() & 0o077, meta.uid()), (0, 0), "{}", file.display());
    }
    // The token was given as a variable here, so it is in the variables of the controller, and of nobody else.
    let token = [("runner token", system.runner_token.expose().to_owned())];
    let controllers = format!("runner token in environ of uid 0 pid {}", system.controller());
    assert_eq!(found(&system, &token).await, BTreeSet::from([controllers]));
    go(&own);
    assert_eq!(system.ended(id).await.status, JobStatus::Success);
    system.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn controller_keeper_and_executor_leave_no_core_file_and_show_their_memory_to_nobody() {
    let Some(system) = StandIn::as_root(1).await else { return };
    let id = system.push(job(WAITS));
    system.says(id, "ready").await;
    let own = system.environment(id);
    let of_binary = |row: &process::Row| {
        let exe = fs::read_link(format!("/proc/{}/exe", row.pid)).unwrap_or_default();
        let line = fs::read_to_string(format!("/proc/{}/cmdline", row.pid)).unwrap_or_default();
        let what = line.split('\0').nth(1).unwrap_or_default().to_owned();
        (exe.starts_with(system.folder()) && row.runs && what != "daemon").then_some((row.pid, what))
    };
    let ours: Vec<(u32, String)> = process::table().unwrap().iter().filter_map(of_binary).collect();
    let kinds: BTreeSet<&str> = ours.iter().map(|(_, what)| what.as_str()).collect();
    assert_eq!(kinds, BTreeSet::from(["executor", "local-init", "local-keeper", "serve"]));
    for (pid, what) in &ours {
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"], "{what}: {core}");
        // What is not dumpable has its files in /proc given to root (proc(5)); of a process of root that cannot be seen.
        if what == "executor" {
            assert_eq!(*pid, own.pid);
            assert_ne!(own.uid, 0);
            assert_eq!(fs::metadata(format!("/proc/{pid}/environ")).unwrap().uid(), 0, "{what} is dumpable");
        }
    }
    go(&own);
    assert_eq!(system.ended(id).await.status, JobStatus::Success);
    system.end().await;
}
