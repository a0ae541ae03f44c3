//! The controller as the reporter of one task: rows into its log, heartbeats, and the terminal report.
//!
//! Only for the time in which the controller is the reporter (rule R7): before `start`, and after the environment was revoked and
//! is confirmed gone. Who that is at a moment is for the callers to know.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use buffa::MessageField;
use buffa_types::google::protobuf::Timestamp;
use tokio_util::sync::CancellationToken;

use super::{RpcError, RpcFault, RunnerRpc};
use crate::{
    backoff::Backoff,
    claims::Verdict,
    failpoint,
    ids::TaskId,
    proto::runner::{LogRow, StepState, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest},
};

/// What Gitea wants of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// It may go on.
    Run,
    /// The user cancelled it; a terminal report may still be expected.
    Cancelled,
    /// It is over at Gitea (zombie, endless, or reported before), with this result.
    Final(TaskResult),
    /// Gitea does not have it, or not for us: deleted, restored from a backup, or another runner's.
    Gone,
}

impl Wish {
    /// How the task ended at Gitea, where it has.
    pub fn result(self) -> Option<TaskResult> {
        match self {
            Wish::Run | Wish::Gone => None,
            Wish::Cancelled => Some(TaskResult::ResultCancelled),
            Wish::Final(result) => Some(result),
        }
    }
}

fn result_of(verdict: Verdict) -> TaskResult {
    match verdict {
        Verdict::Failure => TaskResult::ResultFailure,
        Verdict::Cancelled => TaskResult::ResultCancelled,
    }
}

/// A terminal report to make.
#[derive(Debug, Clone)]
pub struct Settlement {
    pub verdict: Verdict,
    /// For the job's log, a row each; shown to the user as they are.
    pub reasons: Vec<String>,
    /// How many steps the job has. All are listed, else Gitea shows the rest as waiting for ever.
    pub steps: u32,
    /// What is known of steps from the environment's own reports; kept where they had ended.
    pub known_steps: Vec<StepState>,
    pub started_at: SystemTime,
}

/// Protobuf time of a wall-clock time; 1970 if before that.
pub fn timestamp(at: SystemTime) -> Timestamp {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or(0),
        ..Default::default()
    }
}

/// Tells Gitea that the task is cared for, and learns whether it is still wanted. Carries no steps (rule R7).
pub async fn heartbeat(rpc: &RunnerRpc, task: TaskId) -> Result<Wish, RpcError> {
    let request =
        UpdateTaskRequest { state: MessageField::some(TaskState { id: task.0, ..Default::default() }), ..Default::default() };
    match rpc.update_task(request, &[]).await {
        Ok(answer) => Ok(match answer.state.result.as_known() {
            Some(TaskResult::ResultUnspecified) => Wish::Run,
            Some(TaskResult::ResultCancelled) => Wish::Cancelled,
            Some(result) => Wish::Final(result),
            None => Wish::Final(TaskResult::ResultFailure),
        }),
        Err(e) if matches!(e.fault, RpcFault::TaskGone | RpcFault::NotOurTask) => Ok(Wish::Gone),
        Err(e) => Err(e),
    }
}

/// How many log rows Gitea holds for the task.
pub async fn log_length(rpc: &RunnerRpc, task: TaskId) -> Result<i64, RpcError> {
    rpc.update_log(UpdateLogRequest { task_id: task.0, index: 0, ..Default::default() }).await
}

/// Appends rows after those that Gitea holds; answers the new length.
///
/// We may die after Gitea took the rows and before we know: the next reporter asks for the length again, so no row comes twice
/// by index; a status row may then be said again in other words.
pub async fn say(rpc: &RunnerRpc, task: TaskId, rows: &[String]) -> Result<i64, RpcError> {
    let index = log_length(rpc, task).await?;
    let length = append(rpc, task, index, rows, false).await;
    failpoint::reached("report.said");
    length
}

async fn append(rpc: &RunnerRpc, task: TaskId, index: i64, rows: &[String], no_more: bool) -> Result<i64, RpcError> {
    let time = timestamp(SystemTime::now());
    let rows = rows.iter().map(|row| LogRow {
        time: MessageField::some(time.clone()),
        content: row.replace(['\r', '\n'], " "),
        ..Default::default()
    });
    rpc.update_log(UpdateLogRequest { task_id: task.0, index, rows: rows.collect(), no_more, ..Default::default() }).await
}

