//! kill -9 of a process in the middle of its work: no row that was acknowledged is lost, none that was completed comes back.

use std::{
    collections::BTreeSet,
    env,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue as _, Settled},
};

use crate::open;

const PATH: &str = "QUEUE_TEST_CHILD_PATH";
const FIRST: &str = "QUEUE_TEST_CHILD_FIRST";
const KILLS: u32 = 25;

fn sealed(task: i64) -> Vec<u8> {
    format!("sealed {task} ").repeat(100).into_bytes()
}

/// The process that is killed: publishes without end, completes every third, and says each step after (or, for a removal,
/// before and after) it was done.
#[tokio::test]
#[ignore = "started by the test below as a process of its own"]
async fn child() {
    let Ok(path) = env::var(PATH) else { return };
    let first: i64 = env::var(FIRST).unwrap().parse().unwrap();
    let queue = open(Path::new(&path));
    let say = |what: &str, task: i64| {
        let mut out = std::io::stdout().lock();
        // One write a line, so that a kill leaves whole lines or nothing.
        out.write_all(format!("\n{what} {task}\n").as_bytes()).unwrap();
        out.flush().unwrap();
    };
    for task in first..first + 100_000 {
        queue.publish(Lane::Pod, TaskId(task), &sealed(task)).await.unwrap();
        say("stored", task);
        if task % 3 == 0 {
            let lease = queue.lease(Lane::Pod, Duration::ZERO).await.unwrap().unwrap();
            let leased = lease.task.0;
            say("completing", leased);
            assert_eq!(queue.complete(lease).await, Ok(Settled::Done));
            say("completed", leased);
        }
    }
}

#[derive(Default)]
struct Said {
    stored: BTreeSet<i64>,
    completing: BTreeSet<i64>,
    completed: BTreeSet<i64>,
}

impl Said {
    fn hear(&mut self, line: &str) -> bool {
        let Some((what, task)) = line.split_once(' ') else { return false };
        let Ok(task) = task.parse() else { return false };
        match what {
            "stored" => self.stored.insert(task),
            "completing" => self.completing.insert(task),
            "completed" => self.completed.insert(task),
            _ => false,
        }
    }
}

/// Lets a child work for `steps` lines, kills it, and adds what it said until its end.
fn work_and_die(path: &Path, first: i64, steps: u32, said: &mut Said) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "crash::child", "--ignored", "--nocapture"])
        .env(PATH, path)
        .env(FIRST, first.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut heard = 0;
    while heard < steps {
        let line = lines.next().expect("the child works until it is killed");
        heard += u32::from(said.hear(&line));
    }
    child.kill().unwrap();
    for line in lines {
        said.hear(&line);
    }
    child.wait().unwrap();
}

#[tokio::test]
async fn a_killed_process_loses_nothing_it_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue.redb");
    let mut said = Said::default();
    for round in 0..KILLS {
        let first = i64::from(round) * 1_000_000 + 1;
        work_and_die(&path, first, 2 + rand::random_range(0..40), &mut said);

        let queue = open(&path);
        let listed = queue.list(Lane::Pod).await.unwrap();
        let there: BTreeSet<i64> = listed.iter().map(|facts| facts.task.0).collect();
        let missing: Vec<_> = said.stored.difference(&there).filter(|task| !said.completing.contains(task)).collect();
        assert!(missing.is_empty(), "round {round}: acknowledged and lost: {missing:?}");
        let risen: Vec<_> = said.completed.intersection(&there).collect();
        assert!(risen.is_empty(), "round {round}: completed and back: {risen:?}");
        let unsaid: Vec<_> = there.difference(&said.stored).copied().collect();
        // The kill may fall between the commit and the word.
        assert!(unsaid.iter().filter(|task| **task >= first).count() <= 1, "round {round}: {unsaid:?}");
        said.stored.extend(unsaid);
        for task in &there {
            assert_eq!(queue.get(TaskId(*task)).await.unwrap().unwrap().sealed, sealed(*task));
        }
        assert_eq!(queue.depth(Lane::Pod).await.unwrap().ready, u64::try_from(there.len()).unwrap(), "leases came back");
    }
    assert!(said.completed.len() > 5, "the children did complete some");
}
