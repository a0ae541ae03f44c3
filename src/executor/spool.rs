//! What the runner said and Gitea does not have yet, in the order in which it must be told (rules R7, R8 and R11).
//!
//! The bridge puts in, the delivery takes out; both only ask here what comes next. Indices inside are Gitea's: the runner's
//! plus *k*, the rows that the controller wrote before `start`. No network and no clock in here, so that every interleaving
//! can be tested. It lives as long as the executor; when the executor dies the environment is lost, and the controller settles it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

pub use self::store::StoreLimits;
use self::store::{RowStore, placeholder};
use crate::proto::runner::{LogRow, StepState, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest};

mod store;

/// Gitea cuts rows at this many bytes, in the middle of a character if need be; we cut between characters.
const MAX_ROW_BYTES: usize = 64 << 10;
/// The facade takes 2 MiB a request; the rest is for what is around the rows.
const MAX_BATCH_BYTES: usize = 1 << 20;
const MAX_BATCH_ROWS: u64 = 10_000;
/// Gitea drops keys and values beyond these (`gitea.md` §3.7).
const MAX_OUTPUT_KEY: usize = 255;
const MAX_OUTPUT_VALUE: usize = 1 << 20;
/// Bytes of all outputs of a job together; beyond it they are dropped.
const MAX_OUTPUTS: usize = 64 << 20;
/// Accepted requests after which an output that Gitea still does not list is given up.
const OUTPUT_TRIES: u8 = 3;

/// The spool of one environment, shared by bridge, delivery and supervisor.
pub struct SharedSpool {
    spool: Mutex<Spool>,
    changed: Notify,
}

impl SharedSpool {
    pub fn new(spool: Spool) -> Self {
        Self { spool: Mutex::new(spool), changed: Notify::new() }
    }

    /// Looks at the spool. Short: the lock is held across writes to the page cache, never across a network call.
    pub fn lock(&self) -> MutexGuard<'_, Spool> {
        self.spool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that there may be something new to deliver.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// What the delivery does next.
#[derive(Debug, PartialEq)]
pub enum Next {
    Log(UpdateLogRequest),
    /// A state without a result.
    State(UpdateTaskRequest),
    /// The state with the runner's verdict: the runner has exited, and Gitea has every row.
    Terminal(UpdateTaskRequest),
    /// The runner exited without a verdict, and Gitea has every row.
    NoVerdict,
    /// Nothing to send now.
    Wait,
}

pub struct Spool {
    task: i64,
    /// *k*: what the runner's indices are shifted by.
    offset: i64,
    rows: RowStore,
    /// Index of the first row in `rows`: everything below is acknowledged by Gitea.
    base: i64,
    /// Index of the next row from the runner.
    next: i64,
    /// One above the highest row ever sent.
    sent: i64,
    said_no_more: bool,
    sealed: bool,
    /// The log is archived or the task gone: rows are counted and dropped.
    dropping: bool,
    /// All that is known of the task, every step in its latest state, never a result.
    known: TaskState,
    /// At most two: one that waits for its rows, and one into which later ones merge.
    waiting: VecDeque<(i64, TaskState)>,
    delivered: TaskState,
    terminal: Option<TaskState>,
    runner_exited: bool,
    outputs: BTreeMap<String, Output>,
    output_keys: BTreeSet<String>,
    output_bytes: usize,
}

struct Output {
    value: String,
    tries: u8,
}

impl Spool {
    /// `offset` is *k* of `start`; files go into `folder`, which must be this environment's own.
    pub fn new(task: i64, offset: i64, folder: &Path, limits: StoreLimits) -> Self {
        let state = TaskState { id: task, ..Default::default() };
        Self {
            task,
            offset,
            rows: RowStore::new(folder, limits),
            base: offset,
            next: offset,
            sent: offset,
            said_no_more: false,
            sealed: false,
            dropping: false,
            known: state.clone(),
            waiting: VecDeque::new(),
            delivered: state,
            terminal: None,
            runner_exited: false,
            outputs: BTreeMap::new(),
            output_keys: BTreeSet::new(),
            output_bytes: 0,
        }
    }

