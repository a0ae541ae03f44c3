//! The command line: which part of the binary runs, and the exit codes that others rely on.

use std::{io::Read as _, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::{
    backend::{BackendError, local::Isolation},
    config::{self, Config, Faults, Mode, Reader, tools},
    daemon::Daemon,
    mirror::OpenError,
    queue::QueueError,
    telemetry,
};

mod client;
mod doctor;
mod drain;
mod manual;
mod nats_setup;
mod register;
mod show;
mod status;
mod unregister;

/// The exit codes.
pub mod exit {
    pub const SUCCESS: u8 = 0;
    /// A fault of this program, or of the machine.
    pub const UNEXPECTED: u8 = 1;
    /// `doctor` found something that somebody must do.
    pub const TO_DO: u8 = 3;
    /// `drain --wait`: the time is over, and something still runs.
    pub const NOT_YET: u8 = 75;
    /// The settings are wrong; every fault was told.
    pub const CONFIGURATION: u8 = 78;
}

#[derive(Parser)]
#[command(version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the controller. Its settings are environment variables; see `check-config` and the README.
    Serve(Serve),
    /// Register one runner at Gitea, once; keeps what Gitea gave in STATE_DIRECTORY.
    Register(register::Register),
    /// Make the stream and its consumers in NATS, for QUEUE=jetstream; shows a plan first.
    NatsSetup(nats_setup::NatsSetup),
    /// Tell everything that is wrong with the settings, with the way out; changes nothing.
    CheckConfig(Serve),
    /// Look at Gitea, queue, disk, keys, ports and programs, and say of each whether it is fine or what to do; changes nothing.
    Doctor(doctor::Doctor),
    /// What is known of jobs, slots and events, from the mirror in STATE_DIRECTORY; also while the controller runs.
    Show(show::Show),
    Status(status::Status),
    Drain(drain::Drain),
    /// Set the mirror aside, so that the next start of the controller makes it anew. Only while none runs.
    RebuildMirror(show::Rebuild),
    /// Show it all at work on this machine: a stand-in for Gitea, a few jobs of each kind, and nothing to set up.
    Demo(Demo),
    /// Before this installation is removed: fail what still waits here, and name the runner to delete in Gitea; shows a plan first.
    Unregister(unregister::Unregister),
    /// Print completions for a shell, to be kept where that shell looks for them.
    Completions(manual::Completions),
    /// Print the manual page (roff); read it with `man -l`.
    Man,
    /// Inside an environment: fetch the one task, run the official runner, report. Started by the backend.
    Executor,
}

#[derive(Args)]
struct Serve {
    /// Everything on this one machine: embedded queue, local environments, embedded certificate authority.
    #[arg(long)]
    standalone: bool,
}

#[derive(Args)]
pub struct Demo {
    /// End when all jobs have ended; exit code 0 only if each reached its right end.
    #[arg(long)]
    pub exit: bool,
}

/// The whole program. Hidden commands that must run before any thread exists come first.
pub fn main() -> ExitCode {
    let mut args: Vec<_> = std::env::args_os().collect();
    match args.get(1).and_then(|a| a.to_str()) {
        Some("local-keeper") => return crate::backend::local::keeper_main(args.split_off(2)),
        Some("local-init") => return crate::backend::local::init_main(args.split_off(2)),
        Some("doctor-child") => return crate::doctor::child_main(&args.split_off(2)),
        // The demo's stand-in for the official runner is called as that is.
        Some("daemon") => return crate::demo::steps::main_from(args.split_off(1)),
        _ => {}
    }
    // One provider for everybody; a second one in the tree is refused by a test.
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        return ExitCode::from(exit::UNEXPECTED);
    }
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return told(&anyhow::Error::new(e).context("start the runtime")),
    };
    let code = match cli.command {
        Command::Serve(args) => runtime.block_on(serve(&args)),
        Command::CheckConfig(args) => runtime.block_on(check_config(&args)),
        Command::Doctor(args) => runtime.block_on(doctor::run(&args)),
        Command::Register(args) => runtime.block_on(register::run(args)),
        Command::Show(args) => runtime.block_on(show::show(&args)),
        Command::Status(args) => runtime.block_on(status::run(&args)),
        Command::Completions(args) => manual::completions(&args, Cli::command()),
        Command::Man => manual::man(Cli::command()),
        Command::Unregister(args) => runtime.block_on(unregister::run(&args)),
        Command::Drain(args) => runtime.block_on(drain::run(&args)),
        Command::RebuildMirror(args) => show::rebuild(&args),
        Command::NatsSetup(args) => runtime.block_on(nats_setup::run(args)),
        Command::Demo(args) => runtime.block_on(crate::demo::run(args)),
        Command::Executor => runtime.block_on(executor()),
    };
    // Blocking calls that hang (a dead disk) must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_millis(500));
    code
}

