//! Who may do what at NATS, and what is seen where somebody may not: wrong password, missing rights, no TLS.

use std::time::Duration;

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue as _, Published, QueueHealth},
    secret::Secret,
};

use crate::{
    bench::{AT_ONCE, Bench, open, sealed},
    support::nats::{Nats, NatsOptions},
};

/// Whether the server answers a question at all; a refused one it does not.
async fn answers(client: &async_nats::Client, subject: &str, question: &str) -> bool {
    client.request(subject.to_owned(), question.to_owned().into()).await.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_producer_cannot_consume_and_the_worker_cannot_publish() {
    let bench = Bench::new().await;
    bench.publish(1).await;
    let (producer, worker) = tokio::join!(bench.nats.client("producer"), bench.nats.client("worker"));
    let next = "$JS.API.CONSUMER.MSG.NEXT.CI_RUNNER.pod";
    let pull = r#"{"batch":1,"no_wait":true}"#;
    let info = "$JS.API.STREAM.INFO.CI_RUNNER";
    let get = "$JS.API.DIRECT.GET.CI_RUNNER";
    // What each needs, it may.
    assert!(answers(&producer, "ci.assignment.pod.2", "x").await);
    assert!(answers(&worker, info, "").await && answers(&worker, get, r#"{"seq":1}"#).await);
    let mut none = String::new();
    for (who, client, subject, question) in [
        ("producer", &producer, next, pull),
        ("producer", &producer, info, ""),
        ("producer", &producer, get, r#"{"seq":1}"#),
        ("producer", &producer, "$JS.API.STREAM.PURGE.CI_RUNNER", ""),
        ("producer", &producer, "$JS.API.STREAM.MSG.DELETE.CI_RUNNER", r#"{"seq":1}"#),
        ("producer", &producer, "$JS.API.STREAM.DELETE.CI_RUNNER", ""),
        ("producer", &producer, "ci.dead.pod.1", "x"),
        ("worker", &worker, "ci.assignment.pod.3", "x"),
        ("worker", &worker, "$JS.API.STREAM.DELETE.CI_RUNNER", ""),
        ("worker", &worker, "$JS.API.STREAM.UPDATE.CI_RUNNER", "{}"),
        ("worker", &worker, "$JS.API.STREAM.CREATE.OTHER", r#"{"name":"OTHER","subjects":["other"]}"#),
        ("worker", &worker, "$JS.API.CONSUMER.DELETE.CI_RUNNER.pod", ""),
    ] {
        if answers(client, subject, question).await {
            none.push_str(&format!("{who} may ask {subject}; "));
        }
    }
    assert!(none.is_empty(), "{none}");
    // Reading what others are told is not theirs either.
    let mut heard = producer.subscribe("ci.assignment.>").await.unwrap();
    bench.publish(4).await;
    let overheard = tokio::time::timeout(Duration::from_millis(500), futures::StreamExt::next(&mut heard)).await;
    assert!(!matches!(overheard, Ok(Some(_))), "{overheard:?}");
    assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_named_and_costs_nothing_that_was_fetched() {
    let nats = Nats::start().await;
    nats.set_up().await;
    let folder = tempfile::tempdir().unwrap();
    for (wrong, variable) in [("producer", "NATS_PRODUCER_PASSWORD"), ("worker", "NATS_WORKER_PASSWORD")] {
        let mut settings = nats.settings();
        let user = if wrong == "producer" { &mut settings.producer } else { &mut settings.worker };
        user.password = Secret::new("canary-password");
        let queue = open(&folder.path().join(format!("{wrong}.redb")), settings).await.unwrap();
        queue.tend().await;
        let QueueHealth::Unfit(why) = queue.health().await else { panic!("fit") };
        assert!(why.contains(&format!("does not let the user {wrong} in")) && why.contains(variable), "{why}");
        assert!(!why.contains("canary"), "{why}");
        assert_eq!(queue.publish(Lane::Pod, TaskId(1), &sealed(1)).await, Ok(Published::Stored));
        assert!(queue.lease(Lane::Pod, AT_ONCE).await.unwrap().is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_named_with_its_user_and_heals_when_it_is_given() {
    for (right, text, by_pull) in [
        ("publish: { allow: [\"ci.assignment.*.*\"] }", "Permissions Violation for Publish to \"ci.assignment.pod.1\"", false),
        (
            "\"$JS.API.CONSUMER.MSG.NEXT.CI_RUNNER.*\"",
            "Permissions Violation for Publish to \"$JS.API.CONSUMER.MSG.NEXT.CI_RUNNER.pod\"",
            true,
        ),
        ("\"$JS.API.STREAM.INFO.CI_RUNNER\"", "Permissions Violation for Publish to \"$JS.API.STREAM.INFO.CI_RUNNER\"", false),
    ] {
        let without = if by_pull {
            "\"none\"".to_owned()
        } else {
            right.replace("ci.assignment.*.*", "none").replace("$JS.API.STREAM.INFO.CI_RUNNER", "none")
        };
        let nats = Nats::start_with(NatsOptions { replace: vec![(right, without)], ..Default::default() }).await;
        nats.set_up().await;
        let bench = Bench::over(nats).await;
        bench.queue().tend().await;
        assert_eq!(bench.publish(1).await, Published::Stored, "on our disk");
        if by_pull {
            assert!(bench.queue().lease(Lane::Pod, Duration::from_secs(1)).await.unwrap().is_none());
        }
        let why = bench.is_unfit(text).await;
        let user = if right.contains("ci.assignment") { "producer (NATS_PRODUCER_USER)" } else { "worker (NATS_WORKER_USER)" };
        assert!(why.contains(user) && why.contains("docs/nats.md"), "{why}");
        bench.nats.configure(&NatsOptions::default());
        bench.nats.reload();
        bench.drained().await;
        assert_eq!(bench.lease().await.task, TaskId(1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_authority_is_trusted_and_only_where_it_is_given() {
    let nats = Nats::start_with(NatsOptions { tls: true, ..Default::default() }).await;
    nats.set_up().await;
    let bench = Bench::over(nats).await;
    bench.is_fine().await;
    bench.publish(1).await;
    assert_eq!(bench.empty().await, [1]);

    let mut settings = bench.nats.settings();
    settings.ca_file = None;
    let queue = open(&bench.folder().join("other.redb"), settings).await.unwrap();
    queue.tend().await;
    let QueueHealth::Unfit(why) = queue.health().await else { panic!("fit") };
    assert!(why.contains("set NATS_CA_FILE to that authority's certificate"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_is_refused_where_tls_is_asked_for_and_hears_no_password() {
    let other = Nats::start_with(NatsOptions { tls: true, ..Default::default() }).await;
    let plain = Nats::start().await;
    plain.set_up().await;
    let folder = tempfile::tempdir().unwrap();
    let mut by_file = plain.settings();
    by_file.ca_file = other.ca_file();
    let mut by_scheme = plain.settings();
    by_scheme.url = by_scheme.url.replace("nats://", "tls://");
    for (name, settings) in [("file", by_file), ("scheme", by_scheme)] {
        let queue = open(&folder.path().join(format!("{name}.redb")), settings).await.unwrap();
        queue.tend().await;
        let QueueHealth::Unfit(why) = queue.health().await else { panic!("fit") };
        assert!(why.contains("does not speak TLS") && why.contains("nothing is sent in the clear"), "{why}");
        assert!(queue.lease(Lane::Pod, Duration::from_millis(300)).await.unwrap().is_none());
    }
}
