//! The controller put together: makes every part from the settings, connects them, runs them, and ends them in order.
//!
//! Sees everything and decides nothing. `build` opens and binds, and spawns nothing; `run` spawns, watches and drains.

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    assignment::{Rules, seal::SealKeys},
    backend::{
        Backend,
        local::{Isolation, LocalBackend, LocalConfig},
    },
    claims::Claims,
    config::{BackendConfig, Config, GiteaConfig, LocalSettings, tools::Tools},
    environment::Target,
    facade::Facade,
    gitea::RunnerRpc,
    health::Health,
    http::{self, Access, Http},
    identity::{self, Identity, ServeLimits, authority::Authority, binder::Binder},
    ids::BackendKind,
    leader::LeaderPass,
    metrics::{BackendLabel, Metrics},
    mirror::{self, Mirror},
    plan,
    queue::{AssignmentQueue, embedded::EmbeddedQueue, held::Leases},
    reconcile::{Reconciler, Steps},
    scheduler::{Scheduler, SchedulerStatus},
    slots::Slots,
    supervise::EndedEarly,
    waiting::Waiting,
    worker::{self, Workshop},
};

mod running;
mod start;
mod state;

use self::{running::Running, start::count_environments};

const IDENTITY_LIMIT: Duration = Duration::from_secs(30);
/// Of the facade. An environment has four at most, and there are as many as slots.
const CONNECTIONS_PER_ENVIRONMENT: usize = 4;

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
    leases: Leases,
    authority: Authority,
    backends: HashMap<BackendKind, Arc<dyn Backend>>,
    slots: HashMap<BackendKind, Slots>,
    metrics: Metrics,
    mirror: Mirror,
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
        let queue = EmbeddedQueue::open(&state.private.join("queue.redb")).context("open queue")?;
        let pass = LeaderPass::of_database(&queue);
        let keys = state.seal_keys(config.keys.seal.as_deref()).context("read seal key")?;
        let claims = Claims::new(state.capability_key(config.keys.capability.as_deref()).context("read capability key")?);
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
        let (queue, leases): (Arc<dyn AssignmentQueue>, _) = (Arc::new(queue), Leases::default());
        let core = Core {
            config,
            tools,
            rpc,
            queue,
            pass,
            keys,
            claims,
            leases,
            authority,
            backends,
            slots,
            metrics,
            mirror,
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
        running.serving("http", http::serve(http_listener, parts.http(health).router(), running.serve.clone()));
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
    Ok(Arc::new(LocalBackend::new(local)?))
}

/// Makes the roles from the daemon's parts.
struct Parts<'a> {
    core: &'a Core,
    binder: Binder,
    begin: CancellationToken,
}

