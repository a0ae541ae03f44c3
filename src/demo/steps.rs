//! A runner for plain `run:` steps, so that the demo needs no download. It is no replacement for the official runner.
//!
//! It is called as the official one (`daemon --once -c config.yaml`, with a `.runner` file) and speaks the same protocol to the same
//! bridge. It knows `run:`, outputs, `if: always()` and plain look-ups in expressions; everything else fails its step and says so. Where
//! the official runner 1.0.8 is odd after a stop (it reports SUCCESS), so is this one.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use buffa::Message as _;
use clap::Parser as _;
use rand::Rng as _;
use serde::Deserialize;
use tokio::sync::watch;

use crate::{gitea::RunnerRpc, proto::runner::Task, secret::Secret};

mod expand;
mod job;
mod report;
mod shell;

/// Between two looks for a task.
const FETCH_EVERY: Duration = Duration::from_secs(1);
/// Who has no task for so long never will.
const IDLE_LIMIT: Duration = Duration::from_secs(900);

#[derive(clap::Parser)]
#[command(name = "gitea-dynamic-runner steps", version, about = "Runs the run: steps of one job, for the demo")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Waits for one task, runs it, ends.
    Daemon {
        #[arg(short, long)]
        config: Option<PathBuf>,
        /// Always: this runner knows no other way.
        #[arg(long)]
        once: bool,
    },
}

/// The part of the official `config.yaml` that matters here.
#[derive(Default, Deserialize)]
struct Config {
    #[serde(default)]
    runner: RunnerConfig,
}

#[derive(Default, Deserialize)]
struct RunnerConfig {
    #[serde(default)]
    file: Option<PathBuf>,
    #[serde(default)]
    envs: Option<BTreeMap<String, String>>,
}

/// The `.runner` file.
#[derive(Deserialize)]
struct Registration {
    uuid: String,
    token: String,
    address: String,
    labels: Vec<String>,
}

/// Runs as the program; `args` without the program's own name. 0 once a task was run, whatever its result, or after SIGTERM.
pub fn main_from(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let name = OsString::from("steps");
    let arguments = match Arguments::try_parse_from(std::iter::once(name).chain(args)) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version go to stdout and are no failure. Nothing helps where even that cannot be written.
            error.print().ok();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let Command::Daemon { config, .. } = arguments.command;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime");
    match runtime.and_then(|runtime| runtime.block_on(daemon(config.as_deref()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("steps runner: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn daemon(config: Option<&Path>) -> anyhow::Result<()> {
    let config: Config = match config {
        None => Config::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            serde_saphyr::from_str(&text).with_context(|| format!("understand {}", path.display()))?
        }
    };
    let file = config.runner.file.unwrap_or_else(|| ".runner".into());
    let text = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let registration: Registration = serde_json::from_str(&text).with_context(|| format!("understand {}", file.display()))?;
    let address = registration.address.trim_end_matches('/');
    let token = Secret::new(registration.token);
    let rpc = RunnerRpc::to_gitea(address, None, Some((&registration.uuid, &token)))?;
    // `label:host` declares `label`.
    let bare = |label: &String| label.split(':').next().unwrap_or_default().to_owned();
    let labels: Vec<_> = registration.labels.iter().map(bare).collect();
    rpc.declare(concat!("steps-", env!("CARGO_PKG_VERSION")), &labels, &[]).await.context("declare labels")?;
    let stop = stop_on_signal()?;
    if let Some(task) = wait_for_task(&rpc, stop.clone()).await? {
        job::run(task, rpc, address, &config.runner.envs.unwrap_or_default(), &stop).await;
    }
    Ok(())
}

fn stop_on_signal() -> anyhow::Result<watch::Receiver<bool>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (tell, stop) = watch::channel(false);
    let mut term = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
        tell.send_replace(true);
        // Kept, because a watch without its sender counts as closed.
        std::future::pending::<()>().await;
    });
    Ok(stop)
}

/// `None` after a signal. A fetch in flight is heard out even then: its answer may be a task, which would be lost.
async fn wait_for_task(rpc: &RunnerRpc, mut stop: watch::Receiver<bool>) -> anyhow::Result<Option<Task>> {
    let began = tokio::time::Instant::now();
    while began.elapsed() < IDLE_LIMIT {
        match rpc.fetch_task(0).await {
            Ok(fetched) => {
                if let Some(raw) = fetched.task {
                    return Task::decode_from_slice(raw.expose()).context("understand the task").map(Some);
                }
            }
            Err(error) => tracing::warn!(%error, "no answer to FetchTask, asked again"),
        }
        let pause = FETCH_EVERY.mul_f64(rand::rng().random_range(0.8..1.2));
        if let Ok(Ok(_)) = tokio::time::timeout(pause, stop.wait_for(|stop| *stop)).await {
            return Ok(None);
        }
    }
    bail!("no task within {} min", IDLE_LIMIT.as_secs() / 60)
}
