//! Too large, full, old key: each its own behaviour, and nothing lost.

use std::time::Duration;

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{
        AssignmentQueue as _, MAX_SEALED_BYTES, Published, QueueError, QueueHealth,
        jetstream::{JetStreamOptions, JetStreamQueue},
    },
};
use serde_json::json;

use crate::{
    bench::{AT_ONCE, Bench, SOON},
    support::{
        eventually,
        nats::{Nats, NatsOptions},
        small_disk::SmallDisk,
    },
};

#[tokio::test(flavor = "multi_thread")]
async fn what_the_stream_or_the_server_cannot_take_is_refused_and_not_kept() {
    let bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    let refused = bench.queue().publish(Lane::Pod, TaskId(1), &vec![1; MAX_SEALED_BYTES + 1]).await;
    assert_eq!(refused, Err(QueueError::TooLarge { bytes: MAX_SEALED_BYTES + 1, limit: MAX_SEALED_BYTES }));
    // The server's limit, as it said when we connected.
    let refused = bench.queue().publish(Lane::Pod, TaskId(1), &vec![1; 9 << 20]).await;
    assert!(matches!(refused, Err(QueueError::TooLarge { .. })), "{refused:?}");
    assert_eq!(bench.queue().publish(Lane::Pod, TaskId(2), &vec![1; 7 << 20]).await, Ok(Published::Stored));
    assert_eq!(bench.waiting().await, 0);
    // The stream's limit, lowered since it was looked at.
    admin.change_stream("CI_RUNNER", json!({ "max_msg_size": 100_000 })).await;
    let refused = bench.queue().publish(Lane::Pod, TaskId(1), &vec![1; 200_000]).await;
    assert!(matches!(refused, Err(QueueError::TooLarge { bytes: 200_000, .. })), "{refused:?}");
    assert_eq!((bench.queue().get(TaskId(1)).await, bench.waiting().await), (Ok(None), 0));
    assert_eq!(bench.queue().health().await, QueueHealth::Fine, "the queue is none the worse");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_promised_and_is_too_large_stays_here_is_told_and_holds_up_no_other() {
    let mut bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    admin.change_stream("CI_RUNNER", json!({ "max_msg_size": 100_000 })).await;
    bench.nats.kill9();
    // The limit that is known is the old one.
    assert_eq!(bench.queue().publish(Lane::Pod, TaskId(1), &vec![1; 200_000]).await, Ok(Published::Stored));
    assert_eq!(bench.publish(2).await, Published::Stored);
    bench.nats.start_again().await;
    let why = bench.is_unfit("larger than the stream CI_RUNNER takes").await;
    assert!(why.contains("raise its max_message_size"), "{why}");
    assert_eq!(bench.lease().await.task, TaskId(2));
    assert!(bench.queue().get(TaskId(1)).await.unwrap().is_some());
    let admin = bench.nats.admin().await;
    admin.change_stream("CI_RUNNER", json!({ "max_msg_size": 8_388_608 })).await;
    // A look of its own tries it anew, once a minute; a new start does at once.
    bench.close();
    bench.open().await;
    bench.drained().await;
    bench.is_fine().await;
    assert_eq!(bench.queue().get(TaskId(1)).await.unwrap().unwrap().sealed, vec![1; 200_000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_stream_keeps_jobs_from_being_fetched_and_loses_none() {
    let bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    admin.change_stream("CI_RUNNER", json!({ "max_bytes": 20_000 })).await;
    let mut task = 0;
    while bench.waiting().await == 0 {
        task += 1;
        assert_eq!(bench.publish(task).await, Published::Stored);
        assert!(task < 200, "it never filled");
    }
    let why = bench.is_unfit("is full").await;
    assert!(why.contains("raise its max_bytes"), "{why}");
    let first = bench.lease().await;
    bench.queue().complete(first).await.unwrap();
    bench.drained().await;
    bench.is_fine().await;
    assert_eq!(bench.empty().await, (2..=task).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_of_nats_keeps_jobs_from_being_fetched_loses_none_and_heals() {
    let Some(disk) = SmallDisk::new("24m") else { return };
    let nats = Nats::start_with(NatsOptions {
        store: Some(disk.path().join("js")),
        // Small, so that the server believes that there is room.
        replace: vec![("max_file_store: 20GB", "max_file_store: 8GB".to_owned())],
        ..Default::default()
    })
    .await;
    nats.set_up().await;
    let mut bench = Bench::over(nats).await;
    bench.is_fine().await;
    let payload = |task: i64| vec![u8::try_from(task % 251).unwrap(); 2 << 20];
    let mut task = 0;
    while bench.queue().tend().await.outbox == 0 {
        task += 1;
        assert_eq!(bench.queue().publish(Lane::Pod, TaskId(task), &payload(task)).await, Ok(Published::Stored));
        assert!(task < 40, "it never filled");
    }
    let why = bench.is_unfit("NATS").await;
    assert!(why.contains("its disk is full") || why.contains("insufficient"), "{why}");
    for task in 1..=task {
        assert_eq!(bench.queue().get(TaskId(task)).await.unwrap().unwrap().sealed, payload(task), "task {task}");
    }
    disk.resize("120m");
    // The server goes on refusing what it could not write once (2.15.1), until it is started again.
    bench.nats.kill9();
    bench.nats.start_again().await;
    bench.drained().await;
    bench.is_fine().await;
    for expected in 1..=task {
        let lease = bench.lease().await;
        assert_eq!((lease.task.0, lease.sealed == payload(expected)), (expected, true));
        bench.queue().complete(lease).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn too_little_room_on_our_own_disk_is_unfit_but_takes_what_was_fetched() {
    let nats = Nats::start().await;
    nats.set_up().await;
    let folder = tempfile::tempdir().unwrap();
    let options = JetStreamOptions { min_free_bytes: u64::MAX };
    let queue = JetStreamQueue::open(&folder.path().join("outbox.redb"), nats.settings(), options).await.unwrap();
    queue.tend().await;
    let QueueHealth::Unfit(why) = queue.health().await else { panic!("fit") };
    assert!(why.contains("free some space"), "{why}");
    assert_eq!(queue.publish(Lane::Pod, TaskId(1), b"x").await, Ok(Published::Stored));
    let leased = eventually("a lease", SOON, async || queue.lease(Lane::Pod, AT_ONCE).await.unwrap()).await;
    queue.complete(leased).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_written_before_the_assignment_leaves_and_are_bounded_in_age() {
    let bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    let config = admin.config("STREAM.INFO.CI_DEAD").await;
    assert_eq!(config["max_age"], json!(30_u64 * 24 * 3600 * 1_000_000_000));
    bench.publish(1).await;
    let lease = bench.lease().await;
    admin.ok("STREAM.DELETE.CI_DEAD", json!({})).await;
    let refused = bench.queue().reject(lease.clone(), "unreadable").await;
    assert!(matches!(refused, Err(QueueError::Unavailable(_))), "{refused:?}");
    assert_eq!(admin.messages("CI_RUNNER").await, 1, "dead letter and out, or neither");
    bench.nats.set_up().await;
    bench.queue().reject(lease, "unreadable\r\nin two lines").await.unwrap();
    assert_eq!(admin.messages("CI_RUNNER").await, 0);
    let dead = bench.queue().dead().await.unwrap();
    assert_eq!((dead.len(), dead[0].reason.as_str()), (1, "unreadable  in two lines"));
    admin.change_stream("CI_DEAD", json!({ "max_age": 1_000_000_000, "duplicate_window": 1_000_000_000 })).await;
    eventually("it is dropped for its age", SOON, async || bench.queue().dead().await.unwrap().is_empty().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_subject_names_no_task_goes_to_the_dead_letters_and_holds_nothing_up() {
    let bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    admin.publish("ci.assignment.pod.not-a-number", &[], b"poison".to_vec()).await;
    bench.publish(2).await;
    assert_eq!(bench.lease().await.task, TaskId(2));
    let dead = bench.queue().dead().await.unwrap();
    assert_eq!(dead.len(), 1);
    assert_eq!((dead[0].sealed.as_slice(), dead[0].lane), (b"poison".as_slice(), Lane::Pod));
    assert!(dead[0].reason.contains("ci.assignment.pod.not-a-number names no task"), "{}", dead[0].reason);
    assert!(bench.queue().lease(Lane::Pod, Duration::from_millis(200)).await.unwrap().is_none());
}