/// Ends the task at Gitea: reasons into the log, the log sealed, all steps listed, then the result. Idempotent; a task that is
/// over or gone at Gitea already is taken as settled.
///
/// We may die between the seal and the result: then the next look finds the task still running, seals again (`LogSealed` counts
/// as done) and reports.
pub async fn settle(rpc: &RunnerRpc, task: TaskId, settlement: &Settlement) -> Result<(), RpcError> {
    let over = |e: &RpcError| matches!(e.fault, RpcFault::TaskGone | RpcFault::NotOurTask);
    let logged = async {
        let index = log_length(rpc, task).await?;
        // Gitea ≤ 1.26 ignores a seal without rows, so there is always one.
        let rows = if settlement.reasons.is_empty() { &[String::new()][..] } else { &settlement.reasons };
        let length = append(rpc, task, index, rows, true).await?;
        Ok::<_, RpcError>((index, length))
    };
    let logged = logged.await;
    failpoint::reached("settle.sealed");
    let (index, length) = match logged {
        Ok(span) => span,
        Err(e) if e.fault == RpcFault::LogSealed => (0, 0),
        Err(e) if over(&e) => return Ok(()),
        Err(e) => return Err(e),
    };
    let request =
        UpdateTaskRequest { state: MessageField::some(terminal_state(task, settlement, index, length)), ..Default::default() };
    match rpc.update_task(request, &[]).await {
        Ok(_) => Ok(()),
        Err(e) if over(&e) => Ok(()),
        Err(e) => Err(e),
    }
}

/// [`settle`], again and again until Gitea took it; `false` if `stop` came first (the next start settles then).
pub async fn settle_until(rpc: &RunnerRpc, task: TaskId, settlement: &Settlement, stop: &CancellationToken) -> bool {
    let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(15));
    loop {
        match settle(rpc, task, settlement).await {
            Ok(()) => return true,
            Err(e) => tracing::warn!(task = %task, error = %e, "failed to report the end of task {task}; will try again"),
        }
        tokio::select! {
            () = backoff.wait() => {}
            () = stop.cancelled() => return false,
        }
    }
}

fn terminal_state(task: TaskId, settlement: &Settlement, index: i64, length: i64) -> TaskState {
    let stopped = SystemTime::now().max(settlement.started_at);
    let (started_at, stopped_at) = (timestamp(settlement.started_at), timestamp(stopped));
    let mut first_open = true;
    let steps = (0..i64::from(settlement.steps)).map(|id| {
        let known = settlement.known_steps.iter().find(|s| s.id == id);
        if let Some(ended) = known.filter(|s| s.result != TaskResult::ResultUnspecified) {
            return ended.clone();
        }
        // The reasons belong to the step that did not end, so that Gitea's page shows them there.
        let here = std::mem::take(&mut first_open);
        let began = known.filter(|s| s.started_at.is_set());
        StepState {
            id,
            result: if here { result_of(settlement.verdict) } else { TaskResult::ResultSkipped }.into(),
            started_at: began.map_or_else(|| MessageField::some(started_at.clone()), |s| s.started_at.clone()),
            stopped_at: MessageField::some(stopped_at.clone()),
            log_index: began.map_or(index, |s| s.log_index),
            log_length: if here { length - began.map_or(index, |s| s.log_index) } else { 0 },
            ..Default::default()
        }
    });
    TaskState {
        id: task.0,
        result: result_of(settlement.verdict).into(),
        started_at: MessageField::some(started_at.clone()),
        stopped_at: MessageField::some(stopped_at.clone()),
        steps: steps.collect(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_terminal_report_lists_every_step_with_times() {
        let ended = StepState { id: 0, result: TaskResult::ResultSuccess.into(), log_length: 3, ..Default::default() };
        let settlement = Settlement {
            verdict: Verdict::Failure,
            reasons: vec!["the environment was lost".into()],
            steps: 3,
            known_steps: vec![ended.clone()],
            started_at: SystemTime::now(),
        };
        let state = terminal_state(TaskId(7), &settlement, 5, 6);
        let results: Vec<_> = state.steps.iter().map(|s| s.result.as_known().unwrap()).collect();
        assert_eq!(results, [TaskResult::ResultSuccess, TaskResult::ResultFailure, TaskResult::ResultSkipped]);
        assert_eq!(state.steps[0], ended);
        assert_eq!((state.steps[1].log_index, state.steps[1].log_length), (5, 1));
        assert!(state.steps[1..].iter().all(|s| s.stopped_at.seconds >= s.started_at.seconds && s.started_at.seconds > 0));
    }
}
