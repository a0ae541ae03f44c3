//! What the controller finds at NATS when it starts or connects again: exact words, and no job entrusted to what would lose it.

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{
        AssignmentQueue as _, Published, QueueHealth,
        jetstream::{ACCEPTED_FILE, Settings, setup::Setup},
    },
};
use serde_json::{Value, json};

use crate::{
    bench::{AT_ONCE, Bench, open, sealed},
    support::nats::{Nats, NatsOptions, user},
};

/// Why a queue with these settings takes no jobs. What was fetched is kept all the same, and nothing is leased.
async fn refusal(settings: Settings) -> String {
    let folder = tempfile::tempdir().unwrap();
    let queue = open(&folder.path().join("outbox.redb"), settings).await.unwrap();
    queue.tend().await;
    let QueueHealth::Unfit(why) = queue.health().await else { panic!("fit") };
    assert_eq!(queue.publish(Lane::Pod, TaskId(1), &sealed(1)).await, Ok(Published::Stored));
    assert!(queue.lease(Lane::Pod, AT_ONCE).await.unwrap().is_none());
    assert!(queue.get(TaskId(1)).await.unwrap().is_some());
    why
}

/// A stream like ours, but for `change`.
async fn stream_with(nats: &Nats, change: Value) {
    let mut config = json!({ "name": "CI_RUNNER", "subjects": ["ci.assignment.>"], "retention": "workqueue", "storage": "file",
        "discard": "new", "max_msgs_per_subject": 1, "discard_new_per_subject": true, "allow_direct": true, "num_replicas": 1,
        "max_bytes": 4_294_967_296_u64, "max_msg_size": 8_388_608, "duplicate_window": 600_000_000_000_u64 });
    config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    nats.admin().await.ok("STREAM.CREATE.CI_RUNNER", config).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named_with_the_command_that_makes_it() {
    let nats = Nats::start().await;
    let why = refusal(nats.settings()).await;
    let expected =
        format!("the stream CI_RUNNER is not in NATS at {}: make it with `gitea-dynamic-runner nats-setup`", nats.url());
    assert_eq!(why, expected);
    stream_with(&nats, json!({})).await;
    let why = refusal(nats.settings()).await;
    assert_eq!(why, "the stream CI_RUNNER has no consumer pod: make it with `gitea-dynamic-runner nats-setup`");
    nats.set_up().await;
    nats.admin().await.ok("STREAM.DELETE.CI_DEAD", json!({})).await;
    let why = refusal(nats.settings()).await;
    assert_eq!(why, "the stream CI_DEAD for dead letters is not there: make it with `gitea-dynamic-runner nats-setup`");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_jetstream_and_one_that_is_not_there_are_told_apart() {
    let none = NatsOptions { replace: vec![("jetstream: enabled", "jetstream: disabled".to_owned())], ..Default::default() };
    let mut nats = Nats::start_with(none).await;
    let why = refusal(nats.settings()).await;
    assert!(why.contains("JetStream") && (why.contains("enable it there") || why.contains("JetStream is off")), "{why}");
    nats.stop();
    let why = refusal(nats.settings()).await;
    assert!(why.contains("cannot be reached") && why.contains("start it, or correct NATS_URL"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_would_lose_or_double_jobs_is_refused_for_each_reason() {
    for (change, text) in [
        (json!({ "retention": "limits" }), r#"retention is "limits", not "workqueue" (what is acknowledged would not leave"#),
        (json!({ "retention": "interest" }), r#"retention is "interest", not "workqueue""#),
        (json!({ "storage": "memory" }), r#"storage is "memory", not "file" (a restart of the server would lose all jobs"#),
        (
            json!({ "discard": "old", "discard_new_per_subject": false }),
            r#"discard is "old", not "new" (a full stream would drop the oldest job)"#,
        ),
        (json!({ "max_msgs_per_subject": 3 }), "max_msgs_per_subject is 3, not 1 (a task could be stored twice)"),
        (json!({ "max_age": 3_600_000_000_000_u64 }), "max_age is 3600000000000, not 0 (jobs that wait longer would be dropped)"),
        (json!({ "subjects": ["ci.assignment.pod.>"] }), r#"subjects is ["ci.assignment.pod.>"], not ["ci.assignment.>"]"#),
        (json!({ "deny_purge": true }), "deny_purge is true, not false (a cancelled job could not be taken out)"),
    ] {
        let nats = Nats::start().await;
        stream_with(&nats, change).await;
        let why = refusal(nats.settings()).await;
        assert!(why.starts_with("the stream CI_RUNNER is not as it must be: ") && why.contains(text), "{why}");
        assert!(why.ends_with("`gitea-dynamic-runner nats-setup` shows what to do about it"), "{why}");
    }
    let nats = Nats::start().await;
    stream_with(&nats, json!({ "subjects": ["ci.assignment.pod", "ci.assignment.vm"] })).await;
    let why = refusal(nats.settings()).await;
    assert!(why.contains("has the old layout") && why.contains("nats-setup --migrate"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_would_lose_or_delay_jobs_is_refused_and_taken_again_when_it_is_mended() {
    let bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    for (wrong, right, text) in [
        (json!({ "max_deliver": 1000 }), json!({ "max_deliver": -1 }), "max_deliver is 1000, not -1 (a job would be given up"),
        (
            json!({ "max_ack_pending": 4 }),
            json!({ "max_ack_pending": -1 }),
            "max_ack_pending is 4, not -1 (jobs that wait for another try",
        ),
        (
            json!({ "filter_subject": "ci.assignment.pod.*" }),
            json!({ "filter_subject": "ci.assignment.pod.>" }),
            r#"filter_subject is "ci.assignment.pod.*""#,
        ),
        (
            json!({ "inactive_threshold": 60_000_000_000_u64 }),
            json!({ "inactive_threshold": 0 }),
            "inactive_threshold is 60000000000, not 0",
        ),
    ] {
        admin.change_consumer("pod", wrong).await;
        let why = refusal(bench.nats.settings()).await;
        assert!(why.starts_with("the consumer pod of stream CI_RUNNER is not as it must be: ") && why.contains(text), "{why}");
        admin.change_consumer("pod", right).await;
    }
    bench.is_fine().await;
    // AckNone is refused by a work queue itself, so a push consumer stands for what cannot be changed in place.
    admin.ok("CONSUMER.DELETE.CI_RUNNER.vm", json!({})).await;
    let push = json!({ "stream_name": "CI_RUNNER", "config": { "durable_name": "vm", "deliver_subject": "x", "ack_policy": "explicit",
        "deliver_policy": "all", "filter_subject": "ci.assignment.vm.>", "max_deliver": -1, "max_ack_pending": -1 } });
    admin.ok("CONSUMER.DURABLE.CREATE.CI_RUNNER.vm", push).await;
    let why = refusal(bench.nats.settings()).await;
    assert!(why.contains(r#"deliver_subject is "x", not "" (jobs would be pushed although no slot is free)"#), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_stream_in_the_place_of_the_known_one_is_taken_only_when_a_person_accepts_it() {
    let mut bench = Bench::new().await;
    bench.publish(1).await;
    let admin = bench.nats.admin().await;
    admin.ok("STREAM.DELETE.CI_RUNNER", json!({})).await;
    bench.close();
    bench.open().await;
    let why = bench.is_unfit("is gone from NATS").await;
    assert!(why.contains("nats-setup --yes --replace-lost"), "{why}");
    // Somebody makes it anew, by whatever means.
    bench.nats.set_up().await;
    let why = bench.is_unfit("is not the one that this controller knows").await;
    assert!(why.contains("it was made at") && why.contains("nats-setup --accept"), "{why}");
    assert_eq!(bench.publish(2).await, Published::Stored, "on our disk");
    assert_eq!(admin.messages("CI_RUNNER").await, 0, "nothing is entrusted to it");
    let info = admin.ok("STREAM.INFO.CI_RUNNER", json!({})).await;
    let created = async_nats::datetime::parse_rfc3339(info["created"].as_str().unwrap()).unwrap().unix_timestamp_nanos();
    // The word for another stream is no word for this one.
    let word = |created: i128| {
        std::fs::write(
            bench.folder().join(ACCEPTED_FILE),
            json!({ "stream": "CI_RUNNER", "created": created as u64 }).to_string(),
        )
    };
    word(created - 1).unwrap();
    bench.is_unfit("is not the one that this controller knows").await;
    word(created).unwrap();
    bench.is_fine().await;
    bench.drained().await;
    assert!(!bench.folder().join(ACCEPTED_FILE).exists());
    assert_eq!(bench.empty().await, [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_that_are_in_a_stream_when_it_is_first_seen_are_remembered_as_given_out() {
    let mut bench = Bench::new().await;
    bench.publish(41).await;
    bench.close();
    std::fs::remove_file(bench.outbox()).unwrap();
    bench.open().await;
    assert_eq!(bench.queue().highest_task().await, Ok(None));
    bench.is_fine().await;
    assert_eq!(bench.queue().highest_task().await, Ok(Some(TaskId(41))));
    assert_eq!(bench.tasks().await, [41], "also its place is found again");
}

/// What is logged while a queue with these settings looks at the server. The runtime must have one thread.
async fn said(settings: Settings) -> String {
    #[derive(Clone, Default)]
    struct Rows(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Rows {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let rows = Rows::default();
    let into = rows.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || into.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let folder = tempfile::tempdir().unwrap();
    let queue = open(&folder.path().join("outbox.redb"), settings).await.unwrap();
    for _ in 0..4 {
        queue.tend().await;
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    let said = rows.0.lock().unwrap().clone();
    let said = String::from_utf8(said).unwrap();
    said.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).map(|line| format!("{line}\n")).collect()
}

#[tokio::test]
async fn limits_that_are_too_small_are_told_once_each_and_hold_nothing_up() {
    let nats = Nats::start_with(NatsOptions {
        replace: vec![
            ("max_payload: 8MB", "max_payload: 1MB".to_owned()),
            ("sync_interval: always", "sync_interval: \"2m\"".to_owned()),
        ],
        ..Default::default()
    })
    .await;
    let small =
        json!({ "max_bytes": 1_000_000, "max_msg_size": 500_000, "duplicate_window": 120_000_000_000_u64, "max_msgs": 100 });
    stream_with(&nats, small).await;
    Setup::connect(&nats.settings(), &user("admin"), 1).await.unwrap().ensure_dead_letters().await.unwrap();
    let admin = nats.admin().await;
    for lane in ["pod", "vm", "refused"] {
        let config = json!({ "durable_name": lane, "ack_policy": "explicit", "deliver_policy": "all", "ack_wait": 5_000_000_000_u64,
            "filter_subject": format!("ci.assignment.{lane}.>"), "max_deliver": -1, "max_ack_pending": -1 });
        let question = json!({ "stream_name": "CI_RUNNER", "config": config });
        admin.ok(&format!("CONSUMER.DURABLE.CREATE.CI_RUNNER.{lane}"), question).await;
    }
    let said = said(nats.settings()).await;
    for text in [
        "CI_RUNNER: max_bytes is 1000000, less than 1073741824 (it may be full before the disk is): `gitea-dynamic-runner nats-setup --yes` raises it",
        "CI_RUNNER: max_msg_size is 500000, less than 8388608",
        "CI_RUNNER: duplicate_window is 120000000000, less than 600000000000",
        "CI_RUNNER: max_msgs is 100, less than 10000",
        "CI_RUNNER/pod: ack_wait is 5000000000, less than 45000000000 (a delivery that is being worked on would be given again)",
        "NATS takes messages of 1048576 bytes at most; a large task may not fit: set max_payload: 8MB",
        "a power cut loses jobs. Set `sync_interval: always`",
    ] {
        assert_eq!(said.matches(text).count(), 1, "{text} in\n{said}");
    }
    assert!(!said.contains("ERROR"), "{said}");
}

#[tokio::test]
async fn whether_the_server_syncs_is_said_to_be_unknown_where_it_cannot_be_asked() {
    let nats = Nats::start().await;
    nats.set_up().await;
    assert_eq!(said(nats.settings()).await, "", "as docs/nats.md has it, there is nothing to warn of");
    let mut settings = nats.settings();
    settings.monitor_url = None;
    let rows = said(settings.clone()).await;
    assert_eq!((rows.lines().count(), rows.matches("NATS_MONITOR_URL is not set").count()), (1, 1), "{rows}");
    settings.monitor_url = Some("http://127.0.0.1:9".into());
    let rows = said(settings).await;
    assert_eq!((rows.lines().count(), rows.matches("whether sync_interval is `always` is not known").count()), (1, 1), "{rows}");
}

#[tokio::test]
async fn a_refusal_is_told_once_as_an_error() {
    let nats = Nats::start().await;
    let rows = said(nats.settings()).await;
    assert_eq!((rows.lines().count(), rows.matches("ERROR").count()), (1, 1), "{rows}");
    assert!(rows.contains("nothing is fetched or leased until this is mended; running jobs are served"), "{rows}");
}
