//! The controller put together: makes every part from the settings, connects them, runs them, and ends them in order.
//!
//! Sees everything and decides nothing. `build` opens and binds, and spawns nothing; `run` spawns, watches and drains.

use std::{collections::HashMap, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    assignment::seal::SealKeys,
    backend::{
        Backend,
        local::{Isolation, Keepers, LocalBackend, LocalConfig},
    },
    board::Board,
    claims::Claims,
    config::{BackendConfig, Config, GiteaConfig, LocalSettings, QueueConfig, tools::Tools},
    drain::Drain,
    gitea::RunnerRpc,
    health::Health,
    http,
    identity::{Identity, authority::Authority, binder::Binder},
    ids::BackendKind,
    leader::LeaderPass,
    metrics::{BackendLabel, Metrics},
    mirror::{self, Mirror},
    queue::{
        AssignmentQueue, QueueError,
        embedded::EmbeddedQueue,
        held::Leases,
        jetstream::{JetStreamOptions, JetStreamQueue},
    },
    scheduler::SchedulerStatus,
    slots::Slots,
    supervise::EndedEarly,
};

mod notify;
mod parts;
mod running;
mod start;
mod state;
mod window;

use self::{parts::Parts, running::Running};

const IDENTITY_LIMIT: Duration = Duration::from_secs(30);

pub struct Daemon {
    core: Core,
    facade_listener: TcpListener,
    http_listener: TcpListener,
}

/// What the roles are made of.
struct Core {
    config: Config,
    tools: Tools,
    rpc: RunnerRpc,
    queue: Arc<dyn AssignmentQueue>,
    pass: LeaderPass,
    keys: SealKeys,
    claims: Claims,
    drain: Drain,
    leases: Leases,
    authority: Authority,
    backends: HashMap<BackendKind, Arc<dyn Backend>>,
    slots: HashMap<BackendKind, Slots>,
    metrics: Metrics,
    mirror: Mirror,
    board: Board,
    facade_url: String,
}

/// Where a running daemon listens.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    pub facade: SocketAddr,
    pub http: SocketAddr,
}

/// Why the process ends with an error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    EndedEarly(#[from] EndedEarly),
    #[error("{0:#}")]
    Start(anyhow::Error),
}

impl Daemon {
    /// Opens the state directory, and binds the listeners. Nothing runs yet.
    pub async fn build(config: Config, tools: Tools) -> anyhow::Result<Self> {
        let state = state::StateDirectory::open(&config.state_directory).context("open state directory")?;
        let (queue, pass) = open_queue(&config.queue, &state.private).await.context("open queue")?;
        let keys = state.seal_keys(config.keys.seal.as_deref()).context("read seal key")?;
        let claims = Claims::new(state.capability_key(config.keys.capability.as_deref()).context("read capability key")?);
        let drain = Drain::open(&state.private).context("read whether to drain")?;
        let credentials = Some((config.gitea.uuid.as_str(), &config.gitea.token));
        let GiteaConfig { url, ca_file, .. } = &config.gitea;
        let rpc =
            RunnerRpc::to_gitea_through(&config.proxies(), url, ca_file.as_deref(), credentials).context("make Gitea client")?;
        let authority =
            Authority::open(&state.private.join("ca"), &config.identity.trust_domain).context("open certificate authority")?;
        let (metrics, mut backends, mut slots) = (Metrics::new(), HashMap::new(), HashMap::new());
        let mirror =
            Mirror::open(&state.private.join(mirror::FILE), config.gitea.instance(), metrics.clone()).context("open mirror")?;
        for backend in config.backends() {
            let local = local_backend(&config, backend, &tools).with_context(|| format!("make {} backend", backend.kind))?;
            backends.insert(backend.kind, local);
            slots.insert(backend.kind, Slots::new(backend.capacity));
            let limit = i64::try_from(backend.capacity).unwrap_or(i64::MAX);
            let _ = metrics.capacity_limit.get_or_create(&BackendLabel { backend: backend.kind.as_str() }).set(limit);
        }
        let facade_listener = bind("RUNNER_FACADE_LISTEN", config.facade.listen).await?;
        let http_listener = bind("HTTP_LISTEN", config.http.listen).await?;
        let facade_url = match &config.facade.url {
            Some(url) => url.clone(),
            None => format!("https://{}", facade_listener.local_addr().context("look up facade address")?),
        };
        let leases = Leases::default();
        let core = Core {
            config,
            tools,
            rpc,
            queue,
            pass,
            keys,
            claims,
            drain,
            leases,
            authority,
            backends,
            slots,
            metrics,
            mirror,
            board: Board::default(),
            facade_url,
        };
        Ok(Self { core, facade_listener, http_listener })
    }

