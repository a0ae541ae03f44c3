//! The mirror goes away at bad moments: the results are the same as with it, and what is present is shown again soon.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gitea_dynamic_runner::demo::forge::{JobId, JobSpec, JobStatus};

use crate::{
    shown::{in_phase, says, shown},
    support::{eventually, small_disk::SmallDisk, story},
    world::{POD, SOON, World, assert_whole},
};

const JOBS: usize = 50;
const SLOTS: u32 = 12;
/// Present facts are complete again within this after a start.
const COMPLETE: Duration = Duration::from_secs(10);

fn mirror(world: &World) -> PathBuf {
    world.controller.state().join("private/mirror.redb")
}

fn name(n: usize) -> String {
    format!("job-{n}")
}

/// Each waits at the gate; every fifth ends red.
fn push_all(world: &World) -> Vec<JobId> {
    let spec = |n: usize| {
        let (name, end) = (name(n), if n.is_multiple_of(5) { "exit 3" } else { "echo done" });
        let gate = &world.gate;
        let script = format!("{}\nuntil {}; do sleep 1; done\n{end}", gate.sign(&format!("started {name}")), gate.ask("waits"));
        JobSpec::new(&name, &POD).run(&script)
    };
    world.forge.push((0..JOBS).map(spec)).jobs
}

/// The tasks that the mirror shows in this phase.
fn tasks(world: &World, phase: &str) -> Option<BTreeSet<i64>> {
    let (text, code) = says(world, &["show", "--json", "jobs", "--limit", "1000", "--phase", phase]);
    let rows: serde_json::Value = serde_json::from_str(&text).ok().filter(|_| code == 0)?;
    rows.as_array()?.iter().map(|row| row["task"].as_i64()).collect()
}

async fn all_end_as_they_should(world: &World, jobs: &[JobId]) {
    for (n, job) in jobs.iter().enumerate() {
        let view = world.forge.wait_done(*job, Duration::from_secs(150)).await.unwrap();
        let wanted = if n.is_multiple_of(5) { JobStatus::Failure } else { JobStatus::Success };
        assert_eq!(view.status, wanted, "{}: {:#?}", name(n), view.log);
    }
    for n in 0..jobs.len() {
        assert_eq!(world.started(&name(n)), 1, "{}", name(n));
    }
}

/// Jobs that were handed out and have not begun, and the number that runs.
fn held(world: &World, jobs: &[JobId]) -> (usize, usize) {
    let fetched = jobs.iter().filter(|job| world.forge.job(**job).unwrap().task.is_some()).count();
    let started = (0..jobs.len()).filter(|n| world.started(&name(*n)) > 0).count();
    (fetched - started, started)
}

#[tokio::test(flavor = "multi_thread")]
async fn mirror_deleted_under_50_running_and_waiting_jobs_changes_nothing() {
    story(Duration::from_secs(400), async {
        let mut world = World::start(SLOTS).await;
        let jobs = push_all(&world);
        let slots = usize::try_from(SLOTS).unwrap();
        eventually("twelve run and as many wait with us", Duration::from_secs(90), async || {
            let (waiting, running) = held(&world, &jobs);
            (running == slots && waiting >= slots).then_some(())
        })
        .await;
        world.controller.kill9();
        fs::remove_file(mirror(&world)).unwrap();
        let began = Instant::now();
        world.controller.spawn();
        let complete = eventually("all present facts are shown", Duration::from_secs(30), async || {
            let (claimed, queued) = (tasks(&world, "claimed")?, tasks(&world, "queued")?);
            let (waiting, _) = held(&world, &jobs);
            let slots_shown = shown(&world, &["slots"]).as_array()?.len();
            (claimed.len() == slots && queued.len() == waiting && slots_shown == slots)
                .then(|| (began.elapsed(), claimed, queued))
        });
        let (took, claimed, queued) = complete.await;
        assert!(took <= COMPLETE, "complete only after {took:?}");
        let known = |n: usize| world.forge.job(jobs[n]).unwrap().task.unwrap().0;
        let runs: BTreeSet<i64> = (0..JOBS).filter(|n| world.started(&name(*n)) > 0).map(known).collect();
        assert_eq!(claimed, runs);
        assert!(queued.is_disjoint(&claimed));
        let row = shown(&world, &["job", &claimed.first().unwrap().to_string()]);
        assert!(row["rebuilt"] == true && row["repository"] == "boss/demo" && row["environment"].is_string(), "{row:#}");
        world.controller.ready().await;
        world.gate.open();
        all_end_as_they_should(&world, &jobs).await;
        world.no_environment(SOON).await;
        every_task_once_more(&world).await;
        all_end_as_they_should(&world, &jobs).await;
    })
    .await;
}

