//! What `doctor` says of NATS: as the controller would judge it, without changing anything there.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{process::Command, time::Duration};

use serde_json::json;

use crate::support::{
    doctor::{Said, doctor},
    nats::{Nats, NatsOptions},
    story,
};

const STORY: Duration = Duration::from_secs(60);

/// Nothing but NATS is there, so other items have their own to say.
async fn ask(nats: &Nats, more: &[(&str, &str)]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gitea-dynamic-runner"));
    command.env_clear().env("STATE_DIRECTORY", nats.folder()).env("PATH", std::env::var("PATH").unwrap());
    command.envs(nats.env()).envs(more.iter().copied());
    doctor(command).await
}

#[tokio::test]
async fn a_server_as_in_the_document_is_fine_and_gets_no_message() {
    story(STORY, async {
        let nats = Nats::start().await;
        nats.set_up().await;
        let said = ask(&nats, &[]).await;
        for name in ["nats.connection", "nats.publish", "nats.stream", "nats.sync"] {
            assert_eq!(said.state(name), "fine", "{:#?}", said.item(name));
        }
        assert_eq!(nats.admin().await.messages("CI_RUNNER").await, 0);
        assert_eq!(nats.admin().await.messages("CI_DEAD").await, 0);
    })
    .await;
}

#[tokio::test]
async fn a_wrong_password_a_missing_right_and_a_stream_that_is_not_there_are_told() {
    story(STORY, async {
        let nats = Nats::start().await;
        let said = ask(&nats, &[("NATS_WORKER_PASSWORD", "a-canary-of-a-password")]).await;
        said.assert_to_do("nats.connection", "correct NATS_WORKER_USER and NATS_WORKER_PASSWORD", "docs/nats.md");
        assert!(!said.text.contains("a-canary-of-a-password") && !said.text.contains("producer-secret"));
        assert_eq!(said.state("nats.stream"), "unknown");
        ask(&nats, &[]).await.assert_to_do("nats.stream", "make it with `gitea-dynamic-runner nats-setup`", "docs/nats.md");
        nats.set_up().await;
        // The worker's user may not publish assignments.
        let swapped = [
            ("NATS_PRODUCER_USER", "worker"),
            ("NATS_PRODUCER_PASSWORD", "worker-secret"),
            ("NATS_WORKER_USER", "producer"),
            ("NATS_WORKER_PASSWORD", "producer-secret"),
        ];
        let said = ask(&nats, &swapped).await;
        said.assert_to_do("nats.publish", "Give it the rights of docs/nats.md", "docs/nats.md");
    })
    .await;
}

#[tokio::test]
async fn a_stream_that_is_not_synced_or_not_as_it_must_be_is_told() {
    story(STORY, async {
        let options =
            NatsOptions { replace: vec![("sync_interval: always", "sync_interval: \"2m\"".to_owned())], ..Default::default() };
        let nats = Nats::start_with(options).await;
        nats.set_up().await;
        let said = ask(&nats, &[]).await;
        said.assert_to_do("nats.sync", "a power cut loses jobs", "docs/nats.md");
        assert_eq!(said.state("nats.stream"), "fine", "{:#?}", said.item("nats.stream"));
        assert_eq!(ask(&nats, &[("NATS_MONITOR_URL", "")]).await.state("nats.sync"), "unknown");
        nats.admin().await.change_consumer("pod", json!({ "max_deliver": 5 })).await;
        ask(&nats, &[]).await.assert_to_do("nats.stream", "max_deliver is 5", "docs/nats.md");
    })
    .await;
}
