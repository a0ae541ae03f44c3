//! R1 to R3: when Gitea is asked, with which version, and what becomes of an answer that nobody got.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use gitea_dynamic_runner::{
    demo::forge::{Fault, Forge, ForgeConfig, JobSpec, JobStatus, Method, Seen, Times},
    gitea::RunnerRpc,
};
use nix::{sys::signal, unistd::Pid};

use crate::{
    support::{eventually, small_disk::SmallDisk, story},
    world::{POD, SOON, World, rows_with},
};

/// Well below the 30 s after which the controller looks for jobs whatever the version says.
const UNFORCED: Duration = Duration::from_secs(12);

fn fetches(forge: &Forge) -> Vec<Seen> {
    forge.seen().into_iter().filter(|seen| seen.method == Some(Method::FetchTask)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn r1_a_fetch_says_15_seconds_and_is_not_hung_up_on_before_its_answer() {
    story(Duration::from_secs(90), async {
        let mut world = World::prepare(1, ForgeConfig::default(), Vec::new()).await;
        world.forge.inject(Method::FetchTask, Fault::Delay(Duration::from_secs(12)), Times::Next(1));
        let job = world.push(world.quick("late"));
        world.controller.spawn();
        world.ends_green(job).await;
        let fetches = fetches(&world.forge);
        assert!(fetches.iter().all(|fetch| fetch.patience == Some(Duration::from_secs(15))), "{fetches:#?}");
        assert!(fetches[1].at - fetches[0].at >= Duration::from_secs(12), "the answer was waited for, not asked for again");
        assert_eq!(world.forge.job(job).unwrap().fetched, 1);
        assert_eq!(world.started("late"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r1_nothing_is_fetched_while_the_disk_is_too_full_and_readiness_says_why() {
    story(Duration::from_secs(90), async {
        let Some(disk) = SmallDisk::new("64m") else { return };
        crate::support::passable(disk.path());
        let state = disk.path().join("state");
        let env = vec![("STATE_DIRECTORY", state.display().to_string())];
        let mut world = World::prepare(1, ForgeConfig::default(), env).await;
        let job = world.push(world.quick("patient"));
        world.controller.spawn();
        let why = eventually("the controller says that it holds back", SOON, async || {
            world.controller.readiness().await.filter(|why| why.contains("the queue cannot take more"))
        });
        assert!(why.await.contains("free"), "it names the way out");
        assert_eq!(world.forge.count(Method::FetchTask), 0);
        disk.resize("1g");
        world.ends_green(job).await;
        // The state folder is on the disk that goes with this story.
        world.no_environment(SOON).await;
        world.controller.sigterm();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r1_a_full_pool_withdraws_its_label_fetches_no_more_and_declares_it_again() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        let names = ["a", "b", "c", "d", "e", "f"];
        let jobs = world.forge.push(names.map(|name| world.counting(name))).jobs;
        world.starts("a").await;
        let labels = |forge: &Forge| forge.runners()[0].labels.clone();
        world.see("the label to be withdrawn", |forge| (labels(forge) == ["self-hosted"]).then_some(())).await;
        // One runs, one waits, and one question was in flight at most.
        let fetched = || jobs.iter().filter(|job| world.forge.job(**job).unwrap().task.is_some()).count();
        // The scheduler goes on to ask for what it has declared, and gets nothing.
        let asked = world.forge.count(Method::FetchTask);
        world.see("more questions", |forge| (forge.count(Method::FetchTask) > asked + 3).then_some(())).await;
        assert!((2..=3).contains(&fetched()), "{} fetched with one slot", fetched());
        world.gate.open();
        for job in jobs {
            world.ends_green(job).await;
        }
        world.see("the label to be declared again", |forge| (labels(forge) == POD).then_some(())).await;
        assert_eq!(names.map(|name| world.started(name)), [1; 6]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r2_two_jobs_of_one_version_are_both_fetched_at_once() {
    story(Duration::from_secs(60), async {
        let world = World::start(2).await;
        let version = world.forge.tasks_version();
        let jobs = world.forge.push([world.counting("one"), world.counting("two")]).jobs;
        assert_eq!(world.forge.tasks_version(), version + 1);
        let began = Instant::now();
        world.starts("one").await;
        world.starts("two").await;
        assert!(began.elapsed() < UNFORCED, "the second was seen only after {:?}", began.elapsed());
        world.gate.open();
        for job in jobs {
            world.ends_green(job).await;
        }
    })
    .await;
}

/// Keeps all of the forge's sixteen searches busy with questions of a runner whom no job fits.
async fn keep_busy(forge: &Forge) -> tokio::task::JoinSet<()> {
    let (uuid, token) = forge.new_runner("busy", &["other"]);
    let rpc = RunnerRpc::to_gitea(&forge.url(), None, Some((&uuid, &token))).unwrap();
    let mut busy = tokio::task::JoinSet::new();
    for _ in 0..48 {
        let rpc = rpc.clone();
        busy.spawn(async move {
            loop {
                // A throttled answer comes at once; then it asks again.
                rpc.fetch_task(0).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    busy
}

#[tokio::test(flavor = "multi_thread")]
async fn r2_a_throttled_answer_is_asked_again_soon() {
    story(Duration::from_secs(60), async {
        let config = ForgeConfig { pick_time: Duration::from_millis(500), ..Default::default() };
        let mut world = World::prepare(1, config, Vec::new()).await;
        let job = world.push(world.quick("hidden"));
        let busy = keep_busy(&world.forge).await;
        world.controller.start_again().await;
        let throttled = "fetch_requests_total{result=\"throttled\"}";
        eventually("throttled answers", SOON, async || (world.controller.metric(throttled).await? >= 1.0).then_some(())).await;
        drop(busy);
        let began = Instant::now();
        world.ends_green(job).await;
        assert!(began.elapsed() < UNFORCED, "the job was seen only after {:?}", began.elapsed());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_task_whose_answer_was_lost_is_failed_at_the_next_start_and_its_log_says_so() {
    story(Duration::from_secs(90), async {
        let mut world = World::start(1).await;
        // What is stored tells the next start where to look.
        let first = world.push(world.quick("first"));
        world.ends_green(first).await;
        world.forge.inject(Method::FetchTask, Fault::LoseAnswer, Times::UntilCleared);
        let lost = world.push(JobSpec::new("lost", &POD).run("echo never"));
        world.task(lost).await;
        world.controller.kill9();
        world.forge.clear_faults();
        world.controller.start_again().await;
        let view = world.ended(lost).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "did not reach its disk"), 1, "{:#?}", view.log);
        world.counts_a_lost_fetch().await;
        let after = world.push(world.quick("after"));
        world.ends_green(after).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_task_whose_answer_a_broken_connection_swallowed_is_failed_as_soon_as_gitea_answers_again() {
    story(Duration::from_secs(60), async {
        let world = World::start(1).await;
        let first = world.push(world.quick("first"));
        world.ends_green(first).await;
        world.forge.inject(Method::FetchTask, Fault::LoseAnswer, Times::Next(2));
        let lost = world.push(JobSpec::new("lost", &POD).run("echo never"));
        let view = world.ended(lost).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "did not reach its disk"), 1, "{:#?}", view.log);
        world.counts_a_lost_fetch().await;
        let after = world.push(world.quick("after"));
        world.ends_green(after).await;
        assert_eq!(world.controller.metric("lost_fetch_total").await, Some(1.0), "and only that one");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_job_whose_environment_ended_while_the_controller_was_away_is_no_lost_fetch() {
    story(Duration::from_secs(90), async {
        let mut world = World::start(1).await;
        let job = world.push(world.counting("bereft"));
        world.counts("bereft", job).await;
        world.controller.kill9();
        let executor = world.controller.executors().remove(0);
        signal::kill(Pid::from_raw(executor.pid), signal::SIGKILL).unwrap();
        eventually("nothing of it runs", SOON, async || world.controller.processes().is_empty().then_some(())).await;
        world.controller.start_again().await;
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "The environment ended without a result"), 1, "{:#?}", view.log);
        assert_eq!(rows_with(&view, "did not reach its disk"), 0, "{:#?}", view.log);
        assert_eq!(world.controller.metric("lost_fetch_total").await, Some(0.0));
        assert_eq!(world.started("bereft"), 1, "it is not run again");
    })
    .await;
}
