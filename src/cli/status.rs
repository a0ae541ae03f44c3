//! `status`: how everything stands, as the running controller itself has it.
//!
//! The sentence and the counts are those of the dashboard. What the controller does not know is shown as `?`, and what it cannot ask
//! is said, never a zero in its place.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use http::Method;
use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    client::{At, Client, Fault, For},
    say, told, told_faults,
};
use crate::{http::view::Moment, printable::printable};

/// How everything stands: what runs and waits, and how each neighbour answers. Asks the running controller.
#[derive(Args)]
pub(super) struct Status {
    /// For programs: one JSON value.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

pub(super) async fn run(args: &Status) -> ExitCode {
    match overview(args).await {
        Ok(overview) if args.json => {
            say(&format!("{overview:#}"));
            ExitCode::SUCCESS
        }
        Ok(overview) => {
            say(shown(&overview, Moment::now()).trim_end());
            ExitCode::SUCCESS
        }
        Err(Fault::Settings(faults)) => told_faults(&faults),
        Err(fault) => told(&anyhow::Error::new(fault).context("status")),
    }
}

async fn overview(args: &Status) -> Result<Value, Fault> {
    Client::new(&args.at, For::Reading)?.call(Method::GET, "/api/v1/overview", Duration::ZERO).await
}

fn shown(overview: &Value, now: Moment) -> String {
    let mut text = String::new();
    let mut line = |what: &str| text.extend([what, "\n"]);
    line(&word(&overview["sentence"]));
    if let Some(since) = overview["draining_since"].as_str() {
        line(&format!("Draining since {}; `drain --undo` ends it.", printable(since)));
    }
    line(&word(&overview["fetching"]));
    for reason in overview["reasons"].as_array().into_iter().flatten() {
        line(&format!("not ready: {}", word(reason)));
    }
    if overview["stale"].as_bool() != Some(false) {
        line(&format!("What follows is old: it is of {}.", word(&overview["as_of"])));
    }
    line("");
    line(&format!("{:<8} {:>10} {:>8} {:>9} {:>8}  oldest wait", "backend", "slots", "running", "starting", "waiting"));
    for backend in overview["backends"].as_array().into_iter().flatten() {
        let slots = format!("{} of {}", word(&backend["used"]), word(&backend["limit"]));
        let [running, starting, waiting] = ["running", "starting", "waiting"].map(|name| word(&backend[name]));
        let oldest = match (backend["waiting"].as_u64(), moment(&backend["oldest_waiting"])) {
            (_, Some(since)) => since.ago(&now),
            (Some(_), None) => "-".into(),
            (None, None) => "?".into(),
        };
        line(&format!("{:<8} {slots:>10} {running:>8} {starting:>9} {waiting:>8}  {oldest}", word(&backend["backend"])));
    }
    line("");
    for neighbour in overview["neighbours"].as_array().into_iter().flatten() {
        let state = word(&neighbour["state"]);
        let since = moment(&neighbour["since"]).map(|since| format!(" for {}", since.ago(&now))).unwrap_or_default();
        let trouble = match (state.as_str(), neighbour["last_trouble"]["what"].as_str()) {
            ("trouble", Some(what)) => format!(": {}", printable(what)),
            _ => String::new(),
        };
        line(&format!("{:<10} {state}{since}{trouble}  ({})", word(&neighbour["name"]), word(&neighbour["kind"])));
    }
    text
}

/// Of whatever the answer has there; `?` where it knows nothing.
fn word(value: &Value) -> String {
    match value {
        Value::Null => "?".into(),
        Value::String(text) => printable(text),
        other => other.to_string(),
    }
}

fn moment(value: &Value) -> Option<Moment> {
    let at = OffsetDateTime::parse(value.as_str()?, &Rfc3339).ok()?;
    Some(Moment(u64::try_from(at.unix_timestamp_nanos() / 1_000_000).ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_known_is_a_question_mark_and_what_people_wrote_moves_no_cursor() {
        let overview = json!({
            "sentence": "2 jobs run\u{1b}[2J.", "fetching": "Gitea is asked for jobs.", "reasons": ["queue: full"], "stale": true,
            "as_of": null, "draining_since": "2026-11-30T01:00:00Z",
            "backends": [
                { "backend": "pod", "limit": 4, "used": 2, "running": 2, "starting": 0, "waiting": 5, "oldest_waiting": "2026-11-30T01:00:00Z" },
                { "backend": "vm", "limit": 1, "used": null, "running": null, "starting": null, "waiting": null, "oldest_waiting": null },
            ],
            "neighbours": [{ "name": "queue", "kind": "JetStream", "state": "trouble", "since": "2026-11-30T01:01:00Z",
                "last_trouble": { "at": "2026-11-30T01:02:00Z", "what": "refused" } }],
        });
        let now = moment(&json!("2026-11-30T01:03:00Z")).unwrap();
        let expected = "2 jobs run\\u{1b}[2J.\n\
            Draining since 2026-11-30T01:00:00Z; `drain --undo` ends it.\n\
            Gitea is asked for jobs.\n\
            not ready: queue: full\n\
            What follows is old: it is of ?.\n\n\
            backend       slots  running  starting  waiting  oldest wait\n\
            pod          2 of 4        2         0        5  3 min\n\
            vm           ? of 1        ?         ?        ?  ?\n\n\
            queue      trouble for 2 min: refused  (JetStream)\n";
        assert_eq!(shown(&overview, now), expected);
        assert!(shown(&json!({}), now).starts_with("?\n"), "an answer of another version is no panic");
    }
}
