//! The demo: the whole controller at work on this machine, with a stand-in for Gitea and a few jobs of each kind.
//!
//! Everything between the two is the real thing: queue, environments, identities, facade, bridge. It makes a state directory of its
//! own and leaves nothing behind.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::forge::{Forge, ForgeConfig, JobId, JobSpec, JobStatus};
use crate::{
    backend::local::{ForkPullRequests, Isolation, WithoutIsolation},
    cli::Demo,
    config::{
        BackendConfig, Config, FacadeConfig, GiteaConfig, HttpConfig, IdentityConfig, KeyFiles, LocalSettings, QueueConfig,
        tools::{self, Tools},
    },
    daemon::{Daemon, RunError},
    ids::BackendKind,
    names::metadata,
};

/// Longer than the slowest machine needs; the jobs themselves take some ten seconds.
const LIMIT: Duration = Duration::from_secs(120);
const POD_CAPACITY: usize = 2;
const TRUST_DOMAIN: &str = "demo.development";

/// One job of the demo and how it must end.
struct Act {
    job: JobId,
    what: &'static str,
    end: JobStatus,
    cancel: Option<When>,
    shown: Option<JobStatus>,
}

/// When the demo's user cancels a job.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Waiting,
    Running,
}

/// The command.
pub async fn run(args: Demo) -> ExitCode {
    crate::telemetry::start(Some("text"), "error");
    match told(&args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            say(&format!("The demo could not go on: {e:#}"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "what it shows is its output")]
fn say(line: &str) {
    println!("{line}");
}

/// `true`: every job reached its right end.
async fn told(args: &Demo) -> anyhow::Result<bool> {
    let stop = CancellationToken::new();
    crate::cli::stop_on_signals(stop.clone())?;
    let state = Folder::make()?;
    let forge = Forge::start(ForgeConfig::default()).await.context("start the stand-in forge")?;
    let (daemon, running) = controller(&forge, &state.path).await?;
    say(&format!("A stand-in for Gitea listens at {}.", forge.url()));
    say(&format!(
        "The controller runs; its dashboard is at http://{}/ (/readyz and /metrics answer, too). Its state is in {}.",
        daemon.http,
        state.path.display()
    ));
    if Isolation::choose(WithoutIsolation::Refused, 2000).is_err() {
        say("Not started as root: the jobs are not isolated from one another (LOCAL_UNISOLATED=1).");
    }
    say(&format!("Slots: {POD_CAPACITY} for pod, 1 for vm, each a local environment. The jobs:\n"));
    let fine = play(&forge, &stop).await?;
    if !args.exit && !stop.is_cancelled() {
        say("\nCtrl-C ends the demo.");
        stop.cancelled().await;
    }
    daemon.stop.cancel();
    running.await.context("wait for the controller")??;
    Ok(fine)
}

struct Running {
    http: std::net::SocketAddr,
    stop: CancellationToken,
}

async fn controller(forge: &Forge, state: &Path) -> anyhow::Result<(Running, JoinHandle<Result<(), RunError>>)> {
    let config = config(forge, state)?;
    let tools: Tools = tools::look(config.local.runner_bin.as_deref(), &config.local.path).await;
    let daemon = Daemon::build(config, tools).await?;
    let running = Running { http: daemon.addresses()?.http, stop: CancellationToken::new() };
    let stop = running.stop.clone();
    Ok((running, tokio::spawn(daemon.run(stop))))
}

fn config(forge: &Forge, state: &Path) -> anyhow::Result<Config> {
    let (uuid, token) = forge.new_runner("demo", &[]);
    // Jobs run as users of their own, who may not be able to enter the folder in which this binary was built.
    let runner = state.join("gitea-dynamic-runner");
    std::fs::copy("/proc/self/exe", &runner).context("copy this binary")?;
    std::fs::set_permissions(&runner, std::fs::Permissions::from_mode(0o755))?;
    let backend = |kind, capacity| Some(BackendConfig { kind, capacity, timeout_seconds: 600 });
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    Ok(Config {
        queue: QueueConfig::Embedded,
        gitea: GiteaConfig { url: forge.url(), ca_file: None, uuid, token, api_token: None },
        state_directory: state.to_owned(),
        pod: backend(BackendKind::Pod, POD_CAPACITY),
        vm: backend(BackendKind::Vm, 1),
        vm_label: "vm".into(),
        silence_limit: Duration::from_secs(480),
        local: LocalSettings {
            executor_uid: 2000,
            without_isolation: WithoutIsolation::Accepted,
            fork_prs: ForkPullRequests::Refused,
            metadata_prefix: metadata::PREFIX.into(),
            runner_bin: Some(runner),
            path: std::env::var("PATH").unwrap_or_default(),
            proxy: Vec::new(),
        },
        identity: IdentityConfig {
            trust_domain: TRUST_DOMAIN.into(),
            facade_spiffe_id: format!("spiffe://{TRUST_DOMAIN}/dynamic-runner/facade"),
        },
        facade: FacadeConfig { listen: any, url: None },
        keys: KeyFiles { capability: None, seal: None },
        http: HttpConfig { listen: any, hosts: Vec::new(), read_token: None, admin_token: None, trust_loopback: true },
    })
}

/// Pushes the jobs and watches them to their ends.
async fn play(forge: &Forge, stop: &CancellationToken) -> anyhow::Result<bool> {
    let mut acts = push(forge);
    let began = Instant::now();
    while acts.iter().any(|act| !act.shown.is_some_and(JobStatus::is_final)) {
        for act in &mut acts {
            show(forge, act, began);
        }
        if stop.is_cancelled() || began.elapsed() > LIMIT {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let right = acts.iter().filter(|act| act.shown == Some(act.end)).count();
    say(&format!("\n{right} of {} jobs reached their right end in {:.1} s.", acts.len(), began.elapsed().as_secs_f64()));
    for act in acts.iter().filter(|act| act.shown != Some(act.end)) {
        let log = forge.job(act.job).map(|job| job.log.join("\n    ")).unwrap_or_default();
        say(&format!("NOT as it should be: {} is {:?}, expected {:?}; its log:\n    {log}", act.what, act.shown, act.end));
    }
    for act in acts.iter().filter(|act| act.what.contains("runs-on")) {
        let log = forge.job(act.job).map(|job| job.log.join("\n    ")).unwrap_or_default();
        say(&format!("The log of the job with a bad runs-on says:\n    {log}"));
    }
    Ok(right == acts.len())
}

fn push(forge: &Forge) -> Vec<Act> {
    let mut acts = Vec::new();
    let mut add = |spec: JobSpec, what, end, cancel| {
        let jobs = forge.push([spec]).jobs;
        acts.extend(jobs.into_iter().map(|job| Act { job, what, end, cancel, shown: None }));
    };
    let pod = ["self-hosted", "pod"];
    let build = JobSpec::new("build", &pod).run("echo compiling").run("echo \"I am $CI_SPIFFE_ID\"");
    add(build, "green: two steps", JobStatus::Success, None);
    add(JobSpec::new("test", &pod).run("echo one test fails; exit 1"), "red: a step fails", JobStatus::Failure, None);
    let image = JobSpec::new("image", &["self-hosted", "vm"]).run("sleep 1; echo made");
    add(image, "green: for vm", JobStatus::Success, None);
    let server = JobSpec::new("server", &pod).run("echo serving; sleep 300");
    add(server, "cancelled while it runs", JobStatus::Cancelled, Some(When::Running));
    for _ in 0..4 {
        add(JobSpec::new("matrix", &pod).run("sleep 1; echo done"), "green: more jobs than slots", JobStatus::Success, None);
    }
    add(JobSpec::new("late", &pod).run("echo never"), "cancelled while it waits", JobStatus::Cancelled, Some(When::Waiting));
    let lost = JobSpec::new("lost", &["self-hosted"]).run("echo never");
    add(lost, "bad runs-on: fails with its reason", JobStatus::Failure, None);
    acts
}

fn show(forge: &Forge, act: &mut Act, began: Instant) {
    let Some(job) = forge.job(act.job) else { return };
    let runs = job.log.iter().any(|row| row.contains("serving"));
    if (act.cancel == Some(When::Running) && runs) || (act.cancel == Some(When::Waiting) && job.task.is_some()) {
        act.cancel = None;
        forge.cancel(act.job);
    }
    if act.shown != Some(job.status) {
        act.shown = Some(job.status);
        let status = format!("{:?}", job.status);
        let mut line = format!("{:6.1} s  {:>9}  {status:10}  {}", began.elapsed().as_secs_f64(), job.key, act.what);
        if job.status.is_final() && job.status != act.end {
            line.push_str(&format!("  (expected {:?})", act.end));
        }
        say(&line);
    }
}

/// The demo's state directory; gone with it.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn make() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("gdr-demo-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("make {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_dir_all(&self.path) {
            say(&format!("{} could not be removed: {e}", self.path.display()));
        }
    }
}
