//! The fault matrix (`docs/faults.md`) with a real nats-server: F1 to F7 and F16.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use gitea_dynamic_runner::{
    demo::forge::{ForgeConfig, JobSpec, JobStatus, Method},
    failpoint,
};

use crate::{
    ledger::Ledger,
    support::{eventually, nats::Nats, story},
    world::{SOON, World, rows_with},
};

/// What the design allows from a start to a job that goes on, or is made for.
const BACK: Duration = Duration::from_secs(10);

async fn with_nats(capacity: u32) -> (Nats, World) {
    let nats = Nats::start().await;
    nats.set_up().await;
    let world = World::prepare(capacity, ForgeConfig::default(), nats.env()).await;
    (nats, world)
}

/// One job meets the crash; after the restart it is green, its environment made within the limit, and made once.
async fn crashed_at(name: &str) {
    let (nats, mut world) = with_nats(2).await;
    let mut ledger = Ledger::default();
    world.controller.set(failpoint::VARIABLE, Some(name.to_owned()));
    let job = ledger.push(&world, "first", world.quick("first"), JobStatus::Success, 1);
    world.controller.spawn();
    world.controller.crashes(Duration::from_secs(30)).await;
    let task = world.task(job).await;
    world.controller.set(failpoint::VARIABLE, None);
    let began = Instant::now();
    world.controller.spawn();
    eventually("its environment exists", BACK, async || (world.controller.events("runner_claimed", task) > 0).then_some(()))
        .await;
    println!("{name}: claimed {:?} after the start", began.elapsed());
    world.controller.ready().await;
    ledger.push(&world, "second", world.quick("second"), JobStatus::Success, 1);
    ledger.balances(&world).await;
    // None where the crash came between the create and the row that says so.
    assert!(world.controller.events("executor_created", task) <= 1, "one environment");
    assert_eq!(nats.admin().await.messages("CI_RUNNER").await, 0, "nothing stays in the stream");
}

