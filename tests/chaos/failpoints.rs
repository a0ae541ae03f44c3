//! A crash at each failpoint in turn, a restart, and the same ledger as without the crash.
//!
//! The names here are all that the sources have; `tests/tidy.rs` compares them with the sources and with `docs/failure-windows.md`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::{
    demo::forge::{ForgeConfig, JobSpec, JobStatus},
    failpoint,
    ids::Lane,
    queue::{AssignmentQueue as _, embedded::EmbeddedQueue},
};

use crate::{
    ledger::Ledger,
    support::{eventually, nats::Nats, story},
    world::{POD, SOON, World, rows_with},
};

/// From the start, or the deed that leads there, to the crash.
const CRASH: Duration = Duration::from_secs(40);

macro_rules! crash_at {
    ($($name:literal => $test:ident: $story:ident),* $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            story(Duration::from_secs(150), $story($name)).await;
        }
    )*};
}

crash_at! {
    "fetch.answered" => at_fetch_answered: a_lost_fetch,
    "fetch.stored" => at_fetch_stored: plain,
    "fetch.replaced" => at_fetch_replaced: a_restored_gitea,
    "outbox.put" => at_outbox_put: through_jetstream,
    "outbox.sent" => at_outbox_sent: through_jetstream,
    "delivery.taken" => at_delivery_taken: through_jetstream,
    "delivery.acked" => at_delivery_acked: through_jetstream,
    "delivery.buried" => at_delivery_buried: an_unreadable_assignment_in_jetstream,
    "stream.remembered" => at_stream_remembered: through_jetstream,
    "migrate.moved" => at_migrate_moved: an_old_stream,
    "queue.new" => at_queue_new: plain,
    "files.written" => at_files_written: plain,
    "worker.leased" => at_worker_leased: plain,
    "worker.over" => at_worker_over: a_job_that_local_refuses,
    "worker.unreadable" => at_worker_unreadable: an_unreadable_assignment,
    "worker.made" => at_worker_made: plain,
    "worker.offered" => at_worker_offered: plain,
    "identity.bound" => at_identity_bound: plain,
    "local.recorded" => at_local_recorded: plain,
    "local.foldered" => at_local_foldered: plain,
    "local.kept" => at_local_kept: plain,
    "report.said" => at_report_said: plain,
    "start.marked" => at_start_marked: plain,
    "start.completed" => at_start_completed: plain,
    "terminal.accepted" => at_terminal_accepted: plain,
    "terminal.marked" => at_terminal_marked: plain,
    "remove.gone" => at_remove_gone: plain,
    "local.emptied" => at_local_emptied: plain,
    "local.forgotten" => at_local_forgotten: plain,
    "refused.settled" => at_refused_settled: a_job_for_nobody,
    "waiting.settled" => at_waiting_settled: a_cancelled_waiting_job,
    "again.gone" => at_again_gone: an_environment_that_ends_before_start,
    "settle.halted" => at_settle_halted: a_lost_environment,
    "settle.sealed" => at_settle_sealed: a_lost_environment,
    "settle.reported" => at_settle_reported: a_lost_environment,
    "settle.marked" => at_settle_marked: a_lost_environment,
    "mirror.new" => at_mirror_new: plain,
    "mirror.noted" => at_mirror_noted: plain,
    "stranded.republished" => at_stranded_republished: a_lost_queue,
    "drain.written" => at_drain_written: a_drain,
    "drain.removed" => at_drain_removed: an_undone_drain,
    "register.answered" => at_register_answered: a_registration,
    "executor.prepared" => at_executor_prepared: an_executor_that_crashes_before_start,
    "executor.started" => at_executor_started: an_executor_that_crashes_before_its_runner,
    "executor.exited" => at_executor_exited: an_executor_that_crashes_before_its_verdict,
}

/// The controller will crash at `name`, once.
async fn about_to_crash(name: &str, capacity: u32) -> World {
    let env = vec![(failpoint::VARIABLE, name.to_owned())];
    World::prepare(capacity, ForgeConfig::default(), env).await
}

