//! One `run:` step: a script file, a shell in a process group of its own, its output line by line.

use std::{collections::BTreeMap, path::Path, process::Stdio, time::Duration};

use anyhow::Context as _;
use nix::{sys::signal, unistd::Pid};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader},
    process::{Child, Command},
    sync::{mpsc, watch},
    time::{Instant, Interval, MissedTickBehavior, interval},
};

use super::report::Reporter;

/// How often rows and states go out while a step runs. A stop is noticed no later.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// A line longer than this is cut into rows.
const MAX_LINE: usize = 64 << 10;
/// After the shell's end, how long its children may hold the output open.
const LINGER: Duration = Duration::from_secs(2);

/// How a script ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Succeeded,
    Failed,
    /// Killed, because the server or a signal said stop.
    Stopped,
}

pub(super) struct Script<'a> {
    pub(super) text: &'a str,
    /// `bash` or `sh`; bash where it is there if the step names none.
    pub(super) shell: Option<&'a str>,
    pub(super) env: &'a BTreeMap<String, String>,
    /// Working directory.
    pub(super) folder: &'a Path,
    /// Where the script file goes.
    pub(super) file: &'a Path,
}

/// Runs a script to its end, or kills its group when told to stop. Its output becomes rows.
pub(super) async fn run(script: Script<'_>, reporter: &mut Reporter, stop: &watch::Receiver<bool>) -> anyhow::Result<Ended> {
    std::fs::write(script.file, script.text).context("write the script of the step")?;
    let mut child = start(&script)?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let (send, mut lines) = mpsc::channel(256);
    if let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) {
        tokio::spawn(read_lines(out, send.clone()));
        tokio::spawn(read_lines(err, send));
    }
    let mut ticks = ticks();
    let mut stop = stop.clone();
    let mut stopped = false;
    let status = loop {
        if !stopped && (reporter.cancelled || *stop.borrow_and_update()) {
            stopped = true;
            // The shell was not waited for yet, so its number is still its own.
            if let Some(Err(error)) = group.map(|group| signal::killpg(group, signal::Signal::SIGKILL)) {
                tracing::warn!(%error, "script could not be killed");
            }
        }
        tokio::select! {
            status = child.wait() => break status.context("wait for the shell")?,
            Some(line) = lines.recv(), if !reporter.is_full() => reporter.line(&line),
            // The official runner says nothing more once it knows of a stop.
            _ = ticks.tick(), if !stopped => reporter.flush().await,
            Ok(()) = stop.changed() => {}
        }
    };
    let until = Instant::now() + LINGER;
    while let Ok(Some(line)) = tokio::time::timeout_at(until, lines.recv()).await {
        reporter.line(&line);
    }
    Ok(match status {
        _ if stopped => Ended::Stopped,
        status if status.success() => Ended::Succeeded,
        status => {
            reporter.say(&format!("the script ended with {status}"));
            Ended::Failed
        }
    })
}

fn start(script: &Script<'_>) -> anyhow::Result<Child> {
    let command = |program: &str, flags: &[&str]| {
        let mut command = Command::new(program);
        command.args(flags).arg(script.file).envs(script.env).current_dir(script.folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
        command.spawn().with_context(|| format!("start {program}"))
    };
    match script.shell {
        None => command("bash", &["-e"]).or_else(|_| command("sh", &["-e"])),
        Some("bash") => command("bash", &["-eo", "pipefail"]),
        Some("sh") => command("sh", &["-e"]),
        Some(other) => anyhow::bail!("this runner of the demo has no shell {other:?}, only bash and sh"),
    }
}

fn ticks() -> Interval {
    let mut ticks = interval(REPORT_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Lines as text; what is not UTF-8 is shown as such, and a line without end is cut.
async fn read_lines(from: impl AsyncRead + Unpin, into: mpsc::Sender<String>) {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    loop {
        let available = match from.fill_buf().await {
            Ok(available) if !available.is_empty() => available,
            _ => break,
        };
        let newline = available.iter().position(|&byte| byte == b'\n');
        line.extend_from_slice(&available[..newline.unwrap_or(available.len())]);
        let used = newline.map_or(available.len(), |at| at + 1);
        from.consume(used);
        if newline.is_some() || line.len() >= MAX_LINE {
            let text = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            line.clear();
            if into.send(text).await.is_err() {
                return;
            }
        }
    }
    if !line.is_empty() {
        // Nobody listens any more once the job is over.
        into.send(String::from_utf8_lossy(&line).into_owned()).await.ok();
    }
}
