//! `show` and `rebuild-mirror`: what the mirror knows, read from its file, also while a controller runs.
//!
//! Nothing is changed but by `rebuild-mirror`, and that only while no controller runs. Text that people wrote is escaped for the
//! terminal; `--json` is for programs, one value.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

use super::{exit, say, told};
use crate::{
    ids::{Lane, TaskId},
    mirror::{self, Filter, Job, Phase, Reader, Snapshot},
    printable::printable,
};

#[derive(Args)]
pub(super) struct Show {
    /// For programs: one JSON value.
    #[arg(long, global = true)]
    json: bool,
    /// As the controller has it.
    #[arg(long, env = "STATE_DIRECTORY", global = true)]
    state_directory: Option<PathBuf>,
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Subcommand)]
enum What {
    /// Jobs, the newest first.
    Jobs {
        #[arg(long, value_parser = parse_phase)]
        phase: Option<Phase>,
        #[arg(long, value_parser = parse_lane)]
        backend: Option<Lane>,
        /// `owner/name`.
        #[arg(long)]
        repository: Option<String>,
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// One job with its timeline, by its task id at Gitea (71 or gitea-task-71).
    Job { id: String },
    /// What happened, the newest first.
    Events {
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// Which jobs hold a slot.
    Slots,
}

fn parse_phase(text: &str) -> Result<Phase, String> {
    let known = || Phase::ALL.map(Phase::as_str).join(", ");
    Phase::ALL.into_iter().find(|phase| phase.as_str() == text).ok_or_else(|| format!("one of: {}", known()))
}

fn parse_lane(text: &str) -> Result<Lane, String> {
    let known = || Lane::ALL.map(Lane::as_str).join(", ");
    Lane::ALL.into_iter().find(|lane| lane.as_str() == text).ok_or_else(|| format!("one of: {}", known()))
}

pub(super) fn show(args: &Show) -> ExitCode {
    let answer = look(args);
    match answer {
        Ok(text) => {
            say(text.trim_end());
            ExitCode::SUCCESS
        }
        Err(e) => told(&e),
    }
}

fn look(args: &Show) -> anyhow::Result<String> {
    let path = file(args.state_directory.as_deref())?;
    // What of redb panics on a damaged file is a fault of the file.
    let looked = std::panic::catch_unwind(|| {
        let reader = Reader::open(&path)?;
        let snapshot = reader.snapshot()?;
        match &args.what {
            None => overview(&snapshot, args.json),
            Some(What::Jobs { phase, backend, repository, limit }) => {
                let filter =
                    Filter { phase: *phase, lane: *backend, repository: repository.clone(), limit: *limit, ..Filter::default() };
                jobs(&snapshot, &filter, args.json)
            }
            Some(What::Job { id }) => job(&snapshot, id, args.json),
            Some(What::Events { limit }) => events(&snapshot, None, *limit, args.json),
            Some(What::Slots) => slots(&snapshot, args.json),
        }
    });
    let looked =
        looked.unwrap_or_else(|_| Err(format!("{} is damaged: the controller sets it aside when it starts", path.display())));
    looked.map_err(anyhow::Error::msg).context("show")
}

fn file(state_directory: Option<&Path>) -> anyhow::Result<PathBuf> {
    let folder =
        state_directory.context("STATE_DIRECTORY is not set: set it as for the controller, or give --state-directory")?;
    Ok(folder.join("private").join(mirror::FILE))
}

#[derive(Args)]
pub(super) struct Rebuild {
    /// As the controller has it.
    #[arg(long, env = "STATE_DIRECTORY")]
    state_directory: Option<PathBuf>,
}

pub(super) fn rebuild(args: &Rebuild) -> ExitCode {
    let path = match file(args.state_directory.as_deref()) {
        Ok(path) => path,
        Err(e) => return told(&e),
    };
    match mirror::set_aside(&path) {
        Ok(Some(aside)) => {
            say(&format!("Set the mirror aside as {}. The next start makes it anew; timelines begin again.", aside.display()));
            ExitCode::SUCCESS
        }
        Ok(None) => {
            say(&format!("There is no mirror at {}. The next start makes one.", path.display()));
            ExitCode::SUCCESS
        }
        Err(why) => {
            told(&anyhow::Error::msg(why).context("set the mirror aside"));
            ExitCode::from(exit::UNEXPECTED)
        }
    }
}

fn overview(snapshot: &Snapshot, as_json: bool) -> Result<String, String> {
    let overview = snapshot.overview()?;
    if as_json {
        let mut jobs: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
        for (lane, phase, n) in &overview.jobs {
            jobs.entry(lane.as_str()).or_default().insert(phase.as_str(), *n);
        }
        let value = json!({ "jobs": jobs, "rebuilt_at": rfc(overview.rebuilt_ms), "reconciled_at": rfc(overview.reconciled_ms),
            "finished_tasks": overview.finished, "events": overview.events });
        return Ok(format!("{value:#}"));
    }
    let mut text = String::new();
    for lane in Lane::ALL {
        let counts = overview.jobs.iter().filter(|(l, _, n)| *l == lane && *n > 0);
        let counts: Vec<_> = counts.map(|(_, phase, n)| format!("{n} {}", phase.as_str())).collect();
        text += &format!("{:<8} {}\n", lane.as_str(), if counts.is_empty() { "no jobs".to_owned() } else { counts.join(", ") });
    }
    text += &format!("timelines begin   {}\n", shown(overview.rebuilt_ms));
    text += &format!("compared last     {}\n", shown(overview.reconciled_ms));
    Ok(text)
}

fn jobs(snapshot: &Snapshot, filter: &Filter, as_json: bool) -> Result<String, String> {
    let found = snapshot.jobs(filter)?;
    if as_json {
        let all: Vec<Value> = found.iter().map(|(task, job)| value(*task, job)).collect();
        return Ok(format!("{:#}", Value::from(all)));
    }
    if found.is_empty() {
        return Ok("no such jobs".into());
    }
    let mut text = format!("{:>8}  {:<9} {:<8} {:<20} job\n", "task", "phase", "backend", "since");
    for (task, job) in &found {
        let name = printable(&format!("{} {}", job.details.repository, job.details.job_key));
        let phase = job.result.map_or(job.phase.as_str(), |result| result.as_str());
        text += &format!("{:>8}  {phase:<9} {:<8} {:<20} {name}\n", task.0, job.lane.as_str(), shown(Some(job.changed_ms)));
    }
    Ok(text)
}

fn job(snapshot: &Snapshot, id: &str, as_json: bool) -> Result<String, String> {
    let task: TaskId = id.strip_prefix("gitea-task-").unwrap_or(id).parse().map_err(|e| format!("{e}"))?;
    let Some(job) = snapshot.job(task)? else {
        return Err(format!(
            "there is no job of task {task} here: it was never taken, ended more than 30 days ago, or the mirror was made anew"
        ));
    };
    if as_json {
        return Ok(format!("{:#}", value(task, &job)));
    }
    let details = &job.details;
    let mut text = format!("{}  {} on {}\n", task.assignment(), job.phase.as_str(), job.lane.as_str());
    let mut row = |name: &str, what: &str| {
        if !what.is_empty() {
            text.push_str(&format!("  {name:<14} {}\n", printable(what)));
        }
    };
    row("repository", &details.repository);
    row("job", &details.job_key);
    row("name", &details.job_name);
    row("run", &details.run_id);
    row("runs-on", &details.labels.join(", "));
    row("environment", job.environment.as_deref().unwrap_or_default());
    row("attempts", &if job.attempts > 0 { job.attempts.to_string() } else { String::new() });
    row("result", job.result.map_or("", |result| result.as_str()));
    row("reason", job.reason.as_deref().unwrap_or_default());
    if job.rebuilt {
        row("note", "its row was made from what was found: the timeline before is not known");
    }
    for (name, at) in timeline(&job) {
        if at.is_some() {
            row(name, &shown(at));
        }
    }
    text += &events(snapshot, Some(task), 100, false)?;
    Ok(text)
}

fn events(snapshot: &Snapshot, task: Option<TaskId>, limit: usize, as_json: bool) -> Result<String, String> {
    let events = snapshot.events(task, limit)?;
    if as_json {
        let all = events.iter().map(|(at, e)| json!({ "at": rfc(Some(*at)), "task": e.task, "event": e.kind, "text": e.text }));
        return Ok(format!("{:#}", Value::from(all.collect::<Vec<_>>())));
    }
    let mut text = String::new();
    for (at, event) in &events {
        let of = event.task.map(|task| task.to_string()).unwrap_or_default();
        text += &format!("{:<20} {of:>8}  {:<18} {}\n", shown(Some(*at)), printable(&event.kind), printable(&event.text));
    }
    Ok(text)
}

fn slots(snapshot: &Snapshot, as_json: bool) -> Result<String, String> {
    let slots = snapshot.slots()?;
    if as_json {
        let all = slots.iter().map(|(lane, number, slot)| {
            json!({ "backend": lane.as_str(), "slot": number, "task": slot.task, "since": rfc(Some(slot.since_ms)) })
        });
        return Ok(format!("{:#}", Value::from(all.collect::<Vec<_>>())));
    }
    if slots.is_empty() {
        return Ok("no slot is in use".into());
    }
    let row = |(lane, number, slot): &(Lane, u32, mirror::Slot)| {
        format!("{:<8} {number:>4}  {:>8}  since {}\n", lane.as_str(), slot.task, shown(Some(slot.since_ms)))
    };
    Ok(slots.iter().map(row).collect())
}

fn timeline(job: &Job) -> [(&'static str, Option<u64>); 10] {
    let t = &job.times;
    [
        ("fetched", t.fetched),
        ("durable", t.durable),
        ("slot", t.slot),
        ("created", t.created),
        ("identity", t.identity),
        ("claimed", t.claimed),
        ("first_step", t.first_step),
        ("ended", t.ended),
        ("acknowledged", t.acknowledged),
        ("gone", t.gone),
    ]
}

fn value(task: TaskId, job: &Job) -> Value {
    let times: serde_json::Map<String, Value> =
        timeline(job).into_iter().filter(|(_, at)| at.is_some()).map(|(name, at)| (name.to_owned(), rfc(at).into())).collect();
    let details = &job.details;
    json!({
        "task": task.0, "phase": job.phase.as_str(), "backend": job.lane.as_str(), "repository": details.repository,
        "job_key": details.job_key, "job_name": details.job_name, "run_id": details.run_id, "labels": details.labels,
        "attempts": job.attempts, "environment": job.environment, "result": job.result.map(|r| r.as_str()),
        "reason": job.reason, "rebuilt": job.rebuilt, "times": times,
    })
}

/// For a person; `-` where it is not known.
fn shown(ms: Option<u64>) -> String {
    rfc(ms).unwrap_or_else(|| "-".into())
}

/// UTC as in RFC 3339, to the second.
fn rfc(ms: Option<u64>) -> Option<String> {
    let seconds = i64::try_from(ms? / 1000).ok()?;
    time::OffsetDateTime::from_unix_timestamp(seconds).ok()?.format(&Rfc3339).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_utc() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_796_000_461_999, "2026-11-30T01:01:01Z"),
            (4_107_542_399_000, "2100-02-28T23:59:59Z"),
        ] {
            assert_eq!(rfc(Some(ms)).as_deref(), Some(text));
        }
    }
}
