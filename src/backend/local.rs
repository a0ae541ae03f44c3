//! Environments as processes of this machine, each kept by a process of its own that outlives the controller.
//!
//! As root every environment has its own uid, PID and mount namespace; without root it has none of that (`LOCAL_UNISOLATED=1`). The controller writes the
//! record (`state`), starts a `keeper` or has systemd start it (`unit`), which starts an `init`, which runs the executor; `end` removes. The Workload API socket, whose path is told here,
//! is made by whoever serves identities.

use std::{
    collections::hash_map::DefaultHasher,
    ffi::OsString,
    hash::{Hash as _, Hasher as _},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::{Mutex, MutexGuard, Notify};

use self::{cgroup::CgroupPlan, make::Prepared, state::Layout};
use super::{Backend, BackendError, Ensured, EnvironmentSpec, Gone, JobNeeds, Mark, Observed};
use crate::{
    ids::{BackendKind, EnvironmentName, InstanceId},
    leader::LeaderPass,
    names::metadata,
    task::Trust,
};

mod cgroup;
mod check;
mod end;
mod init;
mod keeper;
mod look;
mod make;
mod order;
mod remove;
mod state;
mod unit;

pub use self::{cgroup::Limits, init::init_main, keeper::keeper_main, unit::Keepers};

/// An environment that has no keeper after this long never gets one.
pub(crate) const CREATE_LIMIT: Duration = Duration::from_secs(60);
/// From the deadline, at which the executor is asked to stop, to the end by force.
const GRACE: Duration = Duration::from_secs(300);
const HINT_PERIOD: Duration = Duration::from_secs(1);
/// Environments whose names share a number wait for one another.
const STRIPES: usize = 64;

/// How environments are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Needs root. The first free uid from `base` on; uids of known users are left out.
    UidPerSlot { base: u32 },
    /// Every job can read all that the controller's user can read.
    Unisolated,
}

/// Whether a pull request from a fork may run here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkPullRequests {
    Refused,
    Accepted,
}

#[derive(Debug, Clone)]
pub struct LocalConfig {
    pub kind: BackendKind,
    pub instance: InstanceId,
    /// `STATE_DIRECTORY`. Both kinds may share one.
    pub state_directory: PathBuf,
    /// `METADATA_PREFIX`, without the slash.
    pub metadata_prefix: String,
    pub isolation: Isolation,
    pub keepers: Keepers,
    /// A binary that answers to `local-keeper` and `local-init`. The default, `/proc/self/exe`, is this one even if it was replaced on disk.
    pub self_exe: PathBuf,
    /// The executor's command; the default is `executor` of this binary.
    pub executor: Vec<OsString>,
    /// The executor's `PATH`.
    pub path: String,
    pub runner_bin: Option<PathBuf>,
    /// Proxy variables, as the executor gets them.
    pub proxy: Vec<(String, String)>,
    pub fork_prs: ForkPullRequests,
    pub limits: Limits,
    pub grace: Duration,
    pub cgroup_root: PathBuf,
}

pub struct LocalBackend {
    config: LocalConfig,
    layout: Layout,
    cgroups: CgroupPlan,
    changed: Arc<Notify>,
    stripes: [Mutex<()>; STRIPES],
}

/// Whether to start where environments cannot be kept apart (`LOCAL_UNISOLATED=1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutIsolation {
    Refused,
    Accepted,
}

impl Isolation {
    /// The best that this process can do, or the text that says the way out. Where isolation is possible it is never given up.
    pub fn choose(without: WithoutIsolation, base: u32) -> Result<Self, String> {
        match (check::missing_right(&Keepers::here()), without) {
            (None, _) => Ok(Isolation::UidPerSlot { base }),
            (Some(_), WithoutIsolation::Accepted) => Ok(Isolation::Unisolated),
            (Some(right), WithoutIsolation::Refused) => Err(format!(
                "the local backend gives every job a user and namespaces of its own, and that needs {right}: start as root with it, or set \
                 LOCAL_UNISOLATED=1 if every job may read everything of this user"
            )),
        }
    }
}

