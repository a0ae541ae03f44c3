//! Faults that a real Gitea shows, with the official runner in the environments.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use crate::support::{
    Gate,
    controller::{Controller, ControllerOptions},
    eventually,
    gitea::{RealGitea, Version},
    official, story,
};

const RUN: Duration = Duration::from_secs(60);

/// Gitea gives a silent task up after 20 s instead of ten minutes, and looks every five seconds.
const IMPATIENT: &str = r"
[cron.stop_zombie_tasks]
ENABLED = true
RUN_AT_START = false
SCHEDULE = @every 5s
[actions]
ZOMBIE_TASK_TIMEOUT = 20s
";

#[tokio::test]
async fn f10_after_an_absence_in_which_gitea_gave_the_job_up_its_environment_goes_and_no_zombie_stays() {
    story(Duration::from_secs(150), async {
        let gitea = RealGitea::start(Version::Current, IMPATIENT).await;
        let gate = Gate::new().await;
        let mut controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 1, ..Default::default() }).await;
        let hold = format!(
            "on: push\njobs:\n  hold:\n    runs-on: [self-hosted, pod]\n    steps:\n      - run: |\n          {}\n          {}\n",
            gate.sign("running"),
            gate.wait("holding")
        );
        let (repository, run) = gitea.run("given-up", &hold).await;
        gate.called("running", RUN).await;
        // Nobody can report: to Gitea the job is silent for longer than it waits. Its sweep comes before our next report, which
        // would have saved the job: the controller is held back until then.
        gitea.kill();
        tokio::time::sleep(Duration::from_secs(22)).await;
        controller.kill9();
        gitea.start_again().await;
        assert_eq!(repository.conclusion(run, RUN).await, "failure");
        assert_eq!(controller.executors().len(), 1, "the environment does not know yet");
        controller.start_again().await;
        let began = Instant::now();
        eventually("the environment is gone", Duration::from_secs(60), async || {
            (controller.environments().is_empty() && controller.executors().is_empty()).then_some(())
        })
        .await;
        println!("environment gone {:?} after the start", began.elapsed());
        assert_eq!(repository.conclusion(run, RUN).await, "failure", "what Gitea said first stays");
        gate.open();
        // The slot is free for the next job.
        let (next, next_run) = gitea.run("next", &hold).await;
        assert_eq!(next.conclusion(next_run, RUN).await, "success");
    })
    .await;
}

const NOISE: &str = r#"
on: push
jobs:
  noise:
    runs-on: [RUNS_ON]
    steps:
      - run: |
          echo begin
          head -c 10485760 /dev/zero | tr '\0' 'x'
          echo
          printf 'not \377\376 utf-8 \303\n'
          printf 'a\rb\tc \033[31mred\033[0m\n'
          echo middle
      - run: |
          seq -f 'line %.0f' 1 100000
          echo end
"#;

#[tokio::test]
async fn a_ten_megabyte_line_a_hundred_thousand_lines_and_bytes_that_are_no_text_are_logged_as_the_official_runner_does() {
    story(Duration::from_secs(170), async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let (alone, run_alone) = gitea.run("alone", &NOISE.replace("RUNS_ON", "alone")).await;
        official::run_one_job(&gitea, "alone").await;
        assert_eq!(alone.conclusion(run_alone, RUN).await, "success");
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let (repository, run) = gitea.run("noise", &NOISE.replace("RUNS_ON", "self-hosted, pod")).await;
        assert_eq!(repository.conclusion(run, Duration::from_secs(90)).await, "success");
        let said = |log: Vec<String>| {
            let begin = log.iter().position(|row| row == "begin").unwrap();
            let mut rows = log[begin..].to_vec();
            // See the story of the two steps: under load the seal travels with an empty row.
            rows.pop_if(|last| last.is_empty());
            rows
        };
        let (expected, found) = (said(alone.only_log(run_alone).await), said(repository.only_log(run).await));
        assert!(expected.iter().filter(|row| row.starts_with("line ")).count() >= 100_000, "the yardstick has all lines");
        assert_eq!(found.len(), expected.len());
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let (longest, short) = (found.len().max(expected.len()), found.len().min(expected.len()));
            assert_eq!(&found[..short.min(found.len())], &expected[..short], "row {number}");
            assert_eq!(longest, short, "row {number} has the same length");
        }
    })
    .await;
}
