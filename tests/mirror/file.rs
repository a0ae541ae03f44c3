//! The file itself: damage, another instance, a newer version, crashes, a full disk, and what is kept of what is over.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gitea_dynamic_runner::{
    ids::{InstanceId, Lane, TaskId},
    metrics::{Metrics, ReasonLabel},
    mirror::{self, Details, Filter, Keep, Mirror, OpenError, Outcome, Phase, Reader, Seen, What},
};
use redb::{ReadableDatabase as _, ReadableTable as _};

use crate::support::small_disk::SmallDisk;

fn instance() -> InstanceId {
    InstanceId::of_uuid("the runner")
}

fn open(path: &Path) -> (Mirror, Metrics) {
    let metrics = Metrics::new();
    (Mirror::open(path, instance(), metrics.clone()).unwrap(), metrics)
}

fn details(hash: u8) -> Box<Details> {
    Box::new(Details {
        repository: "boss/app".into(),
        job_key: "test".into(),
        steps: 2,
        token_hash: Some([hash; 32]),
        ..Details::default()
    })
}

fn queued(mirror: &Mirror, task: i64) {
    let what =
        What::Queued { lane: Lane::Pod, details: details(1), fetched_ms: 5, sealed: Some(format!("sealed {task}").into_bytes()) };
    mirror.note(TaskId(task), what);
}

async fn job(mirror: &Mirror, task: i64) -> Option<mirror::Job> {
    mirror.flush().await;
    mirror.ask(move |m| m.job(TaskId(task))).await.unwrap()
}

async fn payload(mirror: &Mirror, task: i64) -> Option<Vec<u8>> {
    mirror.flush().await;
    mirror.ask(move |m| m.payload(TaskId(task))).await.unwrap()
}

async fn jobs(mirror: &Mirror) -> usize {
    mirror.flush().await;
    mirror.ask(|m| m.jobs(&Filter { limit: 1000, ..Filter::default() })).await.unwrap().len()
}

fn rebuilt(metrics: &Metrics, reason: &'static str) -> u64 {
    metrics.mirror_rebuilds.get_or_create(&ReasonLabel { reason }).get()
}

fn set_aside(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut bad: Vec<_> = all.filter(|file| file.to_str().unwrap().contains(".redb.bad-")).collect();
    bad.sort();
    bad
}

#[tokio::test]
async fn a_job_goes_through_its_phases_and_its_envelope_goes_with_its_claim() {
    let folder = tempfile::tempdir().unwrap();
    let (mirror, _) = open(&folder.path().join("m"));
    let (task, environment) = (TaskId(7), "ci-1".to_owned());
    assert_eq!(mirror.age(), None);
    queued(&mirror, 7);
    assert_eq!(payload(&mirror, 7).await.unwrap(), b"sealed 7");
    assert!(mirror.age().unwrap() < Duration::from_secs(10));
    mirror.note(task, What::Slot);
    mirror.note(task, What::Created { environment: environment.clone() });
    mirror.note(task, What::Identity { environment: environment.clone() });
    assert_eq!(job(&mirror, 7).await.unwrap().phase, Phase::Starting);
    assert_eq!(mirror.ask(|m| m.slots()).await.unwrap().len(), 1);
    mirror.note(task, What::MadeAgain { environment: environment.clone(), reason: "it ended".into(), attempts: 1 });
    let waits = job(&mirror, 7).await.unwrap();
    assert_eq!((waits.phase, waits.attempts, waits.environment, waits.times.created), (Phase::Queued, 1, None, None));
    assert!(payload(&mirror, 7).await.is_some());
    let second = "ci-2".to_owned();
    mirror.note(task, What::Slot);
    mirror.note(task, What::Created { environment: second.clone() });
    // Late news of the first.
    mirror.note(task, What::Identity { environment: environment.clone() });
    mirror.note(task, What::Gone { environment });
    mirror.note(task, What::Claimed { environment: second.clone() });
    mirror.note(task, What::Acknowledged);
    mirror.note(task, What::FirstStep);
    let runs = job(&mirror, 7).await.unwrap();
    assert_eq!(
        (runs.phase, runs.environment.as_ref(), runs.times.identity, runs.times.gone),
        (Phase::Claimed, Some(&second), None, None)
    );
    assert_eq!(payload(&mirror, 7).await, None);
    // Nothing brings a running job back to the queue.
    mirror.note(task, What::Returned { reason: "late".into() });
    mirror.note(task, What::MadeAgain { environment: second.clone(), reason: "late".into(), attempts: 2 });
    assert_eq!(job(&mirror, 7).await.unwrap(), runs);
    mirror.finished(task, Outcome::Success, None, Some([1; 32]));
    mirror.note(task, What::Gone { environment: second });
    let over = job(&mirror, 7).await.unwrap();
    assert_eq!((over.phase, over.result), (Phase::Finished, Some(Outcome::Success)));
    let times = over.times;
    for at in [
        times.fetched,
        times.durable,
        times.slot,
        times.created,
        times.claimed,
        times.first_step,
        times.ended,
        times.acknowledged,
        times.gone,
    ] {
        assert!(at.is_some(), "{times:?}");
    }
    let finished = mirror.ask(|m| m.finished(TaskId(7))).await.unwrap().unwrap();
    assert_eq!((finished.result, finished.token_hash), (Outcome::Success, Some([1; 32])));
    assert_eq!(mirror.ask(|m| m.slots()).await.unwrap().len(), 0);
    let kinds: Vec<String> =
        mirror.ask(|m| m.events(Some(TaskId(7)), 100)).await.unwrap().into_iter().map(|(_, e)| e.kind).collect();
    assert_eq!(kinds.first().map(String::as_str), Some("gone"));
    assert_eq!(kinds.last().map(String::as_str), Some("received"));
}

