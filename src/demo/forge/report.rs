//! What a runner's reports do to a job: UpdateTask and UpdateLog, as Gitea 1.27 takes them.

use std::time::{Instant, SystemTime};

use buffa::MessageField;
use buffa_types::google::protobuf::Timestamp;

use super::state::{Job, JobStatus, Refusal, State, Step};
use crate::{ids::TaskId, proto::runner as rpc};

/// Gitea drops an output with a longer key, silently.
const MAX_OUTPUT_KEY: usize = 255;
/// And one with a longer value.
const MAX_OUTPUT_VALUE: usize = 1 << 20;
/// Gitea cuts a row here, be it within a character.
const MAX_ROW: usize = 64 << 10;
/// The stand-in holds logs in memory; Gitea knows no such bound.
const MAX_LOG_BYTES: usize = 512 << 20;

impl State {
    fn job_of_task(&mut self, task: i64, runner: i64) -> Result<&mut Job, TaskFault> {
        let id = self.tasks.get(&TaskId(task)).copied();
        let job = id.and_then(|id| self.jobs.get_mut(&id)).ok_or(TaskFault::Unknown)?;
        match &job.task {
            Some(held) if held.id == TaskId(task) && held.runner == runner => Ok(job),
            Some(held) if held.id == TaskId(task) => Err(TaskFault::OfAnother),
            _ => Err(TaskFault::Unknown),
        }
    }

    /// A final job takes no state any more, but still takes outputs.
    pub(super) fn update_task(
        &mut self,
        runner: i64,
        request: &rpc::UpdateTaskRequest,
    ) -> Result<rpc::UpdateTaskResponse, Refusal> {
        let state = &*request.state;
        let refuse = |fault: TaskFault| match fault {
            TaskFault::Unknown => Refusal::Internal("update task: resource does not exist".into()),
            TaskFault::OfAnother => Refusal::Internal("update task: invalid runner for task".into()),
        };
        let job = self.job_of_task(state.id, runner).map_err(refuse)?;
        let (id, status) = (job.id, job.status);
        let mut end = None;
        let Some(task) = job.task.as_mut() else { return Err(refuse(TaskFault::Unknown)) };
        if !status.is_final() {
            end = JobStatus::of_result(state.result);
            task.updated = Instant::now();
            for (at, step) in (0..).zip(&mut task.steps) {
                take_step(step, state.steps.iter().rev().find(|reported| reported.id == at));
            }
        }
        for (key, value) in &request.outputs {
            if key.len() <= MAX_OUTPUT_KEY && value.len() <= MAX_OUTPUT_VALUE {
                // The first value of a key stays.
                task.outputs.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        let sent_outputs = task.outputs.keys().cloned().collect();
        if let Some(end) = end {
            let end = if status == JobStatus::Cancelling { JobStatus::Cancelled } else { end };
            let stopped = time_of(&state.stopped_at).unwrap_or(SystemTime::UNIX_EPOCH);
            self.finish(id, end, stopped);
        }
        let result = self.jobs[&id].status.result();
        let state = rpc::TaskState { id: state.id, result: result.into(), ..Default::default() };
        Ok(rpc::UpdateTaskResponse { state: MessageField::some(state), sent_outputs, ..Default::default() })
    }

    /// Answers how many rows are held. Rows that are held already are passed over; a gap or a seal lets nothing in.
    pub(super) fn update_log(&mut self, runner: i64, request: &rpc::UpdateLogRequest) -> Result<i64, Refusal> {
        let full = self.log_bytes > MAX_LOG_BYTES;
        let refuse = |fault: TaskFault| match fault {
            TaskFault::Unknown => {
                Refusal::Internal(format!("get task: task with id {}: resource does not exist", request.task_id))
            }
            TaskFault::OfAnother => Refusal::Internal("invalid runner for task".into()),
        };
        let job = self.job_of_task(request.task_id, runner).map_err(refuse)?;
        let Some(task) = job.task.as_mut() else { return Err(refuse(TaskFault::Unknown)) };
        let held = i64::try_from(task.log.len()).unwrap_or(i64::MAX);
        let ends = request.index.saturating_add(i64::try_from(request.rows.len()).unwrap_or(i64::MAX));
        let news = if request.index <= held && ends > held {
            usize::try_from(held.saturating_sub(request.index)).ok().and_then(|skip| request.rows.get(skip..)).unwrap_or_default()
        } else {
            &[]
        };
        if task.sealed {
            return if news.is_empty() { Ok(held) } else { Err(Refusal::Archived) };
        }
        if news.is_empty() && (!request.no_more || request.index > held) {
            return Ok(held);
        }
        if full {
            return Err(Refusal::Internal("the stand-in forge holds 512 MiB of logs, and takes no more".into()));
        }
        task.updated = Instant::now();
        let mut bytes = 0;
        for row in news {
            let content = cut(row.content.replace('\n', "\\n"));
            bytes += content.len();
            task.log.push(content);
        }
        task.sealed = request.no_more;
        let held = i64::try_from(task.log.len()).unwrap_or(i64::MAX);
        self.log_bytes += bytes;
        Ok(held)
    }
}

enum TaskFault {
    Unknown,
    OfAnother,
}

/// A step that began and is left out of a later report counts as running again, be it over or not. Gitea does so, and whoever
/// reports an end must list every step.
fn take_step(step: &mut Step, reported: Option<&rpc::StepState>) {
    if let Some(reported) = reported {
        step.log_index = reported.log_index;
        step.log_length = reported.log_length;
        step.started = time_of(&reported.started_at);
        step.stopped = time_of(&reported.stopped_at);
    }
    if let Some(end) = reported.and_then(|reported| JobStatus::of_result(reported.result)) {
        step.status = end;
    } else if step.started.is_some() {
        step.status = JobStatus::Running;
    }
}

fn time_of<P: buffa::ProtoBox<Timestamp>>(time: &MessageField<Timestamp, P>) -> Option<SystemTime> {
    SystemTime::try_from(time.as_option()?.clone()).ok()
}

fn cut(mut row: String) -> String {
    if row.len() > MAX_ROW {
        let at = (0..=MAX_ROW).rev().find(|&at| row.is_char_boundary(at)).unwrap_or_default();
        row.truncate(at);
    }
    row
}
