//! Inside an environment: gets its identity and its task, runs the official runner on it, and delivers what the runner says.
//!
//! The order is the point: identity, hello, task, `start` (rule R5), runner, and the last row and the verdict only when the
//! runner is gone. It decides nothing about the job: verdicts are the facade's, the environment's end is the backend's. When
//! the executor dies after `start`, the controller settles the job with a reason; before it, the environment is replaced.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::{net::TcpListener, process::Child};
use tokio_util::sync::CancellationToken;

pub use self::settings::Settings;
use self::{
    bridge::{Bridge, RunnerIdentity},
    delivery::{Delivered, Delivery},
    facade::{Denials, Facade},
    proxy::Proxy,
    runner::{Folders, RunnerProgram},
    spool::{SharedSpool, Spool, StoreLimits},
    stop::{Stop, StopCause},
    task::RunnerTask,
};
use crate::{
    backoff::Backoff, failpoint, gitea::RpcError, identity::Identity, names::executor_exit, proto::environment::StopReason,
    secret::Secret,
};

mod bridge;
mod delivery;
pub mod facade;
mod path;
mod processes;
mod proxy;
mod runner;
mod settings;
pub mod spool;
pub mod stop;
mod task;

const SVID_LIMIT: Duration = Duration::from_secs(60);
/// The worker offers the task for up to 4 minutes; what is not had by then belongs to another environment.
const FETCH_LIMIT: Duration = Duration::from_secs(5 * 60);
/// A `start` without an answer may have been taken, and then the job is ours; a controller that restarts is back sooner.
const START_LIMIT: Duration = Duration::from_secs(30 * 60);
const POLL: Duration = Duration::from_secs(2);

/// How an environment ended, as its exit code. The controller needs none of them to be right: it looks at Gitea and at its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// 0: the facade took the runner's verdict.
    Delivered,
    /// 10: the log is delivered, but the runner ended without a verdict; the controller gives one.
    NoVerdict,
    /// 11: the task is not ours any more (deleted, or this environment revoked) after `start`.
    Gone,
    /// 12: there was no `start`: no identity, no task, no runner program, or a stop. The environment may be replaced.
    NotStarted,
    /// 13: a fault of the environment after `start` (its disk, its processes); the controller settles the job.
    Failed,
    /// No job can run in this place; another environment here would end the same way.
    Unfit,
}

impl Ending {
    pub fn code(self) -> u8 {
        match self {
            Ending::Delivered => 0,
            Ending::NoVerdict => 10,
            Ending::Gone => 11,
            Ending::NotStarted => 12,
            Ending::Failed => 13,
            Ending::Unfit => executor_exit::UNFIT,
        }
    }
}

impl From<Ending> for std::process::ExitCode {
    fn from(ending: Ending) -> Self {
        ending.code().into()
    }
}

/// The whole life of an environment, with its settings from the process environment (`names::env`).
pub async fn run() -> Ending {
    // Before any secret is read. Our own variables stay in `/proc/self/environ`, which a process that is not dumpable shows
    // to nobody but root; children get an environment of their own.
    let prepared = crate::process::harden().context("harden the process").and_then(|()| {
        let settings = Settings::from_environment(&|name| std::env::var(name).ok())?;
        anyhow::ensure!(settings.facade_url.starts_with("https://"), "RUNNER_FACADE_URL must be an https:// URL");
        Ok(settings)
    });
    let connected = async {
        let settings = prepared?;
        let stop = stopped_by_signals()?;
        let identity = Identity::connect(&settings.workload_api, &settings.trust_domain, &settings.spiffe_id, SVID_LIMIT);
        let tls = identity.await?.client_config(&settings.facade_spiffe_id);
        let facade = Facade::new(&settings.facade_url, tls, settings.assignment, &settings.capability)?;
        anyhow::Ok((settings, facade, stop))
    };
    match connected.await {
        Ok((settings, facade, stop)) => serve(settings, facade, stop).await,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "the environment cannot start");
            Ending::NotStarted
        }
    }
}

