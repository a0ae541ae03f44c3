//! Stories of one environment: a real executor process between a facade that misbehaves and a scripted runner.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "executor/flood.rs"]
mod flood;
#[path = "executor/proxy.rs"]
mod proxy;
#[path = "executor/runner.rs"]
mod runner;
#[path = "support/small_disk.rs"]
mod small_disk;
#[path = "executor/world.rs"]
mod world;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use gitea_dynamic_runner::{
    executor::{self, Settings, facade::Facade},
    gitea::tls,
    proto::{
        environment::StopReason,
        runner::{Task, TaskResult},
    },
};
use nix::sys::signal::Signal;

use self::world::{Setup, World, until};

#[test]
#[ignore = "no test: the executor of the stories, a process of its own"]
fn executor_process() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ending = runtime.block_on(async {
        let settings = Settings::from_environment(&|name| std::env::var(name).ok()).unwrap();
        let tls = tls::towards_gitea("http://127.0.0.1", None).unwrap();
        let facade = Facade::new(&settings.facade_url, tls, settings.assignment, &settings.capability).unwrap();
        executor::serve(settings, facade, executor::stopped_by_signals().unwrap()).await
    });
    std::process::exit(ending.code().into());
}

#[test]
#[ignore = "no test: the runner of the stories, a process of its own"]
fn runner_process() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(runner::play(&std::env::var("FAKE_RUNNER").unwrap()));
}

/// `count` numbered rows and the last one, each once and in order.
fn assert_rows(world: &World, count: usize) {
    let rows = world.rows();
    let expected = (0..count).map(|n| format!("row {n}")).chain(["the end".to_owned()]);
    assert!(rows.iter().cloned().eq(expected), "{} rows, expected {}", rows.len(), count + 1);
    assert!(world.known().sealed);
    assert_eq!(world.known().rows[..2], ["controller 0", "controller 1"]);
}

fn assert_success(world: &World) {
    let terminal = world.terminal();
    assert!(terminal.state.result == TaskResult::RESULT_SUCCESS);
    assert_eq!((terminal.runner.as_str(), terminal.stop_seen), ("exited", false));
    assert!(world.known().outputs.contains("out"));
}

fn runner_pid(world: &World) -> u32 {
    let file = world.folder.path().join("runner/pid");
    until("the runner runs", || std::fs::read_to_string(&file).is_ok_and(|text| !text.is_empty()));
    std::fs::read_to_string(file).unwrap().parse().unwrap()
}

#[test]
fn ten_thousand_rows_arrive_in_order_and_the_verdict_after_the_runners_exit() {
    let mut world = Setup::new("rows 10000").start();
    let pid = runner_pid(&world);
    world.known().runner_pid = Some(pid);
    assert_eq!(world.ended().code(), Some(0));
    assert_rows(&world, 10_000);
    assert_success(&world);
    let step = world.terminal().state.steps[0].clone();
    assert_eq!((step.log_index, step.log_length), (2, 10_001), "shifted by the controller's two rows");
}

#[test]
fn a_facade_that_is_away_and_loses_answers_costs_no_row_and_doubles_none() {
    let setup = Setup::new("rows 3000");
    setup.facade.known().lose_answers = 3;
    let mut world = setup.start();
    until("the first rows are there", || world.known().rows.len() > 2);
    for _ in 0..3 {
        world.known().away = true;
        let polls = Instant::now() + Duration::from_millis(300);
        until("some calls failed", || Instant::now() > polls);
        let mut known = world.known();
        known.away = false;
        known.lose_answers = 2;
    }
    assert_eq!(world.ended().code(), Some(0));
    assert_rows(&world, 3000);
    assert_success(&world);
    assert!(world.known().starts >= 1);
}

