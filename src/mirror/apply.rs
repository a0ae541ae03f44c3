//! What each note changes: the job's row, its envelope, its slot, the record that it is over, and the ring of events.
//!
//! A note never goes back in time: what is over stays over, and a note about an environment counts only for the one that the row
//! names. A note about a job that has no row changes nothing but the record and the ring; `reconcile` makes the row from what it finds.

use super::{
    Note, Seen, What,
    job::{Finished, Job, Outcome, Phase, text},
    rows::{Failure, META_RECONCILED, Tables},
};
use crate::ids::TaskId;

pub(super) fn apply(tables: &mut Tables<'_>, note: &Note) -> Result<(), Failure> {
    let (task, now) = (note.task, note.at_ms);
    match &note.what {
        What::Queued { lane, details, fetched_ms, sealed } => {
            queued(tables, task, now, Job::new(*lane, details.as_ref().clone(), *fetched_ms), sealed.as_deref())
        }
        What::Finished { result, reason, token_hash } => {
            let end = End { phase: Phase::Finished, result: *result, reason: reason.as_deref(), token_hash: *token_hash };
            over(tables, task, now, &end)
        }
        What::Lost { reason, token_hash } => {
            let end = End { phase: Phase::Lost, result: Outcome::Failure, reason: Some(reason), token_hash: *token_hash };
            over(tables, task, now, &end)
        }
        What::Dead { reason } => {
            let end = End { phase: Phase::Dead, result: Outcome::Failure, reason: Some(reason), token_hash: None };
            over(tables, task, now, &end)
        }
        What::Seen(found) => seen(tables, task, now, found),
        What::Slots { lane, held } => {
            tables.keep_slots(|of, slot| of != lane.code() || held.iter().any(|task| task.0 == slot.task))?;
            held.iter().try_for_each(|task| tables.take_slot(lane.code(), *task, now))
        }
        What::Reconciled(keep) => {
            tables.meta.insert(META_RECONCILED, now.to_le_bytes().as_slice())?;
            tables.prune(keep, now)
        }
        what => moved(tables, task, now, what),
    }
}

/// A job's next station.
fn moved(tables: &mut Tables<'_>, task: TaskId, now: u64, what: &What) -> Result<(), Failure> {
    if matches!(what, What::Claimed { .. }) {
        // Whatever the row says: a job that was started is never queued again.
        tables.drop_payload(task)?;
    }
    let Some(mut job) = tables.job(task)? else { return Ok(()) };
    let Some((kind, words)) = station(&mut job, now, what) else { return Ok(()) };
    job.changed_ms = now;
    tables.put(task, &job)?;
    match what {
        What::Slot => tables.take_slot(job.lane.code(), task, now)?,
        What::Returned { .. } | What::MadeAgain { .. } | What::Gone { .. } => tables.free_slot(task)?,
        _ => {}
    }
    tables.event(now, Some(task), kind, words.into())
}

/// Changes the row; the event's kind and words, or `None` where the note says nothing to it.
fn station<'a>(job: &mut Job, now: u64, what: &'a What) -> Option<(&'static str, &'a str)> {
    let waits = matches!(job.phase, Phase::Queued | Phase::Starting);
    let of = |job: &Job, environment: &str| job.environment.as_deref() == Some(environment);
    let told = match what {
        What::Slot if waits => {
            (job.phase, job.times.slot) = (Phase::Starting, Some(now));
            ("capacity_acquired", "a slot")
        }
        What::Returned { reason } if job.phase == Phase::Starting && job.environment.is_none() => {
            waits_again(job, reason);
            ("backend_retry", reason.as_str())
        }
        What::Republished { reason } if waits => {
            waits_again(job, reason);
            ("republished", reason.as_str())
        }
        What::Created { environment } if waits => {
            job.phase = Phase::Starting;
            if !of(job, environment) {
                (job.environment, job.times.created) = (Some(environment.clone()), Some(now));
            }
            ("executor_created", environment.as_str())
        }
        What::Identity { environment } if of(job, environment) => {
            job.times.identity = Some(now);
            ("identity_bound", environment.as_str())
        }
        What::Claimed { environment } if job.phase.is_open() && job.times.claimed.is_none() => {
            (job.phase, job.times.claimed, job.environment) = (Phase::Claimed, Some(now), Some(environment.clone()));
            ("runner_claimed", environment.as_str())
        }
        What::Acknowledged if job.times.acknowledged.is_none() => {
            job.times.acknowledged = Some(now);
            ("acked", "out of the queue")
        }
        What::FirstStep if job.times.first_step.is_none() => {
            job.times.first_step = Some(now);
            ("first_step", "its first step runs")
        }
        What::MadeAgain { environment, reason, attempts } if waits && (job.environment.is_none() || of(job, environment)) => {
            job.attempts = (*attempts).max(job.attempts);
            waits_again(job, reason);
            ("made_again", reason.as_str())
        }
        What::Gone { environment } if of(job, environment) => {
            job.times.gone = Some(now);
            ("gone", environment.as_str())
        }
        _ => return None,
    };
    Some(told)
}

