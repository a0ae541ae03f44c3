//! What the operator's HTTP is made of: where the pages and answers get what they show.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use anyhow::Context as _;
use tokio::sync::watch;

use super::Parts;
use crate::{
    backend::local::Isolation,
    backlog::{self, Backlog},
    config::QueueConfig,
    drain::Drain,
    gitea::look::Web,
    health::Health,
    http::{
        Access, Api, Draining, Http,
        view::{self, About, Operation, Source, UnknownLabels},
    },
    ids::BackendKind,
    slots::Slots,
};

impl Parts<'_> {
    pub(super) fn http(&self, health: Health, backlog: watch::Receiver<Option<backlog::Seen>>) -> Http {
        let (core, config) = (self.core, &self.core.config.http);
        let (reasons, slots, counted) = (health.clone(), core.slots.clone(), health.serving.clone());
        let held = Arc::new(move || counted.borrow().then(|| slots.values().flat_map(Slots::active).collect()));
        let draining = Draining::new(core.drain.clone(), core.claims.clone(), Arc::clone(&core.queue), held);
        let drain = core.drain.clone();
        let source = Source {
            mirror: core.mirror.clone(),
            claims: core.claims.clone(),
            board: core.board.clone(),
            operation: Arc::new(move || operation(&health, &drain, backlog.borrow().as_ref())),
            capacity: core.slots.iter().map(|(kind, slots)| (*kind, slots.capacity())).collect(),
            about: self.about(),
        };
        Http {
            reasons: Arc::new(move || reasons.reasons()),
            metrics: core.metrics.clone(),
            access: Access {
                read_token: config.read_token.clone(),
                admin_token: config.admin_token.clone(),
                trust_loopback: config.trust_loopback,
                hosts: config.hosts.clone(),
            },
            draining,
            api: Api { source, queue: Arc::clone(&core.queue) },
        }
    }

    /// `None`: there is no token to look with.
    pub(super) fn backlog(&self, seen: watch::Sender<Option<backlog::Seen>>) -> anyhow::Result<Option<Backlog>> {
        let config = &self.core.config;
        let Some(token) = config.gitea.api_token.clone() else { return Ok(None) };
        let web = Web::towards(&config.proxies(), &config.gitea.url, config.gitea.ca_file.as_deref())
            .context("make a client for Gitea's REST API")?;
        let label = |kind: &BackendKind| match kind {
            BackendKind::Pod => "pod".to_owned(),
            BackendKind::Vm => config.vm_label.clone(),
        };
        let declared = self.core.slots.keys().map(label).chain(["self-hosted".to_owned()]).collect::<BTreeSet<_>>();
        let url = config.gitea.url.trim_end_matches('/').to_owned();
        Ok(Some(Backlog { web, url, token, declared, seen }))
    }

    fn about(&self) -> About {
        let config = &self.core.config;
        let queue = match config.queue {
            QueueConfig::Embedded => "a file on this machine",
            QueueConfig::JetStream(_) => "JetStream",
        };
        let local = &config.local;
        let unisolated = matches!(Isolation::choose(local.without_isolation, local.executor_uid), Ok(Isolation::Unisolated));
        let mut kinds = HashMap::from([
            ("gitea", config.gitea.url.clone()),
            ("queue", queue.to_owned()),
            ("identity", format!("embedded authority of {}", config.identity.trust_domain)),
            ("leader", "this process, by its lock on the queue's file".to_owned()),
        ]);
        kinds.extend(BackendKind::ALL.map(|kind| (kind.as_str(), "processes of this machine".to_owned())));
        About {
            version: env!("CARGO_PKG_VERSION"),
            instance: config.gitea.instance(),
            gitea_url: config.gitea.url.trim_end_matches('/').to_owned(),
            kinds,
            vm_label: config.vm_label.clone(),
            unisolated,
        }
    }
}

fn shown(seen: &backlog::Seen) -> view::Backlog {
    let nobodys = seen.nobodys.iter().cloned();
    view::Backlog {
        queued: seen.queued.as_ref().ok().copied(),
        as_of: Some(seen.at.into()),
        nobodys: nobodys.map(|(labels, jobs, example)| UnknownLabels { labels, jobs, example }).collect(),
        trouble: seen.queued.as_ref().err().cloned(),
    }
}

fn operation(health: &Health, drain: &Drain, backlog: Option<&backlog::Seen>) -> Operation {
    Operation {
        reasons: health.reasons(),
        fetching: health.fetching(),
        declared: health.scheduler.borrow().declared.clone(),
        draining_since: drain.since(),
        leads: *health.serving.borrow(),
        backlog: backlog.map(shown),
    }
}
