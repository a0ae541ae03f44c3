//! What only the queue in a file can promise: one process, fenced leases, a restart that keeps everything, and no trust in a
//! file that is not whole.

use std::{fs, path::Path, time::Duration};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    leader::LeaderPass,
    queue::{
        AssignmentQueue as _, Depth, Published, QueueError, QueueHealth, QueuedState, Settled,
        embedded::{EmbeddedOptions, EmbeddedQueue},
    },
};

use redb::ReadableTable as _;

use crate::{LONG_LEASE, open, options};

const AT_ONCE: Duration = Duration::ZERO;

async fn publish(queue: &EmbeddedQueue, task: i64) {
    let stored = queue.publish(Lane::Pod, TaskId(task), format!("sealed {task}").as_bytes()).await;
    assert_eq!(stored, Ok(Published::Stored));
}

#[tokio::test]
async fn a_restart_keeps_everything_and_ends_the_leases_of_the_dead() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue.redb");
    let queue = open(&path);
    for task in 1..=5 {
        publish(&queue, task).await;
    }
    let leased = queue.lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    let delayed = queue.lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    queue.release(delayed, LONG_LEASE).await.unwrap();
    let rejected = queue.lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    queue.reject(rejected, "unreadable").await.unwrap();
    assert_eq!(queue.depth(Lane::Pod).await, Ok(Depth { ready: 2, delayed: 1, leased: 1 }));
    drop(queue);

    let queue = open(&path);
    assert_eq!(queue.depth(Lane::Pod).await, Ok(Depth { ready: 3, delayed: 1, leased: 0 }));
    let states: Vec<_> = queue.list(Lane::Pod).await.unwrap().into_iter().map(|f| (f.task.0, f.state, f.deliveries)).collect();
    use QueuedState::{Delayed, Ready};
    assert_eq!(states, [(1, Ready, 1), (2, Delayed, 1), (4, Ready, 0), (5, Ready, 0)]);
    assert_eq!(queue.dead().await.unwrap().len(), 1);
    assert_eq!(queue.highest_task().await, Ok(Some(TaskId(5))));

    // The lease of the process before is worth nothing here, neither before nor after it is given again.
    assert_eq!(queue.extend(&leased).await, Err(QueueError::LeaseLost));
    let again = queue.lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    assert_eq!((again.task, again.delivery, again.sealed.as_slice()), (TaskId(1), 2, b"sealed 1".as_slice()));
    assert_eq!(queue.complete(leased).await, Ok(Settled::LeaseLost));
    assert_eq!(queue.complete(again).await, Ok(Settled::Done));
}

#[tokio::test]
async fn a_holder_that_comes_too_late_is_fenced_off() {
    let folder = tempfile::tempdir().unwrap();
    let lease_time = Duration::from_millis(300);
    let queue = EmbeddedQueue::open_with(&folder.path().join("queue.redb"), options(lease_time)).unwrap();
    publish(&queue, 1).await;
    let late = queue.lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    let new = queue.lease(Lane::Pod, Duration::from_secs(20)).await.unwrap().unwrap();
    assert_eq!((new.task, new.delivery), (TaskId(1), 2));
    assert_eq!(queue.extend(&late).await, Err(QueueError::LeaseLost));
    assert_eq!(queue.release(late.clone(), AT_ONCE).await, Err(QueueError::LeaseLost));
    assert_eq!(queue.reject(late.clone(), "late").await, Err(QueueError::LeaseLost));
    assert_eq!(queue.complete(late.clone()).await, Ok(Settled::LeaseLost));
    assert_eq!(queue.dead().await, Ok(vec![]));
    assert!(queue.cancel(Lane::Pod, TaskId(1)).await.unwrap());

    // The same task id published again is another assignment; the old leases do not reach it.
    publish(&queue, 1).await;
    assert_eq!(queue.complete(late).await, Ok(Settled::AlreadyGone));
    assert_eq!(queue.extend(&new).await, Err(QueueError::LeaseLost));
    assert!(queue.get(TaskId(1)).await.unwrap().is_some());
    assert_eq!(queue.health().await, QueueHealth::Fine, "a lost lease is no failure of the store");
}