    /// Takes rows from the runner; answers its `ack_index`: never more than it sent in this request, never less than before.
    pub fn take_rows(&mut self, index: i64, rows: Vec<LogRow>, no_more: bool) -> i64 {
        let held = self.next - self.offset;
        let end = index.saturating_add(i64::try_from(rows.len()).unwrap_or(i64::MAX));
        if index < 0 || index > held {
            // A gap: as Gitea does, nothing is taken, and the answer says from where to send.
            return held;
        }
        for mut row in rows.into_iter().skip(usize::try_from(held - index).unwrap_or(usize::MAX)) {
            self.next += 1;
            if self.dropping {
                self.base = self.next;
            } else {
                truncate(&mut row.content, MAX_ROW_BYTES);
                self.rows.push(&row);
            }
        }
        self.said_no_more |= no_more;
        end.min(self.next - self.offset)
    }

    /// Takes a state and outputs from the runner. After the first state with a result only outputs are taken.
    pub fn take_state(&mut self, state: TaskState, outputs: impl IntoIterator<Item = (String, String)>) {
        self.take_outputs(outputs);
        if self.terminal.is_some() {
            return;
        }
        let result = state.result;
        merge(&mut self.known, state, self.offset);
        if result == TaskResult::RESULT_UNSPECIFIED {
            // The second one takes all that comes while the first waits, so a steady stream of rows cannot starve the states.
            if self.waiting.len() > 1 {
                self.waiting.pop_back();
            }
            self.waiting.push_back((self.next, self.known.clone()));
        } else {
            self.terminal = Some(TaskState { result, ..self.known.clone() });
        }
    }

    /// The outputs received so far, as `sent_outputs` for the runner: it need not keep them.
    pub fn output_keys(&self) -> Vec<String> {
        self.output_keys.iter().cloned().collect()
    }

    /// The runner's process is gone; only now its verdict counts (rule R8). `why` says what stopped it, where something did: the
    /// runner itself writes that the job succeeded. Without a verdict the controller writes its own reason.
    pub fn runner_exited(&mut self, why: Option<&str>) {
        self.runner_exited = true;
        if let Some(why) = why.filter(|_| self.terminal.is_some() && !self.dropping) {
            self.next += 1;
            self.rows.push(&placeholder(why));
        }
    }

    pub fn has_verdict(&self) -> bool {
        self.terminal.is_some()
    }

    /// What to send now. The same again until its answer is told here.
    pub fn next_step(&mut self) -> Next {
        if self.waiting.front().is_some_and(|(after, _)| *after <= self.base)
            && let Some((_, state)) = self.waiting.front()
        {
            return Next::State(self.request(state.clone()));
        }
        let ready = self.runner_exited && self.terminal.is_some();
        if ready && !self.sealed && self.rows.len() == 0 {
            // Gitea ≤ 1.26 ignores `no_more` without a row.
            self.rows.push(&placeholder(""));
            self.next += 1;
        }
        // The last row waits for the verdict, so that `no_more` has a row to travel with. Without a verdict the log stays open:
        // the controller will write its reason into it.
        let hold = u64::from(self.said_no_more && !self.runner_exited);
        let sendable = self.rows.len().saturating_sub(hold).min(MAX_BATCH_ROWS);
        if sendable > 0 {
            return Next::Log(self.batch(sendable, ready));
        }
        match &self.terminal {
            Some(_) if !self.runner_exited => Next::Wait,
            // Outputs that do not fit into the terminal request travel before it.
            Some(state) if self.outputs_beyond_one_request() => {
                let state = TaskState { result: TaskResult::RESULT_UNSPECIFIED.into(), ..state.clone() };
                Next::State(self.request(state))
            }
            Some(state) => Next::Terminal(self.request(state.clone())),
            None if self.runner_exited => Next::NoVerdict,
            None => Next::Wait,
        }
    }

    /// The last state that Gitea took: sent again it feeds Gitea's zombie timer and asks for a cancel.
    pub fn heartbeat(&self) -> UpdateTaskRequest {
        UpdateTaskRequest { state: self.delivered.clone().into(), ..Default::default() }
    }

    /// Gitea answered a request for rows up to `end` (exclusive). Answers whether that was progress.
    pub fn log_answered(&mut self, end: i64, no_more: bool, ack: i64) -> bool {
        // An ack above what we sent would make us drop rows that nobody has.
        let ack = ack.clamp(0, self.sent);
        if no_more && ack >= end {
            self.sealed = true;
        }
        if ack < self.base {
            // Gitea was restored from a backup: it lacks rows that we no longer have.
            tracing::warn!(rows = self.base - ack, "Gitea lost log rows that it had; their places are filled");
            let rows = (self.base - ack).unsigned_abs();
            self.rows.push_front_lost(rows, format!("[{rows} log rows were lost here: Gitea had them and has them no more]"));
            self.base = ack;
            return true;
        }
        self.rows.trim((ack - self.base).unsigned_abs());
        let moved = ack > self.base;
        self.base = ack;
        moved || self.sealed
    }

