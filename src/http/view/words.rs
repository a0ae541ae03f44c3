//! The sentences: how things stand in one line, why a job is where it is, and how long ago something was.

use super::{Backend, Moment, Operation};
use crate::{
    claims::Claim,
    ids::Lane,
    mirror::{Job, Outcome, Phase},
};

/// An environment that said nothing for so long is said to be silent; a bridge asks every two seconds.
const SILENT_MS: u64 = 30_000;

/// `4 min`, `2 h 5 min`: at most two units, and none smaller than matters.
pub(crate) fn span(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 if ms == 0 => "0 s".into(),
        0 => format!("{ms} ms"),
        1..60 => format!("{s} s"),
        60..3600 => format!("{} min", s / 60),
        3600..86_400 if (s % 3600) / 60 == 0 => format!("{} h", s / 3600),
        3600..86_400 => format!("{} h {} min", s / 3600, (s % 3600) / 60),
        _ => format!("{} d", s / 86_400),
    }
}

/// How far a job is, in the words of the page.
pub(crate) fn state(job: &Job) -> &'static str {
    match (job.phase, job.result) {
        (Phase::Queued, _) => "waiting",
        (Phase::Starting, _) => "starting",
        (Phase::Claimed, _) => "running",
        (Phase::Dead, _) => "needs you: unreadable",
        (Phase::Lost, _) => "needs you: lost",
        // The controller ended it in its environment's place; what no backend can serve is the workflow's fault.
        (Phase::Finished, Some(Outcome::Failure)) if job.reason.is_some() && job.lane != Lane::Refused => "infrastructure",
        (Phase::Finished, Some(result)) => result.as_str(),
        (Phase::Finished, None) => "unknown",
    }
}

/// What a job's place depends on.
pub(crate) struct Around<'a> {
    pub(crate) now: Moment,
    pub(crate) operation: &'a Operation,
    /// Of the job's backend; `None`: it has none, or nothing is known of it.
    pub(crate) backend: Option<&'a Backend>,
    pub(crate) claim: Option<&'a Claim>,
    /// Waiting jobs that were received before it.
    pub(crate) before: u64,
}

/// Why it is where it is; `None` where there is nothing to say.
pub(crate) fn why(job: &Job, around: &Around<'_>) -> Option<String> {
    match job.phase {
        Phase::Queued => Some(why_waiting(job, around)),
        Phase::Starting => Some(why_starting(job, around)),
        Phase::Claimed => Some(why_running(job, around)),
        Phase::Finished => job.reason.clone(),
        Phase::Dead | Phase::Lost => Some(format!(
            "{} Run it again in Gitea; `gitea-dynamic-runner show events` tells what was tried.",
            job.reason.clone().unwrap_or_else(|| "It is in no queue and no environment any more.".into())
        )),
    }
}

fn why_waiting(job: &Job, around: &Around<'_>) -> String {
    if job.lane == Lane::Refused {
        return "no backend serves its runs-on; it is failed with the reason in its log".into();
    }
    if let Some(since) = around.operation.draining_since {
        return format!("draining for {}: nothing new is started", Moment::from(since).ago(&around.now));
    }
    let again = match (&job.reason, job.attempts) {
        (Some(reason), 0) => format!("; made again: {reason}"),
        (Some(reason), n) => format!("; retry {} of 3: {reason}", n + 1),
        (None, _) => String::new(),
    };
    let Some(backend) = around.backend else {
        return format!("no backend of this controller takes {} jobs now{again}", job.lane);
    };
    if let ("trouble", Some(trouble)) = (backend.standing.state, &backend.standing.last_trouble) {
        let since = backend.standing.since.map_or_else(|| "an unknown time".into(), |since| since.ago(&around.now));
        return format!("the {} backend has been down for {since}: {}{again}", backend.backend, trouble.what);
    }
    if !around.operation.leads {
        return format!("this process does not lead yet{again}");
    }
    match backend.free {
        Some(0) => {
            format!("pool full ({} of {} in use), {} before it{again}", backend.used.unwrap_or(0), backend.limit, around.before)
        }
        Some(_) if around.before > 0 => format!("a slot is free; {} before it{again}", around.before),
        Some(_) => format!("a slot is free; it is taken next{again}"),
        None => format!("the slots are not known now{again}"),
    }
}