fn waits_again(job: &mut Job, reason: &str) {
    job.phase = Phase::Queued;
    job.environment = None;
    job.reason = Some(text(reason.into()));
    (job.times.slot, job.times.created, job.times.identity) = (None, None, None);
}

fn queued(tables: &mut Tables<'_>, task: TaskId, now: u64, mut job: Job, sealed: Option<&[u8]>) -> Result<(), Failure> {
    (job.times.fetched, job.times.durable, job.changed_ms) = (Some(job.received_ms), Some(now), now);
    tables.put(task, &job)?;
    match sealed {
        Some(sealed) => tables.keep_payload(task, sealed)?,
        None => tables.drop_payload(task)?,
    }
    tables.event(now, Some(task), "received", format!("{} for {}", job.details.repository, job.lane))
}

/// How a job ended.
struct End<'a> {
    phase: Phase,
    result: Outcome,
    reason: Option<&'a str>,
    token_hash: Option<[u8; 32]>,
}

fn over(tables: &mut Tables<'_>, task: TaskId, now: u64, end: &End<'_>) -> Result<(), Failure> {
    let row = tables.job(task)?;
    // The end of an older job of this id, after Gitea gave the id anew, is not this one's.
    let known = row.as_ref().and_then(|job| job.details.token_hash);
    if end.token_hash.is_some() && known.is_some() && end.token_hash != known {
        return Ok(());
    }
    if row.as_ref().is_some_and(|job| !job.phase.is_open()) {
        return Ok(());
    }
    if let Some(mut job) = row {
        // One that never had an environment has none to wait for.
        if job.environment.is_none() {
            tables.free_slot(task)?;
        }
        (job.phase, job.result, job.times.ended, job.changed_ms) = (end.phase, Some(end.result), Some(now), now);
        job.reason = end.reason.map(|reason| text(reason.into()));
        tables.put(task, &job)?;
    }
    tables.drop_payload(task)?;
    tables.finish(task, &Finished { ended_ms: now, result: end.result, token_hash: end.token_hash.or(known) })?;
    let words = [end.result.as_str(), end.reason.unwrap_or_default()].join(" ");
    tables.event(now, Some(task), end.phase.as_str(), words.trim_end().into())
}

/// A fact that the row does not show. What was noted after the look that found it is newer, and stays.
fn seen(tables: &mut Tables<'_>, task: TaskId, now: u64, found: &Seen) -> Result<(), Failure> {
    let old = tables.job(task)?;
    if old.as_ref().is_some_and(|job| job.changed_ms > found.looked_ms) {
        return Ok(());
    }
    let another = |job: &Job| match (&found.details, job.details.token_hash) {
        (Some(details), Some(known)) => details.token_hash.is_some_and(|hash| hash != known),
        _ => false,
    };
    let (mut job, kind) = match old.filter(|job| !another(job)) {
        Some(job) => (job, "repaired"),
        None => {
            let details = found.details.clone().unwrap_or_else(|| found.shown.clone());
            let mut job = Job::new(found.lane, details, found.fetched_ms.unwrap_or(now));
            (job.rebuilt, job.times.fetched) = (true, found.fetched_ms);
            (job, "rebuilt")
        }
    };
    if let Some(details) = found.details.as_ref().filter(|_| job.details.token_hash.is_none()) {
        job = Job { details: details.clone(), ..job };
    }
    job.lane = found.lane;
    (job.phase, job.changed_ms) = (found.phase, now);
    if !matches!(found.phase, Phase::Finished) {
        (job.result, job.times.ended, job.times.gone) = (None, None, None);
    }
    match &found.environment {
        Some((environment, created_ms)) => {
            job.times.created = job.times.created.filter(|_| job.environment.as_ref() == Some(environment)).or(Some(*created_ms));
            job.environment = Some(environment.clone());
        }
        None => job.environment = None,
    }
    tables.put(task, &job)?;
    match (&found.sealed, found.phase) {
        (_, Phase::Claimed) => tables.drop_payload(task)?,
        (Some(sealed), _) => tables.keep_payload(task, sealed)?,
        (None, _) => {}
    }
    tables.event(now, Some(task), kind, format!("found {}", found.phase.as_str()))
}
