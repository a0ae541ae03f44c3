//! Any series of calls, restarts among them, against a model that is too simple to be wrong; and many callers at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue as _, Depth, Lease, Published, QueueError, Settled},
};
use proptest::prelude::*;

use crate::{LONG_LEASE, open, quick_folder};

#[derive(Debug, Clone)]
enum Op {
    Publish(Lane, i64),
    Lease(Lane),
    /// One of the leases ever given, by its number modulo their count.
    Complete(usize),
    Extend(usize),
    Release(usize, Duration),
    Reject(usize),
    Cancel(Lane, i64),
    Restart,
}

fn ops() -> impl Strategy<Value = Op> {
    let lane = || prop_oneof![Just(Lane::Pod), Just(Lane::Vm)];
    let delay = prop_oneof![Just(Duration::ZERO), Just(LONG_LEASE)];
    prop_oneof![
        6 => (lane(), 1..9i64).prop_map(|(lane, task)| Op::Publish(lane, task)),
        6 => lane().prop_map(Op::Lease),
        2 => any::<usize>().prop_map(Op::Complete),
        1 => any::<usize>().prop_map(Op::Extend),
        2 => (any::<usize>(), delay).prop_map(|(lease, delay)| Op::Release(lease, delay)),
        1 => any::<usize>().prop_map(Op::Reject),
        1 => (lane(), 1..9i64).prop_map(|(lane, task)| Op::Cancel(lane, task)),
        1 => Just(Op::Restart),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Ready,
    Delayed,
    /// By the number of the lease.
    Leased(usize),
}

#[derive(Debug)]
struct Row {
    task: i64,
    lane: Lane,
    deliveries: u32,
    state: State,
}

/// Rows by their place in the queue, and the leases given, with the place of each.
#[derive(Default)]
struct Model {
    rows: BTreeMap<u64, Row>,
    places: u64,
    leases: Vec<(Lease, u64)>,
    dead: usize,
    highest: Option<i64>,
}

impl Model {
    fn pick(&self, number: usize) -> Option<(usize, Lease, u64)> {
        let number = number.checked_rem(self.leases.len())?;
        let (lease, place) = &self.leases[number];
        Some((number, lease.clone(), *place))
    }

    fn holds(&self, number: usize, place: u64) -> bool {
        self.rows.get(&place).is_some_and(|row| row.state == State::Leased(number))
    }

    fn settled(&self, number: usize, place: u64) -> Settled {
        match self.rows.get(&place) {
            None => Settled::AlreadyGone,
            Some(_) if self.holds(number, place) => Settled::Done,
            Some(_) => Settled::LeaseLost,
        }
    }

    fn depth(&self, lane: Lane) -> Depth {
        let mut depth = Depth::default();
        for row in self.rows.values().filter(|row| row.lane == lane) {
            match row.state {
                State::Ready => depth.ready += 1,
                State::Delayed => depth.delayed += 1,
                State::Leased(_) => depth.leased += 1,
            }
        }
        depth
    }
}

async fn follow(ops: Vec<Op>) {
    let folder = quick_folder();
    let path = folder.path().join("queue.redb");
    let mut queue = open(&path);
    let mut model = Model::default();
    for op in ops {
        match op {
            Op::Publish(lane, task) => {
                let known = model.rows.values().any(|row| row.task == task);
                let expected = if known { Published::Duplicate } else { Published::Stored };
                assert_eq!(queue.publish(lane, TaskId(task), &[task as u8; 3]).await, Ok(expected));
                if !known {
                    model.places += 1;
                    model.rows.insert(model.places, Row { task, lane, deliveries: 0, state: State::Ready });
                    model.highest = model.highest.max(Some(task));
                }
            }
            Op::Lease(lane) => {
                let got = queue.lease(lane, Duration::ZERO).await.unwrap();
                let expected = model.rows.iter_mut().find(|(_, row)| row.lane == lane && row.state == State::Ready);
                assert_eq!(got.is_some(), expected.is_some());
                if let (Some(lease), Some((place, row))) = (got, expected) {
                    row.deliveries += 1;
                    row.state = State::Leased(model.leases.len());
                    assert_eq!((lease.task.0, lease.lane, lease.delivery), (row.task, lane, row.deliveries));
                    assert_eq!(lease.sealed, [row.task as u8; 3]);
                    model.leases.push((lease, *place));
                }
            }
            Op::Complete(number) => {
                let Some((number, lease, place)) = model.pick(number) else { continue };
                let expected = model.settled(number, place);
                assert_eq!(queue.complete(lease).await, Ok(expected));
                if expected == Settled::Done {
                    model.rows.remove(&place);
                }
            }
            Op::Extend(number) => {
                let Some((number, lease, place)) = model.pick(number) else { continue };
                let expected = if model.holds(number, place) { Ok(()) } else { Err(QueueError::LeaseLost) };
                assert_eq!(queue.extend(&lease).await, expected);
            }
            Op::Release(number, delay) => {
                let Some((number, lease, place)) = model.pick(number) else { continue };
                let held = model.holds(number, place);
                assert_eq!(queue.release(lease, delay).await, if held { Ok(()) } else { Err(QueueError::LeaseLost) });
                if held {
                    let state = if delay.is_zero() { State::Ready } else { State::Delayed };
                    model.rows.get_mut(&place).unwrap().state = state;
                }
            }
            Op::Reject(number) => {
                let Some((number, lease, place)) = model.pick(number) else { continue };
                let held = model.holds(number, place);
                assert_eq!(queue.reject(lease, "no").await, if held { Ok(()) } else { Err(QueueError::LeaseLost) });
                if held {
                    model.rows.remove(&place);
                    model.dead += 1;
                }
            }
            Op::Cancel(lane, task) => {
                let place = model.rows.iter().find(|(_, row)| row.lane == lane && row.task == task).map(|(place, _)| *place);
                assert_eq!(queue.cancel(lane, TaskId(task)).await, Ok(place.is_some()));
                place.and_then(|place| model.rows.remove(&place));
            }
            Op::Restart => {
                drop(queue);
                queue = open(&path);
                for row in model.rows.values_mut().filter(|row| matches!(row.state, State::Leased(_))) {
                    row.state = State::Ready;
                }
            }
        }
        for lane in Lane::ALL {
            assert_eq!(queue.depth(lane).await.unwrap(), model.depth(lane));
            let listed = queue.list(lane).await.unwrap();
            let listed: Vec<_> = listed.iter().map(|facts| (facts.task.0, facts.deliveries)).collect();
            let rows = model.rows.values().filter(|row| row.lane == lane);
            assert_eq!(listed, rows.map(|row| (row.task, row.deliveries)).collect::<Vec<_>>());
        }
        assert_eq!(queue.dead().await.unwrap().len(), model.dead);
        assert_eq!(queue.highest_task().await.unwrap(), model.highest.map(TaskId));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_series_of_calls_does_what_the_model_does(ops in prop::collection::vec(ops(), 1..60)) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(follow(ops));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_callers_at_once_get_each_assignment_once() {
    const TASKS: i64 = 200;
    let folder = quick_folder();
    let queue = Arc::new(open(&folder.path().join("queue.redb")));
    let done = Arc::new(Mutex::new(BTreeSet::new()));
    let workers: Vec<_> = (0..6u32)
        .map(|number| {
            let (queue, done) = (Arc::clone(&queue), Arc::clone(&done));
            tokio::spawn(async move {
                while done.lock().unwrap().len() < TASKS as usize {
                    let Some(lease) = queue.lease(Lane::Pod, Duration::from_millis(200)).await.unwrap() else { continue };
                    // Every worker gives some back once, so that places are kept under contention too.
                    if lease.delivery == 1 && lease.task.0 % 6 == i64::from(number) {
                        queue.release(lease, Duration::from_millis(1)).await.unwrap();
                        continue;
                    }
                    let task = lease.task;
                    assert_eq!(queue.complete(lease).await, Ok(Settled::Done));
                    assert!(done.lock().unwrap().insert(task), "{task:?} twice");
                }
            })
        })
        .collect();
    let publishers: Vec<_> = (0..4)
        .map(|part| {
            let queue = Arc::clone(&queue);
            tokio::spawn(async move {
                for task in (1..=TASKS).filter(|task| task % 4 == part) {
                    assert_eq!(queue.publish(Lane::Pod, TaskId(task), b"x").await, Ok(Published::Stored));
                }
            })
        })
        .collect();
    let all = async {
        for task in publishers.into_iter().chain(workers) {
            task.await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("all done in time");
    assert_eq!(queue.depth(Lane::Pod).await, Ok(Depth::default()));
}
