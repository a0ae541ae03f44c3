//! A stand-in forge, a controller that is registered there, and a gate that jobs wait at.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{path::Path, time::Duration};

use gitea_dynamic_runner::{
    demo::forge::{Fault, Forge, ForgeConfig, JobId, JobSpec, JobStatus, JobView, Method, Reported, Times},
    ids::{InstanceId, TaskId},
};

use crate::support::{
    Gate,
    controller::{Controller, ControllerOptions},
    eventually, passable,
};

/// What a job may take from push to its first step, and from its last step to its end.
pub(crate) const SOON: Duration = Duration::from_secs(25);
pub(crate) const POD: [&str; 2] = ["self-hosted", "pod"];

/// The controller is dropped first: its last reports need the forge.
pub(crate) struct World {
    pub(crate) controller: Controller,
    pub(crate) forge: Forge,
    pub(crate) gate: Gate,
    /// The controller's runner at the forge, by its UUID.
    pub(crate) runner: String,
    base: tempfile::TempDir,
}

impl World {
    /// The controller runs and is ready; it serves `pod` alone.
    pub(crate) async fn start(capacity: u32) -> Self {
        let mut world = Self::prepare(capacity, ForgeConfig::default(), Vec::new()).await;
        world.controller.start_again().await;
        world
    }

    /// The controller does not run yet. `env` are more settings for it.
    pub(crate) async fn prepare(pod_capacity: u32, config: ForgeConfig, mut env: Vec<(&'static str, String)>) -> Self {
        let forge = Forge::start(config).await.unwrap();
        let base = tempfile::Builder::new().prefix("g").rand_bytes(4).tempdir().unwrap();
        passable(base.path());
        let (runner, token) = forge.new_runner("under test", &[]);
        env.push(("GITEA_RUNNER_UUID", runner.clone()));
        env.push(("GITEA_RUNNER_TOKEN", token.expose().to_owned()));
        env.insert(0, ("VM_BACKEND", String::new()));
        let options = ControllerOptions { pod_capacity, env, ..Default::default() };
        let controller = Controller::prepare(base.path(), &forge.url(), None, options);
        Self { controller, forge, gate: Gate::new().await, runner, base }
    }

    pub(crate) fn base(&self) -> &Path {
        self.base.path()
    }

    pub(crate) fn instance(&self) -> InstanceId {
        InstanceId::of_uuid(&self.runner)
    }

    pub(crate) fn push(&self, job: JobSpec) -> JobId {
        self.forge.push([job]).jobs[0]
    }

    /// A job that signs `name`, then writes numbered rows until the gate opens.
    pub(crate) fn counting(&self, name: &str) -> JobSpec {
        JobSpec::new(name, &POD).run(&counting(&self.gate, name))
    }

    /// A job that only leaves its name at the gate.
    pub(crate) fn quick(&self, name: &str) -> JobSpec {
        JobSpec::new(name, &POD).run(&format!("{}\necho done", self.gate.sign(&format!("started {name}"))))
    }

    /// How often the job's first step has begun.
    pub(crate) fn started(&self, name: &str) -> usize {
        self.gate.calls(&format!("started {name}"))
    }

    pub(crate) async fn starts(&self, name: &str) {
        self.gate.called(&format!("started {name}"), SOON).await;
    }

    /// The job runs, and some of its rows are at the forge.
    pub(crate) async fn counts(&self, name: &str, job: JobId) {
        self.starts(name).await;
        self.see("rows of the running job", |forge| (numbered(&forge.job(job)?.log).len() > 3).then_some(())).await;
    }

    /// A lost fetch is counted when its job is failed: a moment after the job's page shows that.
    pub(crate) async fn counts_a_lost_fetch(&self) {
        let counted = async || (self.controller.metric("lost_fetch_total").await? == 1.0).then_some(());
        eventually("the lost fetch is counted", SOON, counted).await;
    }

    /// The task that the job was handed out as.
    pub(crate) async fn task(&self, job: JobId) -> TaskId {
        self.see("that the job is fetched", |forge| forge.job(job)?.task).await
    }

    /// The job is fetched and stored, and is said to be.
    pub(crate) async fn waits_with_us(&self, job: JobId) -> TaskId {
        let task = self.task(job).await;
        let stored = async || (self.controller.events("received", task) == 1).then_some(());
        eventually("it waits with us", SOON, stored).await;
        task
    }

    pub(crate) async fn see<T>(&self, what: &str, look: impl FnMut(&Forge) -> Option<T>) -> T {
        self.forge.wait_for(what, SOON, look).await.unwrap()
    }

    pub(crate) async fn ended(&self, job: JobId) -> JobView {
        self.forge.wait_done(job, SOON).await.unwrap()
    }

    pub(crate) async fn ends_green(&self, job: JobId) -> JobView {
        let view = self.ended(job).await;
        assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
        view
    }

    /// Waits for the one environment there shall be.
    pub(crate) async fn environment(&self) -> String {
        let found = eventually("one environment", SOON, async || {
            let mut all = self.controller.environments();
            (all.len() == 1).then(|| all.remove(0))
        });
        found.await
    }

    pub(crate) async fn no_environment(&self, limit: Duration) {
        eventually("no environment is left", limit, async || self.controller.environments().is_empty().then_some(())).await;
    }

    /// Gitea takes no log row, and so no `start` succeeds: environments wait unclaimed.
    pub(crate) fn hold_starts(&self) {
        self.refuse(Method::UpdateLog);
    }

    pub(crate) fn refuse(&self, method: Method) {
        self.forge.inject(method, Fault::Page(502), Times::UntilCleared);
    }

    /// Exactly one reporter at a time: what was sent of a job's log never began below or beyond what the forge held. Holds only
    /// where no answer was lost, for then rows are sent again.
    pub(crate) fn assert_one_reporter(&self, task: TaskId) {
        let mut held = 0;
        for report in self.forge.reports().into_iter().filter(|report| report.task == task) {
            let Reported::Rows { rows, held: now } = report.what else { continue };
            if !rows.is_empty() {
                assert_eq!(rows.start, held, "rows {rows:?} after {held} of task {task}");
                held = now;
            }
        }
    }
}

fn counting(gate: &Gate, name: &str) -> String {
    format!(
        "{sign}\ni=0\nuntil {ask}; do\n  echo \"row $i\"\n  i=$((i + 1))\n  sleep 0.1\ndone\necho \"rows in all: $i\"",
        sign = gate.sign(&format!("started {name}")),
        ask = gate.ask(&format!("counting {name}")),
    )
}

/// The numbers of the numbered rows, as they stand in the log.
pub(crate) fn numbered(log: &[String]) -> Vec<usize> {
    log.iter().filter_map(|row| row.strip_prefix("row ")?.parse().ok()).collect()
}

/// Every numbered row once, in order, to the last.
pub(crate) fn assert_whole(job: &JobView) {
    let said = job.log.iter().find_map(|row| row.strip_prefix("rows in all: ")?.parse::<usize>().ok());
    let said = said.unwrap_or_else(|| panic!("the last row is missing: {:#?}", job.log));
    assert_eq!(numbered(&job.log), (0..said).collect::<Vec<_>>(), "{}: every row once, in order", job.key);
}

/// The rows that hold `text`.
pub(crate) fn rows_with(job: &JobView, text: &str) -> usize {
    job.log.iter().filter(|row| row.contains(text)).count()
}