async fn executor() -> ExitCode {
    telemetry::start(Some("json"), "info");
    ExitCode::from(crate::executor::run().await.code())
}

async fn serve(args: &Serve) -> ExitCode {
    let environment = config::process_environment();
    // The client tells every attempt to connect; what matters of it is told by the queue.
    telemetry::start(environment.get("LOG_FORMAT").map(String::as_str), "info,async_nats=error");
    if let Err(e) = crate::process::harden() {
        return told(&anyhow::Error::new(e).context("make the process non-dumpable"));
    }
    let (config, tools) = match checked(environment, args).await {
        Ok(checked) => checked,
        Err(faults) => return told_faults(&faults),
    };
    for missing in &tools.missing {
        tracing::warn!("{missing}");
    }
    if matches!(Isolation::choose(config.local.without_isolation, config.local.executor_uid), Ok(Isolation::Unisolated)) {
        tracing::warn!("LOCAL_UNISOLATED=1: every job can read everything of this user, the runner's credentials included");
    }
    tracing::info!(
        trust_domain = config.identity.trust_domain,
        "identities come from the embedded certificate authority: it is meant for this one machine only"
    );
    let stop = CancellationToken::new();
    if let Err(e) = stop_on_signals(stop.clone()) {
        return told(&e);
    }
    let daemon = match Daemon::build(config, tools).await {
        Ok(daemon) => daemon,
        // Starting again does not help, so whoever watches us must not try.
        Err(e) if a_newer_version_ran_here(&e) => {
            told(&e);
            return ExitCode::from(exit::CONFIGURATION);
        }
        Err(e) => return told(&e),
    };
    match daemon.run(stop).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => told(&anyhow::Error::new(e)),
    }
}

fn a_newer_version_ran_here(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(OpenError::Newer(_)))
        || matches!(error.downcast_ref(), Some(QueueError::Newer(_)))
        || matches!(error.downcast_ref(), Some(BackendError::Newer(_)))
}

/// Settings and tools, or every fault of both.
async fn checked(
    environment: std::collections::BTreeMap<String, String>,
    args: &Serve,
) -> Result<(Config, tools::Tools), Faults> {
    let mode = if args.standalone { Mode::Standalone } else { Mode::Full };
    let read = Config::read(environment.clone(), mode);
    let reader = Reader::new(environment);
    let runner_bin = reader.optional("RUNNER_BIN").map(PathBuf::from);
    let tools = tools::look(runner_bin.as_deref(), &reader.or("PATH", "")).await;
    let mut faults = match &read {
        Ok(_) => Vec::new(),
        Err(Faults(faults)) => faults.clone(),
    };
    if tools.runner.is_none() {
        faults.extend(tools.missing.first().cloned());
    }
    if let Ok(config) = &read {
        faults.extend(Isolation::choose(config.local.without_isolation, config.local.executor_uid).err());
    }
    match read {
        Ok(config) if faults.is_empty() => Ok((config, tools)),
        _ => Err(Faults(faults)),
    }
}

#[expect(clippy::print_stdout, reason = "what it says is its output")]
async fn check_config(args: &Serve) -> ExitCode {
    match checked(config::process_environment(), args).await {
        Ok((config, tools)) => {
            println!("The settings are fine.");
            for backend in config.backends() {
                println!(
                    "{}: {} environments at once, {} s each at most",
                    backend.kind, backend.capacity, backend.timeout_seconds
                );
            }
            for missing in tools.missing {
                println!("note: {missing}");
            }
            ExitCode::SUCCESS
        }
        Err(faults) => told_faults(&faults),
    }
}

/// The first SIGTERM or SIGINT stops in order; the second at once, for who does not want to wait.
pub fn stop_on_signals(stop: CancellationToken) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stop.is_cancelled() {
                std::process::exit(i32::from(exit::UNEXPECTED));
            }
            stop.cancel();
        }
    });
    Ok(())
}

#[expect(clippy::print_stderr, reason = "for who started it")]
fn told(error: &anyhow::Error) -> ExitCode {
    tracing::error!(error = format!("{error:#}"), "ended with an error");
    eprintln!("gitea-dynamic-runner: {error:#}");
    ExitCode::from(exit::UNEXPECTED)
}

#[expect(clippy::print_stderr, reason = "for who started it")]
fn told_faults(faults: &Faults) -> ExitCode {
    eprint!("The settings are not fine:\n{faults}");
    ExitCode::from(exit::CONFIGURATION)
}

#[expect(clippy::print_stdout, reason = "what it says is its output")]
fn say(text: &str) {
    println!("{text}");
}

/// Standard input, at most 64 KiB; a token is short.
fn read_stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().take(64 << 10).read_to_string(&mut text).context("read standard input")?;
    Ok(text)
}
