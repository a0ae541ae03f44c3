//! What each note changes: the job's row, its envelope, its slot, the record that it is over, and the ring of events.
//!
//! A note never goes back in time: what is over stays over, and a note about an environment counts only for the one that the row
//! names. A note about a job that has no row changes nothing but the record and the ring; `reconcile` makes the row from what it finds.

use super::{
    Note, Seen, What,
    job::{Details, Finished, Job, Outcome, Phase, text},
    rows::{Failure, META_RECONCILED, Tables},
};
use crate::ids::{Lane, TaskId};

pub(super) fn apply(tables: &mut Tables<'_>, note: &Note) -> Result<(), Failure> {
    let Note { task, at_ms: now, what } = note;
    let (task, now) = (*task, *now);
    match what {
        What::Queued { lane, details, fetched_ms, sealed } => {
            queued(tables, task, now, *lane, details, *fetched_ms, sealed.as_deref())
        }
        What::Slot => {
            let Some(job) = change(tables, task, now, |job| {
                waits(job).then(|| {
                    job.phase = Phase::Starting;
                    job.times.slot = Some(now);
                })
            })?
            else {
                return Ok(());
            };
            tables.take_slot(job.lane.code(), task, now)?;
            tables.event(now, Some(task), "capacity_acquired", "a slot".into())
        }
        What::Returned { reason } => {
            let changed = change(tables, task, now, |job| {
                (job.phase == Phase::Starting && job.environment.is_none()).then(|| waits_again(job, reason))
            })?;
            if changed.is_some() {
                tables.free_slot(task)?;
                tables.event(now, Some(task), "backend_retry", reason.clone())?;
            }
            Ok(())
        }
        What::Republished { reason } => {
            let changed = change(tables, task, now, |job| waits(job).then(|| waits_again(job, reason)))?;
            told(tables, changed, task, now, "republished", reason)
        }
        What::Created { environment } => {
            let changed = change(tables, task, now, |job| {
                waits(job).then(|| {
                    job.phase = Phase::Starting;
                    if job.environment.as_ref() != Some(environment) {
                        job.environment = Some(environment.clone());
                        job.times.created = Some(now);
                    }
                })
            })?;
            told(tables, changed, task, now, "executor_created", environment)
        }
        What::Identity { environment } => {
            let changed = change(tables, task, now, |job| of(job, environment).then(|| job.times.identity = Some(now)))?;
            told(tables, changed, task, now, "identity_bound", environment)
        }
        What::Claimed { environment } => {
            let changed = change(tables, task, now, |job| {
                (job.phase.is_open() && job.times.claimed.is_none()).then(|| {
                    job.phase = Phase::Claimed;
                    job.environment = Some(environment.clone());
                    job.times.claimed = Some(now);
                })
            })?;
            // Whatever the row says: a job that was started is never queued again.
            tables.drop_payload(task)?;
            told(tables, changed, task, now, "runner_claimed", environment)
        }
        What::Acknowledged => {
            let changed =
                change(tables, task, now, |job| job.times.acknowledged.is_none().then(|| job.times.acknowledged = Some(now)))?;
            told(tables, changed, task, now, "acked", "out of the queue")
        }
        What::FirstStep => {
            let changed =
                change(tables, task, now, |job| job.times.first_step.is_none().then(|| job.times.first_step = Some(now)))?;
            told(tables, changed, task, now, "first_step", "its first step runs")
        }
        What::MadeAgain { environment, reason, attempts } => {
            let changed = change(tables, task, now, |job| {
                (waits(job) && job.environment.as_ref().is_none_or(|known| known == environment)).then(|| {
                    job.attempts = (*attempts).max(job.attempts);
                    waits_again(job, reason);
                })
            })?;
            if changed.is_some() {
                tables.free_slot(task)?;
            }
            told(tables, changed, task, now, "made_again", reason)
        }
        What::Finished { result, reason, token_hash } => {
            over(tables, task, now, Phase::Finished, *result, reason.as_deref(), *token_hash)
        }
        What::Lost { reason, token_hash } => over(tables, task, now, Phase::Lost, Outcome::Failure, Some(reason), *token_hash),
        What::Dead { reason } => over(tables, task, now, Phase::Dead, Outcome::Failure, Some(reason), None),
        What::Gone { environment } => {
            let changed = change(tables, task, now, |job| of(job, environment).then(|| job.times.gone = Some(now)))?;
            if changed.is_some() {
                tables.free_slot(task)?;
            }
            told(tables, changed, task, now, "gone", environment)
        }
        What::Seen(found) => seen(tables, task, now, found),
        What::Slots { lane, held } => {
            tables.keep_slots(|of, slot| of != lane.code() || held.iter().any(|task| task.0 == slot.task))?;
            for task in held {
                tables.take_slot(lane.code(), *task, now)?;
            }
            Ok(())
        }
        What::Reconciled(keep) => {
            tables.meta.insert(META_RECONCILED, now.to_le_bytes().as_slice())?;
            tables.prune(keep, now)
        }
    }
}

