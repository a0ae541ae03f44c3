//! What every [`AssignmentQueue`] must do, written once. A new implementation writes `suite::run_for!(its_rig)`, where `its_rig` is
//! an `async fn(lease_time: Duration) -> Rig` that makes an empty queue.
//!
//! Not here, since not every store can do it: telling delayed from leased in `depth`, and fencing a holder that came too late.

use std::{future::Future, sync::Arc, time::Duration};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue, Dead, Depth, Lease, MAX_SEALED_BYTES, Published, QueueError, QueueHealth, Queued, Settled},
};
use tokio::time::{Instant, timeout};

use crate::{LONG_LEASE, Rig};

/// Longer than any wait in here should take, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);
const SHORT_LEASE: Duration = Duration::from_millis(1500);
const AT_ONCE: Duration = Duration::ZERO;

macro_rules! run_for {
    ($rig:ident: $($check:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $check() {
            crate::suite::$check($rig).await;
        }
    )*};
    ($rig:ident) => {
        crate::suite::run_for! { $rig:
            a_published_assignment_is_leased_as_it_was_given
            a_second_publish_of_a_task_changes_nothing
            the_oldest_is_leased_first
            a_released_one_keeps_its_old_place
            lanes_do_not_see_each_other
            depth_and_list_follow_each_step
            a_delayed_one_blocks_no_other
            a_delayed_one_comes_back_when_it_is_due
            a_waiting_one_can_be_cancelled
            a_leased_and_a_delayed_one_can_be_cancelled
            a_completed_one_is_gone_for_good
            a_rejected_one_leaves_the_queue_for_the_dead_letters
            an_extended_lease_does_not_run_out
            a_lease_that_runs_out_is_delivered_again_and_counted
            an_empty_queue_answers_none_after_the_wait
            a_waiting_lease_wakes_on_publish
            two_waiting_leases_get_different_assignments
            the_highest_task_is_remembered_after_it_left
            an_assignment_too_large_is_refused
        }
    };
}
pub(crate) use run_for;

type Queue = Arc<dyn AssignmentQueue>;

async fn publish(queue: &Queue, lane: Lane, task: i64) {
    let stored = queue.publish(lane, TaskId(task), &sealed(task)).await;
    assert_eq!(stored, Ok(Published::Stored));
}

fn sealed(task: i64) -> Vec<u8> {
    format!("sealed {task}\0\u{ff}").into_bytes()
}

async fn lease(queue: &Queue, lane: Lane) -> Lease {
    queue.lease(lane, LIMIT).await.unwrap().expect("an assignment is ready")
}

async fn lease_task(queue: &Queue, lane: Lane) -> i64 {
    lease(queue, lane).await.task.0
}

async fn nothing_ready(queue: &Queue, lane: Lane) {
    assert!(queue.lease(lane, AT_ONCE).await.unwrap().is_none());
}

async fn waiting_and_out(queue: &Queue, lane: Lane) -> (u64, u64) {
    let Depth { ready, delayed, leased } = queue.depth(lane).await.unwrap();
    (ready, delayed + leased)
}

pub(crate) async fn a_published_assignment_is_leased_as_it_was_given<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    assert_eq!(queue.get(TaskId(7)).await, Ok(None));
    assert_eq!(queue.health().await, QueueHealth::Fine);
    publish(queue, Lane::Pod, 7).await;
    assert_eq!(queue.get(TaskId(7)).await, Ok(Some(Queued { lane: Lane::Pod, task: TaskId(7), sealed: sealed(7) })));
    let lease = lease(queue, Lane::Pod).await;
    assert_eq!((lease.lane, lease.task, lease.delivery), (Lane::Pod, TaskId(7), 1));
    assert_eq!(lease.sealed, sealed(7));
    assert!(queue.get(TaskId(7)).await.unwrap().is_some(), "a leased one is still held");
    nothing_ready(queue, Lane::Pod).await;
}

pub(crate) async fn a_second_publish_of_a_task_changes_nothing<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 7).await;
    assert_eq!(queue.publish(Lane::Pod, TaskId(7), b"other").await, Ok(Published::Duplicate));
    let held = lease(queue, Lane::Pod).await;
    assert_eq!(held.sealed, sealed(7));
    assert_eq!(queue.publish(Lane::Pod, TaskId(7), b"other").await, Ok(Published::Duplicate));
    nothing_ready(queue, Lane::Pod).await;
    assert_eq!(queue.complete(held).await, Ok(Settled::Done));
}

pub(crate) async fn the_oldest_is_leased_first<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    for task in [5, 3, 9, 4] {
        publish(queue, Lane::Pod, task).await;
    }
    for task in [5, 3, 9, 4] {
        assert_eq!(lease_task(queue, Lane::Pod).await, task);
    }
}

