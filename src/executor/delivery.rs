//! Brings what the spool holds to the facade, in order, until Gitea has it (rules R8 and R11).
//!
//! It retries for as long as the environment lives: the environment's own deadline is the limit, set by the controller. A
//! request whose answer was lost is sent again as it was; Gitea passes over rows that it has. Between the runner's own reports
//! it sends heartbeats, so that a silent job is neither taken for dead nor deaf to a cancel.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    facade::{Denials, Facade},
    spool::{Next, SharedSpool, end_of},
    stop::{Stop, StopCause},
};
use crate::{
    backoff::Backoff,
    gitea::{RpcError, RpcFault},
    names::header,
    proto::runner::{TaskResult, UpdateLogRequest, UpdateTaskRequest},
};

/// The longest silence towards Gitea while the job runs: 2 s polls and this make up the 7 s for a cancel.
const HEARTBEAT: Duration = Duration::from_secs(4);

/// How the delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivered {
    /// The facade took the runner's verdict.
    Verdict,
    /// All rows are delivered, but the runner ended without a verdict: the controller gives its own.
    NoVerdict,
    /// The task is not ours any more (deleted, given to another, or this environment was revoked).
    Gone,
}

pub(super) struct Delivery {
    pub(super) spool: Arc<SharedSpool>,
    pub(super) facade: Facade,
    pub(super) stop: Stop,
}

enum Outcome {
    Progress,
    Retry,
    End(Delivered),
}

impl Delivery {
    /// Runs until everything is delivered after the runner's end.
    pub(super) async fn deliver(self) -> Delivered {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
        let mut reported = Instant::now();
        let mut denials = Denials::default();
        // A terminal request that was denied after an attempt without an answer was taken by that attempt.
        let mut terminal_sent = false;
        loop {
            let next = if reported.elapsed() >= HEARTBEAT { self.heartbeat() } else { self.spool.lock().next_step() };
            let outcome = match next {
                Next::Wait => {
                    let silence = HEARTBEAT.saturating_sub(reported.elapsed());
                    // Both ends are the same: look again.
                    drop(tokio::time::timeout(silence, self.spool.changed()).await);
                    continue;
                }
                Next::NoVerdict => return Delivered::NoVerdict,
                Next::Log(request) => self.send_log(request).await,
                Next::State(request) => {
                    reported = Instant::now();
                    self.send_state(request).await
                }
                Next::Terminal(request) => {
                    let ended = self.send_terminal(request, terminal_sent).await;
                    terminal_sent = true;
                    ended
                }
            };
            match outcome {
                Ok(Outcome::Progress) => {
                    backoff.reset();
                    denials.answered();
                }
                Ok(Outcome::Retry) => backoff.wait().await,
                Ok(Outcome::End(end)) => return end,
                Err(error) => {
                    if denials.is_final(&error) {
                        return self.gone(&error, terminal_sent);
                    }
                    tracing::debug!(%error, "deliver again later");
                    backoff.wait().await;
                }
            }
        }
    }

    fn heartbeat(&self) -> Next {
        let mut spool = self.spool.lock();
        match spool.next_step() {
            // A state, and above all the last one, is as good as a heartbeat.
            next @ (Next::State(_) | Next::Terminal(_) | Next::NoVerdict) => next,
            Next::Log(_) | Next::Wait => Next::State(spool.heartbeat()),
        }
    }

    async fn send_log(&self, request: UpdateLogRequest) -> Result<Outcome, RpcError> {
        let (end, no_more) = (end_of(&request), request.no_more);
        match self.facade.update_log(request).await {
            Ok(ack) if self.spool.lock().log_answered(end, no_more, ack) => Ok(Outcome::Progress),
            Ok(_) => Ok(Outcome::Retry),
            Err(error) if error.fault == RpcFault::LogSealed => {
                tracing::info!("Gitea has archived the log; further rows are dropped");
                self.spool.lock().log_taken();
                Ok(Outcome::Progress)
            }
            Err(error) => Err(error),
        }
    }

    async fn send_state(&self, request: UpdateTaskRequest) -> Result<Outcome, RpcError> {
        let answer = self.facade.update_task(request.clone(), &[]).await?;
        self.spool.lock().state_answered(&request, &answer.sent_outputs);
        let result = answer.state.as_option().map(|state| state.result).unwrap_or_default();
        if result == TaskResult::RESULT_CANCELLED {
            self.stop.ask(StopCause::Cancelled);
        } else if result != TaskResult::RESULT_UNSPECIFIED {
            self.stop.ask(StopCause::EndedByGitea);
        }
        Ok(Outcome::Progress)
    }

    async fn send_terminal(&self, request: UpdateTaskRequest, again: bool) -> Result<Outcome, RpcError> {
        let mut headers = vec![(header::RUNNER, "exited")];
        if self.stop.seen().is_some() {
            headers.push((header::STOP_SEEN, "1"));
        }
        match self.facade.update_task(request, &headers).await {
            Ok(_) => Ok(Outcome::End(Delivered::Verdict)),
            // The answer of an earlier attempt was lost, and the facade closed this environment for its verdict.
            Err(error) if again && error.fault == RpcFault::Denied => Ok(Outcome::End(Delivered::Verdict)),
            Err(error) => Err(error),
        }
    }

    /// Nothing is taken from us any more: the job stops, and what it still says is dropped.
    fn gone(&self, error: &RpcError, terminal_sent: bool) -> Delivered {
        tracing::warn!(%error, "the task is not ours any more; the job is stopped");
        self.stop.ask(StopCause::Gone);
        self.spool.lock().log_taken();
        if terminal_sent { Delivered::Verdict } else { Delivered::Gone }
    }
}
