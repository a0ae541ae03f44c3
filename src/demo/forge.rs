//! A stand-in for Gitea: jobs in memory, its real runner protocol on loopback.
//!
//! The demo shows jobs with it, and the tests hold everything against it; `tests/protocol.rs` holds it against real Gitea, and any
//! difference found there is a fault here. It has no pages, no git, no users: jobs are pushed by calls in this process.
//! `state` and `report` are the rules, `rpc` and `serve` the protocol, `faults` trouble on order.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use anyhow::Context as _;
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::{
    faults::{Fault, Method, Report, Reported, Seen, Times},
    job::{JobId, JobSpec, Needs, RunId, RunWhen, StepSpec, workflow_text},
    state::{Backup, JobStatus},
    view::{JobView, RunnerView, StepView},
};
use crate::{ids::TaskId, secret::Secret};

mod faults;
mod job;
mod report;
mod rpc;
mod serve;
mod state;
mod view;

/// Gitea's `MAX_CONCURRENT_TASK_PICKS`.
const PICKS: usize = 16;
/// How long a freed port may take until it can be bound again.
const REBIND_LIMIT: Duration = Duration::from_secs(10);

/// Gitea's time-outs, and where to listen.
#[derive(Debug, Clone)]
pub struct ForgeConfig {
    /// `None`: any free port.
    pub port: Option<u16>,
    /// A task without a report or a new row for so long is failed.
    pub zombie_timeout: Duration,
    /// A task is failed after so long, reports or not.
    pub endless_timeout: Duration,
    /// How often both are looked at.
    pub sweep_every: Duration,
    /// A runner that was silent for longer is not asked to end a cancelled job.
    pub report_timeout: Duration,
    /// What a search for a job takes; 16 searches at once throttle others.
    pub pick_time: Duration,
}

impl Default for ForgeConfig {
    fn default() -> Self {
        Self {
            port: None,
            zombie_timeout: Duration::from_secs(600),
            endless_timeout: Duration::from_secs(3 * 3600),
            sweep_every: Duration::from_secs(5),
            report_timeout: Duration::from_secs(60),
            pick_time: Duration::from_millis(2),
        }
    }
}

/// A running stand-in. Clones are the same one; it ends with the last of them.
#[derive(Clone)]
pub struct Forge {
    inner: Arc<Inner>,
    listening: Arc<tokio::sync::Mutex<Option<Listening>>>,
    address: SocketAddr,
    _sweeper: Arc<AbortOnDrop>,
}

struct Inner {
    config: ForgeConfig,
    /// Without a slash at its end.
    root_url: String,
    state: Mutex<state::State>,
    faults: Mutex<faults::Faults>,
    record: Mutex<faults::Record>,
    picks: Semaphore,
    changed: tokio::sync::watch::Sender<u64>,
}

struct Listening {
    /// Stops the listener when dropped.
    stop: DropGuard,
    task: JoinHandle<()>,
}

struct AbortOnDrop(JoinHandle<()>);

/// What a push made, jobs in the order given.
#[derive(Debug, Clone)]
pub struct Pushed {
    pub run: RunId,
    pub jobs: Vec<JobId>,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, state::State> {
        locked(&self.state)
    }

