//! `drain`: asks the running controller to begin nothing new, waits for the end, or undoes it.
//!
//! The controller keeps the wish over restarts, so while one waits it may be away for a while.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use http::Method;

use super::{
    client::{At, Client, Fault, For},
    exit, say, told, told_faults,
};
use crate::http::Progress;

const PATH: &str = "/api/v1/drain";
/// One question of a longer wait; between two, progress is told.
const ASK: Duration = Duration::from_secs(2);
/// While nobody answers.
const AWAY: Duration = Duration::from_secs(1);

/// Begin nothing new: no job is fetched or started, what runs goes on. It outlives restarts, until it is undone.
#[derive(Args)]
pub(super) struct Drain {
    /// Wait until nothing runs any more, at most so many seconds (a day, if none are given). Exit code 75: the time is over.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "86400",
        value_parser = clap::value_parser!(u64).range(1..=604_800), conflicts_with = "undo")]
    wait: Option<u64>,
    /// Fetch and start jobs again.
    #[arg(long)]
    undo: bool,
    /// For programs: one JSON value.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

pub(super) async fn run(args: &Drain) -> ExitCode {
    match drain(args).await {
        Ok((progress, code)) => {
            say(&if args.json { serde_json::json!(progress).to_string() } else { shown(&progress) });
            ExitCode::from(code)
        }
        Err(Fault::Settings(faults)) => told_faults(&faults),
        Err(fault) => told(&anyhow::Error::new(fault).context("drain")),
    }
}

async fn drain(args: &Drain) -> Result<(Progress, u8), Fault> {
    let client = Client::new(&args.at, For::Draining)?;
    let method = if args.undo { Method::DELETE } else { Method::POST };
    let progress: Progress = client.call(method, PATH, Duration::ZERO).await?;
    match args.wait {
        None => Ok((progress, exit::SUCCESS)),
        Some(seconds) => wait(&client, Instant::now() + Duration::from_secs(seconds), progress).await,
    }
}

/// Until it is drained, or the time is over.
async fn wait(client: &Client, until: Instant, mut progress: Progress) -> Result<(Progress, u8), Fault> {
    let mut last = String::new();
    loop {
        if progress.drained {
            return Ok((progress, exit::SUCCESS));
        }
        if !progress.draining {
            return Err(Fault::Refused("somebody undid the drain meanwhile".into()));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok((progress, exit::NOT_YET));
        }
        tell(&mut last, shown(&progress));
        let ask = ASK.as_secs().min(left.as_secs() + 1);
        match client.call(Method::GET, &format!("{PATH}?wait={ask}"), ASK).await {
            Ok(now) => progress = now,
            Err(fault @ Fault::Away { .. }) => {
                tell(&mut last, format!("{fault}. It drains on when it is back; asking again"));
                tokio::time::sleep(AWAY.min(left)).await;
            }
            Err(fault) => return Err(fault),
        }
    }
}

/// Progress is for who watches; the answer alone goes to standard output.
#[expect(clippy::print_stderr, reason = "for who waits")]
fn tell(last: &mut String, now: String) {
    if *last != now {
        eprintln!("{now}");
        *last = now;
    }
}

fn shown(progress: &Progress) -> String {
    let Progress { draining, since, drained, waiting, starting, running, leaving, fetching } = progress;
    let count = |n: &Option<usize>| n.map_or_else(|| "?".to_owned(), |n| n.to_string());
    let since = since.as_deref().unwrap_or("?");
    let begin = match (draining, drained) {
        (_, true) => format!("Drained (draining since {since})"),
        (true, false) => format!("Draining since {since}"),
        (false, _) => "Not draining: jobs are fetched and started".to_owned(),
    };
    format!(
        "{begin}. {} running, {} starting, {} leaving, {} waiting here, {fetching} being fetched.",
        count(running),
        count(starting),
        count(leaving),
        count(waiting)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_is_never_shown_as_zero() {
        let progress = Progress {
            draining: true,
            since: Some("2026-11-30T01:01:03Z".into()),
            drained: false,
            waiting: None,
            starting: Some(0),
            running: Some(5),
            leaving: None,
            fetching: 1,
        };
        let expected = "Draining since 2026-11-30T01:01:03Z. 5 running, 0 starting, ? leaving, ? waiting here, 1 being fetched.";
        assert_eq!(shown(&progress), expected);
    }
}