/// After the crash: without the failpoint.
async fn crashes_and_starts_again(world: &mut World) {
    world.controller.crashes(CRASH).await;
    world.controller.set(failpoint::VARIABLE, None);
    world.controller.start_again().await;
}

/// Its one slot is taken, so that what is pushed next waits.
async fn started_with_one_running(world: &mut World) -> Ledger {
    let mut ledger = Ledger::default();
    world.controller.start_again().await;
    let running = ledger.push(world, "running", world.counting("running"), JobStatus::Success, 1);
    world.counts("running", running).await;
    ledger
}

/// One job meets the crash, two more come while nobody is there.
async fn plain(name: &str) {
    let mut world = about_to_crash(name, 2).await;
    one_job_meets_the_crash(&mut world).await;
}

async fn one_job_meets_the_crash(world: &mut World) {
    let mut ledger = Ledger::default();
    ledger.push(world, "first", world.quick("first"), JobStatus::Success, 1);
    world.controller.spawn();
    world.controller.crashes(CRASH).await;
    two_more(world, &mut ledger);
    world.controller.set(failpoint::VARIABLE, None);
    world.controller.start_again().await;
    ledger.balances(world).await;
}

/// As [`plain`], with the queue in JetStream.
async fn through_jetstream(name: &str) {
    let nats = Nats::start().await;
    nats.set_up().await;
    let env = nats.env().into_iter().chain([(failpoint::VARIABLE, name.to_owned())]).collect();
    let mut world = World::prepare(2, ForgeConfig::default(), env).await;
    one_job_meets_the_crash(&mut world).await;
    let admin = nats.admin().await;
    eventually("NATS holds nothing", SOON, async || (admin.messages("CI_RUNNER").await == 0).then_some(())).await;
}

/// Its job is failed, it becomes one dead letter, and leaves.
async fn an_unreadable_assignment_in_jetstream(name: &str) {
    let nats = Nats::start().await;
    nats.set_up().await;
    let env = nats.env().into_iter().chain([(failpoint::VARIABLE, name.to_owned())]).collect();
    let mut world = World::prepare(1, ForgeConfig::default(), env).await;
    let mut ledger = started_with_one_running(&mut world).await;
    let spoilt = ledger.push(&world, "spoilt", world.quick("spoilt"), JobStatus::Failure, 0);
    let task = world.task(spoilt).await;
    let admin = nats.admin().await;
    eventually("it waits in NATS", SOON, async || (admin.messages("CI_RUNNER").await == 1).then_some(())).await;
    world.controller.kill9();
    let subject = format!("ci.assignment.pod.{task}");
    let question = serde_json::json!({ "last_by_subj": subject });
    let stored = admin.ok("STREAM.MSG.GET.CI_RUNNER", question).await["message"].clone();
    let mut sealed =
        stored["data"].as_str().map(|text| base64::Engine::decode(&base64::prelude::BASE64_STANDARD, text).unwrap()).unwrap();
    *sealed.last_mut().unwrap() ^= 1;
    admin.ok("STREAM.MSG.DELETE.CI_RUNNER", serde_json::json!({ "seq": stored["seq"] })).await;
    admin.publish(&subject, &[], sealed).await;
    world.controller.start_again().await;
    world.gate.open();
    crashes_and_starts_again(&mut world).await;
    let view = world.ended(spoilt).await;
    assert_eq!(rows_with(&view, "could not read this job"), 1, "{:#?}", view.log);
    ledger.balances(&world).await;
    eventually("it has left", SOON, async || (admin.messages("CI_RUNNER").await == 0).then_some(())).await;
    assert_eq!(admin.messages("CI_DEAD").await, 1, "buried twice is one letter");
}

