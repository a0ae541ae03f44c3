//! What the stand-in forge knows, and how jobs move: pushed, handed out, cancelled, swept. No IO, no waiting.
//!
//! Every rule here was measured on a Gitea 1.27.3, and `tests/protocol.rs` holds the two against each other. Reports of a runner
//! are in `report`; the protocol around both is in `rpc`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant, SystemTime},
};

use super::{
    Forge, ForgeConfig,
    faults::Given,
    job::{self, JobId, JobSpec, Place, RunId, RunWhen},
};
use crate::{ids::TaskId, proto::runner as rpc, secret::Secret};

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStatus {
    /// Its needs are not done.
    Blocked,
    Waiting,
    Running,
    /// Cancelled, and its runner has yet to report the end.
    Cancelling,
    Success,
    Failure,
    Cancelled,
    Skipped,
}

impl JobStatus {
    pub fn is_final(self) -> bool {
        matches!(self, Self::Success | Self::Failure | Self::Cancelled | Self::Skipped)
    }

    /// What UpdateTask answers: a cancelling job already shows CANCELLED.
    pub(super) fn result(self) -> rpc::TaskResult {
        match self {
            Self::Blocked | Self::Waiting | Self::Running => rpc::TaskResult::RESULT_UNSPECIFIED,
            Self::Success => rpc::TaskResult::RESULT_SUCCESS,
            Self::Failure => rpc::TaskResult::RESULT_FAILURE,
            Self::Cancelling | Self::Cancelled => rpc::TaskResult::RESULT_CANCELLED,
            Self::Skipped => rpc::TaskResult::RESULT_SKIPPED,
        }
    }

    /// The end that a runner reports; `None` for a report that ends nothing.
    pub(super) fn of_result(result: buffa::EnumValue<rpc::TaskResult>) -> Option<Self> {
        match result.as_known()? {
            rpc::TaskResult::RESULT_UNSPECIFIED => None,
            rpc::TaskResult::RESULT_SUCCESS => Some(Self::Success),
            rpc::TaskResult::RESULT_FAILURE => Some(Self::Failure),
            rpc::TaskResult::RESULT_CANCELLED => Some(Self::Cancelled),
            rpc::TaskResult::RESULT_SKIPPED => Some(Self::Skipped),
        }
    }
}

/// A refusal as Gitea words it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Plain(&'static str),
    Unregistered,
    Internal(String),
    Archived,
}

#[derive(Clone)]
pub(super) struct Runner {
    pub(super) id: i64,
    pub(super) uuid: String,
    pub(super) token: Secret,
    pub(super) name: String,
    pub(super) version: String,
    pub(super) labels: Vec<String>,
    pub(super) disabled: bool,
    pub(super) ephemeral: bool,
    pub(super) cancelling: bool,
    pub(super) last_seen: SystemTime,
}

#[derive(Clone)]
pub(super) struct Job {
    pub(super) id: JobId,
    pub(super) run: RunId,
    pub(super) spec: JobSpec,
    pub(super) status: JobStatus,
    pub(super) pushed: SystemTime,
    /// Times that it was handed out; more than 1 only after a backup was restored.
    pub(super) fetched: u32,
    pub(super) task: Option<Task>,
    pub(super) stopped: Option<SystemTime>,
}

#[derive(Clone)]
pub(super) struct Task {
    pub(super) id: TaskId,
    pub(super) runner: i64,
    pub(super) started: SystemTime,
    /// The clock of the zombie sweep, moved by reports and by rows.
    pub(super) updated: Instant,
    pub(super) claimed: Instant,
    pub(super) steps: Vec<Step>,
    pub(super) log: Vec<String>,
    pub(super) sealed: bool,
    pub(super) outputs: BTreeMap<String, String>,
}

#[derive(Clone)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) status: JobStatus,
    pub(super) log_index: i64,
    pub(super) log_length: i64,
    pub(super) started: Option<SystemTime>,
    pub(super) stopped: Option<SystemTime>,
}

