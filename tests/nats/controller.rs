//! The controller with its queue in JetStream: jobs run through crashes and absences of NATS, and through a change of the seal key.

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::ForgeConfig;

use crate::{
    support::{eventually, nats::Nats, story},
    world::{SOON, World, assert_whole},
};

const LIMIT: Duration = Duration::from_secs(150);

/// NATS is set up, the controller is not started.
async fn prepare(capacity: u32, more: Vec<(&'static str, String)>) -> (Nats, World) {
    let nats = Nats::start().await;
    nats.set_up().await;
    let env = nats.env().into_iter().chain(more).collect();
    let world = World::prepare(capacity, ForgeConfig::default(), env).await;
    (nats, world)
}

/// Nothing of an ended job is left in the queue.
async fn queue_is_empty(nats: &Nats) {
    let admin = nats.admin().await;
    eventually("the stream is empty", SOON, async || (admin.messages("CI_RUNNER").await == 0).then_some(())).await;
}

async fn in_stream(nats: &Nats, messages: u64) {
    let admin = nats.admin().await;
    eventually("so many wait in NATS", SOON, async || (admin.messages("CI_RUNNER").await == messages).then_some(())).await;
}

/// Not ready, and says why.
async fn holds_back(world: &World, why: &str) {
    let says = async || world.controller.readiness().await.is_some_and(|text| text.contains(why)).then_some(());
    eventually(why, SOON, says).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_run_through_jetstream_and_leave_nothing_in_it() {
    story(LIMIT, async {
        let (nats, mut world) = prepare(2, Vec::new()).await;
        world.controller.start_again().await;
        let jobs: Vec<_> = (0..5).map(|n| world.push(world.quick(&format!("job-{n}")))).collect();
        for job in jobs {
            world.ends_green(job).await;
        }
        queue_is_empty(&nats).await;
        assert_eq!(world.controller.metric("queue_outbox").await, Some(0.0));
        assert_eq!(world.controller.metric("stuck_deliveries_total").await, Some(0.0));
        for secret in ["worker-secret", "producer-secret"] {
            assert!(!world.controller.log().contains(secret), "a password in the log");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_run_once_each_though_nats_is_killed_again_and_again() {
    story(LIMIT, async {
        let (mut nats, mut world) = prepare(2, Vec::new()).await;
        world.controller.start_again().await;
        let running = world.push(world.counting("running"));
        world.counts("running", running).await;
        let mut jobs = Vec::new();
        for n in 0..4 {
            jobs.extend(
                (0..2).map(|m| (n, m)).map(|(n, m)| (format!("job-{n}-{m}"), world.push(world.quick(&format!("job-{n}-{m}"))))),
            );
            nats.kill9();
            tokio::time::sleep(Duration::from_millis(300 * n)).await;
            nats.start_again().await;
        }
        for (name, job) in jobs {
            let view = world.forge.wait_done(job, Duration::from_secs(60)).await.unwrap();
            assert_eq!(view.status, gitea_dynamic_runner::demo::forge::JobStatus::Success, "{name}: {:#?}", view.log);
            assert_eq!(world.started(&name), 1, "{name}");
        }
        world.gate.open();
        assert_whole(&world.ends_green(running).await);
        queue_is_empty(&nats).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_starts_while_nats_is_away_serves_the_running_job_and_goes_on_when_it_is_back() {
    story(LIMIT, async {
        let (mut nats, mut world) = prepare(1, Vec::new()).await;
        world.controller.start_again().await;
        let running = world.push(world.counting("running"));
        world.counts("running", running).await;
        let waiting = world.push(world.quick("waiting"));
        in_stream(&nats, 1).await;
        world.controller.kill9();
        nats.stop();
        world.controller.spawn();
        holds_back(&world, "NATS at").await;
        // Its rows still arrive, and it ends, while NATS is away.
        let rows = world.forge.job(running).unwrap().log.len();
        world.see("more rows of the running job", |forge| (forge.job(running)?.log.len() > rows + 5).then_some(())).await;
        world.gate.open();
        assert_whole(&world.ends_green(running).await);
        assert_eq!(world.started("waiting"), 0);
        let errors = world.controller.log().matches("nothing is fetched or leased until this is mended").count();
        assert_eq!(errors, 1, "told once");
        nats.start_again().await;
        world.ends_green(waiting).await;
        world.controller.ready().await;
        queue_is_empty(&nats).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_in_nats_keeps_its_heartbeats_while_nats_is_away() {
    story(LIMIT, async {
        let (mut nats, mut world) = prepare(1, Vec::new()).await;
        world.controller.start_again().await;
        let running = world.push(world.counting("running"));
        world.counts("running", running).await;
        let waiting = world.push(world.quick("waiting"));
        let task = world.task(waiting).await;
        in_stream(&nats, 1).await;
        let heartbeats = |world: &World| world.forge.reports().iter().filter(|report| report.task == task).count();
        eventually("a heartbeat", SOON, async || (heartbeats(&world) > 0).then_some(())).await;
        nats.kill9();
        let before = heartbeats(&world);
        eventually("two more heartbeats", SOON, async || (heartbeats(&world) >= before + 2).then_some(())).await;
        nats.start_again().await;
        world.gate.open();
        world.ends_green(running).await;
        world.ends_green(waiting).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_stream_parks_the_controller_until_it_is_mended_and_harms_no_running_job() {
    story(LIMIT, async {
        let (nats, mut world) = prepare(1, Vec::new()).await;
        world.controller.start_again().await;
        let running = world.push(world.counting("running"));
        world.counts("running", running).await;
        let waiting = world.push(world.quick("waiting"));
        in_stream(&nats, 1).await;
        let admin = nats.admin().await;
        admin.change_consumer("pod", serde_json::json!({ "max_deliver": 1000 })).await;
        world.controller.kill9();
        world.controller.spawn();
        holds_back(&world, "max_deliver is 1000, not -1").await;
        world.gate.open();
        assert_whole(&world.ends_green(running).await);
        world.no_environment(SOON).await;
        assert_eq!(world.started("waiting"), 0, "nothing is leased");
        admin.change_consumer("pod", serde_json::json!({ "max_deliver": -1 })).await;
        world.ends_green(waiting).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_sealed_with_an_old_key_run_while_it_is_kept_and_wait_unharmed_while_it_is_missing() {
    const OLD: &str = "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a";
    const NEW: &str = "0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b";
    story(LIMIT, async {
        let keys = tempfile::tempdir().unwrap();
        let file = keys.path().join("seal.key");
        let env = vec![("SEAL_KEY_FILE", file.display().to_string())];
        std::fs::write(&file, OLD).unwrap();
        // Two slots, so that one assignment that cannot be read does not use up what may wait.
        let (nats, mut world) = prepare(2, env).await;
        world.controller.start_again().await;
        let running = ["one", "other"].map(|name| (name, world.push(world.counting(name))));
        for (name, job) in running {
            world.counts(name, job).await;
        }
        let first = world.push(world.quick("first"));
        in_stream(&nats, 1).await;

        // The old key is thrown away too early.
        world.controller.kill9();
        std::fs::write(&file, NEW).unwrap();
        world.controller.start_again().await;
        world.gate.open();
        for (_, job) in running {
            world.ends_green(job).await;
        }
        let alarm =
            async || world.controller.log().contains("failed to open a waiting assignment; it stays in the queue").then_some(());
        eventually("an alarm", SOON, alarm).await;
        let second = world.push(world.quick("second"));
        world.ends_green(second).await;
        assert_eq!((world.started("first"), nats.admin().await.messages("CI_RUNNER").await), (0, 1), "it waits");
        assert_eq!(nats.admin().await.messages("CI_DEAD").await, 0);

        // As it should have been: the new one seals, both open.
        world.controller.kill9();
        std::fs::write(&file, format!("{NEW}\n{OLD}\n")).unwrap();
        world.controller.start_again().await;
        world.forge.wait_done(first, Duration::from_secs(75)).await.unwrap();
        world.ends_green(first).await;
        assert_eq!(world.started("first"), 1);
        queue_is_empty(&nats).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wrong_settings_are_told_before_anything_runs() {
    let (nats, world) = prepare(1, vec![("NATS_WORKER_USER", String::new()), ("NATS_URL", "http://x".into())]).await;
    let said = world.controller.command().args(["check-config", "--standalone"]).output().unwrap();
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(78));
    assert!(text.contains("NATS_WORKER_USER is not set") && text.contains("NATS_URL=http://x"), "{text}");
    drop(nats);
}