fn why_starting(job: &Job, around: &Around<'_>) -> String {
    let again = if job.attempts > 0 { format!("retry {} of 3: ", job.attempts + 1) } else { String::new() };
    let since = |at: Option<u64>| at.map_or_else(String::new, |at| format!(" ({})", Moment(at).ago(&around.now)));
    match (&job.environment, job.times.identity) {
        (None, _) => format!("{again}creating its environment{}", since(job.times.slot)),
        (Some(_), None) => format!("{again}identity pending{}", since(job.times.created)),
        (Some(_), Some(at)) => format!("{again}has its identity, fetches the job{}", since(Some(at))),
    }
}

fn why_running(job: &Job, around: &Around<'_>) -> String {
    let Some(claim) = around.claim else { return "its environment is not connected".into() };
    let mut told = Vec::new();
    if claim.stop.is_some() {
        told.push("cancelling".to_owned());
    }
    let begun = claim.known_steps.iter().filter(|step| step.started_at.is_set() || step.result.to_i32() != 0).count();
    if job.details.steps > 0 && begun > 0 {
        told.push(format!("step {begun} of {}", job.details.steps));
    }
    let silent_ms = u64::try_from(claim.heard_at.elapsed().as_millis()).unwrap_or(u64::MAX);
    if silent_ms > SILENT_MS {
        told.push(format!("silent for {}", span(silent_ms)));
    }
    if told.is_empty() { "runs".into() } else { told.join(", ") }
}

/// How the whole stands. The reasons are those of `/readyz`.
pub(crate) fn sentence(operation: &Operation, backends: &[Backend], now: Moment) -> String {
    let jobs = jobs(backends, now);
    if let Some(reason) = operation.reasons.first() {
        let (who, what) = reason.split_once(": ").unwrap_or(("", reason));
        let more = match operation.reasons.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        return match who {
            "" => format!("Not ready: {what}{more}. {jobs}"),
            "gitea" => format!("Gitea: {what}{more}. Running jobs go on; nothing new is fetched. {jobs}"),
            "scheduler" => format!("Nothing is fetched: it {what}{more}. {jobs}"),
            who => format!("Not ready: {who}: {what}{more}. {jobs}"),
        };
    }
    match operation.draining_since {
        Some(_) => format!("Draining: nothing new is fetched or started. {jobs}"),
        None => format!("Working. {jobs}"),
    }
}

fn jobs(backends: &[Backend], now: Moment) -> String {
    let sum = |of: fn(&Backend) -> Option<u64>| backends.iter().map(of).sum::<Option<u64>>();
    let (Some(running), Some(starting)) = (sum(|b| b.running), sum(|b| b.starting)) else {
        return "What runs and what waits is unknown: the mirror does not answer.".into();
    };
    let mut told = vec![format!("{running} running")];
    if starting > 0 {
        told.push(format!("{starting} starting"));
    }
    for backend in backends.iter().filter(|b| b.waiting.is_some_and(|n| n > 0)) {
        let oldest = backend.oldest_waiting.map_or_else(String::new, |at| format!(" (oldest {})", at.ago(&now)));
        told.push(format!("{} waiting for {}{oldest}", backend.waiting.unwrap_or(0), article(&backend.backend)));
    }
    if backends.iter().all(|b| b.waiting == Some(0)) {
        told.push("nothing waits".into());
    }
    format!("{}.", told.join(", "))
}

fn article(backend: &str) -> String {
    match backend {
        "vm" => "a VM".into(),
        "pod" => "a Pod".into(),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_at_most_two_units() {
        for (ms, text) in [
            (0, "0 s"),
            (12, "12 ms"),
            (1999, "1 s"),
            (59_999, "59 s"),
            (60_000, "1 min"),
            (3_599_999, "59 min"),
            (3_600_000, "1 h"),
            (7_500_000, "2 h 5 min"),
            (86_400_000 * 3, "3 d"),
            (u64::MAX, "213503982334 d"),
        ] {
            assert_eq!(span(ms), text);
        }
    }
}