#[derive(Clone)]
pub(super) struct State {
    pub(super) version: i64,
    pub(super) registration_token: Secret,
    pub(super) runners: BTreeMap<i64, Runner>,
    pub(super) jobs: BTreeMap<JobId, Job>,
    pub(super) tasks: BTreeMap<TaskId, JobId>,
    /// Bytes of all logs held.
    pub(super) log_bytes: usize,
    waiting: BTreeSet<(u64, JobId)>,
    /// The task that was handed out last, and whether it is to be handed out once more.
    given: Given,
    waited: u64,
    last_run: i64,
    last_task: i64,
    last_runner: i64,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            version: 1,
            registration_token: Secret::random(),
            runners: BTreeMap::new(),
            jobs: BTreeMap::new(),
            tasks: BTreeMap::new(),
            log_bytes: 0,
            waiting: BTreeSet::new(),
            given: Given::default(),
            waited: 0,
            last_run: 0,
            last_task: 0,
            last_runner: 0,
        }
    }

    /// A new run. The version moves once, however many of its jobs wait.
    pub(super) fn push(&mut self, specs: Vec<JobSpec>) -> (RunId, Vec<JobId>) {
        self.last_run += 1;
        let run = RunId(self.last_run);
        let mut ids = Vec::with_capacity(specs.len());
        for spec in specs {
            let id = JobId(self.jobs.last_key_value().map_or(1, |(last, _)| last.0 + 1));
            let status = if spec.needs.is_empty() { JobStatus::Waiting } else { JobStatus::Blocked };
            let pushed = SystemTime::now();
            self.jobs.insert(id, Job { id, run, spec, status, pushed, fetched: 0, task: None, stopped: None });
            if status == JobStatus::Waiting {
                self.enqueue(id);
            }
            ids.push(id);
        }
        self.version += 1;
        (run, ids)
    }

    fn enqueue(&mut self, id: JobId) {
        self.waited += 1;
        self.waiting.insert((self.waited, id));
    }

    /// The oldest waiting job that matches the runner's labels, claimed. An empty `runs-on` matches everyone.
    pub(super) fn pick(&mut self, runner: i64, root_url: &str) -> Result<Option<rpc::Task>, Refusal> {
        let Some(row) = self.runners.get(&runner) else { return Err(Refusal::Unregistered) };
        if row.disabled || (row.ephemeral && self.busy(runner)) {
            return Ok(None);
        }
        if let Some(task) = self.given.again() {
            return Ok(Some(task));
        }
        let matches = |job: &Job| job.spec.labels.iter().all(|label| row.labels.contains(label));
        let found = self.waiting.iter().find(|(_, id)| self.jobs.get(id).is_some_and(matches)).copied();
        let Some((order, id)) = found else { return Ok(None) };
        self.waiting.remove(&(order, id));
        let task = self.claim(id, runner, root_url);
        self.given.remember(task.as_ref());
        Ok(task)
    }

    pub(super) fn give_again(&mut self, many: usize) {
        self.given.order(many);
        self.version += 1;
    }

    fn busy(&self, runner: i64) -> bool {
        self.jobs.values().any(|job| !job.status.is_final() && job.task.as_ref().is_some_and(|task| task.runner == runner))
    }

    fn claim(&mut self, id: JobId, runner: i64, root_url: &str) -> Option<rpc::Task> {
        self.last_task += 1;
        let task = TaskId(self.last_task);
        let token = Secret::new(hex::encode(rand::random::<[u8; 20]>()));
        let needs = self.needs(id);
        let job = self.jobs.get_mut(&id)?;
        let waiting = |step: &job::StepSpec| Step {
            name: step.title(),
            status: JobStatus::Waiting,
            log_index: 0,
            log_length: 0,
            started: None,
            stopped: None,
        };
        job.status = JobStatus::Running;
        job.fetched += 1;
        job.task = Some(Task {
            id: task,
            runner,
            started: SystemTime::now(),
            updated: Instant::now(),
            claimed: Instant::now(),
            steps: job.spec.steps.iter().map(waiting).collect(),
            log: Vec::new(),
            sealed: false,
            outputs: BTreeMap::new(),
        });
        self.tasks.insert(task, id);
        let pushed = job.pushed.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let place = Place { task, job: id, run: job.run, root_url, token: &token, pushed };
        Some(job::task(&job.spec, &place, needs))
    }

    fn siblings(&self, id: JobId) -> impl Iterator<Item = &Job> {
        let job = &self.jobs[&id];
        self.jobs.values().filter(move |other| other.run == job.run && job.spec.needs.contains(&other.spec.key))
    }

    fn needs(&self, id: JobId) -> BTreeMap<String, rpc::TaskNeed> {
        let need = |job: &Job| rpc::TaskNeed {
            outputs: job.task.iter().flat_map(|task| task.outputs.clone()).collect(),
            result: job.status.result().into(),
            ..Default::default()
        };
        self.siblings(id).map(|job| (job.spec.key.clone(), need(job))).collect()
    }

    /// Ends a job. The version moves if others of its repository wait: idle runners shall look again.
    pub(super) fn finish(&mut self, id: JobId, status: JobStatus, stopped: SystemTime) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.status = status;
        job.stopped = Some(stopped);
        let (run, repository, runner) = (job.run, job.spec.repository().to_owned(), job.task.as_ref().map(|task| task.runner));
        if self.waiting.iter().any(|(_, other)| self.jobs[other].spec.repository() == repository) {
            self.version += 1;
        }
        if let Some(runner) = runner.filter(|runner| self.runners.get(runner).is_some_and(|row| row.ephemeral)) {
            self.runners.remove(&runner);
        }
        self.unblock(run);
    }

    /// Blocked jobs of the run whose needs are all done now wait, or are skipped. Skipping one may free another.
    fn unblock(&mut self, run: RunId) {
        loop {
            let ready = self.jobs.values().find(|job| {
                job.run == run && job.status == JobStatus::Blocked && self.siblings(job.id).all(|need| need.status.is_final())
            });
            let Some(job) = ready else { return };
            let (id, when) = (job.id, job.spec.run_when);
            let succeeded = self.siblings(id).all(|need| need.status == JobStatus::Success);
            let runs = succeeded || when == RunWhen::Always;
            if runs {
                self.enqueue(id);
                self.version += 1;
            }
            if let Some(job) = self.jobs.get_mut(&id) {
                job.status = if runs { JobStatus::Waiting } else { JobStatus::Skipped };
            }
        }
    }

    /// As the button of the pages does. A runner with the capability `cancelling` that reported lately may finish its work first.
    pub(super) fn cancel(&mut self, id: JobId, report_timeout: Duration) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.status.is_final() {
            return;
        }
        let Some(task) = &job.task else {
            self.waiting.retain(|(_, other)| *other != id);
            return self.finish(id, JobStatus::Cancelled, SystemTime::now());
        };
        let polite = self.runners.get(&task.runner).is_some_and(|runner| runner.cancelling);
        if polite && task.updated.elapsed() <= report_timeout {
            job.status = JobStatus::Cancelling;
        } else {
            self.finish(id, JobStatus::Cancelled, SystemTime::now());
        }
    }

    /// Ends what nobody reported on for too long, and what lasted too long. Tells whether there was any.
    pub(super) fn sweep(&mut self, config: &ForgeConfig) -> bool {
        let over = |job: &&Job| {
            let Some(task) = job.task.as_ref().filter(|_| !job.status.is_final()) else { return false };
            let endless = job.status == JobStatus::Running && task.claimed.elapsed() > config.endless_timeout;
            task.updated.elapsed() > config.zombie_timeout || endless
        };
        let ids: Vec<_> = self.jobs.values().filter(over).map(|job| (job.id, job.status)).collect();
        for &(id, status) in &ids {
            if let Some(task) = self.jobs.get_mut(&id).and_then(|job| job.task.as_mut()) {
                // A log without any row has no file, and Gitea leaves it open.
                task.sealed |= !task.log.is_empty();
                let open = |step: &&mut Step| !step.status.is_final();
                let end = if status == JobStatus::Cancelling { JobStatus::Cancelled } else { JobStatus::Failure };
                task.steps.iter_mut().filter(open).for_each(|step| step.status = end);
            }
            let end = if status == JobStatus::Cancelling { JobStatus::Cancelled } else { JobStatus::Failure };
            self.finish(id, end, SystemTime::now());
        }
        !ids.is_empty()
    }

    /// Deletes a job with its task, as deleting its repository does.
    pub(super) fn forget(&mut self, id: JobId) {
        self.waiting.retain(|(_, other)| *other != id);
        self.tasks.retain(|_, job| *job != id);
        self.jobs.remove(&id);
    }

    pub(super) fn register(&mut self, request: &rpc::RegisterRequest) -> Result<Runner, Refusal> {
        if request.token.is_empty() || request.name.is_empty() {
            return Err(Refusal::Plain("missing runner token, name"));
        }
        if !self.registration_token.matches(&request.token) {
            return Err(Refusal::Plain("runner registration token not found"));
        }
        self.last_runner += 1;
        let hex = hex::encode(rand::random::<[u8; 16]>());
        let runner = Runner {
            id: self.last_runner,
            uuid: format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]),
            token: Secret::new(hex::encode(rand::random::<[u8; 20]>())),
            name: request.name.clone(),
            version: request.version.clone(),
            labels: request.labels.clone(),
            disabled: false,
            ephemeral: request.ephemeral,
            cancelling: says_cancelling(&request.capabilities),
            last_seen: SystemTime::now(),
        };
        self.runners.insert(runner.id, runner.clone());
        Ok(runner)
    }

    /// Overwrites what was known: a capability that is not named again is withdrawn.
    pub(super) fn declare(&mut self, runner: i64, request: &rpc::DeclareRequest) -> Result<Runner, Refusal> {
        let runner = self.runners.get_mut(&runner).ok_or(Refusal::Unregistered)?;
        runner.labels.clone_from(&request.labels);
        runner.version.clone_from(&request.version);
        runner.cancelling = says_cancelling(&request.capabilities);
        Ok(runner.clone())
    }

    /// The runner that these two headers name.
    pub(super) fn authenticate(&mut self, uuid: &str, token: &str) -> Result<i64, Refusal> {
        let runner = self.runners.values_mut().find(|r| r.uuid == uuid && r.token.matches(token));
        let runner = runner.ok_or(Refusal::Unregistered)?;
        runner.last_seen = SystemTime::now();
        Ok(runner.id)
    }
}

fn says_cancelling(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == "cancelling")
}

/// A copy of everything the forge knew, for [`Forge::restore`].
#[derive(Clone)]
pub struct Backup(pub(super) State);

impl Forge {
    /// As a database dump does it.
    pub fn backup(&self) -> Backup {
        Backup(self.state().clone())
    }

    /// Goes back to a backup: later tasks are unknown, their numbers are given again, logs and the version are shorter.
    pub fn restore(&self, backup: Backup) {
        *self.state() = backup.0;
        self.announce();
    }
}