/// The command is what crashes; run again, it goes on, and every message is there once.
async fn an_old_stream(name: &str) {
    let nats = Nats::start().await;
    let admin = nats.admin().await;
    let config = serde_json::json!({ "name": "CI_RUNNER", "subjects": ["ci.assignment.pod"], "retention": "workqueue", "storage": "file",
        "discard": "old", "num_replicas": 1 });
    admin.ok("STREAM.CREATE.CI_RUNNER", config).await;
    for task in ["3", "1", "2"] {
        admin.publish("ci.assignment.pod", &[("Task-Id", task)], task.as_bytes().to_vec()).await;
    }
    let state = tempfile::tempdir().unwrap();
    let migrate = |crash: Option<&str>| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_gitea-dynamic-runner"));
        command.args(["nats-setup", "--migrate", "--yes"]).env_clear().env("STATE_DIRECTORY", state.path());
        command.env("NATS_URL", nats.url()).env("NATS_ADMIN_USER", "admin").env("NATS_ADMIN_PASSWORD", "admin-secret");
        command.envs(crash.map(|at| (failpoint::VARIABLE, at)));
        command.output().unwrap()
    };
    let crashed = migrate(Some(&format!("{name}:2")));
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&crashed.status), Some(9));
    assert_eq!(admin.messages("CI_RUNNER").await, 4, "one is there twice");
    let done = migrate(None);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut left = Vec::new();
    for seq in 1..=10 {
        let message = admin.api("STREAM.MSG.GET.CI_RUNNER", serde_json::json!({ "seq": seq })).await;
        left.extend(message["message"]["subject"].as_str().map(str::to_owned));
    }
    assert_eq!(left, ["ci.assignment.pod.3", "ci.assignment.pod.1", "ci.assignment.pod.2"]);
}

/// Pushed later than the one that meets the crash, for a task in mid-fetch would be lost with it, as rule R3 says.
fn two_more(world: &World, ledger: &mut Ledger) {
    let red = JobSpec::new("red", &POD).run(&format!("{}\nexit 3", world.gate.sign("started red")));
    ledger.push(world, "red", red, JobStatus::Failure, 1);
    ledger.push(world, "second", world.quick("second"), JobStatus::Success, 1);
}

/// R3: the one window that cannot be closed. The job fails with its reason within the restart, and is counted.
async fn a_lost_fetch(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    // A controller that never stored anything knows no id to look above.
    let mut ledger = Ledger::default();
    world.controller.set(failpoint::VARIABLE, Some(format!("{name}:2")));
    ledger.push(&world, "stored", world.quick("stored"), JobStatus::Success, 1);
    world.controller.spawn();
    world.ends_green(ledger.job("stored")).await;
    let lost = ledger.push(&world, "lost", world.quick("lost"), JobStatus::Failure, 0);
    crashes_and_starts_again(&mut world).await;
    let view = world.ended(lost).await;
    assert_eq!(rows_with(&view, "it did not reach its disk"), 1, "{:#?}", view.log);
    world.counts_a_lost_fetch().await;
    ledger.push(&world, "after", world.quick("after"), JobStatus::Success, 1);
    ledger.balances(&world).await;
}

/// The old job goes, then the crash, then nobody has the new one: as a lost fetch, it is failed with its reason.
async fn a_restored_gitea(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    let mut ledger = started_with_one_running(&mut world).await;
    world.forge.set_disabled(1, true);
    let backup = {
        ledger.push(&world, "anew", world.quick("anew"), JobStatus::Failure, 0);
        world.forge.backup()
    };
    world.forge.set_disabled(1, false);
    world.waits_with_us(ledger.job("anew")).await;
    world.forge.restore(backup);
    for disabled in [false, true, false] {
        world.forge.set_disabled(1, disabled);
    }
    crashes_and_starts_again(&mut world).await;
    world.gate.open();
    let view = world.ended(ledger.job("anew")).await;
    assert_eq!(rows_with(&view, "it did not reach its disk"), 1, "{:#?}", view.log);
    ledger.balances(&world).await;
}

async fn a_job_that_local_refuses(name: &str) {
    let spec = JobSpec::from_workflow(
        "on: push\njobs:\n  engine:\n    runs-on: [self-hosted, pod]\n    container: debian\n    steps:\n      - run: echo never\n",
    );
    a_job_that_fails_without_an_environment(name, spec.unwrap()).await;
}

async fn a_job_for_nobody(name: &str) {
    let spec = JobSpec::new("nowhere", &["self-hosted"]).run("echo never");
    a_job_that_fails_without_an_environment(name, spec).await;
}