pub(crate) async fn a_released_one_keeps_its_old_place<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    for task in [1, 2, 3] {
        publish(queue, Lane::Pod, task).await;
    }
    let first = lease(queue, Lane::Pod).await;
    assert_eq!(first.task, TaskId(1));
    queue.release(first, AT_ONCE).await.unwrap();
    let again = lease(queue, Lane::Pod).await;
    assert_eq!((again.task, again.delivery), (TaskId(1), 2));
    assert_eq!(lease_task(queue, Lane::Pod).await, 2);
    assert_eq!(lease_task(queue, Lane::Pod).await, 3);
}

pub(crate) async fn lanes_do_not_see_each_other<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    publish(queue, Lane::Refused, 2).await;
    nothing_ready(queue, Lane::Vm).await;
    assert_eq!(queue.cancel(Lane::Vm, TaskId(1)).await, Ok(false));
    assert_eq!(waiting_and_out(queue, Lane::Vm).await, (0, 0));
    assert_eq!(lease_task(queue, Lane::Refused).await, 2);
    assert_eq!(lease_task(queue, Lane::Pod).await, 1);
}

pub(crate) async fn depth_and_list_follow_each_step<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    assert_eq!(waiting_and_out(queue, Lane::Pod).await, (0, 0));
    for task in [3, 1, 2] {
        publish(queue, Lane::Pod, task).await;
    }
    assert_eq!(waiting_and_out(queue, Lane::Pod).await, (3, 0));
    let held = lease(queue, Lane::Pod).await;
    assert_eq!(waiting_and_out(queue, Lane::Pod).await, (2, 1));
    queue.release(held, LONG_LEASE).await.unwrap();
    assert_eq!(waiting_and_out(queue, Lane::Pod).await, (2, 1));
    let listed = queue.list(Lane::Pod).await.unwrap();
    let listed: Vec<_> = listed.iter().map(|facts| (facts.lane, facts.task.0)).collect();
    assert_eq!(listed, [(Lane::Pod, 3), (Lane::Pod, 1), (Lane::Pod, 2)]);
    let held = lease(queue, Lane::Pod).await;
    assert_eq!(queue.complete(held).await, Ok(Settled::Done));
    assert_eq!(waiting_and_out(queue, Lane::Pod).await, (1, 1));
}

pub(crate) async fn a_delayed_one_blocks_no_other<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    publish(queue, Lane::Pod, 2).await;
    let first = lease(queue, Lane::Pod).await;
    queue.release(first, LONG_LEASE).await.unwrap();
    assert_eq!(lease_task(queue, Lane::Pod).await, 2);
    nothing_ready(queue, Lane::Pod).await;
}

pub(crate) async fn a_delayed_one_comes_back_when_it_is_due<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    let first = lease(queue, Lane::Pod).await;
    let released = Instant::now();
    queue.release(first, Duration::from_millis(700)).await.unwrap();
    let again = lease(queue, Lane::Pod).await;
    assert!(released.elapsed() >= Duration::from_millis(650), "came back after {:?}", released.elapsed());
    assert_eq!((again.task, again.delivery), (TaskId(1), 2));
}

pub(crate) async fn a_waiting_one_can_be_cancelled<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    publish(queue, Lane::Pod, 2).await;
    assert_eq!(queue.cancel(Lane::Pod, TaskId(1)).await, Ok(true));
    assert_eq!(queue.cancel(Lane::Pod, TaskId(1)).await, Ok(false));
    assert_eq!(queue.get(TaskId(1)).await, Ok(None));
    assert_eq!(lease_task(queue, Lane::Pod).await, 2);
}

pub(crate) async fn a_leased_and_a_delayed_one_can_be_cancelled<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    publish(queue, Lane::Pod, 2).await;
    let leased = lease(queue, Lane::Pod).await;
    let delayed = lease(queue, Lane::Pod).await;
    queue.release(delayed, Duration::from_millis(300)).await.unwrap();
    assert_eq!(queue.cancel(Lane::Pod, TaskId(1)).await, Ok(true));
    assert_eq!(queue.cancel(Lane::Pod, TaskId(2)).await, Ok(true));
    assert_eq!(queue.get(TaskId(1)).await, Ok(None));
    assert_eq!(queue.complete(leased).await, Ok(Settled::AlreadyGone));
    assert!(queue.lease(Lane::Pod, Duration::from_millis(600)).await.unwrap().is_none());
    assert_eq!(waiting_and_out(queue, Lane::Pod).await, (0, 0));
}

pub(crate) async fn a_completed_one_is_gone_for_good<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(SHORT_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    let held = lease(queue, Lane::Pod).await;
    assert_eq!(queue.complete(held.clone()).await, Ok(Settled::Done));
    assert_eq!(queue.complete(held).await, Ok(Settled::AlreadyGone), "a repeated call is no error");
    assert_eq!(queue.get(TaskId(1)).await, Ok(None));
    assert!(queue.lease(Lane::Pod, SHORT_LEASE + SHORT_LEASE / 2).await.unwrap().is_none());
    // A restored Gitea gives an id again: that is a new job.
    publish(queue, Lane::Pod, 1).await;
    assert_eq!(lease(queue, Lane::Pod).await.delivery, 1);
}

