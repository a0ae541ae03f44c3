//! Jobs that only the mirror still knows, and what it makes better after a restart.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::PathBuf, time::Duration};

use gitea_dynamic_runner::demo::forge::{JobId, JobStatus};
use nix::{sys::signal, unistd::Pid};

use crate::{
    shown::{in_phase, shown},
    support::{eventually, story},
    world::{SOON, World, assert_whole, rows_with},
};

fn private(world: &World, file: &str) -> PathBuf {
    world.controller.state().join("private").join(file)
}

async fn stranded(world: &World, result: &str) -> f64 {
    world.controller.metric(&format!("stranded_total{{result=\"{result}\"}}")).await.unwrap()
}

const NAMES: [&str; 4] = ["first", "second", "third", "fourth"];

/// Two run in two slots.
async fn two_run(world: &World) -> Vec<JobId> {
    let mut jobs = Vec::new();
    for name in &NAMES[..2] {
        let job = world.push(world.counting(name));
        world.counts(name, job).await;
        let task = world.task(job).await;
        in_phase(world, task, "claimed").await;
        jobs.push(job);
    }
    jobs
}

/// And two wait, and the mirror knows it.
async fn two_run_and_two_wait(world: &World) -> Vec<JobId> {
    let mut jobs = two_run(world).await;
    jobs.extend(two_wait(world).await);
    jobs
}

async fn two_wait(world: &World) -> Vec<JobId> {
    let mut jobs = Vec::new();
    for name in &NAMES[2..] {
        let job = world.push(world.quick(name));
        let task = world.task(job).await;
        in_phase(world, task, "queued").await;
        jobs.push(job);
    }
    jobs
}

async fn all_end_green_each_run_once(world: &World, jobs: &[JobId]) {
    world.gate.open();
    for job in jobs {
        assert_whole_or_quick(&world.forge.wait_done(*job, Duration::from_secs(60)).await.unwrap());
    }
    assert_eq!(NAMES.map(|name| world.started(name)), [1; 4]);
    world.no_environment(SOON).await;
}

