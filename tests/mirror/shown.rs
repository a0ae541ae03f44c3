//! What the mirror remembers of jobs that a whole controller runs, as `show` tells it from the live file.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::{
    demo::forge::{ForgeConfig, JobId, JobSpec, JobStatus},
    ids::TaskId,
};
use nix::{sys::signal, unistd::Pid};
use serde_json::Value;

use crate::{
    file,
    support::{eventually, story},
    world::{POD, SOON, World},
};

/// What a subcommand says, and its exit code.
pub(crate) fn says(world: &World, args: &[&str]) -> (String, i32) {
    let out = world.controller.command().args(args).output().unwrap();
    // Beside an answer there may be a note.
    let said = if out.status.success() { out.stdout } else { [out.stdout, out.stderr].concat() };
    let text = String::from_utf8_lossy(&said).into_owned();
    (text, out.status.code().unwrap())
}

/// One JSON value of `show`.
pub(crate) fn shown(world: &World, args: &[&str]) -> Value {
    let (text, code) = says(world, &[&["show", "--json"], args].concat());
    assert_eq!(code, 0, "{text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The job's row once it is in this phase.
pub(crate) async fn in_phase(world: &World, task: TaskId, phase: &str) -> Value {
    eventually(&format!("task {task} is {phase} in the mirror"), SOON, async || {
        let (text, code) = says(world, &["show", "--json", "job", &task.to_string()]);
        let value: Value = serde_json::from_str(&text).ok().filter(|_| code == 0)?;
        (value["phase"] == phase).then_some(value)
    })
    .await
}

fn assert_times(row: &Value, known: &[&str], unknown: &[&str]) {
    for name in known {
        assert!(row["times"][name].is_string(), "{name} is known: {row:#}");
    }
    for name in unknown {
        assert!(row["times"][name].is_null(), "{name} cannot be: {row:#}");
    }
}

const RUN: [&str; 9] = ["fetched", "durable", "slot", "created", "identity", "claimed", "first_step", "ended", "acknowledged"];

async fn finished(world: &World, job: JobId, status: JobStatus, result: &str) -> Value {
    let task = world.task(job).await;
    assert_eq!(world.ended(job).await.status, status);
    let row = in_phase(world, task, "finished").await;
    assert_eq!(row["result"], result, "{row:#}");
    row
}

#[tokio::test(flavor = "multi_thread")]
async fn every_phase_of_a_green_a_red_a_cancelled_a_refused_and_a_remade_job_is_recorded_and_shown_live() {
    story(Duration::from_secs(150), async {
        let world = World::start(1).await;
        let hostile = "na\u{1b}[2Jme\u{202e}";
        let green = world.push(world.counting("green").context("run_id", hostile));
        world.counts("green", green).await;
        let waits = world.push(world.quick("waits"));
        let (running, waiting) = (world.task(green).await, world.task(waits).await);
        // While they run and wait.
        let row = in_phase(&world, running, "claimed").await;
        assert_eq!(
            (&row["repository"], &row["attempts"], &row["rebuilt"]),
            (&"boss/demo".into(), &0.into(), &false.into()),
            "{row:#}"
        );
        assert_eq!(row["environment"], *world.environment().await);
        in_phase(&world, waiting, "queued").await;
        let (text, code) = says(&world, &["show", "job", &running.to_string()]);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("runner_claimed") && !text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
        let (text, _) = says(&world, &["show"]);
        assert!(text.contains("1 queued, 1 claimed"), "{text}");
        let slots = shown(&world, &["slots"]);
        assert_eq!(slots[0]["task"], running.0, "{slots:#}");
        // Cancelled while it waits.
        world.forge.cancel(waits);
        let row = finished(&world, waits, JobStatus::Cancelled, "cancelled").await;
        assert_times(&row, &["fetched", "durable", "ended"], &["created", "claimed", "first_step"]);
        world.gate.open();
        let row = finished(&world, green, JobStatus::Success, "success").await;
        assert_times(&row, &RUN, &[]);
        let row = eventually("its environment is gone", SOON, async || {
            let row = shown(&world, &["job", &running.to_string()]);
            row["times"]["gone"].is_string().then_some(row)
        });
        assert_eq!(row.await["run_id"], hostile);
        assert_eq!(shown(&world, &["slots"]), serde_json::json!([]));

        let red = world.push(JobSpec::new("red", &POD).run("exit 3"));
        let row = finished(&world, red, JobStatus::Failure, "failure").await;
        assert_times(&row, &RUN, &[]);
        let refused = world.push(JobSpec::new("nowhere", &["self-hosted"]).run("echo never"));
        let row = finished(&world, refused, JobStatus::Failure, "failure").await;
        assert_times(&row, &["fetched", "durable", "ended"], &["slot", "created", "claimed"]);
        assert!(row["reason"].as_str().unwrap().contains("runs-on") && row["backend"] == "refused", "{row:#}");

        world.hold_starts();
        let remade = world.push(world.quick("remade"));
        let task = world.task(remade).await;
        let executor = eventually("an executor", SOON, async || world.controller.executors().first().cloned()).await;
        signal::kill(Pid::from_raw(executor.pid), signal::SIGKILL).unwrap();
        eventually("its end is noted", SOON, async || {
            (shown(&world, &["job", &task.to_string()])["attempts"] == 1).then_some(())
        })
        .await;
        world.forge.clear_faults();
        let row = finished(&world, remade, JobStatus::Success, "success").await;
        assert_times(&row, &RUN, &[]);
        assert_eq!(row["attempts"], 1);
        let events = shown(&world, &["events", "--limit", "1000"]);
        let kinds = |task: TaskId| {
            let of = events.as_array().unwrap().iter().filter(|e| e["task"] == task.0).map(|e| e["event"].as_str().unwrap());
            of.rev().collect::<Vec<_>>()
        };
        let seen = kinds(task);
        for kind in [
            "received",
            "capacity_acquired",
            "executor_created",
            "identity_bound",
            "made_again",
            "runner_claimed",
            "acked",
            "finished",
        ] {
            assert!(seen.contains(&kind), "{kind} in {seen:?}");
        }
        let counts = shown(&world, &[]);
        assert_eq!(counts["jobs"]["pod"]["finished"], 4, "{counts:#}");
        assert_eq!(world.controller.metric("mirror_dropped_total").await, Some(0.0));
        world.no_environment(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_of_a_newer_version_refuses_the_start_with_78_and_the_way_out_and_rebuild_mirror_is_one() {
    story(Duration::from_secs(90), async {
        let mut world = World::start(1).await;
        let (text, code) = says(&world, &["rebuild-mirror"]);
        assert!(code == 1 && text.contains("stop it first"), "{code}: {text}");
        world.controller.sigterm();
        file::newer(&world.controller.state().join("private/mirror.redb"));
        let (text, code) = says(&world, &["serve", "--standalone"]);
        assert!(code == 78 && text.contains("a newer version ran here"), "{code}: {text}");
        let (text, code) = says(&world, &["rebuild-mirror"]);
        assert!(code == 0 && text.contains(".bad-"), "{code}: {text}");
        world.controller.start_again().await;
        world.gate.open();
        let job = world.push(world.quick("after"));
        world.ends_green(job).await;
        let task = world.task(job).await;
        in_phase(&world, task, "finished").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn show_says_what_to_do_where_there_is_no_mirror() {
    story(Duration::from_secs(30), async {
        let world = World::prepare(1, ForgeConfig::default(), Vec::new()).await;
        let (text, code) = says(&world, &["show"]);
        assert!(code == 1 && text.contains("is STATE_DIRECTORY right"), "{code}: {text}");
    })
    .await;
}
