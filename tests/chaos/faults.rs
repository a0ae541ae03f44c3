//! The fault matrix (`docs/faults.md`) where the stand-in forge shows the fault; each test's name begins with its number there.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use gitea_dynamic_runner::demo::forge::{Fault, ForgeConfig, JobId, JobSpec, JobStatus, Method, Times};

use crate::{
    ledger::Ledger,
    support::{eventually, story},
    world::{POD, SOON, World, assert_whole, rows_with},
};

/// The library behind `faketime`, where Debian has it on this kind of machine.
fn fake_time() -> String {
    let machines = std::fs::read_dir("/usr/lib").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let mut places = machines.map(|machine| machine.join("faketime/libfaketime.so.1"));
    let found = places.find(|place| place.exists()).expect("libfaketime is missing; tests/run.sh chaos installs it");
    found.display().to_string()
}

/// The controller's wall clock is off by so much; those of its environments and of the forge are not.
fn skewed(world: &mut World, by: &str) {
    world.controller.set("LD_PRELOAD", Some(fake_time()));
    world.controller.set("FAKETIME_DONT_FAKE_MONOTONIC", Some("1".into()));
    world.controller.set("FAKETIME", Some(by.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn f15_a_clock_that_is_five_minutes_off_and_jumps_at_a_restart_costs_no_job() {
    story(Duration::from_secs(150), async {
        let mut world = World::prepare(2, ForgeConfig::default(), Vec::new()).await;
        let mut ledger = Ledger::default();
        skewed(&mut world, "+5m");
        world.controller.start_again().await;
        let running = ledger.push(&world, "running", world.counting("running"), JobStatus::Success, 1);
        world.counts("running", running).await;
        let ahead = ledger.push(&world, "ahead", world.quick("ahead"), JobStatus::Success, 1);
        world.ends_green(ahead).await;
        for waiting in ["second", "third"] {
            ledger.push(&world, waiting, world.counting(waiting), JobStatus::Success, 1);
        }
        world.waits_with_us(ledger.job("third")).await;
        // Ten minutes back: leases, delays and deadlines of the run before lie in the future.
        world.controller.kill9();
        skewed(&mut world, "-5m");
        world.controller.start_again().await;
        world.counts("second", ledger.job("second")).await;
        world.gate.open();
        ledger.balances(&world).await;
    })
    .await;
}

/// Cancels, and waits until nothing of the job runs; how long that took.
async fn cancelled(world: &World, job: JobId) -> Duration {
    let began = Instant::now();
    world.forge.cancel(job);
    world.ended(job).await;
    eventually("nothing of the cancelled job runs", SOON, async || world.controller.executors().is_empty().then_some(())).await;
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn f17_a_cancel_before_the_fetch_or_in_our_queue_makes_no_environment() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        let holding = world.push(world.counting("holding"));
        world.counts("holding", holding).await;
        let (queued, backlog) = (world.push(world.quick("queued")), world.push(world.quick("backlog")));
        let task = world.waits_with_us(queued).await;
        // Never handed out: one waits with us already, so the label is withdrawn.
        world.forge.cancel(backlog);
        assert_eq!(world.ended(backlog).await.status, JobStatus::Cancelled);
        let began = Instant::now();
        world.forge.cancel(queued);
        eventually("it leaves the queue", SOON, async || {
            let depth = world.controller.metric("queue_depth{lane=\"pod\",state=\"ready\"}").await?;
            (depth == 0.0).then_some(())
        })
        .await;
        assert!(began.elapsed() <= Duration::from_secs(10), "{:?}", began.elapsed());
        world.gate.open();
        world.ends_green(holding).await;
        assert_eq!(world.controller.events("executor_created", task), 0);
        assert_eq!((world.started("queued"), world.started("backlog")), (0, 0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f17_a_cancel_while_its_environment_is_made_or_offered_ends_it_before_it_starts() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        world.hold_starts();
        let job = world.push(world.quick("offered"));
        world.environment().await;
        world.forge.clear_faults();
        world.forge.inject(Method::UpdateLog, Fault::Page(502), Times::Next(3));
        let took = cancelled(&world, job).await;
        println!("offered: {took:?}");
        let view = world.forge.job(job).unwrap();
        assert_eq!((view.status, world.started("offered") <= 1), (JobStatus::Cancelled, true), "{:#?}", view.log);
        world.no_environment(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f17_a_cancel_reaches_a_job_that_talks_one_that_is_silent_and_one_that_is_deaf() {
    story(Duration::from_secs(180), async {
        let world = World::start(1).await;
        let sign = |name: &str| world.gate.sign(&format!("started {name}"));
        let silent = JobSpec::new("silent", &POD).run(&format!("{}\nsleep 1000", sign("silent")));
        let deaf = JobSpec::new("deaf", &POD).run(&format!("trap '' TERM INT HUP\n{}\nwhile :; do sleep 1; done", sign("deaf")));
        for (name, spec) in [("talks", world.counting("talks")), ("silent", silent), ("deaf", deaf)] {
            let job = world.push(spec);
            world.starts(name).await;
            let took = cancelled(&world, job).await;
            println!("{name}: {took:?}");
            // Two seconds of polling, and the seconds that a step has to end by itself.
            assert!(took <= Duration::from_secs(20), "{name} took {took:?}");
            assert_eq!(world.forge.job(job).unwrap().status, JobStatus::Cancelled);
            world.no_environment(SOON).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f17_a_cancel_between_the_last_row_and_the_verdict_and_one_after_the_end_change_no_result() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        let job = world.push(world.counting("ending"));
        world.counts("ending", job).await;
        // Its rows are taken at once, its verdict is not.
        world.forge.inject(Method::UpdateTask, Fault::Delay(Duration::from_secs(2)), Times::UntilCleared);
        world.gate.open();
        world
            .see("the last row", |forge| forge.job(job)?.log.iter().any(|row| row.starts_with("rows in all")).then_some(()))
            .await;
        world.forge.cancel(job);
        world.forge.clear_faults();
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Cancelled, "a cancel that came first is not overruled");
        assert_whole(&view);
        world.no_environment(SOON).await;
        let late = world.push(world.quick("late"));
        world.ends_green(late).await;
        world.forge.cancel(late);
        world.no_environment(SOON).await;
        assert_eq!(world.forge.job(late).unwrap().status, JobStatus::Success);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f17_a_cancel_while_gitea_does_not_answer_or_the_controller_is_away_reaches_the_job_when_they_are_back() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        let job = world.push(world.counting("unheard"));
        world.counts("unheard", job).await;
        world.controller.kill9();
        world.forge.cancel(job);
        world.controller.start_again().await;
        let began = Instant::now();
        world.no_environment(SOON).await;
        assert!(began.elapsed() <= Duration::from_secs(20), "{:?}", began.elapsed());
        assert_eq!(world.forge.job(job).unwrap().status, JobStatus::Cancelled);
        let job = world.push(world.counting("unheard too"));
        world.counts("unheard too", job).await;
        world.refuse(Method::UpdateTask);
        world.refuse(Method::UpdateLog);
        world.forge.cancel(job);
        let failed = world.forge.count(Method::UpdateTask);
        world.see("reports that fail", |forge| (forge.count(Method::UpdateTask) > failed + 2).then_some(())).await;
        world.forge.clear_faults();
        world.no_environment(SOON).await;
        assert_eq!(world.forge.job(job).unwrap().status, JobStatus::Cancelled);
    })
    .await;
}

/// The resident size of the controller, in MiB.
fn resident(world: &World) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.controller.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

#[tokio::test(flavor = "multi_thread")]
async fn f19_a_burst_of_500_jobs_stays_at_gitea_and_takes_no_memory_and_another_backends_job_does_not_wait() {
    story(Duration::from_secs(240), async {
        let mut world = World::prepare(4, ForgeConfig::default(), vec![("VM_BACKEND", "local".into())]).await;
        world.controller.start_again().await;
        let burst: Vec<JobSpec> = (0..500).map(|n| JobSpec::new(&format!("burst{n}"), &POD).run("true")).collect();
        let burst = world.forge.push(burst).jobs;
        let other = world.push(JobSpec::new("other", &["self-hosted", "vm"]).run(&world.gate.sign("started other")));
        let pushed = Instant::now();
        world.starts("other").await;
        let waited = pushed.elapsed();
        assert!(waited <= Duration::from_secs(5), "the other backend's job waited {waited:?}");
        world.ends_green(other).await;
        let (mut most_held, mut most_memory) = (0, 0);
        world
            .forge
            .wait_for("the burst is over", Duration::from_secs(200), |forge| {
                let views: Vec<_> = burst.iter().map(|job| forge.job(*job).unwrap()).collect();
                most_held = most_held.max(views.iter().filter(|view| view.status == JobStatus::Running).count());
                most_memory = most_memory.max(resident(&world));
                views.iter().all(|view| view.status.is_final()).then_some(())
            })
            .await
            .unwrap();
        println!("held at once: {most_held}; resident: {most_memory} MiB");
        assert!(burst.iter().all(|job| world.forge.job(*job).unwrap().status == JobStatus::Success));
        // Four run, four wait with us, and as many questions as there are slots may be on their way.
        assert!(most_held <= 4 + 4 + 5, "{most_held} were taken from Gitea at once");
        assert!(most_memory <= 150, "{most_memory} MiB");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_a_gitea_that_takes_a_second_for_each_report_holds_no_job_up_and_gets_every_row() {
    story(Duration::from_secs(150), async {
        let world = World::start(1).await;
        world.forge.inject(Method::UpdateLog, Fault::Delay(Duration::from_secs(1)), Times::UntilCleared);
        // Some 50 MB in a minute, and then it is done: the rows may come later, the job does not wait for them.
        let script = format!(
            "{}\nline=$(printf 'x%.0s' $(seq 1000))\nfor i in $(seq 0 7999); do echo \"row $i\"; echo \"$line\"; done\n{}\necho \"rows in all: 8000\"",
            world.gate.sign("started loud"),
            world.gate.sign("finished loud")
        );
        let job = world.push(JobSpec::new("loud", &POD).run(&script));
        world.starts("loud").await;
        world.gate.called("finished loud", Duration::from_secs(60)).await;
        let there = world.forge.job(job).unwrap().log.len();
        println!("rows at Gitea when the job had said all: {there}");
        assert!(there < 16_000, "the log is behind, the job is not");
        world.forge.clear_faults();
        let view = world.forge.wait_done(job, Duration::from_secs(60)).await.unwrap();
        assert_eq!(view.status, JobStatus::Success);
        assert_whole(&view);
        assert_eq!(rows_with(&view, "xxxxx"), 8000);
    })
    .await;
}