/// Each finished task is delivered once more, and none runs: what the mirror knows is not even queued, and what it does not know
/// Gitea says is over (rule R4).
async fn every_task_once_more(world: &World) {
    let begins = world.controller.log().len();
    let refused = |words: &[&str]| -> BTreeSet<String> {
        let log = world.controller.log();
        let rows = log[begins..].lines().filter(|row| words.iter().any(|words| row.contains(words)));
        let values = rows.filter_map(|row| serde_json::from_str::<serde_json::Value>(row).ok());
        values.filter_map(|row| Some(row["assignment"].as_str()?.to_owned())).collect()
    };
    let known = || refused(&["Gitea delivered a task that is over"]);
    let by_gitea = || refused(&["the job is over at Gitea, or not there any more", "a waiting job is not wanted any more"]);
    let created = || world.controller.log().matches("\"event\":\"executor_created\"").count();
    let made = created();
    world.forge.give_all_again(JOBS);
    eventually("each is refused", Duration::from_secs(90), async || (known().union(&by_gitea()).count() == JOBS).then_some(()))
        .await;
    // Those that ran when the mirror went have no token there, so for them there is rule R4 alone.
    let (known, by_gitea) = (known().len(), by_gitea().len());
    assert!(known >= JOBS - 2 * usize::try_from(SLOTS).unwrap() && by_gitea > 0, "{known} and {by_gitea}");
    assert_eq!(created(), made, "no environment was made");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_finished_task_delivered_once_more_runs_by_no_mirror_at_all() {
    story(Duration::from_secs(150), async {
        let mut world = World::start(4).await;
        world.gate.open();
        let jobs: Vec<_> = (0..8).map(|n| world.push(world.quick(&name(n)))).collect();
        for job in &jobs {
            world.ends_green(*job).await;
        }
        world.no_environment(SOON).await;
        world.controller.sigterm();
        fs::remove_file(mirror(&world)).unwrap();
        world.controller.start_again().await;
        let created = || world.controller.log().matches("\"event\":\"executor_created\"").count();
        let made = created();
        world.forge.give_all_again(8);
        eventually("each is found over at Gitea", SOON * 2, async || {
            let log = world.controller.log();
            let over = log.matches("the job is over at Gitea, or not there any more").count();
            (over + log.matches("a waiting job is not wanted any more").count() == 8).then_some(())
        })
        .await;
        assert_eq!(created(), made);
        assert_eq!(world.controller.metric("repeated_tasks_total").await, Some(0.0));
        assert_eq!((0..8).map(|n| world.started(&name(n))).sum::<usize>(), 8);
    })
    .await;
}

type Harm = fn(&Path);

/// What is done to the live file.
const HARM: [(&str, Harm); 5] = [
    ("removed", |path| fs::remove_file(path).unwrap()),
    ("cut", |path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(fs::metadata(path).unwrap().len() / 2).unwrap();
    }),
    ("emptied", |path| {
        fs::OpenOptions::new().write(true).truncate(true).open(path).unwrap();
    }),
    ("overwritten", |path| fs::write(path, "no database\n".repeat(20_000)).unwrap()),
    ("replaced", |path| {
        fs::remove_file(path).unwrap();
        fs::write(path, "another file").unwrap();
    }),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_is_removed_cut_or_overwritten_under_the_live_controller_harms_no_job_and_comes_back() {
    story(Duration::from_secs(200), async {
        let world = World::start(2).await;
        let long = world.push(world.counting("long"));
        world.counts("long", long).await;
        let task = world.task(long).await;
        for (n, (kind, harm)) in HARM.into_iter().enumerate() {
            in_phase(&world, task, "claimed").await;
            harm(&mirror(&world));
            let job = world.push(world.quick(&name(n)));
            assert_eq!(world.ended(job).await.status, JobStatus::Success, "{kind}");
            in_phase(&world, task, "claimed").await;
            let other = world.task(job).await;
            eventually(&format!("{kind}: nothing is shown as open that is over"), SOON, async || {
                let open = tasks(&world, "claimed")?;
                (open == BTreeSet::from([task.0]) && !open.contains(&other.0)).then_some(())
            })
            .await;
        }
        let mut begun = 0.0;
        for reason in ["damaged", "vanished"] {
            begun += world.controller.metric(&format!("mirror_rebuilds_total{{reason=\"{reason}\"}}")).await.unwrap();
        }
        assert!(begun >= 3.0, "made anew {begun} times");
        let bad = fs::read_dir(world.controller.state().join("private")).unwrap();
        let bad = bad.filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().contains(".bad-")).count();
        assert!((1..=3).contains(&bad), "{bad} set aside");
        world.gate.open();
        assert_whole(&world.ends_green(long).await);
        assert_eq!(world.started("long"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_below_the_mirror_holds_no_job_up_and_it_comes_back_when_there_is_space() {
    let Some(disk) = SmallDisk::new("3m") else { return };
    story(Duration::from_secs(150), async {
        let mut world = World::start(2).await;
        world.controller.sigterm();
        // The mirror alone lies on the small disk.
        let (here, there) = (mirror(&world), disk.path().join("mirror.redb"));
        fs::copy(&here, &there).unwrap();
        fs::remove_file(&here).unwrap();
        std::os::unix::fs::symlink(&there, &here).unwrap();
        world.controller.start_again().await;
        let filler = disk.path().join("filler");
        fs::write(&filler, vec![1; 4 << 20]).unwrap_err();
        let long = world.push(world.counting("long"));
        world.counts("long", long).await;
        for n in 0..40 {
            let job = world.push(world.quick(&name(n)).secret("LARGE", &"x".repeat(20_000)));
            world.ends_green(job).await;
            if world.controller.metric("mirror_write_errors_total").await.unwrap() > 0.0 {
                break;
            }
        }
        assert!(world.controller.metric("mirror_write_errors_total").await.unwrap() > 0.0, "the disk was full");
        let job = world.push(world.quick("on a full disk"));
        world.ends_green(job).await;
        assert_eq!(world.controller.readiness().await.as_deref(), Some(""), "it is ready all the while");
        fs::remove_file(&filler).unwrap();
        let task = world.task(long).await;
        in_phase(&world, task, "claimed").await;
        let after = world.push(world.quick("after"));
        world.ends_green(after).await;
        let task = world.task(after).await;
        in_phase(&world, task, "finished").await;
        world.gate.open();
        assert_whole(&world.ends_green(long).await);
    })
    .await;
}