async fn a_job_that_fails_without_an_environment(name: &str, spec: JobSpec) {
    let mut world = about_to_crash(name, 1).await;
    let mut ledger = Ledger::default();
    ledger.push(&world, "failed", spec, JobStatus::Failure, 0);
    world.controller.spawn();
    crashes_and_starts_again(&mut world).await;
    ledger.push(&world, "after", world.quick("after"), JobStatus::Success, 1);
    ledger.balances(&world).await;
}

/// What cannot be opened becomes a dead letter, and its job fails with a reason.
async fn an_unreadable_assignment(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    let mut ledger = started_with_one_running(&mut world).await;
    let spoilt = ledger.push(&world, "spoilt", world.quick("spoilt"), JobStatus::Failure, 0);
    let task = world.waits_with_us(spoilt).await;
    world.controller.kill9();
    let queue = EmbeddedQueue::open(&world.controller.state().join("private/queue.redb")).unwrap();
    let mut sealed = queue.get(task).await.unwrap().unwrap().sealed;
    *sealed.last_mut().unwrap() ^= 1;
    assert!(queue.cancel(Lane::Pod, task).await.unwrap());
    queue.publish(Lane::Pod, task, &sealed).await.unwrap();
    drop(queue);
    world.controller.start_again().await;
    world.gate.open();
    crashes_and_starts_again(&mut world).await;
    let view = world.ended(spoilt).await;
    assert_eq!(rows_with(&view, "could not read this job"), 1, "{:#?}", view.log);
    ledger.balances(&world).await;
}

async fn a_cancelled_waiting_job(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    let mut ledger = started_with_one_running(&mut world).await;
    let waiting = ledger.push(&world, "waiting", world.quick("waiting"), JobStatus::Cancelled, 0);
    world.waits_with_us(waiting).await;
    world.forge.cancel(waiting);
    crashes_and_starts_again(&mut world).await;
    world.gate.open();
    ledger.balances(&world).await;
}

/// The wish is on disk though nobody was told: after the restart it drains, and undone it goes on.
async fn a_drain(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    let mut ledger = started_with_one_running(&mut world).await;
    drains(&world, &[], false);
    crashes_and_starts_again(&mut world).await;
    ledger.push(&world, "waiting", world.quick("waiting"), JobStatus::Success, 1);
    drains(&world, &[], true);
    world.gate.open();
    world.ends_green(ledger.job("running")).await;
    drains(&world, &["--wait=30"], true);
    assert_eq!(world.started("waiting"), 0);
    drains(&world, &["--undo"], true);
    ledger.balances(&world).await;
}

/// The wish is gone though nobody was told.
async fn an_undone_drain(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    let mut ledger = started_with_one_running(&mut world).await;
    drains(&world, &[], true);
    drains(&world, &["--undo"], false);
    crashes_and_starts_again(&mut world).await;
    ledger.push(&world, "waiting", world.quick("waiting"), JobStatus::Success, 1);
    world.gate.open();
    ledger.balances(&world).await;
}

fn drains(world: &World, args: &[&str], answered: bool) {
    let mut command = world.controller.command();
    command.env_remove(failpoint::VARIABLE).arg("drain").args(args);
    let said = command.output().unwrap();
    assert_eq!(said.status.success(), answered, "drain {args:?}: {}", String::from_utf8_lossy(&said.stderr));
}

async fn an_environment_that_ends_before_start(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    world.controller.set(failpoint::EXECUTOR_VARIABLE, Some("executor.prepared".into()));
    let mut ledger = Ledger::default();
    ledger.push(&world, "first", world.quick("first"), JobStatus::Success, 1);
    world.controller.spawn();
    world.controller.crashes(CRASH).await;
    two_more(&world, &mut ledger);
    world.controller.set(failpoint::VARIABLE, None);
    world.controller.set(failpoint::EXECUTOR_VARIABLE, None);
    world.controller.start_again().await;
    ledger.balances(&world).await;
}