impl Parts<'_> {
    /// What must be there before anything else runs: our identity, and a count of the environments that exist.
    async fn start(&self) -> anyhow::Result<(Identity, Vec<(Reconciler, Steps)>)> {
        let identity = own_identity(&self.core.config, &self.core.authority).await?;
        self.remember_attempts().await;
        let reconcilers = count_environments(self.reconcilers(), &self.begin).await;
        self.core.claims.counted();
        Ok((identity, reconcilers))
    }

    fn run_roles(
        &self,
        running: &mut Running,
        facade_listener: TcpListener,
        identity: &Identity,
        reconcilers: Vec<(Reconciler, Steps)>,
        status: watch::Sender<SchedulerStatus>,
    ) {
        let core = self.core;
        let (capabilities, server_capabilities) = watch::channel(String::new());
        let router = self.facade(server_capabilities).router();
        let (tls, limits) = (identity.server_config(), self.facade_limits());
        running.serving("facade", identity::serve(facade_listener, tls, router, limits, running.serve.clone()));
        for (reconciler, steps) in reconcilers {
            let name = match reconciler.backend.kind() {
                BackendKind::Pod => "reconcile/pod",
                BackendKind::Vm => "reconcile/vm",
            };
            running.beginning(name, reconciler.run(steps));
        }
        let workshop = self.workshop();
        for (kind, backend) in &core.backends {
            let name = match kind {
                BackendKind::Pod => "worker/pod",
                BackendKind::Vm => "worker/vm",
            };
            if let Some(slots) = core.slots.get(kind) {
                let worker = worker::worker(workshop.clone(), Arc::clone(backend), slots.clone(), self.begin.clone());
                running.beginning(name, worker);
            }
        }
        running.beginning("worker/refusals", worker::refusals(workshop, self.begin.clone()));
        let leases = worker::extend_leases(Arc::clone(&core.queue), core.leases.clone(), self.begin.clone());
        running.beginning("leases", leases);
        running.beginning("waiting", self.waiting().run(self.begin.clone()));
        running.beginning("mirror", self.keeper().run());
        running.beginning("scheduler", self.scheduler(capabilities, status).run(self.begin.clone(), core.pass));
    }

    fn facade_limits(&self) -> ServeLimits {
        let of_all = self.core.slots.values().map(Slots::capacity).sum::<usize>() * CONNECTIONS_PER_ENVIRONMENT;
        ServeLimits {
            // One peer that takes all that it may leaves as much to the others.
            connections: of_all * 2 + 16,
            // Siblings of a matrix have one SPIFFE ID, so all environments may be one peer.
            connections_per_peer: of_all,
            handshake: Duration::from_secs(10),
            max_age: Duration::from_secs(3600),
        }
    }

    fn rules(&self) -> Rules {
        let config = &self.core.config;
        Rules { trust_domain: config.identity.trust_domain.clone(), vm_label: config.vm_label.clone() }
    }

    fn cleans_up(&self) -> bool {
        self.core.tools.runner.as_ref().is_some_and(crate::config::tools::Runner::cleans_up)
    }

    fn http(&self, health: Health) -> Http {
        let config = &self.core.config.http;
        Http {
            reasons: Arc::new(move || health.reasons()),
            metrics: self.core.metrics.clone(),
            access: Access {
                read_token: config.read_token.clone(),
                trust_loopback: config.trust_loopback,
                hosts: config.hosts.clone(),
            },
        }
    }

    fn scheduler(&self, server_capabilities: watch::Sender<String>, status: watch::Sender<SchedulerStatus>) -> Scheduler {
        let core = self.core;
        Scheduler {
            rpc: core.rpc.clone(),
            queue: Arc::clone(&core.queue),
            claims: core.claims.clone(),
            rules: self.rules(),
            keys: core.keys.clone(),
            capacity: core.slots.iter().map(|(kind, slots)| (*kind, slots.capacity())).collect(),
            version: format!("gitea-dynamic-runner v{}", env!("CARGO_PKG_VERSION")),
            capabilities: if self.cleans_up() { vec!["cancelling".into()] } else { Vec::new() },
            metrics: core.metrics.clone(),
            mirror: core.mirror.clone(),
            server_capabilities,
            status,
        }
    }

    fn target(&self) -> Target {
        let Core { config, facade_url, .. } = self.core;
        let seconds = |backend: &Option<BackendConfig>| backend.as_ref().map_or(14_400, |b| b.timeout_seconds);
        Target {
            instance: config.gitea.instance(),
            facade_url: facade_url.clone(),
            facade_spiffe_id: config.identity.facade_spiffe_id.clone(),
            gitea_url: config.gitea.url.clone(),
            gitea_ca_file: config.gitea.ca_file.clone(),
            pod_deadline_seconds: seconds(&config.pod),
            vm_deadline_seconds: seconds(&config.vm),
        }
    }

    fn workshop(&self) -> Workshop {
        let Core { rpc, queue, pass, keys, claims, leases, metrics, mirror, .. } = self.core;
        Workshop {
            rpc: rpc.clone(),
            queue: Arc::clone(queue),
            leases: leases.clone(),
            claims: claims.clone(),
            rules: self.rules(),
            keys: keys.clone(),
            binder: self.binder.clone(),
            metrics: metrics.clone(),
            mirror: mirror.clone(),
            pass: *pass,
            target: self.target(),
        }
    }

    fn waiting(&self) -> Waiting {
        let core = self.core;
        Waiting {
            rpc: core.rpc.clone(),
            queue: Arc::clone(&core.queue),
            leases: core.leases.clone(),
            claims: core.claims.clone(),
            rules: self.rules(),
            keys: core.keys.clone(),
            slots: core.slots.clone(),
            metrics: core.metrics.clone(),
            mirror: core.mirror.clone(),
            pass: core.pass,
        }
    }

    fn facade(&self, server_capabilities: watch::Receiver<String>) -> Facade {
        let core = self.core;
        Facade {
            rpc: core.rpc.clone(),
            claims: core.claims.clone(),
            queue: Arc::clone(&core.queue),
            leases: core.leases.clone(),
            backends: core.backends.clone(),
            pass: core.pass,
            metrics: core.metrics.clone(),
            mirror: core.mirror.clone(),
            server_capabilities,
        }
    }

    fn reconcilers(&self) -> Vec<Reconciler> {
        let core = self.core;
        let slots = |kind: &BackendKind| core.slots.get(kind).cloned().unwrap_or_else(|| Slots::new(1));
        let make = |(kind, backend): (&BackendKind, &Arc<dyn Backend>)| Reconciler {
            backend: Arc::clone(backend),
            slots: slots(kind),
            rpc: core.rpc.clone(),
            queue: Arc::clone(&core.queue),
            leases: core.leases.clone(),
            claims: core.claims.clone(),
            rules: self.rules(),
            keys: core.keys.clone(),
            binder: self.binder.clone(),
            target: self.target(),
            metrics: core.metrics.clone(),
            mirror: core.mirror.clone(),
            pass: core.pass,
            stop_grace: if self.cleans_up() { plan::STOP_GRACE_CLEANUP } else { plan::STOP_GRACE },
            silence_limit: core.config.silence_limit,
            stop: self.begin.clone(),
        };
        core.backends.iter().map(make).collect()
    }
}
