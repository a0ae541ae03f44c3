//! A running controller's answers against the OpenAPI document that it serves, by schemathesis.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{process::Command, time::Duration};

use gitea_dynamic_runner::{
    demo::forge::{JobSpec, JobStatus},
    http,
};

use crate::{
    support::{peers_dir, story},
    world::{POD, World},
};

const LIMIT: Duration = Duration::from_secs(240);

#[tokio::test]
async fn the_api_answers_as_its_document_says() {
    story(LIMIT, async {
        let world = World::start(2).await;
        // A job of each kind, so that answers have something in them.
        let (red, running) = (world.push(JobSpec::new("red", &POD).run("exit 1")), world.push(world.counting("running")));
        assert_eq!(world.ended(red).await.status, JobStatus::Failure);
        world.counts("running", running).await;
        let (waiting, other) = (world.push(world.counting("waiting")), world.push(world.counting("other")));
        world.waits_with_us(other).await;
        let bad = world.push(JobSpec::new("bad", &["self-hosted"]).run("true"));
        world.ended(bad).await;

        // While there is something of everything to show; and who may only read.
        assert_agrees(&world, "may-read", &["--exclude-path", "/api/v1/drain"]).await;

        world.gate.open();
        for job in [running, waiting, other] {
            world.ends_green(job).await;
        }
        world.no_environment(Duration::from_secs(20)).await;
        // Now a drain is over as soon as it begins, so that no answer waits for it.
        assert_agrees(&world, "may-drain", &["--include-path", "/api/v1/drain"]).await;
    })
    .await;
}

async fn assert_agrees(world: &World, token: &str, which: &[&str]) {
    let program = peers_dir().join("tools/schemathesis/bin/schemathesis");
    let mut command = Command::new(program);
    let document = format!("{}/api/v1/openapi.json", world.controller.http_url());
    command.args(["run", &document, "--header", &format!("Authorization: Bearer {token}")]).args(which);
    command.args(["--checks", "all", "--max-examples", "25", "--seed", "5", "--no-color", "--generation-deterministic"]);
    command.env("HOME", world.base()).current_dir(world.base());
    let out = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    println!("{said}");
    assert!(out.status.success() && said.contains(" generated, "), "the document and the answers differ, or nothing was asked");
}

#[test]
fn the_document_names_every_path_and_every_field_has_words() {
    let document = serde_json::to_value(http::document()).unwrap();
    let paths: Vec<_> = document["paths"].as_object().unwrap().keys().cloned().collect();
    for path in ["overview", "jobs", "jobs/{id}", "environments", "queue", "reconcilers"] {
        assert!(paths.contains(&format!("/api/v1/{path}")), "{path} is not in {paths:?}");
    }
}
