//! `show` and `rebuild-mirror`: what the mirror knows, read from its file, also while a controller runs.
//!
//! Of one job the running controller knows more (why it waits): it is asked first, by whoever has its token.
//! Nothing is changed but by `rebuild-mirror`, and that only while no controller runs. Text that people wrote is escaped for the
//! terminal; `--json` is for programs, one value.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

use super::{
    client::{At, Client, Fault, For},
    exit, say, told,
};
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
    #[command(flatten)]
    at: At,
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

pub(super) async fn show(args: &Show) -> ExitCode {
    let answer = match &args.what {
        Some(What::Job { id }) => match of_controller(args, id).await {
            Some(answer) => answer,
            None => look(args),
        },
        _ => look(args),
    };
    match answer {
        Ok(text) => {
            say(text.trim_end());
            ExitCode::SUCCESS
        }
        Err(e) => told(&e),
    }
}

/// `None`: its file is to be looked at, and why was said.
async fn of_controller(args: &Show, id: &str) -> Option<anyhow::Result<String>> {
    let client = match Client::new(&args.at, For::Reading) {
        // Whoever has no token looks at the file, as ever.
        Ok(client) if client.has_token() || args.at.is_given() => client,
        Ok(_) => return None,
        Err(fault) => return Some(Err(fault.into())),
    };
    let task = match parse_task(id) {
        Ok(task) => task,
        Err(why) => return Some(Err(anyhow::Error::msg(why))),
    };
    match client.call::<Value>(Method::GET, &format!("/api/v1/jobs/{task}"), Duration::ZERO).await {
        Ok(job) if args.json => Some(Ok(format!("{job:#}"))),
        Ok(job) => Some(Ok(told_job(&job))),
        Err(Fault::Missing(why)) => Some(Err(anyhow::Error::msg(why).context("show"))),
        Err(fault) => {
            note(&format!("{fault}. This is what the file of its mirror says:"));
            None
        }
    }
}

#[expect(clippy::print_stderr, reason = "beside the answer")]
fn note(text: &str) {
    eprintln!("{text}");
}

fn parse_task(id: &str) -> Result<TaskId, String> {
    id.strip_prefix("gitea-task-").unwrap_or(id).parse().map_err(|e| format!("{e}"))
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
            Some(What::Events { limit }) => events(&snapshot, *limit, args.json),
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
    let task = parse_task(id)?;
    let Some(job) = snapshot.job(task)? else {
        return Err(format!(
            "there is no job of task {task} here: it was never taken, ended more than 30 days ago, or the mirror was made anew"
        ));
    };
    let mut value = value(task, &job);
    if as_json {
        return Ok(format!("{value:#}"));
    }
    value["events"] = told_events(snapshot, Some(task), 100)?;
    Ok(told_job(&value))
}

/// One job for a person, from its JSON, whoever told it.
fn told_job(job: &Value) -> String {
    let word = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => printable(text),
        other => other.to_string(),
    };
    let task = job["task"].as_i64().unwrap_or_default();
    let mut text = format!("{}  {} on {}\n", TaskId(task).assignment(), word(&job["phase"]), word(&job["backend"]));
    let mut row = |name: &str, what: &str| {
        if !what.is_empty() {
            text.push_str(&format!("  {name:<14} {what}\n"));
        }
    };
    row("why", &word(&job["why"]));
    for (name, key) in
        [("repository", "repository"), ("job", "job_key"), ("name", "job_name"), ("run", "run_id"), ("link", "run_url")]
    {
        row(name, &word(&job[key]));
    }
    let labels: Vec<_> = job["labels"].as_array().into_iter().flatten().map(word).collect();
    row("runs-on", &labels.join(", "));
    row("environment", &word(&job["environment"]));
    row("attempts", &if job["attempts"].as_u64() > Some(0) { word(&job["attempts"]) } else { String::new() });
    row("result", &word(&job["result"]));
    row("reason", &word(&job["reason"]));
    if job["rebuilt"].as_bool() == Some(true) {
        row("note", "its row was made from what was found: the timeline before is not known");
    }
    for name in STATIONS {
        row(name, &word(&job["times"][name]));
    }
    text + &event_rows(&job["events"])
}

fn event_rows(events: &Value) -> String {
    let mut text = String::new();
    for event in events.as_array().into_iter().flatten() {
        let word = |key: &str| event[key].as_str().map_or_else(|| "-".into(), printable);
        let task = event["task"].as_i64().map(|task| task.to_string()).unwrap_or_default();
        text += &format!("{:<20} {task:>8}  {:<18} {}\n", word("at"), word("event"), word("text"));
    }
    text
}

fn events(snapshot: &Snapshot, limit: usize, as_json: bool) -> Result<String, String> {
    let events = told_events(snapshot, None, limit)?;
    Ok(if as_json { format!("{events:#}") } else { event_rows(&events) })
}

fn told_events(snapshot: &Snapshot, task: Option<TaskId>, limit: usize) -> Result<Value, String> {
    let events = snapshot.events(task, limit)?;
    let all = events.iter().map(|(at, e)| json!({ "at": rfc(Some(*at)), "task": e.task, "event": e.kind, "text": e.text }));
    Ok(all.collect())
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

const STATIONS: [&str; 10] =
    ["fetched", "durable", "slot", "created", "identity", "claimed", "first_step", "ended", "acknowledged", "gone"];

fn timeline(job: &Job) -> [(&'static str, Option<u64>); 10] {
    let t = &job.times;
    let times = [t.fetched, t.durable, t.slot, t.created, t.identity, t.claimed, t.first_step, t.ended, t.acknowledged, t.gone];
    std::array::from_fn(|n| (STATIONS[n], times[n]))
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