/// Changes a row if there is one and `with` wants to; answers what it is now.
fn change(
    tables: &mut Tables<'_>,
    task: TaskId,
    now: u64,
    with: impl FnOnce(&mut Job) -> Option<()>,
) -> Result<Option<Job>, Failure> {
    let Some(mut job) = tables.job(task)? else { return Ok(None) };
    if with(&mut job).is_none() {
        return Ok(None);
    }
    job.changed_ms = now;
    tables.put(task, &job)?;
    Ok(Some(job))
}

fn told(tables: &mut Tables<'_>, changed: Option<Job>, task: TaskId, now: u64, kind: &str, words: &str) -> Result<(), Failure> {
    match changed {
        Some(_) => tables.event(now, Some(task), kind, words.into()),
        None => Ok(()),
    }
}

/// It may still be started somewhere.
fn waits(job: &Job) -> bool {
    matches!(job.phase, Phase::Queued | Phase::Starting)
}

fn of(job: &Job, environment: &str) -> bool {
    job.environment.as_deref() == Some(environment)
}

fn waits_again(job: &mut Job, reason: &str) {
    job.phase = Phase::Queued;
    job.environment = None;
    job.reason = Some(text(reason.into()));
    (job.times.slot, job.times.created, job.times.identity) = (None, None, None);
}

fn queued(
    tables: &mut Tables<'_>,
    task: TaskId,
    now: u64,
    lane: Lane,
    details: &Details,
    fetched_ms: u64,
    sealed: Option<&[u8]>,
) -> Result<(), Failure> {
    let mut job = Job::new(lane, details.clone(), fetched_ms);
    (job.times.fetched, job.times.durable, job.changed_ms) = (Some(fetched_ms), Some(now), now);
    tables.put(task, &job)?;
    match sealed {
        Some(sealed) => tables.keep_payload(task, sealed)?,
        None => tables.drop_payload(task)?,
    }
    tables.event(now, Some(task), "received", format!("{} for {lane}", job.details.repository))
}

fn over(
    tables: &mut Tables<'_>,
    task: TaskId,
    now: u64,
    phase: Phase,
    result: Outcome,
    reason: Option<&str>,
    token_hash: Option<[u8; 32]>,
) -> Result<(), Failure> {
    let row = tables.job(task)?;
    // The end of an older job of this id, after Gitea gave the id anew, is not this one's.
    let known = row.as_ref().and_then(|job| job.details.token_hash);
    if token_hash.is_some() && known.is_some() && token_hash != known {
        return Ok(());
    }
    let changed = change(tables, task, now, |job| {
        job.phase.is_open().then(|| {
            (job.phase, job.result, job.times.ended) = (phase, Some(result), Some(now));
            job.reason = reason.map(|reason| text(reason.into()));
        })
    })?;
    tables.drop_payload(task)?;
    // One that never had an environment has none to wait for.
    if row.as_ref().is_some_and(|job| job.environment.is_none()) {
        tables.free_slot(task)?;
    }
    if row.is_none() || changed.is_some() {
        tables.finish(task, &Finished { ended_ms: now, result, token_hash: token_hash.or(known) })?;
        let words = [result.as_str(), reason.unwrap_or_default()].join(" ");
        tables.event(now, Some(task), phase.as_str(), words.trim_end().into())?;
    }
    Ok(())
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
            job.times.created = job.times.created.filter(|_| of(&job, environment)).or(Some(*created_ms));
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
