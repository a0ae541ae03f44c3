//! Stories of the demo's steps runner, called as the official runner is, against the stand-in forge.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{path::Path, process::Stdio, time::Duration};

use gitea_dynamic_runner::{
    demo::forge::{Fault, Forge, ForgeConfig, JobSpec, JobStatus, JobView, Method, RunWhen, StepSpec, Times},
    secret::Secret,
};
use nix::{sys::signal, unistd::Pid};
use tokio::process::{Child, Command};

const LIMIT: Duration = Duration::from_secs(20);
/// The variable that makes this test binary a runner.
const AS_RUNNER: &str = "TEST_AS_STEPS_RUNNER";

struct Story {
    forge: Forge,
    uuid: String,
    token: Secret,
    folder: tempfile::TempDir,
}

impl Story {
    async fn new() -> Self {
        let forge = Forge::start(ForgeConfig::default()).await.unwrap();
        let (uuid, token) = forge.new_runner("inner", &[]);
        let folder = tempfile::tempdir().unwrap();
        let registration = serde_json::json!({"id": 1, "uuid": uuid, "name": "inner", "token": token.expose(),
            "address": forge.url(), "labels": ["self-hosted:host", "pod:host"], "ephemeral": false});
        std::fs::write(folder.path().join(".runner"), registration.to_string()).unwrap();
        std::fs::write(
            folder.path().join("config.yaml"),
            "log:\n  level: info\nrunner:\n  file: .runner\n  envs:\n    FROM_CONFIG: yes\n",
        )
        .unwrap();
        Self { forge, uuid, token, folder }
    }

    /// The runner as a process of its own: this test binary, told by a variable to be the runner.
    fn start(&self) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "the_runner_itself", "--ignored", "--nocapture"])
            .env(AS_RUNNER, "1")
            .current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).spawn().unwrap()
    }

    /// Runs one job to its end, and the runner to its.
    async fn run(&self, job: JobSpec) -> JobView {
        let id = self.forge.push([job]).jobs[0];
        let mut runner = self.start();
        let view = self.forge.wait_done(id, LIMIT).await.unwrap();
        assert!(ended(&mut runner).await, "0, whatever the result");
        view
    }
}

async fn ended(runner: &mut Child) -> bool {
    tokio::time::timeout(LIMIT, runner.wait()).await.unwrap().unwrap().success()
}

fn job(key: &str) -> JobSpec {
    JobSpec::new(key, &["self-hosted", "pod"])
}

/// Not a test of its own: what `Story::start` runs.
#[test]
#[ignore = "the stories start it as their runner"]
fn the_runner_itself() {
    if std::env::var_os(AS_RUNNER).is_some() {
        let code = gitea_dynamic_runner::demo::steps::main_from(["daemon", "--once", "-c", "config.yaml"].map(Into::into));
        std::process::exit(if code == std::process::ExitCode::SUCCESS { 0 } else { 1 });
    }
}

#[tokio::test]
async fn a_job_turns_green_with_its_rows_in_order_and_its_steps_told_apart() {
    let story = Story::new().await;
    let view =
        story.run(job("hello").run("echo one; echo two >&2").run("echo $GITHUB_JOB $CI $FROM_CONFIG; printf no-newline")).await;
    assert_eq!(view.status, JobStatus::Success, "{view:?}");
    assert!(view.sealed && view.fetched == 1);
    assert_eq!(view.log.last().unwrap(), "", "the log ends with an empty row");
    let rows = |at: usize| {
        let (from, len) = (view.steps[at].log_index as usize, view.steps[at].log_length as usize);
        view.log[from..from + len].to_vec()
    };
    let mut first = rows(0)[1..].to_vec();
    first.sort();
    assert_eq!(first, ["one", "two"]);
    assert_eq!(rows(1)[1..], ["hello true yes", "no-newline"]);
    assert!(view.steps.iter().all(|step| step.status == JobStatus::Success && step.started <= step.stopped));
    assert!(view.stopped >= view.started);
}

#[tokio::test]
async fn a_failing_step_skips_the_next_but_not_always() {
    let story = Story::new().await;
    let always = StepSpec { run: Some("echo cleaned".into()), condition: Some("always()".into()), ..StepSpec::default() };
    let view = story.run(job("red").run("false; echo not-here").run("echo nor-here").step(always)).await;
    assert_eq!(view.status, JobStatus::Failure);
    let steps: Vec<_> = view.steps.iter().map(|step| step.status).collect();
    assert_eq!(steps, [JobStatus::Failure, JobStatus::Skipped, JobStatus::Success]);
    assert!(view.log.contains(&"cleaned".to_owned()) && !view.log.iter().any(|row| row == "not-here" || row == "nor-here"));
}