impl LocalConfig {
    pub fn new(kind: BackendKind, instance: InstanceId, state_directory: PathBuf, isolation: Isolation) -> Self {
        let self_exe = PathBuf::from("/proc/self/exe");
        Self {
            kind,
            instance,
            state_directory,
            metadata_prefix: metadata::PREFIX.to_owned(),
            isolation,
            keepers: Keepers::Children,
            executor: vec![self_exe.clone().into(), "executor".into()],
            self_exe,
            path: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            runner_bin: None,
            proxy: Vec::new(),
            fork_prs: ForkPullRequests::Refused,
            limits: Limits::default(),
            grace: GRACE,
            cgroup_root: "/sys/fs/cgroup".into(),
        }
    }
}

impl LocalBackend {
    /// Makes the state folders and plans the limits. A fault's text says what to change.
    pub fn new(config: LocalConfig) -> Result<Self, BackendError> {
        let layout = Layout { state: config.state_directory.clone() };
        check::config(&config, &layout)?;
        let mut cgroups = match config.keepers {
            Keepers::Children => {
                let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
                CgroupPlan::make(&config.cgroup_root, &own, &config.limits)
            }
            // Its unit is its group, and holds the limits.
            Keepers::Units { .. } => CgroupPlan::default(),
        };
        match config.isolation {
            // A uid of its own has a limit of its own.
            Isolation::UidPerSlot { .. } => cgroups.unlimited.retain(|what| *what != cgroup::TASKS),
            Isolation::Unisolated => {
                tracing::warn!(backend = %config.kind, "environments are not isolated: every job can read everything of this user");
            }
        }
        if !cgroups.unlimited.is_empty() {
            let unlimited = cgroups.unlimited.join(", ");
            tracing::warn!(backend = %config.kind, unlimited, "no writable cgroup for this: a job may use all that the machine has of it");
        }
        let stripes = std::array::from_fn(|_| Mutex::new(()));
        Ok(Self { config, layout, cgroups, changed: Arc::new(Notify::new()), stripes })
    }

    /// Creating and ending the same environment do not overlap.
    async fn alone(&self, name: &EnvironmentName) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        self.stripes[usize::try_from(hasher.finish() % STRIPES as u64).unwrap_or(0)].lock().await
    }

    async fn observe(&self, name: &EnvironmentName) -> Result<Option<Observed>, BackendError> {
        let (layout, prefix, name) = (self.layout.clone(), self.config.metadata_prefix.clone(), name.clone());
        blocking(move || look::observe(&layout, &prefix, &name)).await
    }

    /// A name of another instance is never touched.
    fn own(&self, name: &EnvironmentName) -> Result<(), BackendError> {
        match name.parts() {
            Some((instance, ..)) if instance == self.config.instance => Ok(()),
            _ => Err(BackendError::Permanent(format!("environment {name} is of another runner registration"))),
        }
    }
}

#[async_trait]
impl Backend for LocalBackend {
    fn kind(&self) -> BackendKind {
        self.config.kind
    }

    fn refuses(&self, job: &JobNeeds) -> Option<String> {
        if let Some(what) = &job.needs_docker {
            return Some(format!(
                "this job needs a container engine ({what}), which a local environment does not have: take it out of the workflow, or run the job on a \
                 backend that has one (POD_BACKEND, VM_BACKEND)"
            ));
        }
        (job.trust == Trust::PullRequest && self.config.fork_prs == ForkPullRequests::Refused).then(|| {
            "this job runs code of a fork's pull request, which the local backend refuses because its environments are processes of the runner's own \
             machine: push the branch to the repository itself, or set LOCAL_FORK_PRS=1 at the runner if you trust everybody who can open one"
                .to_owned()
        })
    }