async fn a_lost_environment(name: &str) {
    let mut world = about_to_crash(name, 2).await;
    let mut ledger = Ledger::default();
    world.controller.start_again().await;
    let lost = ledger.push(&world, "lost", world.counting("lost"), JobStatus::Failure, 1);
    world.counts("lost", lost).await;
    let executor = world.controller.executors().remove(0);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(executor.pid), nix::sys::signal::SIGKILL).unwrap();
    crashes_and_starts_again(&mut world).await;
    let view = world.ended(lost).await;
    assert!(rows_with(&view, "environment ended without a result") >= 1, "{:#?}", view.log);
    ledger.push(&world, "after", world.quick("after"), JobStatus::Success, 1);
    ledger.balances(&world).await;
}

/// The queue's file is gone, and the waiting jobs come back from the mirror's copies.
async fn a_lost_queue(name: &str) {
    let mut world = about_to_crash(name, 2).await;
    let mut ledger = Ledger::default();
    world.controller.start_again().await;
    for name in ["one", "two"] {
        let running = ledger.push(&world, name, world.counting(name), JobStatus::Success, 1);
        world.counts(name, running).await;
    }
    for name in ["three", "four"] {
        let waiting = ledger.push(&world, name, world.quick(name), JobStatus::Success, 1);
        let task = world.task(waiting).await;
        eventually("it waits with us", SOON, async || (world.controller.events("received", task) == 1).then_some(())).await;
    }
    world.controller.sigterm();
    std::fs::remove_file(world.controller.state().join("private/queue.redb")).unwrap();
    world.controller.spawn();
    crashes_and_starts_again(&mut world).await;
    world.gate.open();
    ledger.balances(&world).await;
}

/// Ends with a person: the next `register` refuses, and says which runner to look for.
async fn a_registration(name: &str) {
    let mut world = about_to_crash(name, 1).await;
    for known in ["GITEA_RUNNER_UUID", "GITEA_RUNNER_TOKEN"] {
        world.controller.set(known, None);
    }
    let token = world.base().join("token");
    std::fs::write(&token, world.forge.registration_token().expose()).unwrap();
    let register = |world: &World| {
        let mut command = world.controller.command();
        command.args(["register", "--name", "half", "--token-file"]).arg(&token).output().unwrap()
    };
    use std::os::unix::process::ExitStatusExt as _;
    assert_eq!(register(&world).status.signal(), Some(9));
    world.controller.set(failpoint::VARIABLE, None);
    let said = register(&world);
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && text.contains("did not end") && text.contains("half"), "{text}");
    assert_eq!(world.forge.runners().iter().filter(|runner| runner.name == "half").count(), 1);
}

async fn an_executor_that_crashes_before_start(name: &str) {
    let mut world = World::prepare(1, ForgeConfig::default(), vec![(failpoint::EXECUTOR_VARIABLE, name.to_owned())]).await;
    let mut ledger = Ledger::default();
    ledger.push(&world, "first", world.quick("first"), JobStatus::Success, 1);
    world.controller.spawn();
    eventually("an environment ends before its start", CRASH, async || {
        world.controller.log().contains("claim_timeout").then_some(())
    })
    .await;
    world.controller.kill9();
    two_more(&world, &mut ledger);
    world.controller.set(failpoint::EXECUTOR_VARIABLE, None);
    world.controller.start_again().await;
    ledger.balances(&world).await;
}

/// After `start` it is never run again: it fails with its reason.
async fn an_executor_that_crashes_before_its_runner(name: &str) {
    an_executor_that_crashes_after_start(name, 0).await;
}

async fn an_executor_that_crashes_before_its_verdict(name: &str) {
    an_executor_that_crashes_after_start(name, 1).await;
}

async fn an_executor_that_crashes_after_start(name: &str, runs: usize) {
    let mut world = World::prepare(1, ForgeConfig::default(), vec![(failpoint::EXECUTOR_VARIABLE, name.to_owned())]).await;
    let mut ledger = Ledger::default();
    let lost = ledger.push(&world, "lost", world.quick("lost"), JobStatus::Failure, runs);
    world.controller.start_again().await;
    let view = world.ended(lost).await;
    assert!(rows_with(&view, "environment ended without a result") == 1, "{:#?}", view.log);
    world.controller.kill9();
    world.controller.set(failpoint::EXECUTOR_VARIABLE, None);
    world.controller.start_again().await;
    ledger.push(&world, "after", world.quick("after"), JobStatus::Success, 1);
    ledger.balances(&world).await;
}
