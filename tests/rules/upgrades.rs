//! What a newer version left behind: an older one refuses it with the way out and code 78, and changes nothing. And the end of an installation.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::Path, process::Output, time::Duration};

use gitea_dynamic_runner::{
    assignment::{Assignment, Rules, seal::SealKeys},
    demo::forge::JobStatus,
    gitea::RunnerRpc,
    queue::{AssignmentQueue as _, embedded::EmbeddedQueue},
    secret::Secret,
};
use serde_json::Value;

use crate::{
    support::story,
    world::{SOON, World, rows_with},
};

const STORY: Duration = Duration::from_secs(90);

fn layout(file: &Path, version: u64) {
    let database = redb::Database::open(file).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(redb::TableDefinition::<u8, u64>::new("meta")).unwrap().insert(0, version).unwrap();
    transaction.commit().unwrap();
}

fn setting(world: &World, name: &str) -> String {
    let command = world.controller.command();
    let (_, value) = command.get_envs().find(|(known, _)| *known == name).unwrap();
    value.unwrap().to_str().unwrap().to_owned()
}

async fn run(world: &World, arguments: &[&str]) -> (i32, String) {
    let mut command = world.controller.command();
    command.args(arguments);
    let said: Output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    (said.status.code().unwrap(), text)
}

async fn refused(world: &World, file: &Path) {
    let (code, said) = run(world, &["serve", "--standalone"]).await;
    assert_eq!(code, 78, "{said}");
    let name = file.file_name().unwrap().to_str().unwrap();
    assert!(said.contains(name) && said.contains("Run that version again"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_or_an_environment_of_a_newer_version_refuses_the_start_with_78_and_the_way_out() {
    story(STORY, async {
        let mut world = World::start(1).await;
        let job = world.push(world.counting("a"));
        world.counts("a", job).await;
        world.controller.sigterm();

        let queue = world.controller.state().join("private/queue.redb");
        layout(&queue, 7);
        refused(&world, &queue).await;
        layout(&queue, 1);

        let name = world.environment().await;
        let record = world.controller.state().join(format!("private/environments/{name}.json"));
        let kept = fs::read_to_string(&record).unwrap();
        let mut newer: Value = serde_json::from_str(&kept).unwrap();
        newer["version"] = 9.into();
        newer["labels"] = "in another form".into();
        fs::write(&record, newer.to_string()).unwrap();
        refused(&world, &record).await;
        fs::write(&record, kept).unwrap();

        // The version that wrote them goes on.
        world.controller.start_again().await;
        world.gate.open();
        world.ends_green(job).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_at_the_end_of_an_installation_fails_with_its_reason_and_the_runner_is_named() {
    story(STORY, async {
        let mut world = World::start(1).await;
        let job = world.push(world.counting("runs"));
        world.counts("runs", job).await;
        let waits = world.push(world.quick("waits"));
        world.waits_with_us(waits).await;
        let (code, said) = run(&world, &["unregister", "--standalone", "--yes"]).await;
        assert!(code == 1 && said.contains("environment(s) are left here"), "{code}: {said}");
        world.gate.open();
        world.ends_green(job).await;
        world.ends_green(waits).await;

        world.no_environment(SOON).await;
        world.controller.sigterm();

        // One that is taken from the forge and waits in the queue while no controller runs.
        let left = world.push(world.quick("left"));
        let token = Secret::new(setting(&world, "GITEA_RUNNER_TOKEN"));
        let rpc = RunnerRpc::to_gitea(&world.forge.url(), None, Some((&world.runner, &token))).unwrap();
        let raw = rpc.fetch_task(0).await.unwrap().task.unwrap();
        let rules = Rules { trust_domain: "dynamic-runner.development".into(), vm_label: "vm".into() };
        let assignment = Assignment::of_task(raw.expose().to_vec(), &rules, 1_700_000_000_000).unwrap();
        let private = world.controller.state().join("private");
        let keys = SealKeys::parse(&fs::read_to_string(private.join("seal.key")).unwrap()).unwrap();
        let queue = EmbeddedQueue::open(&private.join("queue.redb")).unwrap();
        queue.publish(assignment.lane, assignment.task, &assignment.seal(&keys)).await.unwrap();
        drop(queue);

        let (code, said) = run(&world, &["unregister", "--standalone"]).await;
        assert!(code == 0 && said.contains("1 job(s) wait here") && said.contains("Nothing was changed"), "{code}: {said}");
        assert!(!world.forge.job(left).unwrap().status.is_final());
        for _ in 0..2 {
            let (code, said) = run(&world, &["unregister", "--standalone", "--yes"]).await;
            assert!(code == 0 && said.contains("None waits") && said.contains(&world.runner), "{code}: {said}");
            assert!(!said.contains(token.expose()));
        }
        let view = world.forge.job(left).unwrap();
        assert_eq!((view.status, rows_with(&view, "The runner that had taken this job was removed")), (JobStatus::Failure, 1));
        assert_eq!(world.started("left"), 0);
    })
    .await;
}