pub(crate) async fn a_rejected_one_leaves_the_queue_for_the_dead_letters<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(SHORT_LEASE).await;
    let queue = &rig.queue;
    assert_eq!(queue.dead().await, Ok(vec![]));
    publish(queue, Lane::Vm, 1).await;
    let held = lease(queue, Lane::Vm).await;
    queue.reject(held, "envelope is unreadable").await.unwrap();
    let dead = queue.dead().await.unwrap();
    let [Dead { lane, task, reason, at_ms, sealed: payload }] = dead.as_slice() else { panic!("{dead:?}") };
    assert_eq!((*lane, *task, reason.as_str()), (Lane::Vm, TaskId(1), "envelope is unreadable"));
    assert_eq!(*payload, sealed(1));
    assert!(*at_ms > 1_700_000_000_000, "{at_ms}");
    assert_eq!(queue.get(TaskId(1)).await, Ok(None));
    assert!(queue.lease(Lane::Vm, SHORT_LEASE + SHORT_LEASE / 2).await.unwrap().is_none());
}

pub(crate) async fn an_extended_lease_does_not_run_out<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(SHORT_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    let held = lease(queue, Lane::Pod).await;
    let start = Instant::now();
    let mut other = std::pin::pin!(queue.lease(Lane::Pod, SHORT_LEASE * 2));
    loop {
        tokio::select! {
            got = &mut other => {
                assert!(got.unwrap().is_none(), "taken after {:?}", start.elapsed());
                break;
            }
            () = tokio::time::sleep(SHORT_LEASE / 8) => queue.extend(&held).await.unwrap(),
        }
    }
    assert!(start.elapsed() >= SHORT_LEASE * 2);
    assert_eq!(queue.complete(held).await, Ok(Settled::Done));
}

pub(crate) async fn a_lease_that_runs_out_is_delivered_again_and_counted<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(SHORT_LEASE).await;
    let queue = &rig.queue;
    publish(queue, Lane::Pod, 1).await;
    publish(queue, Lane::Pod, 2).await;
    let start = Instant::now();
    assert_eq!(lease_task(queue, Lane::Pod).await, 1);
    let second = lease(queue, Lane::Pod).await;
    assert_eq!(second.task, TaskId(2));
    assert_eq!(queue.complete(second).await, Ok(Settled::Done));
    let again = lease(queue, Lane::Pod).await;
    assert_eq!((again.task, again.delivery), (TaskId(1), 2));
    assert!(start.elapsed() >= SHORT_LEASE - Duration::from_millis(50), "{:?}", start.elapsed());
    assert_eq!(again.sealed, sealed(1));
}

pub(crate) async fn an_empty_queue_answers_none_after_the_wait<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let start = Instant::now();
    let got = timeout(LIMIT, rig.queue.lease(Lane::Pod, Duration::from_millis(400))).await.unwrap();
    assert!(got.unwrap().is_none());
    assert!(start.elapsed() >= Duration::from_millis(400));
}

pub(crate) async fn a_waiting_lease_wakes_on_publish<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let waiting = tokio::spawn({
        let queue = Arc::clone(&rig.queue);
        async move { lease_task(&queue, Lane::Pod).await }
    });
    publish(&rig.queue, Lane::Vm, 1).await;
    publish(&rig.queue, Lane::Pod, 2).await;
    let woken = timeout(LIMIT / 2, waiting).await.expect("woken, not only timed out");
    assert_eq!(woken.unwrap(), 2);
}

pub(crate) async fn two_waiting_leases_get_different_assignments<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let queue = Arc::clone(&rig.queue);
            tokio::spawn(async move { lease_task(&queue, Lane::Pod).await })
        })
        .collect();
    for task in 1..=4 {
        publish(&rig.queue, Lane::Pod, task).await;
    }
    let mut got = Vec::new();
    for waiting in waiting {
        got.push(timeout(LIMIT, waiting).await.unwrap().unwrap());
    }
    got.sort_unstable();
    assert_eq!(got, [1, 2, 3, 4]);
}

pub(crate) async fn the_highest_task_is_remembered_after_it_left<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let queue = &rig.queue;
    assert_eq!(queue.highest_task().await, Ok(None));
    publish(queue, Lane::Pod, 9).await;
    publish(queue, Lane::Vm, 4).await;
    assert_eq!(queue.cancel(Lane::Pod, TaskId(9)).await, Ok(true));
    assert_eq!(queue.highest_task().await, Ok(Some(TaskId(9))));
}

pub(crate) async fn an_assignment_too_large_is_refused<F: Future<Output = Rig>>(rig: impl Fn(Duration) -> F) {
    let rig = rig(LONG_LEASE).await;
    let too_large = vec![1; MAX_SEALED_BYTES + 1];
    let refused = rig.queue.publish(Lane::Pod, TaskId(1), &too_large).await;
    assert_eq!(refused, Err(QueueError::TooLarge { bytes: MAX_SEALED_BYTES + 1, limit: MAX_SEALED_BYTES }));
    assert_eq!(rig.queue.get(TaskId(1)).await, Ok(None));
    assert_eq!(rig.queue.health().await, QueueHealth::Fine, "the store is none the worse");
}
