//! Which job runs where and when: capacity, independent pools, labels that cannot be served, strangers' pull requests.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use crate::support::{
    Gate,
    controller::{Controller, ControllerOptions},
    gitea::{RealGitea, Version, Visibility},
    story,
};

const STORY: Duration = Duration::from_secs(100);
const RUN: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_matrix_of_six_with_capacity_two_is_green_with_never_more_than_two_environments() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        gate.open();
        let controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 2, ..Default::default() }).await;
        let workflow = format!(
            r#"
on: push
jobs:
  many:
    runs-on: [self-hosted, pod]
    strategy:
      matrix:
        n: [1, 2, 3, 4, 5, 6]
    steps:
      - run: |
          {}
          sleep 1
"#,
            gate.sign("job ${{ matrix.n }}")
        );
        let (repository, run) = gitea.run("matrix", &workflow).await;
        let mut most = 0;
        let sampling = async {
            loop {
                most = most.max(controller.environments().len()).max(controller.executors().len());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let conclusion = tokio::select! {
            conclusion = repository.conclusion(run, RUN) => conclusion,
            () = sampling => unreachable!("it samples until the run has ended"),
        };
        assert_eq!(conclusion, "success");
        assert_eq!(most, 2, "two slots: both used, never a third");
        let jobs = repository.jobs(run).await;
        assert_eq!(jobs.iter().filter(|job| job.conclusion == "success").count(), 6, "{jobs:?}");
        for n in 1..=6 {
            assert_eq!(gate.calls(&format!("job {n}")), 1, "job {n} ran once");
        }
    })
    .await;
}

#[tokio::test]
async fn a_vm_job_is_not_held_up_by_a_full_pod_pool() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        let _controller = Controller::start(&gitea, ControllerOptions { pod_capacity: 1, ..Default::default() }).await;
        let pods = format!(
            r#"
on: push
jobs:
  slow:
    runs-on: [self-hosted, pod]
    strategy:
      matrix:
        n: [1, 2, 3]
    steps:
      - run: {}
"#,
            gate.wait("pod")
        );
        let (slow, slow_run) = gitea.run("slow", &pods).await;
        gate.called("pod", RUN).await;
        let vm = "on: push\njobs:\n  quick:\n    runs-on: [self-hosted, vm]\n    steps:\n      - run: echo quick\n";
        let (quick, quick_run) = gitea.run("quick", vm).await;
        assert_eq!(quick.conclusion(quick_run, Duration::from_secs(15)).await, "success");
        let waiting = slow.jobs(slow_run).await;
        assert!(waiting.iter().all(|job| job.conclusion.is_empty()), "the pod pool was full all the time: {waiting:?}");
        gate.open();
        assert_eq!(slow.conclusion(slow_run, RUN).await, "success");
    })
    .await;
}

#[tokio::test]
async fn a_job_whose_runs_on_names_no_backend_fails_and_its_log_says_why() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let workflow = "on: push\njobs:\n  nowhere:\n    runs-on: [self-hosted]\n    steps:\n      - run: echo never\n      - run: echo ever\n";
        let (repository, run) = gitea.run("nowhere", workflow).await;
        assert_eq!(repository.conclusion(run, RUN).await, "failure");
        let job = repository.jobs(run).await.remove(0);
        let log = repository.log(job.id).await;
        assert!(log.iter().any(|row| row.contains("runs-on") && row.contains("pod")), "the reason and the way out: {log:#?}");
        assert_eq!(job.steps.len(), 2, "{job:?}");
        assert!(job.steps.iter().all(|(_, conclusion)| conclusion != "success" && !conclusion.is_empty()), "{job:?}");
    })
    .await;
}

#[tokio::test]
async fn a_job_that_wants_a_container_fails_and_its_log_says_why() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let workflow = "on: push\njobs:\n  boxed:\n    runs-on: [self-hosted, pod]\n    container: debian:12\n    steps:\n      - run: echo never\n";
        let (repository, run) = gitea.run("boxed", workflow).await;
        assert_eq!(repository.conclusion(run, RUN).await, "failure");
        let log = repository.only_log(run).await;
        assert!(log.iter().any(|row| row.contains("container")), "{log:#?}");
        assert!(!log.iter().any(|row| row == "never"), "{log:#?}");
    })
    .await;
}

const PULL: &str = r#"
on: pull_request
jobs:
  check:
    runs-on: [self-hosted, pod]
    steps:
      - run: echo "identity $CI_SPIFFE_ID"
"#;

/// The log and the conclusion of the approved run of a stranger's pull request.
async fn strangers_pull_request(env: Vec<(&'static str, String)>) -> (String, Vec<String>) {
    let gitea = RealGitea::start(Version::Current, "").await;
    let _controller = Controller::start(&gitea, ControllerOptions { env, ..Default::default() }).await;
    let repository = gitea.repository("open", Visibility::Public, &[(".gitea/workflows/ci.yaml", PULL)]).await;
    repository.pull_request_of("stranger", &[("change.txt", "a change\n")]).await;
    let run = repository.newest_run_after(0).await;
    repository.approve(run).await;
    (repository.conclusion(run, RUN).await, repository.only_log(run).await)
}

#[tokio::test]
async fn a_fork_pull_request_is_refused_by_the_local_backend_and_its_log_says_why() {
    story(STORY, async {
        let (conclusion, log) = strangers_pull_request(Vec::new()).await;
        assert_eq!(conclusion, "failure", "{log:#?}");
        assert!(log.iter().any(|row| row.contains("LOCAL_FORK_PRS")), "the reason and the way out: {log:#?}");
        assert!(!log.iter().any(|row| row.starts_with("identity ")), "no step ran: {log:#?}");
    })
    .await;
}

#[tokio::test]
async fn an_allowed_fork_pull_request_runs_with_an_identity_of_its_own_kind() {
    story(STORY, async {
        let (conclusion, log) = strangers_pull_request(vec![("LOCAL_FORK_PRS", "1".to_owned())]).await;
        assert_eq!(conclusion, "success", "{log:#?}");
        assert!(
            log.iter().any(|row| row.starts_with("identity spiffe://") && row.contains("/ci-pr/boss/open/check")),
            "{log:#?}"
        );
    })
    .await;
}