#[tokio::test]
async fn a_second_controller_on_the_same_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue.redb");
    let queue = open(&path);
    let _pass = LeaderPass::of_database(&queue);
    let refused = EmbeddedQueue::open(&path).unwrap_err();
    assert!(matches!(refused, QueueError::InUse(_)), "{refused}");
    assert!(refused.to_string().contains("another controller runs on this state folder"), "{refused}");
    publish(&queue, 1).await;
    drop(queue);
    assert!(open(&path).get(TaskId(1)).await.unwrap().is_some());
}

/// What is left of a queue with 20 assignments after `spoil`; it must be refused, and left as it is.
async fn refused_after(spoil: impl Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue.redb");
    let queue = open(&path);
    for task in 1..=20 {
        publish(&queue, task).await;
    }
    drop(queue);
    spoil(&path);
    let before = fs::read(&path).unwrap();
    for _ in 0..2 {
        let refused = EmbeddedQueue::open(&path).unwrap_err();
        assert!(matches!(refused, QueueError::Damaged(_)), "{refused}");
        assert!(refused.to_string().contains(&format!("mv {0} {0}.bad", path.display())), "names the way out: {refused}");
        assert_eq!(fs::read(&path).unwrap().len(), before.len(), "is not replaced");
    }
    // The way out works.
    fs::rename(&path, folder.path().join("queue.redb.bad")).unwrap();
    let queue = open(&path);
    assert_eq!(queue.get(TaskId(1)).await, Ok(None));
    publish(&queue, 1).await;
}

#[tokio::test]
async fn an_empty_file_is_not_taken_for_a_new_queue() {
    refused_after(|path| fs::write(path, b"").unwrap()).await;
}

#[tokio::test]
async fn a_text_file_is_refused() {
    refused_after(|path| fs::write(path, "not a queue\n".repeat(1000)).unwrap()).await;
}