    /// No row will be taken any more (log archived, task gone): what is here and what comes is dropped.
    pub fn log_taken(&mut self) {
        self.rows.clear();
        self.base = self.next;
        self.dropping = true;
        self.sealed = true;
    }

    /// Gitea took the state of `request`; `listed` is its `sent_outputs`.
    pub fn state_answered(&mut self, request: &UpdateTaskRequest, listed: &[String]) {
        for key in listed {
            self.drop_output(key);
        }
        for key in request.outputs.keys() {
            let given_up = self.outputs.get_mut(key).is_some_and(|output| {
                output.tries += 1;
                output.tries >= OUTPUT_TRIES
            });
            if given_up {
                tracing::warn!(key, "an output of the job was sent and is not listed by Gitea");
                self.drop_output(key);
            }
        }
        if let Some(state) = request.state.as_option() {
            if self.waiting.front().is_some_and(|(_, first)| first == state) {
                self.waiting.pop_front();
            }
            self.delivered = TaskState { result: TaskResult::RESULT_UNSPECIFIED.into(), ..state.clone() };
        }
    }

    fn batch(&mut self, rows: u64, ready: bool) -> UpdateLogRequest {
        let rows = self.rows.peek(rows, MAX_BATCH_BYTES);
        let no_more = ready && rows.len() as u64 == self.rows.len();
        let request = UpdateLogRequest { task_id: self.task, index: self.base, rows, no_more, ..Default::default() };
        self.sent = self.sent.max(end_of(&request));
        request
    }

    fn request(&self, state: TaskState) -> UpdateTaskRequest {
        let mut bytes = 0;
        let outputs = self.outputs.iter().take_while(|(key, output)| {
            bytes += key.len() + output.value.len();
            bytes <= MAX_OUTPUT_VALUE + MAX_OUTPUT_KEY
        });
        let outputs = outputs.map(|(key, output)| (key.clone(), output.value.clone())).collect();
        UpdateTaskRequest { state: state.into(), outputs, ..Default::default() }
    }

    fn outputs_beyond_one_request(&self) -> bool {
        self.outputs.iter().map(|(key, output)| key.len() + output.value.len()).sum::<usize>() > MAX_OUTPUT_VALUE + MAX_OUTPUT_KEY
    }

    fn take_outputs(&mut self, outputs: impl IntoIterator<Item = (String, String)>) {
        for (key, value) in outputs {
            // Listed to the runner in any case: it would only try again, and Gitea would drop it again.
            let first = self.output_keys.insert(key.clone());
            let bytes = key.len() + value.len();
            if key.len() > MAX_OUTPUT_KEY || value.len() > MAX_OUTPUT_VALUE || self.output_bytes + bytes > MAX_OUTPUTS {
                tracing::warn!(bytes, "an output of the job is larger than Gitea takes, and is dropped");
            } else if first {
                self.output_bytes += bytes;
                self.outputs.insert(key, Output { value, tries: 0 });
            }
        }
    }

    fn drop_output(&mut self, key: &str) {
        if let Some(output) = self.outputs.remove(key) {
            self.output_bytes = self.output_bytes.saturating_sub(key.len() + output.value.len());
        }
    }
}

/// The index after the last row of `request`.
pub fn end_of(request: &UpdateLogRequest) -> i64 {
    request.index.saturating_add(i64::try_from(request.rows.len()).unwrap_or(i64::MAX))
}

/// Puts `new` over `known`: times and each step as last reported; what is not mentioned stays.
fn merge(known: &mut TaskState, new: TaskState, offset: i64) {
    if new.started_at.is_set() {
        known.started_at = new.started_at;
    }
    if new.stopped_at.is_set() {
        known.stopped_at = new.stopped_at;
    }
    let mut steps: BTreeMap<i64, StepState> = std::mem::take(&mut known.steps).into_iter().map(|step| (step.id, step)).collect();
    for mut step in new.steps {
        // A step without rows has no place in the log, and 0 stays 0 for "none yet".
        if step.log_length > 0 || step.log_index > 0 {
            step.log_index = step.log_index.saturating_add(offset);
        }
        steps.insert(step.id, step);
    }
    known.steps = steps.into_values().collect();
}

fn truncate(text: &mut String, max: usize) {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
    }
}

#[cfg(test)]
mod tests;
