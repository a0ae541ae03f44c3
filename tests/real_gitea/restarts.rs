//! The controller goes and comes back under running and waiting jobs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use crate::support::{
    Gate,
    controller::{Controller, ControllerOptions},
    eventually,
    gitea::{Job, RealGitea, Repository, Version},
    story,
};

const STORY: Duration = Duration::from_secs(150);
const RUN: Duration = Duration::from_secs(60);

/// Five jobs that write numbered rows until the gate opens.
fn five_jobs(gate: &Gate) -> String {
    format!(
        r#"
on: push
jobs:
  count:
    runs-on: [self-hosted, pod]
    strategy:
      matrix:
        n: [1, 2, 3, 4, 5]
    steps:
      - run: |
          {sign}
          i=0
          until {ask}; do
            echo "row $i"
            i=$((i + 1))
            sleep 0.1
          done
          echo "rows in all: $i"
"#,
        sign = gate.sign("started ${{ matrix.n }}"),
        ask = gate.ask("counting ${{ matrix.n }}"),
    )
}

/// How many jobs have begun their step.
fn started(gate: &Gate) -> usize {
    (1..=5).filter(|n| gate.calls(&format!("started {n}")) > 0).count()
}

/// Three jobs run and write, two wait in our queue.
async fn three_run_and_two_wait(gate: &Gate, repository: &Repository<'_>, run: i64) {
    eventually("three jobs run", RUN, async || (started(gate) == 3).then_some(())).await;
    eventually("all five are fetched", RUN, async || {
        let jobs = repository.jobs(run).await;
        (jobs.iter().filter(|job| job.status == "in_progress").count() == 5).then_some(())
    })
    .await;
    let written = |n: i32| gate.calls(&format!("counting {n}")) >= 10;
    eventually("each running job has written", RUN, async || ((1..=5).filter(|n| written(*n)).count() == 3).then_some(())).await;
}

fn numbered_rows_are_whole(job: &Job, log: &[String]) {
    let rows: Vec<usize> = log.iter().filter_map(|row| row.strip_prefix("row ")?.parse().ok()).collect();
    let said: usize =
        log.iter().find_map(|row| row.strip_prefix("rows in all: ")?.parse().ok()).unwrap_or_else(|| panic!("{log:#?}"));
    assert_eq!(rows, (0..said).collect::<Vec<_>>(), "{}: every row once, in order", job.name);
}

async fn all_five_end_green(gate: &Gate, repository: &Repository<'_>, run: i64) {
    assert_eq!(repository.conclusion(run, RUN).await, "success");
    let jobs = repository.jobs(run).await;
    assert_eq!(jobs.len(), 5, "{jobs:?}");
    for job in &jobs {
        assert_eq!(job.conclusion, "success", "{job:?}");
        numbered_rows_are_whole(job, &repository.log(job.id).await);
    }
    for n in 1..=5 {
        assert_eq!(gate.calls(&format!("started {n}")), 1, "job {n} ran once");
    }
}

#[tokio::test]
async fn after_kill_9_with_three_running_and_two_waiting_jobs_all_five_end_green_each_run_once() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let mut controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 3, ..Default::default() }).await;
        let (repository, run) = gitea.run("five", &five_jobs(&gate)).await;
        three_run_and_two_wait(&gate, &repository, run).await;
        controller.kill9();
        let counted: Vec<usize> = (1..=5).map(|n| gate.calls(&format!("counting {n}"))).collect();
        eventually("the running jobs go on without a controller", RUN, async || {
            let now = (1..=5).map(|n| gate.calls(&format!("counting {n}")));
            (now.zip(&counted).filter(|(now, before)| now > *before).count() == 3).then_some(())
        })
        .await;
        controller.start_again().await;
        assert_eq!(started(&gate), 3, "the three environments still hold the three slots");
        gate.open();
        all_five_end_green(&gate, &repository, run).await;
    })
    .await;
}

#[tokio::test]
async fn sigterm_ends_the_controller_within_ten_seconds_and_harms_no_job() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let mut controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 3, ..Default::default() }).await;
        let (repository, run) = gitea.run("five", &five_jobs(&gate)).await;
        three_run_and_two_wait(&gate, &repository, run).await;
        controller.sigterm();
        assert_eq!(controller.environments().len(), 3, "running environments are left running");
        // Their jobs may even end in the meantime.
        gate.open();
        eventually("the three jobs come to their end", RUN, async || {
            let asked: usize = (1..=5).map(|n| gate.calls(&format!("counting {n}"))).sum();
            tokio::time::sleep(Duration::from_secs(1)).await;
            (asked == (1..=5).map(|n| gate.calls(&format!("counting {n}"))).sum::<usize>()).then_some(())
        })
        .await;
        controller.start_again().await;
        all_five_end_green(&gate, &repository, run).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_with_three_running_and_two_waiting_jobs_and_restarted_the_three_end_and_undone_the_two_run_once_each() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let mut controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 3, ..Default::default() }).await;
        let (repository, run) = gitea.run("five", &five_jobs(&gate)).await;
        three_run_and_two_wait(&gate, &repository, run).await;
        let drain = |controller: &Controller, args: &[&str]| {
            let said = controller.command().arg("drain").args(args).output().unwrap();
            assert!(said.status.success(), "drain {args:?}: {}", String::from_utf8_lossy(&said.stderr));
        };
        drain(&controller, &[]);
        controller.sigterm();
        controller.start_again().await;
        gate.open();
        drain(&controller, &["--wait=60"]);
        let ended = repository.jobs(run).await.into_iter().filter(|job| job.conclusion == "success").count();
        assert_eq!((ended, started(&gate)), (3, 3), "the waiting two were not started");
        assert_eq!(controller.environments(), Vec::<String>::new());
        drain(&controller, &["--undo"]);
        all_five_end_green(&gate, &repository, run).await;
    })
    .await;
}
