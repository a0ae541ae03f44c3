//! Draining: nothing new is fetched or started, what runs goes on, over restarts and crashes, until it is undone.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use gitea_dynamic_runner::demo::forge::{ForgeConfig, JobId, JobSpec, JobStatus, Method};
use serde_json::Value;

use crate::{
    support::{controller::ADMIN_TOKEN, eventually, story},
    world::{SOON, World, rows_with},
};

/// A drained controller answers a question within this; a running one asks Gitea twice a second.
const ONE_MORE_FETCH: Duration = Duration::from_secs(2);

/// The controller runs, with an admin's token.
async fn world(capacity: u32) -> World {
    let mut world = World::prepare(capacity, ForgeConfig::default(), Vec::new()).await;
    world.controller.start_again().await;
    world
}

/// The command as the operator types it, with the controller's settings.
fn drain(world: &World, args: &[&str]) -> Output {
    world.controller.command().arg("drain").args(args).output().unwrap()
}

fn drained_now(world: &World, args: &[&str]) -> Value {
    let said = drain(world, &[args, &["--json"]].concat());
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success(), "drain {args:?}: {}\n{out}\n{err}", said.status);
    serde_json::from_str(&out).unwrap()
}

/// `of_five` jobs that run until the gate opens, and as many that wait here for their slots.
async fn running_and_waiting(world: &World, capacity: usize) -> (Vec<JobId>, Vec<JobId>) {
    let running: Vec<_> = (0..capacity).map(|n| world.push(world.counting(&format!("running{n}")))).collect();
    for (n, job) in running.iter().enumerate() {
        world.counts(&format!("running{n}"), *job).await;
    }
    let waiting: Vec<_> = (0..capacity).map(|n| world.push(world.quick(&format!("waiting{n}")))).collect();
    for job in &waiting {
        world.waits_with_us(*job).await;
    }
    (running, waiting)
}

/// As many questions arrive at the forge as did; and a controller that asks would have asked meanwhile.
async fn nothing_is_fetched(world: &World) {
    let before = world.forge.count(Method::FetchTask);
    tokio::time::sleep(ONE_MORE_FETCH).await;
    assert_eq!(world.forge.count(Method::FetchTask), before, "it asked for a job while draining");
}