fn assert_whole_or_quick(view: &gitea_dynamic_runner::demo::forge::JobView) {
    assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
    if NAMES[..2].contains(&view.key.as_str()) {
        assert_whole(view);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_queue_was_lost_its_waiting_jobs_run_from_the_mirrors_sealed_copies() {
    for crash in [false, true] {
        story(Duration::from_secs(150), async {
            let mut world = World::start(2).await;
            let jobs = two_run_and_two_wait(&world).await;
            if crash {
                world.controller.kill9();
            } else {
                world.controller.sigterm();
            }
            fs::remove_file(private(&world, "queue.redb")).unwrap();
            world.controller.start_again().await;
            eventually("both are queued again", SOON, async || (stranded(&world, "republished").await == 2.0).then_some(()))
                .await;
            all_end_green_each_run_once(&world, &jobs).await;
            assert_eq!(stranded(&world, "failed").await, 0.0);
            assert_eq!(world.controller.metric("lost_fetch_total").await, Some(0.0));
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_queue_was_set_back_to_an_older_backup_what_it_lacks_runs_and_nothing_is_taken_for_a_lost_fetch() {
    story(Duration::from_secs(150), async {
        let mut world = World::start(2).await;
        let mut jobs = two_run(&world).await;
        world.controller.sigterm();
        let backup = world.base().join("queue.backup");
        fs::copy(private(&world, "queue.redb"), &backup).unwrap();
        world.controller.start_again().await;
        jobs.extend(two_wait(&world).await);
        world.controller.sigterm();
        fs::copy(&backup, private(&world, "queue.redb")).unwrap();
        world.controller.start_again().await;
        all_end_green_each_run_once(&world, &jobs).await;
        assert_eq!(stranded(&world, "republished").await, 2.0);
        assert_eq!(world.controller.metric("lost_fetch_total").await, Some(0.0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranded_job_without_a_copy_and_one_that_is_over_at_gitea_get_no_environment() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(2).await;
        let jobs = two_run_and_two_wait(&world).await;
        let (without, cancelled) = (world.task(jobs[2]).await, jobs[3]);
        world.controller.sigterm();
        fs::remove_file(private(&world, "queue.redb")).unwrap();
        {
            let database = redb::Database::open(private(&world, "mirror.redb")).unwrap();
            let txn = database.begin_write().unwrap();
            let payload = redb::TableDefinition::<i64, &[u8]>::new("payload");
            assert!(txn.open_table(payload).unwrap().remove(without.0).unwrap().is_some());
            txn.commit().unwrap();
        }
        world.forge.cancel(cancelled);
        world.controller.start_again().await;
        let view = world.ended(jobs[2]).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "no copy of it is left"), 1, "{:#?}", view.log);
        assert!(view.steps.iter().all(|step| step.status.is_final()), "{:#?}", view.steps);
        assert_eq!(world.ended(cancelled).await.status, JobStatus::Cancelled);
        let row = in_phase(&world, without, "lost").await;
        assert!(row["reason"].as_str().unwrap().contains("no copy"), "{row:#}");
        let cancelled = world.task(cancelled).await;
        in_phase(&world, cancelled, "finished").await;
        world.gate.open();
        for job in &jobs[..2] {
            world.ends_green(*job).await;
        }
        assert_eq!((world.started("third"), world.started("fourth")), (0, 0));
        assert_eq!((stranded(&world, "failed").await, stranded(&world, "republished").await), (1.0, 0.0));
        world.no_environment(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_job_whose_environment_was_removed_by_hand_while_nobody_looked_fails_with_a_reason_and_never_runs_again() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        let job = world.push(world.counting("bereft"));
        world.counts("bereft", job).await;
        let (task, name) = (world.task(job).await, world.environment().await);
        in_phase(&world, task, "claimed").await;
        world.controller.kill9();
        for process in world.controller.processes() {
            signal::kill(Pid::from_raw(process.pid), signal::SIGKILL).ok();
        }
        eventually("nothing of it runs", SOON, async || world.controller.processes().is_empty().then_some(())).await;
        fs::remove_file(private(&world, &format!("environments/{name}.json"))).unwrap();
        fs::remove_dir_all(world.controller.state().join("env").join(&name)).unwrap();
        world.controller.start_again().await;
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "not run again by itself"), 1, "{:#?}", view.log);
        assert_eq!(rows_with(&view, "did not reach its disk"), 0, "{:#?}", view.log);
        in_phase(&world, task, "lost").await;
        assert_eq!(stranded(&world, "failed").await, 1.0);
        let after = world.push(world.quick("after"));
        world.ends_green(after).await;
        assert_eq!(world.started("bereft"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_after_a_restart_the_token_of_a_running_job_is_known_so_a_restored_giteas_job_of_its_id_is_a_new_one() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        world.forge.set_disabled(1, true);
        let job = world.push(world.counting("again"));
        let backup = world.forge.backup();
        world.forge.set_disabled(1, false);
        world.counts("again", job).await;
        let (old, task) = (world.environment().await, world.task(job).await);
        in_phase(&world, task, "claimed").await;
        world.controller.kill9();
        world.controller.start_again().await;
        world.forge.restore(backup);
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
        assert_whole(&world.ends_green(job).await);
        let row = in_phase(&world, task, "finished").await;
        assert_eq!(row["rebuilt"], false);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r10_environments_that_ended_before_a_restart_count_after_it() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        world.hold_starts();
        let job = world.push(world.quick("never"));
        let task = world.task(job).await;
        for ended in 1..=3 {
            let executor = eventually("an executor", SOON, async || world.controller.executors().first().cloned()).await;
            signal::kill(Pid::from_raw(executor.pid), signal::SIGKILL).unwrap();
            let known = || world.controller.events("claim_timeout", task) == ended;
            eventually("the controller knows that it ended", SOON, async || known().then_some(())).await;
            if ended == 2 {
                eventually("so does the mirror", SOON, async || {
                    (shown(&world, &["job", &task.to_string()])["attempts"] == 2).then_some(())
                })
                .await;
                world.controller.kill9();
                // It is ready only when Gitea takes reports again, but it works before.
                world.controller.spawn();
            }
        }
        world.forge.clear_faults();
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "3 environments ended before they could take this job"), 1, "{:#?}", view.log);
        world.no_environment(SOON).await;
        assert_eq!(world.started("never"), 0);
    })
    .await;
}