/// SIGTERM and SIGINT become a stop.
pub fn stopped_by_signals() -> anyhow::Result<Stop> {
    use tokio::signal::unix::{SignalKind, signal};
    let stop = Stop::default();
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut signals = signal(kind).context("listen to signals")?;
        let stop = stop.clone();
        tokio::spawn(async move {
            if signals.recv().await.is_some() {
                stop.ask(StopCause::Shutdown);
            }
        });
    }
    Ok(stop)
}

/// The life of an environment that can reach its facade.
pub async fn serve(settings: Settings, facade: Facade, stop: Stop) -> Ending {
    let program = match RunnerProgram::find(&settings.runner, &settings.job_environment).await {
        Ok(program) => program,
        Err(error) => {
            tracing::error!(%error, assignment = %settings.assignment, "no runner can be run here");
            return if error.is_permanent() { Ending::Unfit } else { Ending::NotStarted };
        }
    };
    let prepared = tokio::select! {
        prepared = prepare(&settings, &facade, program) => prepared,
        _ = stop.asked() => Err(anyhow::anyhow!("stopped before start")),
    };
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), assignment = %settings.assignment, "the environment has no job to run");
            return Ending::NotStarted;
        }
    };
    // A stop in between may leave a `start` that the facade took: the controller then settles a claim without an environment.
    failpoint::reached("executor.prepared");
    let started = tokio::select! {
        started = retried(START_LIMIT, || facade.start()) => started.map_err(anyhow::Error::from),
        _ = stop.asked() => Err(anyhow::anyhow!("stopped before start was answered")),
    };
    let result = match started {
        Ok(offset) => run_job(settings, facade, stop, prepared, offset).await,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "the facade did not let the job start");
            return Ending::NotStarted;
        }
    };
    result.unwrap_or_else(|error| {
        tracing::error!(error = format!("{error:#}"), "the job cannot be run here");
        Ending::Failed
    })
}

/// All that can fail before `start` does so here: until then another environment may take the job.
struct Prepared {
    task: RunnerTask,
    server_capabilities: String,
    program: RunnerProgram,
    folders: Folders,
    listener: TcpListener,
    address: String,
    proxy: Arc<Proxy>,
    closing: CancellationToken,
}

async fn prepare(settings: &Settings, facade: &Facade, program: RunnerProgram) -> anyhow::Result<Prepared> {
    processes::adopt_orphans().context("become the parent of the job's orphans")?;
    let folders = Folders::make(&settings.work).with_context(|| format!("make folders in {}", settings.work.display()))?;
    let server_capabilities = retried(FETCH_LIMIT, || facade.hello()).await.context("say hello")?;
    let raw = fetch(facade).await?;
    let task = RunnerTask::new(raw, &settings.gitea_url).context("read the task")?;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("bind the bridge")?;
    let address = format!("http://{}", listener.local_addr().context("read the bridge's address")?);
    let closing = CancellationToken::new();
    let tls = crate::gitea::tls::towards_gitea(&settings.gitea_url, settings.gitea_ca_file.as_deref())?;
    let announced = task.announced.clone();
    let proxy = Proxy::new(&settings.gitea_url, announced, &address, &tls, &settings.proxies, closing.clone())?;
    Ok(Prepared { task, server_capabilities, program, folders, listener, address, proxy: Arc::new(proxy), closing })
}

/// The task; an answer without one means that it is not offered yet.
async fn fetch(facade: &Facade) -> anyhow::Result<crate::secret::SecretBytes> {
    let deadline = Instant::now() + FETCH_LIMIT;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let fetched = retried(left, || facade.fetch_task()).await.context("fetch the task")?;
        match fetched.task {
            Some(task) => return Ok(task),
            None if Instant::now() >= deadline => anyhow::bail!("no task was offered within {} s", FETCH_LIMIT.as_secs()),
            None => backoff.wait().await,
        }
    }
}

