//! Jobs that do not end by themselves: cancelled, stopped from outside, out of time, or finished while Gitea is away.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use nix::{sys::signal, unistd::Pid};

use crate::support::{
    Gate,
    controller::{Controller, ControllerOptions},
    eventually,
    gitea::{RealGitea, Version},
    story,
};

const STORY: Duration = Duration::from_secs(120);
const RUN: Duration = Duration::from_secs(60);

fn workflow(job: &str, script: &[&str]) -> String {
    let script: String = script.iter().map(|line| format!("          {line}\n")).collect();
    format!(
        "on: push\njobs:\n  {job}:\n    runs-on: [self-hosted, pod]\n    steps:\n      - run: |\n{script}      - if: always()\n        run: echo afterwards\n"
    )
}

#[tokio::test]
async fn a_job_cancelled_while_it_waits_never_starts() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 1, ..Default::default() }).await;
        let (first, first_run) = gitea.run("first", &workflow("hold", &[&gate.wait("holding")])).await;
        gate.called("holding", RUN).await;
        let (second, second_run) = gitea.run("second", &workflow("wait", &[&gate.sign("too late")])).await;
        // In our queue, not in Gitea's: the controller has fetched it.
        eventually("the second job is fetched", RUN, async || {
            second.jobs(second_run).await.iter().any(|job| job.status == "in_progress").then_some(())
        })
        .await;
        second.cancel(second_run).await;
        assert_eq!(second.conclusion(second_run, RUN).await, "cancelled");
        assert_eq!(controller.environments().len(), 1, "only the first job has one");
        gate.open();
        assert_eq!(first.conclusion(first_run, RUN).await, "success");
        assert_eq!(gate.calls("too late"), 0, "the cancelled job never ran");
    })
    .await;
}

async fn a_cancelled_running_job(version: Version) {
    let gitea = RealGitea::start(version, "").await;
    let gate = Gate::new().await;
    let controller = Controller::start(&gitea, ControllerOptions::default()).await;
    // Children that outlive the shell, ignore signals and have left its process group.
    let stubborn = "setsid bash -c 'trap \"\" TERM INT HUP; while :; do sleep 1000; done' &";
    let (repository, run) =
        gitea.run("cancelled", &workflow("endless", &["echo begun", stubborn, &gate.sign("running"), "sleep 1000"])).await;
    gate.called("running", RUN).await;
    assert!(!controller.processes().is_empty(), "the test sees the job's processes");
    repository.cancel(run).await;
    assert_eq!(repository.conclusion(run, RUN).await, "cancelled");
    eventually("no process of the job is left", Duration::from_secs(30), async || {
        controller.processes().is_empty().then_some(())
    })
    .await;
    let job = repository.jobs(run).await.remove(0);
    assert_eq!(job.conclusion, "cancelled");
    assert!(repository.log(job.id).await.iter().any(|row| row == "begun"), "what it had said stays");
}

#[tokio::test]
async fn a_job_cancelled_while_it_runs_is_never_green_and_its_children_are_gone() {
    story(STORY, a_cancelled_running_job(Version::Current)).await;
}

#[tokio::test]
async fn on_gitea_1_26_a_job_cancelled_while_it_runs_is_never_green_and_its_children_are_gone() {
    story(STORY, a_cancelled_running_job(Version::Old)).await;
}

#[tokio::test]
async fn a_job_whose_environment_is_stopped_from_outside_is_never_green() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let (repository, run) =
            gitea.run("stopped", &workflow("stopped", &["echo begun", &gate.sign("running"), "sleep 1000"])).await;
        gate.called("running", RUN).await;
        let executors = controller.executors();
        assert!(!executors.is_empty(), "the test sees the executor among {:?}", controller.processes());
        for executor in executors {
            signal::kill(Pid::from_raw(executor.pid), signal::SIGTERM).unwrap();
        }
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert!(["failure", "cancelled"].contains(&conclusion.as_str()), "{conclusion}: {log:#?}");
        assert!(log.iter().any(|row| row == "begun"), "{log:#?}");
    })
    .await;
}

#[tokio::test]
async fn a_job_past_its_deadline_is_stopped_and_never_green() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let env = vec![("POD_TIMEOUT_SECONDS", "30".to_owned())];
        let _controller = Controller::start(&gitea, ControllerOptions { env, ..Default::default() }).await;
        let (repository, run) = gitea.run("late", &workflow("late", &["echo begun", "sleep 1000"])).await;
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert!(["failure", "cancelled"].contains(&conclusion.as_str()), "{conclusion}: {log:#?}");
        assert!(log.iter().any(|row| row == "begun"), "{log:#?}");
        assert!(log.iter().any(|row| row.contains("deadline")), "its log says what stopped it: {log:#?}");
    })
    .await;
}

#[tokio::test]
async fn f9_a_job_ends_green_with_its_whole_log_though_gitea_is_away_for_five_minutes() {
    story(Duration::from_secs(460), async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let script = [
            "for i in $(seq 1 100); do echo \"early $i\"; done",
            &gate.wait("half"),
            "for i in $(seq 1 500); do echo \"late $i\"; done",
        ];
        let (repository, run) = gitea.run("away", &workflow("patient", &script)).await;
        gate.called("half", RUN).await;
        gitea.kill();
        gate.open();
        // The absence itself is the story; nothing can be asked meanwhile.
        tokio::time::sleep(Duration::from_secs(305)).await;
        gitea.start_again().await;
        assert_eq!(repository.conclusion(run, Duration::from_secs(90)).await, "success");
        let log = repository.only_log(run).await;
        for (word, count) in [("early", 100), ("late", 500)] {
            let rows: Vec<&str> = log.iter().filter_map(|row| row.strip_prefix(word)).filter(|row| !row.contains('$')).collect();
            let expected: Vec<String> = (1..=count).map(|i| format!(" {i}")).collect();
            assert_eq!(rows, expected, "every {word} row once, in order");
        }
        assert!(log.iter().any(|row| row == "afterwards"), "the last step ran");
    })
    .await;
}