#[test]
fn the_result_waits_for_a_facade_that_comes_back_after_the_runner_is_gone() {
    let mut world = Setup::new("rows 200").start();
    let pid = runner_pid(&world);
    world.known().away = true;
    until("the runner is gone", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert!(world.known().terminal.is_none());
    world.known().away = false;
    assert_eq!(world.ended().code(), Some(0));
    assert_rows(&world, 200);
    assert_success(&world);
}

#[test]
fn a_line_of_ten_megabytes_is_cut_and_the_job_goes_on() {
    let mut world = Setup::new("line 10485760").start();
    assert_eq!(world.ended().code(), Some(0));
    assert_eq!(world.rows(), ["ü".repeat(32 << 10), "the end".to_owned()]);
    assert_success(&world);
}

#[test]
fn a_cancel_stops_the_job_within_seconds_and_kills_what_a_step_left() {
    let mut world = Setup::new("cancelled").start();
    until("the job sleeps", || world.rows() == ["sleeping"]);
    world.known().stop = StopReason::STOP_REASON_CANCELLED;
    let asked = Instant::now();
    assert_eq!(world.ended().code(), Some(0));
    assert!(asked.elapsed() < Duration::from_secs(12), "{:?}", asked.elapsed());
    assert!(world.terminal().stop_seen, "the facade must know that this success is none");
    assert_eq!(world.rows(), ["sleeping", "the end", "This job was stopped, because it was cancelled."]);
}

#[test]
fn giteas_own_cancel_arrives_by_heartbeat_though_the_runner_is_silent() {
    let mut world = Setup::new("cancelled").start();
    until("the job sleeps", || world.rows() == ["sleeping"]);
    world.known().answer = TaskResult::RESULT_CANCELLED;
    assert_eq!(world.ended().code(), Some(0));
    assert!(world.terminal().stop_seen);
}

#[test]
fn sigterm_stops_the_job_in_order_and_is_told() {
    let mut world = Setup::new("cancelled").start();
    until("the job sleeps", || world.rows() == ["sleeping"]);
    world.signal(Signal::SIGTERM);
    assert_eq!(world.ended().code(), Some(0));
    assert!(world.terminal().stop_seen);
}

#[test]
fn a_runner_deaf_to_stops_is_killed_and_no_verdict_is_invented() {
    let mut world = Setup::new("deaf").start();
    until("the job runs", || world.rows() == ["deaf"]);
    world.known().stop = StopReason::STOP_REASON_DEADLINE;
    assert_eq!(world.ended().code(), Some(10));
    assert!(world.known().terminal.is_none() && !world.known().sealed);
}

#[test]
fn a_silent_job_is_kept_alive_at_gitea() {
    let mut world = Setup::new("waits").start();
    until("the runner is there", || world.folder.path().join("runner/pid").exists());
    until("heartbeats arrive", || world.known().states.len() >= 2);
    assert!(world.known().states.iter().all(|state| state.result == TaskResult::RESULT_UNSPECIFIED && state.id == world::TASK));
    world.go();
    assert_eq!(world.ended().code(), Some(0));
    assert!(world.terminal().state.result == TaskResult::RESULT_FAILURE);
}

#[test]
fn a_runner_that_dies_without_a_verdict_leaves_its_log_open_for_the_controllers_reason() {
    let mut world = Setup::new("dies").start();
    assert_eq!(world.ended().code(), Some(10));
    assert_eq!(world.rows(), ["last words"]);
    assert!(world.known().terminal.is_none() && !world.known().sealed);
}

#[test]
fn a_deleted_task_stops_the_job() {
    let mut world = Setup::new("deaf").start();
    until("the job runs", || world.rows() == ["deaf"]);
    world.known().task_gone = true;
    assert_eq!(world.ended().code(), Some(11));
}

#[test]
fn a_denied_environment_starts_nothing() {
    let setup = Setup::new("rows 1");
    setup.facade.known().deny = true;
    let mut world = setup.start();
    assert_eq!(world.ended().code(), Some(12));
    assert_eq!(world.known().starts, 0);
    assert!(!world.folder.path().join("runner/.runner").exists());
}

#[test]
fn without_a_runner_program_no_job_is_started_and_the_exit_code_says_that_none_will_be() {
    let mut setup = Setup::new("rows 1");
    setup.runner = Some("/nowhere/gitea-runner".into());
    let mut world = setup.start();
    assert_eq!(world.ended().code(), Some(14));
    assert_eq!(world.known().starts, 0, "nothing is begun that cannot be done");
}

/// The official runner, where `tests/peers` has built it.
fn official_runner() -> Option<PathBuf> {
    let folder = std::env::var_os("PEERS_DIR").map(PathBuf::from);
    let folder = folder.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/gitea-dynamic-runner/peers")))?;
    let program = folder.join("bin/gitea-runner");
    if !program.exists() {
        eprintln!("skipped: {} is not there", program.display());
    }
    program.exists().then_some(program)
}

fn official(script: &str) -> Option<World> {
    let mut setup = Setup::new("");
    setup.runner = Some(official_runner()?);
    let payload = format!(
        "name: ci\non: push\njobs:\n  build:\n    name: build\n    runs-on: [self-hosted, pod]\n    steps:\n      - run: {script}\n"
    );
    let context = serde_json::json!({
        "job": "build", "repository": "o/r", "repository_owner": "o", "event_name": "push", "event": {}, "ref": "refs/heads/main",
        "sha": "0123456789012345678901234567890123456789", "run_id": "1", "run_number": "1", "run_attempt": "1", "workflow": "ci.yaml",
        "actor": "a", "token": "t", "server_url": "http://127.0.0.1:9/", "gitea_default_actions_url": "http://127.0.0.1:9",
    });
    let context = serde_json::from_value::<buffa_types::google::protobuf::Struct>(context).unwrap();
    let payload = Some(payload.into_bytes());
    let secrets =
        [("GITHUB_TOKEN", "t"), ("GITEA_TOKEN", "t")].into_iter().map(|(name, value)| (name.into(), value.into())).collect();
    let task = Task { id: world::TASK, context: context.into(), workflow_payload: payload, secrets, ..Default::default() };
    setup.facade.known().task = buffa::Message::encode_to_vec(&task);
    setup.facade.known().runner_keeps_order = false;
    Some(setup.start())
}

#[test]
fn the_official_runner_runs_a_job_and_its_log_and_verdict_arrive() {
    let Some(mut world) = official(r#"'echo "server $GITHUB_SERVER_URL"; echo "capability [$CI_RUNNER_CAPABILITY]"'"#) else {
        return;
    };
    assert_eq!(world.ended().code(), Some(0));
    let rows = world.rows().join("\n");
    assert!(rows.contains("server http://127.0.0.1:") && rows.contains("capability []"), "{rows}");
    assert!(world.known().sealed);
    let terminal = world.terminal();
    assert!(terminal.state.result == TaskResult::RESULT_SUCCESS, "{rows}");
    assert_eq!((terminal.runner.as_str(), terminal.stop_seen), ("exited", false));
}

#[test]
fn a_cancel_reaches_the_official_runner_within_seconds() {
    let Some(mut world) = official("'echo asleep; setsid sleep 300; echo awake'") else { return };
    until("the job sleeps", || world.rows().iter().any(|row| row == "asleep"));
    world.known().stop = StopReason::STOP_REASON_CANCELLED;
    let asked = Instant::now();
    let ended = world.ended();
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    assert_eq!(ended.code(), Some(0), "it reported by itself: {:?}", world.rows());
    assert!(world.terminal().stop_seen);
    assert!(!world.rows().iter().any(|row| row == "awake"));
}
