//! What callers see of the stand-in's state: copies, taken at one moment.

use std::{collections::BTreeMap, time::SystemTime};

use super::{
    job::{JobId, RunId},
    state::{self, JobStatus},
};
use crate::ids::TaskId;

/// A job as the forge sees it now.
#[derive(Debug, Clone)]
pub struct JobView {
    pub id: JobId,
    pub run: RunId,
    pub key: String,
    pub repository: String,
    pub labels: Vec<String>,
    pub status: JobStatus,
    pub task: Option<TaskId>,
    /// The id of the runner that has or had the task.
    pub runner: Option<i64>,
    /// Times handed out.
    pub fetched: u32,
    pub steps: Vec<StepView>,
    /// Contents of the log's rows.
    pub log: Vec<String>,
    pub sealed: bool,
    pub outputs: BTreeMap<String, String>,
    pub pushed: SystemTime,
    /// When it was handed out.
    pub started: Option<SystemTime>,
    /// As the runner reported it; 1970 if it reported an end without a time.
    pub stopped: Option<SystemTime>,
}

#[derive(Debug, Clone)]
pub struct StepView {
    pub name: String,
    pub status: JobStatus,
    /// The step's rows in the log.
    pub log_index: i64,
    pub log_length: i64,
    pub started: Option<SystemTime>,
    pub stopped: Option<SystemTime>,
}

#[derive(Debug, Clone)]
pub struct RunnerView {
    pub id: i64,
    pub uuid: String,
    pub name: String,
    pub version: String,
    pub labels: Vec<String>,
    pub disabled: bool,
    pub ephemeral: bool,
    /// Declared the capability `cancelling`.
    pub cancelling: bool,
    pub last_seen: SystemTime,
}

impl From<&state::Job> for JobView {
    fn from(job: &state::Job) -> Self {
        let task = job.task.as_ref();
        let step = |step: &state::Step| StepView {
            name: step.name.clone(),
            status: step.status,
            log_index: step.log_index,
            log_length: step.log_length,
            started: step.started,
            stopped: step.stopped,
        };
        JobView {
            id: job.id,
            run: job.run,
            key: job.spec.key.clone(),
            repository: job.spec.repository().to_owned(),
            labels: job.spec.labels.clone(),
            status: job.status,
            task: task.map(|task| task.id),
            runner: task.map(|task| task.runner),
            fetched: job.fetched,
            steps: task.map(|task| task.steps.iter().map(step).collect()).unwrap_or_default(),
            log: task.map(|task| task.log.clone()).unwrap_or_default(),
            sealed: task.is_some_and(|task| task.sealed),
            outputs: task.map(|task| task.outputs.clone()).unwrap_or_default(),
            pushed: job.pushed,
            started: task.map(|task| task.started),
            stopped: job.stopped,
        }
    }
}

impl From<&state::Runner> for RunnerView {
    fn from(runner: &state::Runner) -> Self {
        RunnerView {
            id: runner.id,
            uuid: runner.uuid.clone(),
            name: runner.name.clone(),
            version: runner.version.clone(),
            labels: runner.labels.clone(),
            disabled: runner.disabled,
            ephemeral: runner.ephemeral,
            cancelling: runner.cancelling,
            last_seen: runner.last_seen,
        }
    }
}