async fn run_job(settings: Settings, facade: Facade, stop: Stop, prepared: Prepared, offset: i64) -> anyhow::Result<Ending> {
    let Prepared { task, server_capabilities, program, folders, listener, address, proxy, closing } = prepared;
    let _close = closing.clone().drop_guard();
    let spool = Spool::new(task.id, offset, &folders.spool, StoreLimits::default());
    let spool = Arc::new(SharedSpool::new(spool));
    let identity =
        RunnerIdentity { uuid: settings.assignment.to_string(), name: settings.assignment.to_string(), token: Secret::random() };
    let bridge = Arc::new(Bridge {
        task_id: task.id,
        task: task.for_runner(&address),
        runner: identity.clone(),
        server_capabilities,
        spool: spool.clone(),
        stop: stop.clone(),
        reported: AtomicBool::new(false),
    });
    let config = runner::write_files(&folders, &identity, &address, &task.labels)?;
    let serving = tokio::spawn(bridge::serve(listener, bridge, proxy, closing.clone()));
    let polling = tokio::spawn(closing.clone().run_until_cancelled_owned(poll(facade.clone(), stop.clone())));
    let delivery = tokio::spawn(Delivery { spool: spool.clone(), facade, stop: stop.clone() }.deliver());
    failpoint::reached("executor.started");
    if stop.seen().is_none() {
        let child = runner::spawn(&program, &config, &folders, &settings.job_environment)?;
        wait_for_runner(child, program.major, &stop).await;
    }
    failpoint::reached("executor.exited");
    {
        let mut spool = spool.lock();
        spool.runner_exited(stop.seen().map(StopCause::told));
        tracing::info!(verdict = spool.has_verdict(), "the runner has exited");
    }
    spool.wake();
    // The environment's own deadline bounds this wait: before it, giving up would lose rows that we have.
    let delivered = delivery.await.context("deliver")?;
    closing.cancel();
    serving.await.context("close the bridge")?;
    polling.await.context("stop polling")?;
    Ok(match delivered {
        Delivered::Verdict => Ending::Delivered,
        Delivered::NoVerdict => Ending::NoVerdict,
        Delivered::Gone => Ending::Gone,
    })
}

async fn wait_for_runner(child: Child, major: u32, stop: &Stop) {
    match runner::supervise(child, major, stop).await {
        Ok(status) => tracing::debug!(%status, "the runner's exit code says nothing about the job"),
        Err(error) => tracing::error!(%error, "the job's processes cannot be ended in order"),
    }
}

/// Asks every 2 s whether the job shall stop, until it shall.
async fn poll(facade: Facade, stop: Stop) {
    let mut tick = tokio::time::interval(POLL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.seen().is_none() {
        tick.tick().await;
        match facade.poll().await {
            Ok(StopReason::STOP_REASON_NONE) => {}
            Ok(StopReason::STOP_REASON_CANCELLED) => stop.ask(StopCause::Cancelled),
            Ok(StopReason::STOP_REASON_DEADLINE) => stop.ask(StopCause::Deadline),
            Ok(StopReason::STOP_REASON_SHUTDOWN) => stop.ask(StopCause::Shutdown),
            // Whether we are still served is found out by the delivery, which has something to lose.
            Err(error) => tracing::debug!(%error, "poll again later"),
        }
    }
}

/// Calls until there is an answer, a denial for good, or `limit` is over; then the last error is the answer.
async fn retried<T, F: Future<Output = Result<T, RpcError>>>(
    limit: Duration,
    mut call: impl FnMut() -> F,
) -> Result<T, RpcError> {
    let deadline = Instant::now() + limit;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
    let mut denials = Denials::default();
    loop {
        match call().await {
            Err(error) if !denials.is_final(&error) && Instant::now() < deadline => {
                tracing::debug!(%error, "ask the facade again later");
                backoff.wait().await;
            }
            answer => return answer,
        }
    }
}