    pub fn addresses(&self) -> anyhow::Result<Addresses> {
        Ok(Addresses { facade: self.facade_listener.local_addr()?, http: self.http_listener.local_addr()? })
    }

    /// Runs until `stop`, or until an essential task ends. Environments go on after it.
    pub async fn run(self, stop: CancellationToken) -> Result<(), RunError> {
        let Daemon { core, facade_listener, http_listener } = self;
        let (status, scheduler_status) = watch::channel(SchedulerStatus::default());
        let (serving, is_serving) = watch::channel(false);
        let mut running = Running::default();
        let parts = Parts { core: &core, binder: Binder::Embedded(core.authority.clone()), begin: running.begin.clone() };
        let health = Health { scheduler: scheduler_status, serving: is_serving, stopping: running.begin.clone() };
        let told = notify::tell(health.clone(), running.pulses.clone());
        let (backlog, backlog_seen) = watch::channel(None);
        let (router, metrics) = (parts.http(health, backlog_seen).router(), core.metrics.clone());
        running.serving("http", http::serve(http_listener, router, metrics, running.serve.clone()));
        if let Some(backlog) = parts.backlog(backlog).map_err(RunError::Start)? {
            running.beginning("backlog", backlog.run(running.begin.clone()));
        }
        if core.drain.since().is_some() {
            tracing::warn!("draining, as was asked before this start: nothing new is fetched or started until `drain --undo`");
        }
        let (identity, reconcilers) = tokio::select! {
            started = parts.start() => started.map_err(RunError::Start)?,
            () = stop.cancelled() => return Ok(()),
        };
        parts.run_roles(&mut running, facade_listener, &identity, reconcilers, status);
        core.metrics.leader.set(1);
        serving.send_replace(true);
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "controller runs");
        let ended = running.watch(&stop).await;
        tracing::info!("stopping: nothing new is begun; running environments go on");
        drop(told);
        running.end(&core.authority).await;
        core.mirror.close().await;
        match ended {
            Some(ended) => Err(ended.into()),
            None => Ok(()),
        }
    }
}

async fn bind(name: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("listen on {name}={address}"))
}

/// The lock of the queue's file, or of its outbox, is the right to act.
async fn open_queue(config: &QueueConfig, private: &Path) -> Result<(Arc<dyn AssignmentQueue>, LeaderPass), QueueError> {
    match config {
        QueueConfig::Embedded => {
            let queue = EmbeddedQueue::open(&private.join("queue.redb"))?;
            let pass = LeaderPass::of_database(&queue);
            Ok((Arc::new(queue), pass))
        }
        QueueConfig::JetStream(settings) => {
            let outbox = private.join("outbox.redb");
            let queue = JetStreamQueue::open(&outbox, settings.as_ref().clone(), JetStreamOptions::default()).await?;
            let pass = LeaderPass::of_outbox(&queue);
            Ok((Arc::new(queue), pass))
        }
    }
}

async fn own_identity(config: &Config, authority: &Authority) -> anyhow::Result<Identity> {
    let socket = config.state_directory.join("private/controller.sock");
    let identity = &config.identity;
    authority.ensure_socket(&socket, &identity.facade_spiffe_id, None).await.context("serve the controller's own identity")?;
    let endpoint = format!("unix://{}", socket.display());
    Identity::connect(&endpoint, &identity.trust_domain, &identity.facade_spiffe_id, IDENTITY_LIMIT)
        .await
        .context("get the controller's own identity")
}

fn local_backend(config: &Config, backend: &BackendConfig, tools: &Tools) -> anyhow::Result<Arc<dyn Backend>> {
    let LocalSettings { executor_uid, without_isolation, fork_prs, metadata_prefix, runner_bin: _, path, proxy } = &config.local;
    let isolation = Isolation::choose(*without_isolation, *executor_uid).map_err(anyhow::Error::msg)?;
    let instance = config.gitea.instance();
    let mut local = LocalConfig::new(backend.kind, instance, config.state_directory.clone(), isolation);
    local.metadata_prefix.clone_from(metadata_prefix);
    local.runner_bin = tools.runner.as_ref().map(|r| r.path.clone());
    local.path.clone_from(path);
    local.proxy.clone_from(proxy);
    local.fork_prs = *fork_prs;
    local.keepers = Keepers::here();
    Ok(Arc::new(LocalBackend::new(local)?))
}
