//! The steps runner's reports: rows without secrets, states, and the end, in the official runner's order.
//!
//! A report that fails is sent again with the next; only the end insists, for as long as the official runner does.

use std::{collections::BTreeMap, time::Duration};

use buffa_types::google::protobuf::Timestamp;
use rand::Rng as _;

use crate::{
    gitea::{RpcError, RpcFault, RunnerRpc},
    proto::runner::{LogRow, StepState, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest},
};

/// Rows kept while they cannot be sent; a job that prints more waits.
const MAX_ROWS: usize = 100_000;
/// Rows in one UpdateLog.
const BATCH: usize = 1000;
/// How long each of the two last reports is tried, as the official runner does.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

pub(super) struct Reporter {
    rpc: RunnerRpc,
    task: i64,
    /// Longest first, so that a secret within another leaves nothing of the longer one.
    masks: Vec<String>,
    rows: Vec<LogRow>,
    /// Rows that the server holds: the index of the first of `rows`.
    held: i64,
    started_at: Timestamp,
    pub(super) steps: Vec<StepState>,
    pub(super) outputs: BTreeMap<String, String>,
    /// The server wants no more of this job.
    pub(super) cancelled: bool,
}

impl Reporter {
    pub(super) fn new(rpc: RunnerRpc, task: i64, steps: usize, secrets: impl Iterator<Item = String>) -> Self {
        let steps = (0..).take(steps).map(|id| StepState { id, ..Default::default() }).collect();
        let mut reporter = Self {
            rpc,
            task,
            masks: Vec::new(),
            rows: Vec::new(),
            held: 0,
            started_at: now(),
            steps,
            outputs: BTreeMap::new(),
            cancelled: false,
        };
        secrets.for_each(|secret| reporter.mask(&secret));
        reporter
    }

    /// Hides a value, and each of its lines, from now on.
    pub(super) fn mask(&mut self, value: &str) {
        let lines = value.lines().map(str::trim).chain([value]);
        self.masks.extend(lines.filter(|line| !line.is_empty()).map(str::to_owned));
        self.masks.sort_by_key(|mask| std::cmp::Reverse(mask.len()));
        self.masks.dedup();
    }

    pub(super) fn hides(&self, text: &str) -> bool {
        self.masks.iter().any(|mask| text.contains(mask))
    }

    pub(super) fn say(&mut self, text: &str) {
        let mut content = text.to_owned();
        for mask in self.masks.iter().filter(|mask| text.contains(*mask)) {
            content = content.replace(mask, "***");
        }
        self.rows.push(LogRow { time: now().into(), content, ..Default::default() });
    }

    /// A line of a step's output. `::add-mask::` is an order, not a row.
    pub(super) fn line(&mut self, line: &str) {
        match line.strip_prefix("::add-mask::") {
            Some(value) => self.mask(value),
            None => self.say(line),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.rows.len() >= MAX_ROWS
    }

    /// The index that the next row will have.
    pub(super) fn next_row(&self) -> i64 {
        self.held.saturating_add(i64::try_from(self.rows.len()).unwrap_or(i64::MAX))
    }

    pub(super) fn step_begins(&mut self, at: usize) {
        let next = self.next_row();
        if let Some(step) = self.steps.get_mut(at) {
            step.started_at = now().into();
            step.log_index = next;
        }
    }

    pub(super) fn step_ends(&mut self, at: usize, result: TaskResult) {
        let next = self.next_row();
        if let Some(step) = self.steps.get_mut(at) {
            let never_began = !step.started_at.is_set();
            if never_began {
                step.started_at = now().into();
                step.log_index = next;
            }
            step.stopped_at = now().into();
            step.result = result.into();
            step.log_length = next - step.log_index;
        }
    }

    /// Sends what there is. Errors are for the next time.
    pub(super) async fn flush(&mut self) {
        let rows = self.send_rows().await;
        let state = self.send_state(TaskResult::RESULT_UNSPECIFIED).await.map(|_| ());
        if let Err(error) = rows.and(state) {
            tracing::warn!(%error, "report not delivered, sent again");
        }
    }

    async fn send_rows(&mut self) -> Result<(), RpcError> {
        while !self.rows.is_empty() {
            let batch = self.rows[..self.rows.len().min(BATCH)].to_vec();
            self.send_log(batch, false).await?;
        }
        Ok(())
    }

    async fn send_log(&mut self, rows: Vec<LogRow>, no_more: bool) -> Result<(), RpcError> {
        let sent = rows.len();
        let request = UpdateLogRequest { task_id: self.task, index: self.held, rows, no_more, ..Default::default() };
        let taken = match self.rpc.update_log(request).await {
            Ok(ack) => usize::try_from(ack.saturating_sub(self.held)).unwrap_or(0).min(sent),
            // The log is closed: what is left has no place any more.
            Err(error) if error.fault == RpcFault::LogSealed => sent,
            Err(error) => return Err(error),
        };
        self.rows.drain(..taken.min(self.rows.len()));
        self.held = self.held.saturating_add(i64::try_from(taken).unwrap_or(i64::MAX));
        Ok(())
    }

    /// Tells whether every output was taken.
    async fn send_state(&mut self, result: TaskResult) -> Result<bool, RpcError> {
        let stopped_at = (result != TaskResult::RESULT_UNSPECIFIED).then(now);
        let state = TaskState {
            id: self.task,
            result: result.into(),
            started_at: self.started_at.clone().into(),
            stopped_at: stopped_at.into(),
            steps: self.steps.clone(),
            ..Default::default()
        };
        let outputs = self.outputs.clone().into_iter().collect();
        let request = UpdateTaskRequest { state: state.into(), outputs, ..Default::default() };
        let answer = self.rpc.update_task(request, &[]).await?;
        if result == TaskResult::RESULT_UNSPECIFIED && answer.state.result != TaskResult::RESULT_UNSPECIFIED {
            self.cancelled = true;
        }
        Ok(self.outputs.keys().all(|key| answer.sent_outputs.contains(key)))
    }

    /// The end: the rest of the log, closed by an empty row, and only then the result. Each has its own limit.
    pub(super) async fn close(&mut self, result: TaskResult) {
        self.say("");
        for last in [Last::Log, Last::Result(result)] {
            if tokio::time::timeout(CLOSE_LIMIT, self.insist(last)).await.is_err() {
                tracing::error!(?last, "last report given up after 30 s, and lost");
            }
        }
    }

    async fn insist(&mut self, last: Last) {
        let mut pause = Duration::from_millis(100);
        loop {
            let done = match last {
                Last::Log => self.seal().await.map(|()| true),
                Last::Result(result) => self.send_state(result).await,
            };
            match done {
                Ok(true) => return,
                Ok(false) => tracing::warn!("not every output was taken, sent again"),
                Err(error) => tracing::warn!(%error, ?last, "last report not delivered, sent again"),
            }
            tokio::time::sleep(pause.mul_f64(rand::rng().random_range(0.8..1.2))).await;
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }

    async fn seal(&mut self) -> Result<(), RpcError> {
        while self.rows.len() > BATCH {
            let batch = self.rows[..BATCH].to_vec();
            self.send_log(batch, false).await?;
        }
        let rest = self.rows.clone();
        self.send_log(rest, true).await
    }
}

#[derive(Debug, Clone, Copy)]
enum Last {
    Log,
    Result(TaskResult),
}

fn now() -> Timestamp {
    std::time::SystemTime::now().into()
}
