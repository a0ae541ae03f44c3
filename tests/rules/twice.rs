//! R4: no job runs twice, whoever delivers it again: Gitea, a restored queue, a restored Gitea.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::{JobStatus, Method};

use crate::{
    support::{eventually, story},
    world::{SOON, World, assert_whole, rows_with},
};

const PODS_IN_QUEUE: [&str; 3] = [
    "queue_depth{lane=\"pod\",state=\"ready\"}",
    "queue_depth{lane=\"pod\",state=\"delayed\"}",
    "queue_depth{lane=\"pod\",state=\"leased\"}",
];

/// Waits until so many assignments are in the queue.
async fn queued(world: &World, number: f64) {
    eventually(&format!("{number} in the queue"), SOON, async || {
        let mut sum = 0.0;
        for series in PODS_IN_QUEUE {
            sum += world.controller.metric(series).await?;
        }
        (sum == number).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_a_task_delivered_twice_while_it_waits_runs_and_ended_runs_once() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        let first = world.push(world.counting("first"));
        world.starts("first").await;
        let ignored = || world.controller.log().matches("delivered a task twice").count();
        let given_again = async || {
            let fetches = world.forge.count(Method::FetchTask);
            world.forge.give_again();
            world.see("the repeated answer", |forge| (forge.count(Method::FetchTask) > fetches + 1).then_some(())).await;
        };
        // It runs: the copy is stored, found claimed, and taken out again.
        given_again().await;
        queued(&world, 0.0).await;
        // It waits: the copy is not even stored.
        let second = world.push(world.counting("second"));
        let waiting = world.task(second).await;
        queued(&world, 1.0).await;
        given_again().await;
        eventually("the copy is refused", SOON, async || (ignored() == 1).then_some(())).await;
        world.gate.open();
        assert_whole(&world.ends_green(first).await);
        assert_whole(&world.ends_green(second).await);
        // It is over.
        given_again().await;
        queued(&world, 0.0).await;
        world.no_environment(SOON).await;
        assert_eq!(world.controller.events("executor_created", waiting), 1);
        assert_eq!((world.started("first"), world.started("second")), (1, 1));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_a_restored_queue_runs_no_finished_job_again() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        let running = world.push(world.counting("running"));
        world.starts("running").await;
        let waiting = world.push(world.quick("waiting"));
        let task = world.task(waiting).await;
        queued(&world, 1.0).await;
        world.controller.sigterm();
        let queue = world.controller.state().join("private/queue.redb");
        let backup = world.base().join("queue.backup");
        std::fs::copy(&queue, &backup).unwrap();
        world.controller.start_again().await;
        world.gate.open();
        world.ends_green(running).await;
        let before = world.ends_green(waiting).await;
        world.no_environment(SOON).await;
        world.controller.sigterm();
        std::fs::copy(&backup, &queue).unwrap();
        world.controller.start_again().await;
        queued(&world, 0.0).await;
        assert_eq!(world.controller.events("executor_created", task), 1);
        let after = world.forge.job(waiting).unwrap();
        assert_eq!((after.status, after.log), (JobStatus::Success, before.log));
        assert_eq!(world.started("waiting"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_a_task_id_that_a_restored_gitea_gives_anew_is_a_new_job_and_the_old_environment_goes_first() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        // Held back, so that the backup has the job waiting.
        world.forge.set_disabled(1, true);
        let job = world.push(world.counting("again"));
        let backup = world.forge.backup();
        world.forge.set_disabled(1, false);
        world.counts("again", job).await;
        let (old, task) = (world.environment().await, world.task(job).await);
        world.forge.restore(backup);
        assert_eq!(world.forge.job(job).unwrap().status, JobStatus::Waiting);
        // The version moves on, as it does at a Gitea that lives.
        for disabled in [false, true, false] {
            world.forge.set_disabled(1, disabled);
        }
        eventually("the job runs anew", Duration::from_secs(60), async || {
            let all = world.controller.environments();
            assert!(all.len() <= 1, "the old environment goes first: {all:?}");
            (world.started("again") == 2).then_some(())
        })
        .await;
        assert_eq!(world.task(job).await, task, "the same id");
        assert_ne!(world.environment().await, old);
        world.gate.open();
        let view = world.ends_green(job).await;
        assert_whole(&view);
        assert_eq!(rows_with(&view, "was made for this job"), 1, "no row of the old job: {:#?}", view.log);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_a_job_cancelled_while_it_waits_gets_no_environment() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let running = world.push(world.counting("running"));
        world.starts("running").await;
        let waiting = world.push(world.quick("waiting"));
        let task = world.task(waiting).await;
        queued(&world, 1.0).await;
        world.forge.cancel(waiting);
        let limit = Duration::from_secs(7);
        let said = world.forge.wait_for("the last row of the cancelled job", limit, |forge| {
            let view = forge.job(waiting)?;
            (rows_with(&view, "cancelled before it had an environment") == 1).then_some(view)
        });
        assert_eq!(said.await.unwrap().status, JobStatus::Cancelled);
        queued(&world, 0.0).await;
        world.gate.open();
        world.ends_green(running).await;
        world.no_environment(SOON).await;
        assert_eq!(world.controller.events("executor_created", task), 0);
        assert_eq!(world.started("waiting"), 0);
    })
    .await;
}
