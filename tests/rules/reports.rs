//! R7 and R8: whose rows come where in a job's log, and what a stopped job's result is.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use gitea_dynamic_runner::demo::forge::{JobSpec, JobStatus, JobView, StepSpec};
use nix::{sys::signal, unistd::Pid};

use crate::{
    support::{eventually, story},
    world::{POD, SOON, World, assert_whole, rows_with},
};

fn named(name: &str, run: &str) -> StepSpec {
    StepSpec { name: Some(name.to_owned()), run: Some(run.to_owned()), ..Default::default() }
}

fn position(view: &JobView, text: &str) -> usize {
    view.log.iter().position(|row| row.contains(text)).unwrap_or_else(|| panic!("{text:?} is not in {:#?}", view.log))
}

/// All steps have ended, between push and now.
fn assert_real_times(view: &JobView) {
    for step in &view.steps {
        let (started, stopped) = (step.started.unwrap(), step.stopped.unwrap());
        assert!(view.pushed <= started && started <= stopped, "{step:#?}");
        assert!(step.status.is_final(), "{step:#?}");
    }
    assert!(view.started.unwrap() <= view.stopped.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn r7_the_controllers_rows_come_first_and_the_jobs_rows_and_steps_follow_without_gap_or_repetition() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let first = world.push(world.counting("first"));
        world.starts("first").await;
        let spec = JobSpec::new("second", &POD).step(named("Say one", "echo one")).step(named("Say two", "echo two; echo three"));
        let second = world.push(spec);
        world.see("why it waits", |forge| (rows_with(&forge.job(second)?, "Waiting for a pod slot") == 1).then_some(())).await;
        world.gate.open();
        assert_whole(&world.ends_green(first).await);
        let view = world.ends_green(second).await;
        let told = [
            "Waiting for a pod slot: 1 of 1 are in use, 0 job(s) before this one.",
            "was made for this job",
            "Its identity is spiffe://",
            "run by the demo's steps runner",
            "Say one",
            "one",
            "Say two",
            "two",
            "three",
        ];
        let rows: Vec<&str> = view.log.iter().map(String::as_str).filter(|row| !row.is_empty()).collect();
        assert_eq!(rows.len(), told.len(), "{rows:#?}");
        assert!(rows.iter().zip(told).all(|(row, part)| row.contains(part)), "{rows:#?}");
        for step in &view.steps {
            assert_eq!(view.log[usize::try_from(step.log_index).unwrap()], step.name, "the step's first row is its own");
        }
        assert_eq!(view.steps.iter().map(|step| step.log_length).collect::<Vec<_>>(), [2, 3]);
        assert_real_times(&view);
        world.assert_one_reporter(world.task(first).await);
        world.assert_one_reporter(world.task(second).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r7_after_an_environment_is_killed_the_controllers_reason_follows_and_all_steps_are_listed() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let spec = world.counting("killed");
        let job = world.push(spec.step(named("After", "echo never")));
        world.counts("killed", job).await;
        let executor = world.controller.executors().remove(0);
        signal::kill(Pid::from_raw(executor.pid), signal::SIGKILL).unwrap();
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure);
        let reason = position(&view, "The environment ended without a result");
        assert_eq!(reason, view.log.len() - 1, "it is the last row: {:#?}", view.log);
        assert_eq!(view.steps.iter().map(|step| step.status).collect::<Vec<_>>(), [JobStatus::Failure, JobStatus::Skipped]);
        assert_real_times(&view);
        let failed = &view.steps[0];
        assert_eq!(failed.log_index + failed.log_length, i64::try_from(view.log.len()).unwrap(), "its page shows the reason");
        assert!(view.sealed);
        world.assert_one_reporter(world.task(job).await);
        assert_eq!(world.started("killed"), 1, "it is not run again");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r8_a_job_whose_executor_gets_sigterm_is_never_green() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let job = world.push(world.counting("stopped"));
        world.counts("stopped", job).await;
        let executor = world.controller.executors().remove(0);
        signal::kill(Pid::from_raw(executor.pid), signal::SIGTERM).unwrap();
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure, "{:#?}", view.log);
        assert_real_times(&view);
        // The inner runner itself said SUCCESS.
        assert!(world.controller.log().contains("replaced the runner's result"));
        world.no_environment(SOON).await;
        assert_eq!(world.started("stopped"), 1, "it is not run again");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r8_a_cancel_reaches_a_running_job_within_seven_seconds_and_it_ends_cancelled() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let script = format!("{}\nsetsid sleep 86399 & sleep 86399", world.gate.sign("started sleeper"));
        let job = world.push(JobSpec::new("sleeper", &POD).run(&script));
        world.starts("sleeper").await;
        let sleeps = || world.controller.processes().iter().filter(|process| process.command.contains("86399")).count();
        eventually("the job's processes", SOON, async || (sleeps() >= 2).then_some(())).await;
        let cancelled = Instant::now();
        world.forge.cancel(job);
        eventually("the job's own process is stopped", SOON, async || (sleeps() < 2).then_some(())).await;
        assert!(cancelled.elapsed() <= Duration::from_secs(7), "it took {:?}", cancelled.elapsed());
        world.no_environment(SOON).await;
        assert_eq!(sleeps(), 0, "nothing of it is left");
        assert_eq!(world.forge.job(job).unwrap().status, JobStatus::Cancelled);
    })
    .await;
}