    async fn list(&self) -> Result<Vec<Observed>, BackendError> {
        let (layout, prefix) = (self.layout.clone(), self.config.metadata_prefix.clone());
        let (kind, instance) = (self.config.kind, self.config.instance.clone());
        blocking(move || {
            let mut found = Vec::new();
            for name in layout.names()? {
                if name.parts().is_some_and(|(of, ..)| of == instance) {
                    // One that ended between the two looks is no error.
                    found.extend(look::observe(&layout, &prefix, &name)?.filter(|seen| seen.backend == kind));
                }
            }
            Ok(found)
        })
        .await
    }

    async fn ensure(&self, spec: &EnvironmentSpec, _pass: &LeaderPass) -> Result<(Ensured, Observed), BackendError> {
        self.own(&spec.name)?;
        let _alone = self.alone(&spec.name).await;
        let order = make::Maker { config: &self.config, layout: &self.layout, cgroups: &self.cgroups }.plan(spec)?;
        let Prepared { ensured, order } = blocking(move || make::prepare(order)).await?;
        if let Some(order) = order
            && let Err(error) = make::start(&self.config, &spec.name, order, &self.changed).await
        {
            // Only a keeper runs jobs, and none came up; one that did come up has the lock and is seen by the look below.
            tracing::warn!(executor = %spec.name, error = format!("{error:#}"), "cannot start the environment's keeper");
        }
        let seen = self.observe(&spec.name).await?.ok_or(BackendError::NotFound)?;
        self.changed.notify_one();
        Ok((ensured, seen))
    }

    async fn mark(&self, name: &EnvironmentName, mark: Mark, _pass: &LeaderPass) -> Result<(), BackendError> {
        self.own(name)?;
        let (layout, name) = (self.layout.clone(), name.clone());
        let label = match mark {
            Mark::Claimed => metadata::CLAIMED,
            Mark::Terminal => metadata::TERMINAL,
        };
        let key = format!("{}/{label}", self.config.metadata_prefix);
        let found = blocking(move || make::label(&layout, &name, &key)).await?;
        self.changed.notify_one();
        if found { Ok(()) } else { Err(BackendError::NotFound) }
    }

    async fn ensure_halted(&self, name: &EnvironmentName, _pass: &LeaderPass) -> Result<Gone, BackendError> {
        self.own(name)?;
        let _alone = self.alone(name).await;
        let (layout, name) = (self.layout.clone(), name.clone());
        let halted = blocking(move || end::halt(&layout, &name)).await?;
        self.changed.notify_one();
        Ok(halted)
    }

    async fn ask_stop(&self, name: &EnvironmentName, _pass: &LeaderPass) -> Result<(), BackendError> {
        self.own(name)?;
        let (layout, name) = (self.layout.clone(), name.clone());
        let found = blocking(move || look::ask_stop(&layout, &name)).await?;
        if found { Ok(()) } else { Err(BackendError::NotFound) }
    }

    async fn ensure_gone(&self, name: &EnvironmentName, _pass: &LeaderPass) -> Result<Gone, BackendError> {
        self.own(name)?;
        let _alone = self.alone(name).await;
        let claimed = self.observe(name).await?.is_some_and(|seen| seen.claimed);
        let (layout, name) = (self.layout.clone(), name.clone());
        let gone = blocking(move || end::end(&layout, &name, claimed)).await?;
        self.changed.notify_one();
        Ok(gone)
    }

    async fn changed(&self) {
        // A keeper of an earlier controller is no child of ours, so its end is only seen by looking: hence the period.
        tokio::time::timeout(HINT_PERIOD, self.changed.notified()).await.ok();
    }
}

/// File work off the runtime's threads; every fault there may pass.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> Result<T, BackendError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(BackendError::Transient(error.to_string())),
        Err(error) => Err(BackendError::Transient(format!("local backend: {error}"))),
    }
}