#[tokio::test(flavor = "multi_thread")]
async fn f1_killed_between_the_answer_to_a_fetch_and_our_disk_the_job_fails_with_its_reason_and_is_counted() {
    story(Duration::from_secs(120), async {
        let (_nats, mut world) = with_nats(1).await;
        let mut ledger = Ledger::default();
        world.controller.set(failpoint::VARIABLE, Some("fetch.answered:2".into()));
        let stored = ledger.push(&world, "stored", world.quick("stored"), JobStatus::Success, 1);
        world.controller.spawn();
        world.ends_green(stored).await;
        let lost = ledger.push(&world, "lost", world.quick("lost"), JobStatus::Failure, 0);
        world.controller.crashes(Duration::from_secs(30)).await;
        world.controller.set(failpoint::VARIABLE, None);
        world.controller.start_again().await;
        let view = world.ended(lost).await;
        assert_eq!(rows_with(&view, "it did not reach its disk"), 1, "{:#?}", view.log);
        world.counts_a_lost_fetch().await;
        ledger.balances(&world).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f1_killed_between_our_disk_and_the_acknowledgement_of_nats_the_job_runs_once() {
    story(Duration::from_secs(120), async {
        crashed_at("outbox.put").await;
        crashed_at("outbox.sent").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f2_killed_after_the_acknowledgement_and_before_the_create_it_is_made_within_ten_seconds_and_once() {
    story(Duration::from_secs(120), async {
        crashed_at("fetch.stored").await;
        crashed_at("worker.leased").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f3_killed_while_the_create_is_under_way_there_is_one_environment() {
    story(Duration::from_secs(120), crashed_at("local.kept")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f4_killed_while_a_job_runs_and_logs_it_is_attached_again_within_ten_seconds_and_no_row_is_missing_or_doubled() {
    story(Duration::from_secs(120), async {
        let (_nats, mut world) = with_nats(1).await;
        let mut ledger = Ledger::default();
        world.controller.start_again().await;
        let job = ledger.push(&world, "running", world.counting("running"), JobStatus::Success, 1);
        world.counts("running", job).await;
        world.controller.kill9();
        let held = world.forge.job(job).unwrap().log.len();
        let began = Instant::now();
        world.controller.spawn();
        let more = world.forge.wait_for("more rows", BACK, |forge| (forge.job(job)?.log.len() > held).then_some(()));
        more.await.unwrap();
        println!("attached again after {:?}", began.elapsed());
        world.controller.ready().await;
        world.gate.open();
        ledger.balances(&world).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f5_killed_after_gitea_took_the_result_it_stays_and_the_environment_goes() {
    story(Duration::from_secs(120), async {
        let (nats, mut world) = with_nats(1).await;
        let mut ledger = Ledger::default();
        world.controller.set(failpoint::VARIABLE, Some("terminal.accepted".into()));
        let job = ledger.push(&world, "ended", world.quick("ended"), JobStatus::Success, 1);
        world.controller.spawn();
        world.controller.crashes(Duration::from_secs(30)).await;
        assert_eq!(world.ends_green(job).await.status, JobStatus::Success);
        world.controller.set(failpoint::VARIABLE, None);
        world.controller.start_again().await;
        ledger.balances(&world).await;
        assert_eq!(nats.admin().await.messages("CI_RUNNER").await, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f6_nats_away_for_a_minute_nothing_is_fetched_running_jobs_go_on_and_end_and_then_the_others_run() {
    story(Duration::from_secs(200), async {
        let (mut nats, mut world) = with_nats(2).await;
        let mut ledger = Ledger::default();
        world.controller.start_again().await;
        let running = ledger.push(&world, "running", world.counting("running"), JobStatus::Success, 1);
        world.counts("running", running).await;
        nats.kill9();
        let away = Instant::now();
        eventually("it says that it is not ready, and why", SOON, async || {
            world.controller.readiness().await.filter(|why| why.contains("NATS") || why.contains("queue"))
        })
        .await;
        let waiting = ledger.push(&world, "waiting", world.quick("waiting"), JobStatus::Success, 1);
        // The running job ends meanwhile, whole and green.
        world.gate.open();
        world.ends_green(running).await;
        world.no_environment(SOON).await;
        let rest = Duration::from_secs(60).saturating_sub(away.elapsed());
        tokio::time::sleep(rest).await;
        let view = world.forge.job(waiting).unwrap();
        assert_eq!((view.status, view.fetched), (JobStatus::Waiting, 0), "it waits at Gitea, where nothing can be lost");
        nats.start_again().await;
        ledger.balances(&world).await;
    })
    .await;
}

/// The operator's command; what it said.
fn nats_setup(world: &World, arguments: &[&str]) -> String {
    let mut command = world.controller.command();
    command.arg("nats-setup").args(arguments);
    command.env("NATS_ADMIN_USER", "admin").env("NATS_ADMIN_PASSWORD", "admin-secret");
    let said = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success(), "{text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn f7_the_data_of_nats_are_lost_running_jobs_go_on_and_what_waited_comes_back_from_the_mirror_and_runs_once() {
    story(Duration::from_secs(150), async {
        let (mut nats, mut world) = with_nats(1).await;
        let mut ledger = Ledger::default();
        world.controller.start_again().await;
        let running = ledger.push(&world, "running", world.counting("running"), JobStatus::Success, 1);
        world.counts("running", running).await;
        let waiting = ledger.push(&world, "waiting", world.quick("waiting"), JobStatus::Success, 1);
        let task = world.task(waiting).await;
        eventually("it waits in the stream", SOON, async || (nats.admin().await.messages("CI_RUNNER").await == 1).then_some(()))
            .await;
        nats.kill9();
        std::fs::remove_dir_all(nats.folder().join("js")).unwrap();
        nats.start_again().await;
        let way_out = eventually("it says what is missing, and the way out", SOON, async || {
            world.controller.readiness().await.filter(|why| why.contains("nats-setup"))
        });
        println!("{}", way_out.await);
        let rows = world.forge.job(running).unwrap().log.len();
        world.see("more rows of the running job", |forge| (forge.job(running)?.log.len() > rows).then_some(())).await;
        println!("{}", nats_setup(&world, &["--replace-lost", "--yes"]));
        eventually("what waited is in the stream again", Duration::from_secs(40), async || {
            (nats.admin().await.messages("CI_RUNNER").await == 1).then_some(())
        })
        .await;
        world.gate.open();
        ledger.balances(&world).await;
        assert_eq!(world.controller.events("executor_created", task), 1);
    })
    .await;
}

/// Fifty jobs of one backend, of which one at a time runs, and then one of the other backend: nothing holds it up.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_vm_jobs_before_it_do_not_hold_a_pod_job_up_for_five_seconds() {
    story(Duration::from_secs(150), async {
        let nats = Nats::start().await;
        nats.set_up().await;
        let mut env = nats.env();
        env.extend([("VM_BACKEND", "local".to_owned()), ("VM_CAPACITY", "1".to_owned())]);
        let mut world = World::prepare(2, ForgeConfig::default(), env).await;
        world.controller.start_again().await;
        let hold = world.gate.wait("holding");
        let vms = (0..50).map(|n| JobSpec::new(&format!("vm{n}"), &["self-hosted", "vm"]).run(&hold));
        let vms = world.forge.push(vms).jobs;
        world.gate.called("holding", SOON).await;
        eventually("the other vm jobs are held back at Gitea", SOON, async || {
            let fetched = vms.iter().filter(|job| world.forge.job(**job).unwrap().fetched > 0).count();
            // One runs, one waits with us, and as many more as questions were on their way.
            (fetched >= 2).then(|| assert!(fetched <= 2 + 3, "{fetched} of 50 were taken"))
        })
        .await;
        let pushed = Instant::now();
        let pod = world.push(world.quick("pod"));
        let task = world.task(pod).await;
        let made = async || (world.controller.events("executor_created", task) == 1).then_some(());
        eventually("the pod job's environment is made", Duration::from_secs(5), made).await;
        println!("made {:?} after its push", pushed.elapsed());
        world.ends_green(pod).await;
        assert!(world.forge.job(vms[49]).unwrap().fetched == 0, "the backlog is still at Gitea");
        for vm in &vms {
            world.forge.cancel(*vm);
        }
        world.gate.open();
        world.no_environment(Duration::from_secs(60)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f16_a_task_delivered_twice_runs_once_whether_it_waits_runs_or_is_over() {
    story(Duration::from_secs(120), async {
        let (nats, mut world) = with_nats(1).await;
        let mut ledger = Ledger::default();
        world.controller.start_again().await;
        let again = async || {
            let fetches = world.forge.count(Method::FetchTask);
            world.forge.give_again();
            world.see("the repeated answer", |forge| (forge.count(Method::FetchTask) > fetches + 1).then_some(())).await;
        };
        let running = ledger.push(&world, "running", world.counting("running"), JobStatus::Success, 1);
        world.counts("running", running).await;
        again().await;
        let waiting = ledger.push(&world, "waiting", world.quick("waiting"), JobStatus::Success, 1);
        world.task(waiting).await;
        again().await;
        world.gate.open();
        world.ends_green(running).await;
        world.ends_green(waiting).await;
        again().await;
        ledger.balances(&world).await;
        eventually("nothing stays in the stream", SOON, async || {
            (nats.admin().await.messages("CI_RUNNER").await == 0).then_some(())
        })
        .await;
    })
    .await;
}
