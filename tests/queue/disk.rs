//! A disk that is full: nothing acknowledged is lost, and the queue goes on by itself once there is room.

use std::time::{Duration, Instant};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue as _, QueueError, QueueHealth, embedded::EmbeddedQueue},
};

use crate::{open, small_disk::SmallDisk};

fn sealed(task: i64) -> Vec<u8> {
    vec![u8::try_from(task % 251).unwrap(); 20_000]
}

/// Publishes until the disk is full; gives the first task that was refused.
async fn fill(queue: &EmbeddedQueue) -> i64 {
    for task in 1..10_000 {
        match queue.publish(Lane::Pod, TaskId(task), &sealed(task)).await {
            Ok(_) => {}
            Err(QueueError::Unavailable(why)) => {
                assert!(why.contains("no space is left") && why.contains("free some space"), "{why}");
                return task;
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the disk never filled");
}

async fn all_there(queue: &EmbeddedQueue, up_to: i64) {
    for task in 1..=up_to {
        let found = queue.get(TaskId(task)).await.unwrap();
        assert!(found.is_some_and(|found| found.sealed == sealed(task)), "task {task} of {up_to}");
    }
}

#[tokio::test]
async fn a_full_disk_loses_nothing_and_heals_by_itself() {
    let Some(disk) = SmallDisk::new("3m") else { return };
    let path = disk.path().join("queue.redb");
    let queue = open(&path);
    let refused = fill(&queue).await;
    assert!(refused > 10, "{refused}");
    assert!(matches!(queue.health().await, QueueHealth::Unfit(_)));
    let again = queue.publish(Lane::Pod, TaskId(refused), &sealed(refused)).await;
    assert!(matches!(again, Err(QueueError::Unavailable(_))), "{again:?}");
    all_there(&queue, refused - 1).await;

    disk.resize("30m");
    let limit = Instant::now() + Duration::from_secs(20);
    while queue.health().await != QueueHealth::Fine {
        assert!(Instant::now() < limit, "{:?}", queue.health().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    queue.publish(Lane::Pod, TaskId(refused), &sealed(refused)).await.unwrap();
    all_there(&queue, refused).await;
    let first = queue.lease(Lane::Pod, Duration::ZERO).await.unwrap().unwrap();
    assert_eq!(first.task, TaskId(1));
    queue.complete(first).await.unwrap();
    drop(queue);

    let queue = open(&path);
    assert_eq!(queue.depth(Lane::Pod).await.unwrap().ready, u64::try_from(refused - 1).unwrap());
}

#[tokio::test]
async fn leases_outlive_a_full_disk_and_the_repair_after_it() {
    let Some(disk) = SmallDisk::new("3m") else { return };
    let queue = open(&disk.path().join("queue.redb"));
    queue.publish(Lane::Vm, TaskId(20_000), b"held").await.unwrap();
    let held = queue.lease(Lane::Vm, Duration::ZERO).await.unwrap().unwrap();
    fill(&queue).await;
    disk.resize("30m");
    let limit = Instant::now() + Duration::from_secs(20);
    while let Err(error) = queue.extend(&held).await {
        assert!(matches!(error, QueueError::Unavailable(_)) && Instant::now() < limit, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    queue.complete(held).await.unwrap();
}

#[tokio::test]
async fn a_queue_on_a_full_disk_opens_and_can_be_looked_at() {
    let Some(disk) = SmallDisk::new("3m") else { return };
    let path = disk.path().join("queue.redb");
    let queue = open(&path);
    let refused = fill(&queue).await;
    drop(queue);
    let filler = disk.path().join("filler");
    let full = std::fs::write(&filler, vec![1; 4 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);

    let queue = open(&path);
    all_there(&queue, refused - 1).await;
    drop(queue);
    assert!(path.exists());
}
