//! Whether what an environment reports as its end may go to Gitea as it is (rule R8).
//!
//! The official runner reports SUCCESS after a SIGTERM, with cancelled steps (measured), and exits with 0 whatever happened. So its
//! word counts only when nothing speaks against it.

use crate::{
    claims::{Stop, Verdict},
    proto::runner::{StepState, TaskResult},
};

/// What is known about how the job came to its end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ending {
    /// A stop was asked for by the controller or by Gitea.
    pub(super) stop: Option<Stop>,
    /// The executor itself saw one (SIGTERM).
    pub(super) stop_seen: bool,
    /// The runner's process is gone.
    pub(super) exited: bool,
}

/// The result to report for one that the runner reported.
pub(super) fn verdict(reported: TaskResult, steps: &[StepState], ending: Ending) -> TaskResult {
    let Ending { stop, stop_seen, exited } = ending;
    let interrupted = steps.iter().any(|s| s.result == TaskResult::ResultCancelled);
    let stopped = match stop {
        Some(stop) => match crate::plan::verdict_of(stop) {
            Verdict::Cancelled => TaskResult::ResultCancelled,
            Verdict::Failure => TaskResult::ResultFailure,
        },
        None => TaskResult::ResultFailure,
    };
    match reported {
        TaskResult::ResultSuccess | TaskResult::ResultSkipped if stop.is_some() || stop_seen || interrupted || !exited => stopped,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn success_counts_only_when_nothing_speaks_against_it() {
        use TaskResult as R;
        let clean = Ending { stop: None, stop_seen: false, exited: true };
        let step = |result: R| StepState { result: result.into(), ..Default::default() };
        let fine = [step(R::ResultSuccess), step(R::ResultSkipped)];
        let table = [
            (R::ResultSuccess, &fine[..], clean, R::ResultSuccess),
            (R::ResultSkipped, &[], clean, R::ResultSkipped),
            (R::ResultFailure, &fine[..], clean, R::ResultFailure),
            (R::ResultCancelled, &fine[..], clean, R::ResultCancelled),
            (R::ResultSuccess, &[step(R::ResultCancelled)][..], clean, R::ResultFailure),
            (R::ResultSuccess, &fine[..], Ending { stop_seen: true, ..clean }, R::ResultFailure),
            (R::ResultSuccess, &fine[..], Ending { exited: false, ..clean }, R::ResultFailure),
            (R::ResultSuccess, &fine[..], Ending { stop: Some(Stop::Cancelled), ..clean }, R::ResultCancelled),
            (R::ResultSuccess, &fine[..], Ending { stop: Some(Stop::Deadline), ..clean }, R::ResultFailure),
            (R::ResultSkipped, &fine[..], Ending { stop: Some(Stop::Deadline), ..clean }, R::ResultFailure),
        ];
        for (reported, steps, ending, expected) in table {
            assert_eq!(verdict(reported, steps, ending), expected, "{reported:?} {ending:?}");
        }
    }
}
