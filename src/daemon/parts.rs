//! The roles made from the daemon's parts, and begun: who is given what.
//!
//! A role sees no other one; what they share (claims, slots, leases, mirror) they get here.

use std::{sync::Arc, time::Duration};

use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{Core, own_identity, running::Running, start::count_environments};
use crate::{
    assignment::Rules,
    backend::Backend,
    board::Standing,
    config::BackendConfig,
    environment::Target,
    facade::Facade,
    identity::{self, Identity, ServeLimits, binder::Binder},
    ids::BackendKind,
    plan,
    reconcile::{Reconciler, Steps, deliveries},
    scheduler::{Scheduler, SchedulerStatus},
    slots::Slots,
    waiting::Waiting,
    worker::{self, Workshop},
};

/// Of the facade. An environment has four at most, and there are as many as slots.
const CONNECTIONS_PER_ENVIRONMENT: usize = 4;

/// Makes the roles from the daemon's parts.
pub(super) struct Parts<'a> {
    pub(super) core: &'a Core,
    pub(super) binder: Binder,
    pub(super) begin: CancellationToken,
}

impl Parts<'_> {
    /// What must be there before anything else runs: our identity, and a count of the environments that exist.
    pub(super) async fn start(&self) -> anyhow::Result<(Identity, Vec<(Reconciler, Steps)>)> {
        let identity = own_identity(&self.core.config, &self.core.authority).await?;
        self.core.board.neighbour("identity", Standing::Fine);
        self.remember_attempts().await;
        let reconcilers = count_environments(self.reconcilers(), &self.begin).await;
        self.core.claims.counted();
        Ok((identity, reconcilers))
    }

    pub(super) fn run_roles(
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
        let (queue, metrics, board, stop) =
            (Arc::clone(&core.queue), core.metrics.clone(), core.board.clone(), self.begin.clone());
        running.beginning("queue/store", deliveries::store(Arc::clone(&queue), metrics.clone(), board.clone(), stop.clone()));
        running.beginning("queue/deliveries", deliveries::deliveries(queue, metrics, board, stop));
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

    pub(super) fn rules(&self) -> Rules {
        let config = &self.core.config;
        Rules { trust_domain: config.identity.trust_domain.clone(), vm_label: config.vm_label.clone() }
    }

    fn cleans_up(&self) -> bool {
        self.core.tools.runner.as_ref().is_some_and(crate::config::tools::Runner::cleans_up)
    }

    fn scheduler(&self, server_capabilities: watch::Sender<String>, status: watch::Sender<SchedulerStatus>) -> Scheduler {
        let core = self.core;
        Scheduler {
            rpc: core.rpc.clone(),
            queue: Arc::clone(&core.queue),
            claims: core.claims.clone(),
            drain: core.drain.clone(),
            rules: self.rules(),
            keys: core.keys.clone(),
            capacity: core.slots.iter().map(|(kind, slots)| (*kind, slots.capacity())).collect(),
            version: format!("gitea-dynamic-runner v{}", env!("CARGO_PKG_VERSION")),
            capabilities: if self.cleans_up() { vec!["cancelling".into()] } else { Vec::new() },
            metrics: core.metrics.clone(),
            mirror: core.mirror.clone(),
            board: core.board.clone(),
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
        let Core { rpc, queue, pass, keys, claims, drain, leases, metrics, mirror, .. } = self.core;
        Workshop {
            rpc: rpc.clone(),
            queue: Arc::clone(queue),
            leases: leases.clone(),
            claims: claims.clone(),
            drain: drain.clone(),
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
            drain: core.drain.clone(),
            rules: self.rules(),
            keys: core.keys.clone(),
            slots: core.slots.clone(),
            metrics: core.metrics.clone(),
            mirror: core.mirror.clone(),
            board: core.board.clone(),
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

    pub(super) fn reconcilers(&self) -> Vec<Reconciler> {
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
            board: core.board.clone(),
            pass: core.pass,
            stop_grace: if self.cleans_up() { plan::STOP_GRACE_CLEANUP } else { plan::STOP_GRACE },
            silence_limit: core.config.silence_limit,
            stop: self.begin.clone(),
        };
        core.backends.iter().map(make).collect()
    }
}
