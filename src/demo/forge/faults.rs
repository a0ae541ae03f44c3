//! Trouble on order, for tests: answers that fail, come late, or never arrive. And the record of what was asked.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use connectrpc::ErrorCode;

use crate::{
    ids::TaskId,
    proto::runner::{self as rpc, TaskResult},
};

/// Requests, and reports, remembered one by one; older requests only count.
const MAX_SEEN: usize = 100_000;

/// A call of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    Ping,
    Register,
    Declare,
    FetchTask,
    UpdateTask,
    UpdateLog,
}

/// What happens to a call instead of its answer.
#[derive(Debug, Clone)]
pub enum Fault {
    /// A Connect error, nothing done.
    Fail { code: ErrorCode, message: String },
    /// A proxy's page with this HTTP status, nothing done.
    Page(u16),
    /// Answered as usual, but not before.
    Delay(Duration),
    /// The work is done, and the connection drops instead of the answer.
    LoseAnswer,
    /// The connection drops, nothing done.
    LoseRequest,
}

/// How often a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    Next(u32),
    UntilCleared,
}

/// One request that came in.
#[derive(Debug, Clone)]
pub struct Seen {
    /// `None` for a path outside the protocol.
    pub method: Option<Method>,
    pub path: String,
    pub at: Instant,
    /// Of its body.
    pub bytes: usize,
    /// How long the client says it waits (`Connect-Timeout-Ms`).
    pub patience: Option<Duration>,
}

/// A report that was taken, from whichever runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub task: TaskId,
    pub what: Reported,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reported {
    /// UpdateLog: where its rows go, and how many rows the log had then.
    Rows { rows: Range<i64>, held: i64 },
    /// UpdateTask: a result (UNSPECIFIED while it runs), and how many steps it lists.
    State { result: TaskResult, steps: usize },
}

impl Method {
    pub const ALL: [Method; 6] =
        [Method::Ping, Method::Register, Method::Declare, Method::FetchTask, Method::UpdateTask, Method::UpdateLog];

    pub(super) fn path(self) -> &'static str {
        match self {
            Method::Ping => "/api/actions/ping.v1.PingService/Ping",
            Method::Register => "/api/actions/runner.v1.RunnerService/Register",
            Method::Declare => "/api/actions/runner.v1.RunnerService/Declare",
            Method::FetchTask => "/api/actions/runner.v1.RunnerService/FetchTask",
            Method::UpdateTask => "/api/actions/runner.v1.RunnerService/UpdateTask",
            Method::UpdateLog => "/api/actions/runner.v1.RunnerService/UpdateLog",
        }
    }

    pub(super) fn of_path(path: &str) -> Option<Self> {
        Method::ALL.into_iter().find(|method| method.path() == path)
    }
}

/// What is on order: at most one fault a method, the newest.
#[derive(Default)]
pub(super) struct Faults(BTreeMap<Method, (Fault, Times)>);

impl Faults {
    pub(super) fn inject(&mut self, method: Method, fault: Fault, times: Times) {
        self.0.insert(method, (fault, times));
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn strike(&mut self, method: Method) -> Option<Fault> {
        let (fault, times) = self.0.get_mut(&method)?;
        match times {
            Times::UntilCleared => Some(fault.clone()),
            Times::Next(0) => None,
            Times::Next(left) => {
                *left -= 1;
                Some(fault.clone())
            }
        }
    }
}

#[derive(Default)]
pub(super) struct Record {
    pub(super) seen: VecDeque<Seen>,
    pub(super) reports: VecDeque<Report>,
    pub(super) counts: BTreeMap<Method, u64>,
}

impl Record {
    pub(super) fn add(&mut self, seen: Seen) {
        if let Some(method) = seen.method {
            *self.counts.entry(method).or_default() += 1;
        }
        if self.seen.len() == MAX_SEEN {
            self.seen.pop_front();
        }
        self.seen.push_back(seen);
    }

    pub(super) fn add_report(&mut self, task: i64, what: Reported) {
        if self.reports.len() == MAX_SEEN {
            self.reports.pop_front();
        }
        self.reports.push_back(Report { task: TaskId(task), what });
    }
}

/// Answers that gave a task, remembered so that they can come twice.
#[derive(Clone, Default)]
pub(super) struct Given {
    newest: VecDeque<rpc::Task>,
    again: VecDeque<rpc::Task>,
}

impl Given {
    const MOST: usize = 1000;

    pub(super) fn remember(&mut self, task: Option<&rpc::Task>) {
        self.newest.extend(task.cloned());
        self.newest.drain(..self.newest.len().saturating_sub(Self::MOST));
    }

    /// The newest `many`, oldest first.
    pub(super) fn order(&mut self, many: usize) {
        self.again.extend(self.newest.iter().skip(self.newest.len().saturating_sub(many)).cloned());
    }

    /// The next to be given once more.
    pub(super) fn again(&mut self) -> Option<rpc::Task> {
        self.again.pop_front()
    }
}