#[tokio::test]
async fn a_truncated_file_is_refused() {
    for keep in [64, 4096, 5000] {
        refused_after(|path| fs::File::options().write(true).open(path).unwrap().set_len(keep).unwrap()).await;
    }
    refused_after(|path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_flipped_bit_in_an_assignment_is_refused() {
    refused_after(|path| {
        let mut bytes = fs::read(path).unwrap();
        // Old copies of a page may hold the text too; so all of them are hit.
        let hits: Vec<_> = bytes.windows(9).enumerate().filter(|(_, w)| *w == b"sealed 17").map(|(at, _)| at).collect();
        assert!(!hits.is_empty());
        for at in hits {
            bytes[at] ^= 1;
        }
        fs::write(path, bytes).unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_database_of_something_else_is_refused() {
    refused_after(|path| {
        fs::remove_file(path).unwrap();
        let other = redb::Database::create(path).unwrap();
        let txn = other.begin_write().unwrap();
        txn.open_table(redb::TableDefinition::<u64, u64>::new("other")).unwrap();
        txn.commit().unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_queue_of_a_newer_version_is_refused_and_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue.redb");
    let queue = open(&path);
    publish(&queue, 1).await;
    drop(queue);
    set_layout(&path, 999);
    let before = fs::read(&path).unwrap();
    let refused = EmbeddedQueue::open(&path).unwrap_err();
    assert!(matches!(refused, QueueError::Newer(_)), "{refused}");
    let said = refused.to_string();
    assert!(said.contains("layout 999") && said.contains("Run that version again"), "{said}");
    assert_eq!(fs::read(&path).unwrap().len(), before.len(), "is not replaced");
    // With the version that wrote it, everything is there.
    set_layout(&path, 1);
    assert!(open(&path).get(TaskId(1)).await.unwrap().is_some());
}

fn set_layout(path: &Path, layout: u64) {
    let database = redb::Database::open(path).unwrap();
    let txn = database.begin_write().unwrap();
    txn.open_table(redb::TableDefinition::<u8, u64>::new("meta")).unwrap().insert(0, layout).unwrap();
    txn.commit().unwrap();
}

#[tokio::test]
async fn what_a_crash_left_of_a_new_queue_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue.redb");
    fs::write(folder.path().join("queue.redb.new"), b"half").unwrap();
    let queue = open(&path);
    publish(&queue, 1).await;
    drop(queue);
    let mut files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["queue.redb", "queue.redb.lock"]);
}

#[test]
fn a_missing_folder_is_named() {
    let refused = EmbeddedQueue::open(Path::new("/nonexistent/state/queue.redb")).unwrap_err();
    assert!(matches!(refused, QueueError::Unavailable(_)), "{refused}");
    assert!(refused.to_string().contains("/nonexistent/state/queue.redb"), "{refused}");
}

#[tokio::test]
async fn too_little_free_space_is_unfit_but_takes_what_was_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let options = EmbeddedOptions { min_free_bytes: u64::MAX, ..options(LONG_LEASE) };
    let queue = EmbeddedQueue::open_with(&folder.path().join("queue.redb"), options).unwrap();
    let QueueHealth::Unfit(why) = queue.health().await else { panic!("fit") };
    assert!(why.contains("free some space") && why.contains(&folder.path().display().to_string()), "{why}");
    publish(&queue, 1).await;
    assert!(queue.lease(Lane::Pod, AT_ONCE).await.unwrap().is_some());
}

#[tokio::test]
async fn a_delay_from_another_clock_does_not_put_a_job_off_for_good() {
    let folder = tempfile::tempdir().unwrap();
    let queue = open(&folder.path().join("queue.redb"));
    publish(&queue, 1).await;
    let held = queue.lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    queue.release(held, Duration::MAX).await.unwrap();
    assert_eq!(queue.depth(Lane::Pod).await.unwrap().delayed, 1);
    drop(queue);

    // As if the clock had been an hour ahead when the delay was given.
    let path = folder.path().join("queue.redb");
    let database = redb::Database::open(&path).unwrap();
    let txn = database.begin_write().unwrap();
    {
        let mut timed = txn.open_table(redb::TableDefinition::<(u8, u64, u64), i64>::new("timed")).unwrap();
        let ((lane, due, seq), task) = timed.pop_first().unwrap().map(|(key, task)| (key.value(), task.value())).unwrap();
        timed.insert((lane, due + 3_600_000, seq), task).unwrap();
        let mut tasks = txn.open_table(redb::TableDefinition::<i64, &[u8]>::new("tasks")).unwrap();
        let row = tasks.get(task).unwrap().unwrap().value().to_vec();
        let (old, new) = (postcard::to_stdvec(&due).unwrap(), postcard::to_stdvec(&(due + 3_600_000)).unwrap());
        assert!(row.ends_with(&old));
        let row = [&row[..row.len() - old.len()], new.as_slice()].concat();
        tasks.insert(task, row.as_slice()).unwrap();
    }
    txn.commit().unwrap();
    drop(database);

    let again = open(&path).lease(Lane::Pod, AT_ONCE).await.unwrap().unwrap();
    assert_eq!((again.task, again.delivery), (TaskId(1), 2));
}

#[tokio::test]
async fn a_wait_of_any_length_is_no_panic_and_can_be_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let queue = open(&folder.path().join("queue.redb"));
    let dropped = tokio::time::timeout(Duration::from_millis(100), queue.lease(Lane::Pod, Duration::MAX)).await;
    assert!(dropped.is_err());
    publish(&queue, 1).await;
    assert!(queue.lease(Lane::Pod, AT_ONCE).await.unwrap().is_some());
}
