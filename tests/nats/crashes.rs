//! kill -9 of the server and of us, in the middle of publishes and leases: nothing acknowledged is lost, nothing settled comes back.

use std::{
    collections::BTreeSet,
    env,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue as _, QueueError, Settled},
};

use crate::{
    bench::{AT_ONCE, Bench, SOON, open, sealed},
    support::eventually,
};

const OUTBOX: &str = "NATS_TEST_CHILD_OUTBOX";
const URL: &str = "NATS_TEST_CHILD_URL";
const FIRST: &str = "NATS_TEST_CHILD_FIRST";

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_of_the_server_amid_publishes_and_leases_loses_and_doubles_nothing() {
    const TASKS: i64 = 250;
    let mut bench = Bench::new().await;
    let queue = bench.queue.take().unwrap();
    let stop = AtomicBool::new(false);
    let publish = async {
        for task in 1..=TASKS {
            queue.publish(Lane::Pod, TaskId(task), &sealed(task)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
    };
    let tend = async {
        while !stop.load(Ordering::Relaxed) {
            queue.tend().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let consume = async {
        let mut done: BTreeSet<i64> = BTreeSet::new();
        let mut unsure = BTreeSet::new();
        let limit = Instant::now() + Duration::from_secs(90);
        while done.len() < usize::try_from(TASKS).unwrap() {
            assert!(Instant::now() < limit, "only {} of {TASKS}", done.len());
            let Some(lease) = queue.lease(Lane::Pod, Duration::from_millis(500)).await.unwrap_or_default() else { continue };
            let task = lease.task.0;
            assert_eq!(lease.sealed, sealed(task));
            assert!(!done.contains(&task) || unsure.contains(&task), "task {task} came back after it was settled");
            match queue.complete(lease).await {
                Ok(_) => {
                    done.insert(task);
                }
                // Not known whether the server heard it: it may come again, and that is said beforehand (rule R4).
                Err(QueueError::Unavailable(_)) => {
                    done.insert(task);
                    unsure.insert(task);
                }
                Err(other) => panic!("{other}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        unsure
    };
    let nats = &mut bench.nats;
    let kill = async {
        for _ in 0..6 {
            tokio::time::sleep(Duration::from_millis(600)).await;
            nats.kill9();
            tokio::time::sleep(Duration::from_millis(rand::random_range(0..300))).await;
            nats.start_again().await;
        }
    };
    let (_, _, unsure, ()) = tokio::join!(publish, tend, consume, kill);
    // Whatever is left was leased by a pull whose connection broke, or is one of which nobody knew.
    let admin = nats.admin().await;
    let left = admin.messages("CI_RUNNER").await;
    assert!(left <= unsure.len() as u64, "{left} left, {} unsure", unsure.len());
}

/// The process that is killed: publishes without end, and says each that was acknowledged.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below as a process of its own"]
async fn child() {
    let Ok(path) = env::var(OUTBOX) else { return };
    let first: i64 = env::var(FIRST).unwrap().parse().unwrap();
    let settings = gitea_dynamic_runner::queue::jetstream::Settings {
        url: env::var(URL).unwrap(),
        ca_file: None,
        producer: crate::support::nats::user("producer"),
        worker: crate::support::nats::user("worker"),
        names: gitea_dynamic_runner::queue::jetstream::Names::default(),
        monitor_url: None,
    };
    let queue = open(Path::new(&path), settings).await.unwrap();
    let say = |what: &str, task: i64| {
        let mut out = std::io::stdout().lock();
        // One write a line, so that a kill leaves whole lines or nothing.
        out.write_all(format!("\n{what} {task}\n").as_bytes()).unwrap();
        out.flush().unwrap();
    };
    for task in first..first + 100_000 {
        queue.tend().await;
        queue.publish(Lane::Pod, TaskId(task), &sealed(task)).await.unwrap();
        say("stored", task);
        if task % 4 == 0
            && let Ok(Some(lease)) = queue.lease(Lane::Pod, AT_ONCE).await
        {
            let task = lease.task.0;
            say("completing", task);
            if queue.complete(lease).await == Ok(Settled::Done) {
                say("completed", task);
            }
        }
    }
}

fn start_child(bench: &Bench, first: i64) -> std::process::Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "crashes::child", "--ignored", "--nocapture"])
        .env(OUTBOX, bench.outbox())
        .env(URL, bench.nats.url())
        .env(FIRST, first.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_of_a_publisher_between_its_disk_and_nats_loses_and_doubles_nothing() {
    let mut bench = Bench::new().await;
    bench.close();
    let (mut stored, mut completing, mut completed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for round in 0..8 {
        let mut child = start_child(&bench, round * 1_000_000 + 1);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut hear = |line: &str| {
            let Some((what, Ok(task))) = line.split_once(' ').map(|(what, task)| (what, task.parse::<i64>())) else {
                return false;
            };
            match what {
                "stored" => stored.insert(task),
                "completing" => completing.insert(task),
                "completed" => completed.insert(task),
                _ => false,
            }
        };
        let mut heard = 0;
        // Every other round NATS is away for a part of it, so that rows wait in the outbox when the kill comes.
        while heard < 5 + rand::random_range(0..30) {
            heard += i32::from(hear(&lines.next().expect("the child works until it is killed")));
            if heard == 4 && round % 2 == 1 {
                bench.nats.kill9();
                break;
            }
        }
        if round % 2 == 1 {
            for _ in 0..3 {
                hear(&lines.next().unwrap());
                hear(&lines.next().unwrap());
            }
        }
        child.kill().unwrap();
        for line in lines {
            hear(&line);
        }
        child.wait().unwrap();
        if round % 2 == 1 {
            bench.nats.start_again().await;
        }
        bench.open().await;
        bench.drained().await;
        bench.is_fine().await;
        let there: BTreeSet<i64> = bench.tasks().await.into_iter().collect();
        let missing: Vec<_> = stored.difference(&there).filter(|task| !completing.contains(task)).collect();
        assert!(missing.is_empty(), "round {round}: acknowledged and lost: {missing:?}");
        let risen: Vec<_> = completed.intersection(&there).collect();
        assert!(risen.is_empty(), "round {round}: completed and back: {risen:?}");
        assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, there.len() as u64, "each once");
        bench.close();
    }
    assert!(completed.len() > 2, "the children did complete some");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leases_of_a_killed_process_come_back_at_once_and_not_at_their_deadline() {
    let mut bench = Bench::new().await;
    for task in [1, 2, 3] {
        bench.publish(task).await;
    }
    let first = bench.lease().await;
    let second = bench.lease().await;
    assert_eq!((first.task, second.task), (TaskId(1), TaskId(2)));
    bench.queue().complete(second).await.unwrap();
    bench.close();

    let began = Instant::now();
    bench.open().await;
    let again = bench.lease().await;
    assert_eq!((again.task, again.delivery), (TaskId(1), 2));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}; the deadline is a minute", began.elapsed());
    assert_eq!(bench.lease().await.task, TaskId(3));
    assert!(bench.queue().lease(Lane::Pod, AT_ONCE).await.unwrap().is_none());
    // What the dead process held is not its any more.
    assert_eq!(bench.queue().complete(first).await, Ok(Settled::LeaseLost));
    assert_eq!(bench.queue().complete(again).await, Ok(Settled::Done));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settlement_that_nobody_answers_is_no_success() {
    let mut bench = Bench::new().await;
    bench.publish(1).await;
    let lease = bench.lease().await;
    let admin = bench.nats.admin().await;
    admin.ok("CONSUMER.DELETE.CI_RUNNER.pod", serde_json::json!({})).await;
    let settled = bench.queue().complete(lease.clone()).await;
    assert!(matches!(settled, Err(QueueError::Unavailable(_))), "{settled:?}");
    assert_eq!(admin.messages("CI_RUNNER").await, 1);
    // By its id it leaves all the same.
    assert_eq!(bench.queue().cancel(Lane::Pod, TaskId(1)).await, Ok(true));
    bench.nats.stop();
    let settled = bench.queue().complete(lease).await;
    assert!(matches!(settled, Ok(Settled::AlreadyGone)), "{settled:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_consumer_has_given_up_is_found_and_brought_back() {
    let bench = Bench::new().await;
    let admin = bench.nats.admin().await;
    for task in [1, 2, 3] {
        bench.publish(task).await;
    }
    admin.change_consumer("pod", serde_json::json!({ "max_deliver": 1, "ack_wait": 700_000_000 })).await;
    let given_up = bench.lease().await;
    assert_eq!(given_up.task, TaskId(1));
    // Its deadline passes, and it is in no count of the consumer any more.
    let counts = async || {
        // A pull is what lets the server notice.
        if let Some(other) = bench.queue().lease(Lane::Pod, AT_ONCE).await.unwrap() {
            bench.queue().release(other, AT_ONCE).await.unwrap();
        }
        let info = admin.ok("CONSUMER.INFO.CI_RUNNER.pod", serde_json::json!({})).await;
        let counted = info["num_pending"].as_u64().unwrap() + info["num_ack_pending"].as_u64().unwrap();
        (counted < 3).then_some(())
    };
    eventually("the consumer has given it up", SOON, counts).await;
    admin.change_consumer("pod", serde_json::json!({ "max_deliver": -1, "ack_wait": 60_000_000_000_u64 })).await;
    // As a new process would see it: nothing is held.
    let mut bench = bench;
    bench.close();
    bench.open().await;
    bench.is_fine().await;
    assert_eq!(bench.queue().revive_stuck().await, Ok(0), "one look is not enough");
    let revived = bench.queue().revive_stuck().await.unwrap();
    assert!(revived >= 1, "{revived}");
    let mut came = bench.empty().await;
    came.sort_unstable();
    assert_eq!(came, [1, 2, 3]);
    assert_eq!((bench.queue().revive_stuck().await, bench.queue().revive_stuck().await), (Ok(0), Ok(0)));
    assert_eq!(admin.messages("CI_RUNNER").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_healthy_is_taken_for_stuck() {
    let mut bench = Bench::new().await;
    for task in 1..=6 {
        bench.publish(task).await;
    }
    let held = bench.lease().await;
    let delayed = bench.lease().await;
    bench.queue().release(delayed, Duration::from_secs(60)).await.unwrap();
    for _ in 0..3 {
        assert_eq!(bench.queue().revive_stuck().await, Ok(0));
    }
    // A delivery of a process that is gone, and one delayed by it, are the server's to give again.
    bench.close();
    bench.open().await;
    bench.is_fine().await;
    for _ in 0..3 {
        assert_eq!(bench.queue().revive_stuck().await, Ok(0));
    }
    assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, 6);
    drop(held);
}