#[tokio::test]
async fn a_task_id_that_a_restored_gitea_gives_anew_is_a_new_row_that_the_old_jobs_end_does_not_touch() {
    let folder = tempfile::tempdir().unwrap();
    let (mirror, _) = open(&folder.path().join("m"));
    queued(&mirror, 3);
    mirror.note(TaskId(3), What::Claimed { environment: "old".into() });
    let what = What::Queued { lane: Lane::Pod, details: details(2), fetched_ms: 9, sealed: None };
    mirror.note(TaskId(3), what);
    mirror.finished(TaskId(3), Outcome::Failure, Some("the old one"), Some([1; 32]));
    mirror.note(TaskId(3), What::Gone { environment: "old".into() });
    let row = job(&mirror, 3).await.unwrap();
    assert_eq!((row.phase, row.details.token_hash, row.environment), (Phase::Queued, Some([2; 32]), None));
    assert_eq!(mirror.ask(|m| m.finished(TaskId(3))).await.unwrap(), None);
    assert_eq!(jobs(&mirror).await, 1, "the index has no place of the old row");
}

#[tokio::test]
async fn what_was_found_makes_rows_but_never_undoes_what_was_noted_later() {
    let folder = tempfile::tempdir().unwrap();
    let (mirror, _) = open(&folder.path().join("m"));
    let seen = |looked_ms, phase| {
        let seen = Seen {
            looked_ms,
            lane: Lane::Vm,
            phase,
            environment: Some(("ci-9".into(), 4)),
            details: None,
            shown: *details(0),
            fetched_ms: None,
            sealed: None,
        };
        What::Seen(Box::new(seen))
    };
    mirror.note(TaskId(9), seen(10, Phase::Claimed));
    let row = job(&mirror, 9).await.unwrap();
    assert!(row.rebuilt && row.times.fetched.is_none());
    assert_eq!(
        (row.phase, row.lane, row.environment.as_deref(), row.times.created),
        (Phase::Claimed, Lane::Vm, Some("ci-9"), Some(4))
    );
    mirror.finished(TaskId(9), Outcome::Success, None, None);
    mirror.note(TaskId(9), seen(10, Phase::Claimed));
    assert_eq!(job(&mirror, 9).await.unwrap().phase, Phase::Finished);
}

type Damage = fn(&Path);

