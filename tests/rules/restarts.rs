//! The controller goes and comes back under running and waiting jobs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use gitea_dynamic_runner::demo::forge::{JobId, JobStatus};

use crate::{
    support::{eventually, story},
    world::{SOON, World, assert_whole},
};

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Five jobs in three slots: three run and write, two wait in our queue.
async fn three_run_and_two_wait(world: &World) -> Vec<JobId> {
    let jobs = world.forge.push(NAMES.map(|name| world.counting(name))).jobs;
    for (name, job) in NAMES.iter().zip(&jobs).take(3) {
        world.counts(name, *job).await;
    }
    for job in &jobs {
        world.task(*job).await;
    }
    jobs
}

async fn all_end_green_each_run_once(world: &World, jobs: &[JobId]) {
    for job in jobs {
        let view = world.forge.wait_done(*job, Duration::from_secs(60)).await.unwrap();
        assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
        assert_whole(&view);
    }
    assert_eq!(NAMES.map(|name| world.started(name)), [1; 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_kill_9_with_three_running_and_two_waiting_all_five_are_green_and_each_ran_once() {
    story(Duration::from_secs(150), async {
        let mut world = World::start(3).await;
        let jobs = three_run_and_two_wait(&world).await;
        world.controller.kill9();
        let counted = NAMES.map(|name| world.gate.calls(&format!("counting {name}")));
        eventually("the running jobs go on without a controller", SOON, async || {
            let now = NAMES.map(|name| world.gate.calls(&format!("counting {name}")));
            (now.iter().zip(counted).filter(|(now, before)| **now > *before).count() == 3).then_some(())
        })
        .await;
        let held = world.forge.job(jobs[0]).unwrap().log.len();
        let began = Instant::now();
        world.controller.start_again().await;
        world.see("rows of the reattached job", |forge| (forge.job(jobs[0])?.log.len() > held).then_some(())).await;
        assert!(began.elapsed() <= Duration::from_secs(12), "reattached only after {:?}", began.elapsed());
        assert_eq!(world.controller.environments().len(), 3, "they still hold the three slots");
        world.gate.open();
        all_end_green_each_run_once(&world, &jobs).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_again_and_again_loses_no_row_and_no_job() {
    story(Duration::from_secs(150), async {
        let mut world = World::start(3).await;
        let jobs = three_run_and_two_wait(&world).await;
        for _ in 0..6 {
            world.controller.kill9();
            world.controller.spawn();
            // At moments that differ: this is no wait for anything.
            tokio::time::sleep(Duration::from_millis(rand::random_range(50..2500))).await;
        }
        world.controller.ready().await;
        world.gate.open();
        all_end_green_each_run_once(&world, &jobs).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_the_controller_within_ten_seconds_and_jobs_even_end_without_it() {
    story(Duration::from_secs(150), async {
        let mut world = World::start(3).await;
        let jobs = three_run_and_two_wait(&world).await;
        world.controller.sigterm();
        assert_eq!(world.controller.environments().len(), 3, "running environments are left running");
        world.gate.open();
        let asked = || NAMES.map(|name| world.gate.calls(&format!("counting {name}")));
        eventually("the three jobs come to their end", SOON, async || {
            let before = asked();
            tokio::time::sleep(Duration::from_secs(1)).await;
            (before == asked()).then_some(())
        })
        .await;
        world.controller.start_again().await;
        all_end_green_each_run_once(&world, &jobs).await;
    })
    .await;
}