#[tokio::test]
async fn outputs_go_to_the_jobs_that_need_them_and_secrets_into_no_row() {
    let story = Story::new().await;
    let step = StepSpec {
        id: Some("make".into()),
        run: Some(
            "{ echo where=here; echo 'leak<<END'; echo \"$K\"; echo END; } >>$GITHUB_OUTPUT; echo LATER=later >>$GITHUB_ENV"
                .into(),
        ),
        ..StepSpec::default()
    };
    let mut plan =
        job("plan").secret("KEY", "hunter2\nsecond-line").step(step).run("echo $LATER; echo \"$K\"; echo ${{ github.token }}");
    plan.env.insert("K".into(), "${{ secrets.KEY }}".into());
    plan.outputs.insert("where".into(), "${{ steps.make.outputs.where }}".into());
    plan.outputs.insert("leak".into(), "${{ steps.make.outputs.leak }}".into());
    let mut build =
        job("build").var("COLOUR", "blue").needs("plan").run("echo ${{ needs.plan.outputs.where }} ${{ vars.COLOUR }}");
    build.run_when = RunWhen::Always;
    let pushed = story.forge.push([plan, build]);
    assert!(ended(&mut story.start()).await);
    let plan = story.forge.wait_done(pushed.jobs[0], LIMIT).await.unwrap();
    assert_eq!(plan.status, JobStatus::Success, "{plan:?}");
    assert_eq!(plan.outputs.keys().collect::<Vec<_>>(), ["where"], "an output with a secret is left out");
    assert!(plan.log.contains(&"later".to_owned()) && plan.log.contains(&"***".to_owned()));
    assert!(!plan.log.iter().any(|row| row.contains("hunter2") || row.contains("second-line")), "{:?}", plan.log);
    assert!(ended(&mut story.start()).await);
    let build = story.forge.wait_done(pushed.jobs[1], LIMIT).await.unwrap();
    assert!(build.log.contains(&"here blue".to_owned()), "{:?}", build.log);
}

#[tokio::test]
async fn what_it_cannot_do_fails_with_a_reason() {
    let story = Story::new().await;
    let uses = StepSpec { uses: Some("actions/checkout@v4".into()), ..StepSpec::default() };
    let bad = [job("a").step(uses), job("b").run("echo ${{ hashFiles('x') }}")];
    for (job, reason) in bad.into_iter().zip(["runs only run: steps", "does not know the expression"]) {
        let view = story.run(job.run("echo next")).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert!(view.log.iter().any(|row| row.contains(reason)), "{:?}", view.log);
        assert_eq!(view.steps[1].status, JobStatus::Skipped);
    }
}

#[tokio::test]
async fn a_cancelled_job_is_killed_and_reports_as_the_official_runner_does() {
    let story = Story::new().await;
    let id = story.forge.push([job("long").run("echo begun; sleep 600 & wait").run("echo never")]).jobs[0];
    let mut runner = story.start();
    let begun = |forge: &Forge| forge.job(id)?.log.contains(&"begun".to_owned()).then_some(());
    story.forge.wait_for("the step", LIMIT, begun).await.unwrap();
    story.forge.cancel(id);
    assert!(ended(&mut runner).await);
    let view = story.forge.job(id).unwrap();
    assert_eq!(view.status, JobStatus::Cancelled, "Gitea keeps its own word");
    assert!(!view.log.contains(&"never".to_owned()));
    nothing_runs_in(story.folder.path());
}

#[tokio::test]
async fn after_sigterm_it_reports_success_as_the_official_runner_does() {
    let story = Story::new().await;
    let id = story.forge.push([job("long").run("echo begun; sleep 600").run("echo never")]).jobs[0];
    let mut runner = story.start();
    let begun = |forge: &Forge| forge.job(id)?.log.contains(&"begun".to_owned()).then_some(());
    story.forge.wait_for("the step", LIMIT, begun).await.unwrap();
    signal::kill(Pid::from_raw(runner.id().unwrap() as i32), signal::Signal::SIGTERM).unwrap();
    assert!(ended(&mut runner).await);
    let view = story.forge.job(id).unwrap();
    assert_eq!(view.status, JobStatus::Success);
    let steps: Vec<_> = view.steps.iter().map(|step| step.status).collect();
    assert_eq!(steps, [JobStatus::Failure, JobStatus::Cancelled]);
    nothing_runs_in(story.folder.path());
}

#[tokio::test]
async fn a_server_in_trouble_loses_neither_row_nor_result() {
    let story = Story::new().await;
    let fail = || Fault::Fail { code: connectrpc::ErrorCode::Unavailable, message: "later".into() };
    story.forge.inject(Method::UpdateLog, Fault::LoseAnswer, Times::Next(3));
    story.forge.inject(Method::UpdateTask, fail(), Times::Next(3));
    story.forge.inject(Method::FetchTask, Fault::Page(502), Times::Next(1));
    let view = story.run(job("rows").run("for i in $(seq 3000); do echo row-$i; done")).await;
    assert_eq!(view.status, JobStatus::Success);
    let rows: Vec<_> = view.log.iter().filter(|row| row.starts_with("row-")).collect();
    assert_eq!(rows.len(), 3000, "none lost, none twice");
    assert!(rows.iter().enumerate().all(|(at, row)| **row == format!("row-{}", at + 1)));
    assert!(story.forge.runners().iter().any(|runner| runner.uuid == story.uuid) && !story.token.expose().is_empty());
}

/// No process works in a folder any more.
fn nothing_runs_in(folder: &Path) {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let left: Vec<_> =
        processes.filter(|process| std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder))).collect();
    assert!(left.is_empty(), "{left:?}");
}