fn started(world: &World, waiting: usize) -> Vec<usize> {
    (0..waiting).map(|n| world.started(&format!("waiting{n}"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn with_five_running_and_five_waiting_jobs_none_starts_the_running_end_green_and_undone_the_five_run_once_each() {
    story(Duration::from_secs(150), async {
        let world = world(5).await;
        let (running, waiting) = running_and_waiting(&world, 5).await;
        let progress = drained_now(&world, &[]);
        assert_eq!((&progress["draining"], &progress["drained"]), (&Value::Bool(true), &Value::Bool(false)), "{progress}");
        assert_eq!((&progress["running"], &progress["waiting"]), (&5.into(), &5.into()), "{progress}");
        assert_eq!(drained_now(&world, &[])["since"], progress["since"], "a repeated drain changes nothing");
        // One more at Gitea, which is not even fetched.
        let later = world.push(world.quick("later"));
        eventually("the last question is answered", SOON, async || (drained_now(&world, &[])["fetching"] == 0).then_some(()))
            .await;
        nothing_is_fetched(&world).await;
        assert_eq!(world.controller.readiness().await.as_deref(), Some(""), "a wanted state is no fault");
        assert_eq!(world.controller.metric("drain_state").await, Some(1.0));
        // The reason is in each waiting job's own log, and its heartbeats go on: a cancel is seen.
        world
            .see("that the jobs know why they wait", |forge| {
                let told = |job: &JobId| rows_with(&forge.job(*job).unwrap(), "this runner is draining") == 1;
                waiting.iter().all(told).then_some(())
            })
            .await;
        let out_of_time = drain(&world, &["--wait=1"]);
        assert_eq!(out_of_time.status.code(), Some(75), "{}", String::from_utf8_lossy(&out_of_time.stderr));
        let mut waits = world.controller.command();
        let waits = waits.args(["drain", "--wait=60"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        world.forge.cancel(waiting[4]);
        assert_eq!(world.ended(waiting[4]).await.status, JobStatus::Cancelled);
        world.gate.open();
        for job in &running {
            world.ends_green(*job).await;
        }
        let said = tokio::task::spawn_blocking(|| waits.wait_with_output().unwrap()).await.unwrap();
        let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success() && out.starts_with("Drained"), "{out}{err}");
        assert!(err.contains("Draining since"), "progress is shown: {err}");
        assert_eq!(world.controller.metric("drain_state").await, Some(2.0));
        assert_eq!(world.controller.environments(), Vec::<String>::new());
        assert_eq!(started(&world, 5), [0; 5], "none of the waiting started");
        nothing_is_fetched(&world).await;
        assert_eq!(drained_now(&world, &["--undo"])["draining"], false);
        for job in waiting[..4].iter().chain([&later]) {
            world.ends_green(*job).await;
        }
        assert_eq!(started(&world, 5), [1, 1, 1, 1, 0]);
        assert_eq!(world.controller.metric("drain_state").await, Some(0.0));
        world.no_environment(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_outlives_a_sigterm_and_a_kill_9_and_running_jobs_are_unharmed() {
    story(Duration::from_secs(150), async {
        let mut world = world(2).await;
        let (running, waiting) = running_and_waiting(&world, 2).await;
        let since = drained_now(&world, &[])["since"].clone();
        world.controller.sigterm();
        let fetched = world.forge.count(Method::FetchTask);
        world.controller.start_again().await;
        assert_eq!(drained_now(&world, &[])["since"], since, "it drains on");
        world.controller.kill9();
        world.controller.start_again().await;
        let progress = drained_now(&world, &[]);
        assert_eq!((&progress["since"], &progress["running"], &progress["waiting"]), (&since, &2.into(), &2.into()));
        nothing_is_fetched(&world).await;
        assert_eq!(world.forge.count(Method::FetchTask), fetched, "nor in any of the starts");
        world.gate.open();
        for job in &running {
            world.ends_green(*job).await;
        }
        drained_now(&world, &["--wait=30"]);
        assert_eq!(started(&world, 2), [0; 2]);
        // Undone, the wish is gone for the next start, too.
        drained_now(&world, &["--undo"]);
        world.controller.kill9();
        world.controller.start_again().await;
        for job in &waiting {
            world.ends_green(*job).await;
        }
        assert_eq!(started(&world, 2), [1; 2]);
        for n in 0..2 {
            assert_eq!(world.started(&format!("running{n}")), 1);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_environment_that_exists_when_the_drain_begins_starts_its_job_and_none_is_made_in_its_place() {
    story(Duration::from_secs(120), async {
        let mut world = world(1).await;
        world.hold_starts();
        let offered = world.push(world.quick("waiting0"));
        world.environment().await;
        let progress = drained_now(&world, &[]);
        assert_eq!(progress["drained"], false, "it is still to start: {progress}");
        // Over a restart it is found and offered again, though nothing is leased.
        world.controller.kill9();
        world.controller.start_again().await;
        world.forge.clear_faults();
        world.ends_green(offered).await;
        drained_now(&world, &["--wait=30"]);
        drained_now(&world, &["--undo"]);
        world.hold_starts();
        let lost = world.push(world.quick("waiting1"));
        world.environment().await;
        drained_now(&world, &[]);
        let executor = eventually("its executor runs", SOON, async || world.controller.executors().pop()).await;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(executor.pid), nix::sys::signal::SIGKILL).unwrap();
        world.no_environment(SOON).await;
        drained_now(&world, &["--wait=30"]);
        world.forge.clear_faults();
        nothing_is_fetched(&world).await;
        assert_eq!(world.controller.environments(), Vec::<String>::new(), "none is made in its place");
        assert_eq!(started(&world, 2), [1, 0]);
        drained_now(&world, &["--undo"]);
        world.ends_green(lost).await;
        assert_eq!(started(&world, 2), [1, 1]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_gitea_gives_while_the_drain_begins_is_stored_and_waits_and_what_cannot_be_served_is_still_ended() {
    story(Duration::from_secs(120), async {
        let world = world(2).await;
        // Questions are in flight all the time, so some of the ten drains meet an answer on its way.
        let mut jobs = Vec::new();
        for n in 0..6 {
            jobs.push(world.push(world.quick(&format!("waiting{n}"))));
            let began = Instant::now();
            let progress = drained_now(&world, &["--wait=30"]);
            assert!(began.elapsed() < SOON, "{progress}");
            nothing_is_fetched(&world).await;
            let fetched = jobs.iter().filter(|job| world.forge.job(**job).unwrap().task.is_some()).count();
            let ended = jobs.iter().filter(|job| world.forge.job(**job).unwrap().status.is_final()).count();
            assert_eq!(drained_now(&world, &[])["waiting"], fetched - ended, "what was given is kept");
            drained_now(&world, &["--undo"]);
        }
        for job in &jobs {
            world.ends_green(*job).await;
        }
        assert_eq!(started(&world, 6), [1; 6]);
        assert_eq!(world.controller.metric("lost_fetch_total").await, Some(0.0));
        world.refuse(Method::UpdateTask);
        let nowhere = world.push(JobSpec::new("nowhere", &["self-hosted"]).run("echo never"));
        world.task(nowhere).await;
        drained_now(&world, &["--wait=30"]);
        world.forge.clear_faults();
        let view = world.ended(nowhere).await;
        assert_eq!((view.status, rows_with(&view, "runs-on")), (JobStatus::Failure, 1), "{:#?}", view.log);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_says_what_to_do_where_it_may_not_or_nobody_answers() {
    story(Duration::from_secs(60), async {
        let mut world = World::prepare(1, ForgeConfig::default(), Vec::new()).await;
        let refused = |world: &World, variables: &[(&str, &str)]| {
            let mut command = world.controller.command();
            for (name, value) in variables {
                command.env(name, value);
            }
            let said = command.arg("drain").output().unwrap();
            let text = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(!text.contains(ADMIN_TOKEN), "{text}");
            (said.status.code(), text)
        };
        let (code, text) = refused(&world, &[]);
        assert!(code == Some(1) && text.contains("no controller answers at http://127.0.0.1:"), "{code:?} {text}");
        assert!(text.contains("is it running?"), "{text}");
        world.controller.start_again().await;
        let reader = world.base().join("c/read-token");
        let (code, text) = refused(&world, &[("ADMIN_TOKEN_FILE", reader.to_str().unwrap())]);
        assert!(code == Some(1) && text.contains("show the one of ADMIN_TOKEN_FILE"), "{code:?} {text}");
        let (code, text) = refused(&world, &[("ADMIN_TOKEN_FILE", "")]);
        assert!(code == Some(1) && text.contains("wants a token: set ADMIN_TOKEN_FILE"), "{code:?} {text}");
        let wrong = world.base().join("wrong");
        std::fs::write(&wrong, "wrong").unwrap();
        let (code, text) = refused(&world, &[("ADMIN_TOKEN_FILE", wrong.to_str().unwrap())]);
        assert!(code == Some(1) && text.contains("does not take the token of ADMIN_TOKEN_FILE"), "{code:?} {text}");
        let (code, text) = refused(&world, &[("ADMIN_TOKEN_FILE", "/nonexistent")]);
        assert!(code == Some(78) && text.contains("ADMIN_TOKEN_FILE=/nonexistent"), "{code:?} {text}");
        assert_eq!(world.controller.metric("http_denied_total{reason=\"token\"}").await, Some(2.0));
        world.controller.sigterm();
        world.controller.set("ADMIN_TOKEN_FILE", None);
        world.controller.start_again().await;
        let (code, text) = refused(&world, &[]);
        assert!(code == Some(1) && text.contains("draining is refused: set ADMIN_TOKEN_FILE"), "{code:?} {text}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn status_and_show_job_ask_the_controller_and_show_job_goes_on_without_it() {
    story(Duration::from_secs(90), async {
        let mut world = world(1).await;
        let running = world.push(world.counting("running0"));
        world.counts("running0", running).await;
        let waiting = world.push(world.quick("waiting0"));
        let task = world.waits_with_us(waiting).await;
        let said = |world: &World, args: &[&str]| {
            let said = world.controller.command().args(args).output().unwrap();
            let [out, err] = [said.stdout, said.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
            (said.status.code(), out, err)
        };
        drained_now(&world, &[]);
        let (code, text, err) = said(&world, &["status"]);
        assert_eq!(code, Some(0), "{err}");
        assert!(text.contains("Draining since") && text.contains("1 of 1") && text.contains("gitea"), "{text}");
        let (_, json, _) = said(&world, &["status", "--json"]);
        let overview: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&overview["backends"][0]["running"], &overview["backends"][0]["waiting"]), (&1.into(), &1.into()), "{json}");
        let id = task.to_string();
        let (code, text, err) = said(&world, &["show", "job", &id]);
        assert!(code == Some(0) && err.is_empty(), "{err}");
        assert!(text.contains("  why ") && text.contains("queued on pod"), "{text}");
        let (_, json, _) = said(&world, &["show", "--json", "job", &id]);
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["task"], task.0, "{json}");
        let (code, _, err) = said(&world, &["show", "job", "999999"]);
        assert!(code == Some(1) && err.contains("there is no such job here"), "{err}");
        world.controller.kill9();
        let (code, text, err) = said(&world, &["show", "job", &id]);
        assert!(code == Some(0) && text.contains("queued on pod"), "{text}{err}");
        assert!(err.contains("no controller answers at") && err.contains("the file of its mirror"), "{err}");
        let (code, _, err) = said(&world, &["status"]);
        assert!(code == Some(1) && err.contains("is it running?"), "{err}");
        world.controller.start_again().await;
        world.gate.open();
        drained_now(&world, &["--undo"]);
        world.ends_green(running).await;
        world.ends_green(waiting).await;
        world.no_environment(SOON).await;
    })
    .await;
}