    fn faults(&self) -> MutexGuard<'_, faults::Faults> {
        locked(&self.faults)
    }

    fn record(&self) -> MutexGuard<'_, faults::Record> {
        locked(&self.record)
    }

    /// Wakes whoever waits for a change.
    fn announce(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// A panic in a test that holds the lock shall show itself, not a poisoned lock.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Forge {
    /// Starts one on a loopback port.
    pub async fn start(config: ForgeConfig) -> anyhow::Result<Self> {
        let wanted = SocketAddr::from(([127, 0, 0, 1], config.port.unwrap_or_default()));
        let listener = TcpListener::bind(wanted).await.with_context(|| format!("listen on {wanted}"))?;
        let address = listener.local_addr().context("read own address")?;
        let inner = Arc::new(Inner {
            root_url: format!("http://{address}"),
            state: Mutex::new(state::State::new()),
            faults: Mutex::default(),
            record: Mutex::default(),
            picks: Semaphore::new(PICKS),
            changed: tokio::sync::watch::Sender::new(0),
            config,
        });
        let sweeper = Arc::new(AbortOnDrop(tokio::spawn(sweep(Arc::downgrade(&inner)))));
        let forge = Self { inner, listening: Arc::default(), address, _sweeper: sweeper };
        *forge.listening.lock().await = Some(forge.listen(listener));
        Ok(forge)
    }

    fn listen(&self, listener: TcpListener) -> Listening {
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve::serve(listener, serve::router(&self.inner), stop.clone()));
        Listening { stop: stop.drop_guard(), task }
    }

    /// ROOT_URL, without a slash at its end.
    pub fn url(&self) -> String {
        self.inner.root_url.clone()
    }

    pub fn registration_token(&self) -> Secret {
        self.state().registration_token.clone()
    }

    /// Invents a runner as Register does; tells its UUID and token.
    pub fn new_runner(&self, name: &str, labels: &[&str]) -> (String, Secret) {
        let token = self.registration_token().expose().to_owned();
        let labels = labels.iter().map(|&label| label.to_owned()).collect();
        let name = if name.is_empty() { "runner" } else { name };
        let request = crate::proto::runner::RegisterRequest { name: name.into(), token, labels, ..Default::default() };
        let registered = self.state().register(&request);
        // The token is the right one and the name not empty, so there is nothing to refuse.
        registered.map_or_else(|_| (String::new(), Secret::new("")), |runner| (runner.uuid, runner.token))
    }

    /// A run of these jobs; those without needs wait at once.
    pub fn push(&self, jobs: impl IntoIterator<Item = JobSpec>) -> Pushed {
        let (run, jobs) = self.state().push(jobs.into_iter().collect());
        self.inner.announce();
        Pushed { run, jobs }
    }

    /// Cancels a job as a user does.
    pub fn cancel(&self, job: JobId) {
        self.state().cancel(job, self.inner.config.report_timeout);
        self.inner.announce();
    }

    /// The next search for a job gives the last task once more, as it was: an answer that came twice.
    pub fn give_again(&self) {
        self.give_all_again(1);
    }

    /// As [`Self::give_again`], with the newest `many` tasks; each search gives one. The last thousand are remembered.
    pub fn give_all_again(&self, many: usize) {
        self.state().give_again(many);
        self.announce();
    }

    /// Deletes a job and its task, as deleting its repository does.
    pub fn forget(&self, job: JobId) {
        self.state().forget(job);
        self.inner.announce();
    }

    pub fn job(&self, id: JobId) -> Option<JobView> {
        self.state().jobs.get(&id).map(JobView::from)
    }

    /// All jobs, oldest first. Copies their logs.
    pub fn jobs(&self) -> Vec<JobView> {
        self.state().jobs.values().map(JobView::from).collect()
    }

    /// The job of a task.
    pub fn job_of_task(&self, task: TaskId) -> Option<JobId> {
        self.state().tasks.get(&task).copied()
    }

    /// The present `tasks_version`.
    pub fn tasks_version(&self) -> i64 {
        self.state().version
    }

    pub fn runners(&self) -> Vec<RunnerView> {
        self.state().runners.values().map(RunnerView::from).collect()
    }

    /// Switches a runner off (it gets no more jobs) or on again. The version moves if that changes anything.
    pub fn set_disabled(&self, runner: i64, disabled: bool) {
        let mut state = self.state();
        if let Some(row) = state.runners.get_mut(&runner).filter(|row| row.disabled != disabled) {
            row.disabled = disabled;
            state.version += 1;
        }
    }

    /// Deletes a runner. Its tasks go on until the zombie sweep.
    pub fn delete_runner(&self, runner: i64) {
        self.state().runners.remove(&runner);
        self.inner.announce();
    }

    /// Orders trouble for a call, in place of what was ordered before for it.
    pub fn inject(&self, method: Method, fault: Fault, times: Times) {
        self.inner.faults().inject(method, fault, times);
    }

    /// No more trouble, for any call.
    pub fn clear_faults(&self) {
        self.inner.faults().clear();
    }

    /// The last requests, oldest first; bounded at 100,000.
    pub fn seen(&self) -> Vec<Seen> {
        self.inner.record().seen.iter().cloned().collect()
    }

    /// The last reports that were taken, oldest first; bounded at 100,000.
    pub fn reports(&self) -> Vec<Report> {
        self.inner.record().reports.iter().cloned().collect()
    }

    /// How often a call came in, faults included.
    pub fn count(&self, method: Method) -> u64 {
        self.inner.record().counts.get(&method).copied().unwrap_or_default()
    }

    /// Refuses connections, and cuts those that are open. The state stays.
    pub async fn go_down(&self) {
        if let Some(Listening { stop, task }) = self.listening.lock().await.take() {
            drop(stop);
            if let Err(error) = task.await {
                tracing::debug!(%error, "stand-in forge's listener did not end well");
            }
        }
    }

    /// Listens again, on the same port.
    pub async fn come_up(&self) -> anyhow::Result<()> {
        let mut listening = self.listening.lock().await;
        if listening.is_some() {
            return Ok(());
        }
        let bind = async {
            loop {
                match TcpListener::bind(self.address).await {
                    Ok(listener) => return listener,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let bound = tokio::time::timeout(REBIND_LIMIT, bind).await;
        let listener = bound.with_context(|| format!("listen on {} again: another process has it", self.address))?;
        *listening = Some(self.listen(listener));
        Ok(())
    }

    /// Down and up again.
    pub async fn restart(&self) -> anyhow::Result<()> {
        self.go_down().await;
        self.come_up().await
    }

    /// Looks at every change until `look` finds what it wants.
    pub async fn wait_for<T>(&self, what: &str, limit: Duration, mut look: impl FnMut(&Forge) -> Option<T>) -> anyhow::Result<T> {
        let mut changes = self.inner.changed.subscribe();
        let found = async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = look(self) {
                    return found;
                }
                // Some of what callers look at changes without a word, so it is looked at now and then too.
                let pause = tokio::time::sleep(Duration::from_millis(100));
                tokio::select! {
                    _ = changes.changed() => {}
                    () = pause => {}
                }
            }
        };
        let found = tokio::time::timeout(limit, found).await;
        found.with_context(|| format!("waited {} s for {what}", limit.as_secs_f32()))
    }

    /// Waits until a job is over.
    pub async fn wait_done(&self, job: JobId, limit: Duration) -> anyhow::Result<JobView> {
        let look = |forge: &Forge| forge.job(job).filter(|job| job.status.is_final());
        let waited = self.wait_for(&format!("the end of job {}", job.0), limit, look).await;
        waited.with_context(|| format!("it is {:?}", self.job(job).map(|job| job.status)))
    }

    fn state(&self) -> MutexGuard<'_, state::State> {
        self.inner.state()
    }

    fn announce(&self) {
        self.inner.announce();
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Gitea's cron jobs for zombies and endless tasks.
async fn sweep(inner: Weak<Inner>) {
    while let Some(inner) = inner.upgrade() {
        let pause = inner.config.sweep_every;
        let swept = inner.state().sweep(&inner.config);
        if swept {
            inner.announce();
        }
        drop(inner);
        tokio::time::sleep(pause).await;
    }
}