/// Each kind of damage, and what is done to a whole file for it.
const DAMAGE: [(&str, Damage); 6] = [
    ("cut", |path| cut(path, fs::metadata(path).unwrap().len() / 2)),
    ("cut to a stub", |path| cut(path, 100)),
    ("empty", |path| fs::write(path, "").unwrap()),
    ("a text", |path| fs::write(path, "not a database at all\n".repeat(400)).unwrap()),
    ("no tables", |path| {
        fs::remove_file(path).unwrap();
        redb::Database::create(path).unwrap();
    }),
    ("a row of nonsense", |path| {
        let database = redb::Database::create(path).unwrap();
        let txn = database.begin_write().unwrap();
        txn.open_table(redb::TableDefinition::<i64, &[u8]>::new("assignments"))
            .unwrap()
            .insert(1, [1, 255, 255].as_slice())
            .unwrap();
        txn.commit().unwrap();
    }),
];

fn cut(path: &Path, len: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[tokio::test]
async fn a_damaged_file_is_set_aside_counted_and_made_anew() {
    for (kind, damage) in DAMAGE {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mirror.redb");
        let (mirror, _) = open(&path);
        queued(&mirror, 1);
        mirror.close().await;
        drop(mirror);
        damage(&path);
        let (mirror, metrics) = open_when_free(&path).await;
        // Nonsense in a row is found only where it is read.
        mirror.note(TaskId(1), What::Slot);
        assert_eq!(job(&mirror, 1).await, None, "{kind}");
        assert_eq!((rebuilt(&metrics, "damaged"), set_aside(folder.path()).len()), (1, 1), "{kind}");
        queued(&mirror, 2);
        assert_eq!(job(&mirror, 2).await.unwrap().phase, Phase::Queued, "{kind}: the new one works");
    }
}

/// The thread of the one before may hold the lock for a moment yet.
async fn open_when_free(path: &Path) -> (Mirror, Metrics) {
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        let metrics = Metrics::new();
        match Mirror::open(path, instance(), metrics.clone()) {
            Ok(mirror) => return (mirror, metrics),
            Err(OpenError::InUse(_)) if Instant::now() < limit => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn flipped_bits_are_harmless_or_set_the_file_aside_and_never_show_wrong_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mirror.redb");
    let (mirror, _) = open(&path);
    for task in 1..=50 {
        queued(&mirror, task);
    }
    mirror.close().await;
    drop(mirror);
    let whole = fs::read(&path).unwrap();
    let mut aside = 0;
    for _ in 0..60 {
        let mut bytes = whole.clone();
        let at = rand::random_range(0..bytes.len());
        bytes[at] ^= 1 << rand::random_range(0..8);
        fs::write(&path, &bytes).unwrap();
        let (mirror, metrics) = open_when_free(&path).await;
        let found = jobs(&mirror).await;
        let bad = rebuilt(&metrics, "damaged") + rebuilt(&metrics, "instance");
        assert!((bad, found) == (0, 50) || (bad, found) == (1, 0), "bit at {at}: {bad} set aside, {found} jobs");
        aside += bad;
        mirror.close().await;
    }
    assert!(aside > 0, "some bits matter");
    assert!(set_aside(folder.path()).len() <= 3, "and few of those are kept");
}

#[tokio::test]
async fn another_instances_file_is_set_aside_and_a_second_writer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mirror.redb");
    let (mirror, metrics) = open(&path);
    queued(&mirror, 1);
    mirror.flush().await;
    let second = Mirror::open(&path, instance(), metrics.clone()).err().unwrap();
    assert!(matches!(&second, OpenError::InUse(why) if why.contains("stop it first")), "{second}");
    assert!(mirror::set_aside(&path).unwrap_err().contains("stop it first"));
    mirror.close().await;
    let limit = Instant::now() + Duration::from_secs(10);
    let other = loop {
        match Mirror::open(&path, InstanceId::of_uuid("another"), metrics.clone()) {
            Ok(other) => break other,
            Err(error) => assert!(Instant::now() < limit, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(jobs(&other).await, 0);
    assert_eq!((rebuilt(&metrics, "instance"), set_aside(folder.path()).len()), (1, 1));
}

#[tokio::test]
async fn a_newer_file_is_refused_with_the_way_out_and_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mirror.redb");
    let (mirror, metrics) = open(&path);
    mirror.close().await;
    newer(&path);
    let limit = Instant::now() + Duration::from_secs(10);
    let error = loop {
        match Mirror::open(&path, instance(), metrics.clone()).err().unwrap() {
            OpenError::InUse(_) if Instant::now() < limit => tokio::time::sleep(Duration::from_millis(10)).await,
            error => break error,
        }
    };
    assert!(matches!(error, OpenError::Newer(_)), "{error}");
    let said = error.to_string();
    assert!(said.contains("a newer version ran here") && said.contains("mv "), "{said}");
    assert!(Reader::open(&path).err().unwrap().contains("a newer version ran here"));
    assert_eq!(set_aside(folder.path()), Vec::<PathBuf>::new());
}

pub(crate) fn newer(path: &Path) {
    let database = redb::Database::create(path).unwrap();
    let txn = database.begin_write().unwrap();
    let meta = redb::TableDefinition::<&str, &[u8]>::new("meta");
    txn.open_table(meta).unwrap().insert("schema_version", (mirror::SCHEMA + 1).to_le_bytes().as_slice()).unwrap();
    txn.commit().unwrap();
}

#[tokio::test]
async fn ended_jobs_finished_records_and_events_are_bounded_in_age_and_number() {
    let folder = tempfile::tempdir().unwrap();
    let (mirror, _) = open(&folder.path().join("m"));
    for task in 1..=40 {
        queued(&mirror, task);
        if task <= 30 {
            mirror.finished(TaskId(task), Outcome::Success, None, None);
        }
    }
    let keep = Keep { ended_ms: 3_600_000, ended_jobs: 20, finished: 25, events_ms: 3_600_000, events: 15 };
    mirror.note(TaskId(0), What::Reconciled(keep.clone()));
    mirror.flush().await;
    let overview = mirror.ask(|m| m.overview()).await.unwrap();
    assert_eq!((overview.finished, overview.events), (25, 15));
    assert_eq!(jobs(&mirror).await, 30, "those that wait are never pruned");
    assert!(job(&mirror, 10).await.is_none() && job(&mirror, 11).await.is_some(), "the oldest go first");
    tokio::time::sleep(Duration::from_millis(30)).await;
    mirror.note(TaskId(0), What::Reconciled(Keep { ended_ms: 1, events_ms: 1, ..keep }));
    mirror.flush().await;
    let overview = mirror.ask(|m| m.overview()).await.unwrap();
    assert_eq!((overview.finished, overview.events, jobs(&mirror).await), (0, 0, 10));
    let database_rows = overview.jobs.iter().map(|(_, _, n)| n).sum::<u64>();
    assert_eq!(database_rows, 10, "the index goes with the rows");
}

#[tokio::test]
async fn a_file_that_is_removed_cut_or_replaced_by_a_folder_under_the_writer_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mirror.redb");
    let (mirror, metrics) = open(&path);
    queued(&mirror, 1);
    mirror.flush().await;
    fs::remove_file(&path).unwrap();
    queued(&mirror, 2);
    assert!(job(&mirror, 1).await.is_none() && job(&mirror, 2).await.is_some());
    assert_eq!(rebuilt(&metrics, "vanished"), 1);
    assert!(Reader::open(&path).unwrap().snapshot().unwrap().job(TaskId(2)).unwrap().is_some(), "a reader sees the new one");
    cut(&path, fs::metadata(&path).unwrap().len() / 2);
    queued(&mirror, 3);
    assert!(job(&mirror, 3).await.is_some());
    // What redb holds in memory may make the file whole again when it is closed; else it is set aside.
    let whole = job(&mirror, 2).await.is_some();
    assert_eq!((rebuilt(&metrics, "damaged"), set_aside(folder.path()).len()), if whole { (0, 0) } else { (1, 1) });
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    queued(&mirror, 4);
    mirror.flush().await;
    assert!(mirror.ask(|m| m.job(TaskId(4))).await.is_none(), "it does not answer, and nobody is held up");
    assert!(metrics.mirror_dropped.get() > 0 && metrics.mirror_write_errors.get() > 0);
    fs::remove_dir(&path).unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    while mirror.ask(|m| m.overview()).await.is_none() {
        assert!(Instant::now() < limit, "it is opened again after a pause");
        queued(&mirror, 5);
        mirror.flush().await;
    }
    queued(&mirror, 6);
    assert!(job(&mirror, 6).await.is_some());
}

#[tokio::test]
async fn a_full_disk_only_makes_it_stale_and_a_lost_claim_takes_its_envelope_along() {
    let Some(disk) = SmallDisk::new("3m") else { return };
    let path = disk.path().join("mirror.redb");
    let (mirror, metrics) = open(&path);
    queued(&mirror, 1);
    mirror.flush().await;
    let filler = |task: i64| {
        let bytes: Vec<u8> = (0..100_000).map(|_| rand::random()).collect();
        mirror.note(TaskId(task), What::Queued { lane: Lane::Pod, details: details(1), fetched_ms: 5, sealed: Some(bytes) });
    };
    for task in 100..200 {
        filler(task);
        mirror.flush().await;
        if metrics.mirror_write_errors.get() > 0 {
            break;
        }
    }
    assert!(metrics.mirror_write_errors.get() > 0, "the disk is full");
    // Its claim is not kept, so it must not be queued again from here.
    mirror.note(TaskId(1), What::Claimed { environment: "ci-1".into() });
    mirror.flush().await;
    assert!(metrics.mirror_dropped.get() > 0);
    disk.resize("30m");
    let limit = Instant::now() + Duration::from_secs(25);
    loop {
        mirror.flush().await;
        if mirror.ask(|m| m.overview()).await.is_some() {
            break;
        }
        assert!(Instant::now() < limit, "it works again after a pause");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    queued(&mirror, 500);
    assert!(job(&mirror, 500).await.is_some());
    assert_eq!(payload(&mirror, 1).await, None);
}

const PATH: &str = "MIRROR_TEST_CHILD_PATH";

/// The process that is killed: notes without end, and says each time that something is on disk.
#[tokio::test]
#[ignore = "started by the test below as a process of its own"]
async fn child() {
    let Ok(path) = std::env::var(PATH) else { return };
    let (mirror, _) = open(Path::new(&path));
    let first = mirror.ask(|m| m.overview()).await.unwrap().jobs.iter().map(|(_, _, n)| n).sum::<u64>();
    for task in i64::try_from(first).unwrap() + 1.. {
        queued(&mirror, task);
        mirror.note(TaskId(task), What::Slot);
        if task % 3 == 0 {
            mirror.flush().await;
            use std::io::Write as _;
            let mut out = std::io::stdout().lock();
            out.write_all(format!("\nkept {task}\n").as_bytes()).unwrap();
            out.flush().unwrap();
        }
    }
}

#[tokio::test]
async fn kill_9_while_it_writes_leaves_a_file_that_opens_whole_for_reader_and_writer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mirror.redb");
    for round in 0..10 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file::child", "--ignored", "--nocapture"])
            .env(PATH, &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (steps, mut kept) = (2 + rand::random_range(0..8), 0);
        for _ in 0..steps {
            let line = lines.by_ref().find_map(|line| line.strip_prefix("kept ")?.parse::<i64>().ok());
            kept = line.expect("the child works until it is killed");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let reader = Reader::open(&path).unwrap();
        let open = reader.snapshot().unwrap().open_jobs().unwrap();
        assert!(i64::try_from(open.len()).unwrap() >= kept, "round {round}: {} of {kept}", open.len());
        drop(reader);
        let (mirror, metrics) = open_when_free(&path).await;
        assert_eq!(rebuilt(&metrics, "damaged"), 0);
        mirror.close().await;
        drop(mirror);
    }
    let database = redb::Database::open(&path).unwrap();
    let txn = database.begin_read().unwrap();
    let rows = txn.open_table(redb::TableDefinition::<i64, &[u8]>::new("assignments")).unwrap().iter().unwrap().count();
    let index = txn.open_table(redb::TableDefinition::<(u8, u8, u64, i64), ()>::new("by_state")).unwrap().iter().unwrap().count();
    assert_eq!(rows, index, "rows and their index are one transaction");
}
