//! The passes over environments and over what waits, each run twice: what they find they repair, and then there is nothing left to do.
//!
//! The backend is the real local one, its executors are shells; forge, queue and claims are in this process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::HashMap, path::Path, sync::Arc, time::Duration};

use gitea_dynamic_runner::{
    assignment::{Assignment, Rules, seal::SealKeys},
    backend::{
        Backend, Mark,
        local::{Isolation, LocalBackend, LocalConfig},
    },
    board::Board,
    claims::{CapabilityKey, Claims},
    demo::forge::{Forge, ForgeConfig, JobId, JobSpec, JobStatus, Method},
    drain::Drain,
    environment::Target,
    gitea::RunnerRpc,
    identity::{authority::Authority, binder::Binder},
    ids::{BackendKind, EnvironmentName, InstanceId, Nonce},
    leader::LeaderPass,
    metrics::Metrics,
    mirror::Mirror,
    plan,
    queue::{embedded::EmbeddedQueue, held::Leases},
    reconcile::{Reconciler, Steps},
    slots::Slots,
    waiting::{Memory, Waiting},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    support::{eventually, story},
    world::{POD, SOON},
};

/// The first job's executor ends at once, the others' stay.
const EXECUTOR: &str = "[ $CI_ASSIGNMENT_ID != gitea-task-1 ] || exit 3; exec sleep 300";

struct Desk {
    reconciler: Reconciler,
    assignments: Vec<Assignment>,
    jobs: Vec<JobId>,
    forge: Forge,
    folder: tempfile::TempDir,
}

fn backend(folder: &Path, instance: &InstanceId) -> Arc<dyn Backend> {
    let mut config = LocalConfig::new(BackendKind::Pod, instance.clone(), folder.to_owned(), Isolation::Unisolated);
    config.self_exe = env!("CARGO_BIN_EXE_gitea-dynamic-runner").into();
    config.executor = vec!["/bin/sh".into(), "-c".into(), EXECUTOR.into()];
    Arc::new(LocalBackend::new(config).unwrap())
}

async fn desk(jobs: usize) -> Desk {
    let folder = tempfile::Builder::new().prefix("g").rand_bytes(4).tempdir().unwrap();
    let private = folder.path().join("private");
    std::fs::create_dir(&private).unwrap();
    let forge = Forge::start(ForgeConfig::default()).await.unwrap();
    let (uuid, token) = forge.new_runner("passes", &POD);
    let rpc = RunnerRpc::to_gitea(&forge.url(), None, Some((&uuid, &token))).unwrap();
    rpc.declare("v1", &POD.map(str::to_owned), &[]).await.unwrap();
    let pushed = forge.push((0..jobs).map(|n| JobSpec::new(&format!("job{n}"), &POD).run("true")));
    let rules = Rules { trust_domain: "td.test".into(), vm_label: "vm".into() };
    let mut assignments = Vec::new();
    for _ in 0..jobs {
        let raw = rpc.fetch_task(0).await.unwrap().task.unwrap();
        assignments.push(Assignment::of_task(raw.expose().to_vec(), &rules, 1000).unwrap());
    }
    let queue = EmbeddedQueue::open(&private.join("queue.redb")).unwrap();
    let (pass, metrics, instance) = (LeaderPass::of_database(&queue), Metrics::new(), InstanceId::of_uuid(&uuid));
    let mirror = Mirror::open(&private.join("mirror.redb"), instance.clone(), metrics.clone()).unwrap();
    let reconciler = Reconciler {
        backend: backend(folder.path(), &instance),
        slots: Slots::new(2),
        rpc,
        queue: Arc::new(queue),
        leases: Leases::default(),
        claims: Claims::new(CapabilityKey::random()),
        rules,
        keys: SealKeys::parse(&"1".repeat(64)).unwrap(),
        binder: Binder::Embedded(Authority::open(&private.join("ca"), "td.test").unwrap()),
        target: Target {
            instance,
            facade_url: "https://127.0.0.1:1".into(),
            facade_spiffe_id: "spiffe://td.test/facade".into(),
            gitea_url: forge.url(),
            gitea_ca_file: None,
            pod_deadline_seconds: 600,
            vm_deadline_seconds: 600,
        },
        metrics,
        mirror,
        board: Board::default(),
        pass,
        stop_grace: plan::STOP_GRACE,
        silence_limit: Duration::from_secs(480),
        stop: CancellationToken::new(),
    };
    Desk { reconciler, assignments, jobs: pushed.jobs, forge, folder }
}

impl Desk {
    async fn queued(&self, index: usize) {
        let assignment = &self.assignments[index];
        let sealed = assignment.seal(&self.reconciler.keys);
        self.reconciler.queue.publish(assignment.lane, assignment.task, &sealed).await.unwrap();
    }

    async fn environment(&self, index: usize) -> EnvironmentName {
        let (r, nonce) = (&self.reconciler, Nonce::random());
        let capability = r.claims.key().capability(self.assignments[index].id, &nonce);
        let spec = r.target.spec(BackendKind::Pod, &self.assignments[index], nonce, capability);
        r.backend.ensure(&spec, &r.pass).await.unwrap().1.name
    }

    /// Older than what may still be in the making.
    fn age(&self, name: &EnvironmentName) {
        let path = self.folder.path().join(format!("private/environments/{name}.json"));
        let mut record: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        record["created_ms"] = json!(record["created_ms"].as_u64().unwrap() - 61_000);
        std::fs::write(&path, record.to_string()).unwrap();
    }

    async fn names(&self) -> Vec<EnvironmentName> {
        let mut names: Vec<_> = self.reconciler.backend.list().await.unwrap().into_iter().map(|e| e.name).collect();
        names.sort();
        names
    }

    /// One look, and all that follows from it; how many steps that took beside it.
    async fn pass(&self) -> usize {
        let mut steps = Steps::new();
        self.reconciler.environments_pass(&mut steps).await.unwrap();
        let begun = steps.len();
        steps.join_all().await;
        begun
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pass_settles_removes_and_adopts_what_a_crash_left_and_a_second_one_finds_nothing_to_do() {
    story(Duration::from_secs(90), async {
        let desk = desk(5).await;
        let (r, pass) = (&desk.reconciler, desk.reconciler.pass);
        let lost = desk.environment(0).await;
        r.backend.mark(&lost, Mark::Claimed, &pass).await.unwrap();
        let terminal = desk.environment(1).await;
        r.backend.mark(&terminal, Mark::Claimed, &pass).await.unwrap();
        r.backend.mark(&terminal, Mark::Terminal, &pass).await.unwrap();
        desk.queued(2).await;
        let waiting = desk.environment(2).await;
        let stray = desk.environment(3).await;
        desk.age(&stray);
        let young = desk.environment(4).await;
        let others = backend(desk.folder.path(), &InstanceId::of_uuid("somebody else"));
        let nonce = Nonce::random();
        let mut spec = r.target.spec(
            BackendKind::Pod,
            &desk.assignments[4],
            nonce.clone(),
            r.claims.key().capability(desk.assignments[4].id, &nonce),
        );
        spec.instance = InstanceId::of_uuid("somebody else");
        spec.name = EnvironmentName::new(&spec.instance, desk.assignments[4].task, &nonce);
        let foreign = others.ensure(&spec, &pass).await.unwrap().1.name;
        eventually("the first executor has ended", SOON, async || {
            r.backend.list().await.unwrap().iter().any(|e| e.name == lost && e.phase.ended().is_some()).then_some(())
        })
        .await;

        assert_eq!(desk.pass().await, 3, "one is settled, two are removed");
        let mut left = vec![waiting.clone(), young.clone()];
        left.sort();
        assert_eq!(desk.names().await, left);
        let view = desk.forge.job(desk.jobs[0]).unwrap();
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(view.log.iter().filter(|row| row.contains("ended without a result: exit code 3")).count(), 1);
        let served: Vec<_> = r.claims.of_backend(BackendKind::Pod).into_iter().map(|c| c.name).collect();
        assert_eq!(served, std::slice::from_ref(&waiting));
        assert_eq!(r.slots.active(), [desk.assignments[2].id]);

        let reports = desk.forge.reports().len();
        for _ in 0..2 {
            assert_eq!(desk.pass().await, 0, "nothing is left to do");
        }
        assert_eq!((desk.names().await, desk.forge.reports().len()), (left, reports));
        assert_eq!(others.list().await.unwrap().len(), 1, "another instance's is left alone");

        for (backend, name) in [(&r.backend, waiting), (&r.backend, young), (&others, foreign)] {
            while backend.ensure_gone(&name, &pass).await.unwrap() != gitea_dynamic_runner::backend::Gone::Gone {}
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_look_at_what_waits_tells_gitea_of_each_and_ends_what_was_cancelled_and_a_second_one_says_nothing() {
    story(Duration::from_secs(60), async {
        let desk = desk(3).await;
        for index in 0..3 {
            desk.queued(index).await;
        }
        let r = &desk.reconciler;
        let waiting = Waiting {
            rpc: r.rpc.clone(),
            queue: Arc::clone(&r.queue),
            leases: r.leases.clone(),
            claims: r.claims.clone(),
            drain: Drain::open(desk.folder.path()).unwrap(),
            rules: r.rules.clone(),
            keys: r.keys.clone(),
            slots: HashMap::from([(BackendKind::Pod, r.slots.clone())]),
            metrics: r.metrics.clone(),
            mirror: r.mirror.clone(),
            board: r.board.clone(),
            pass: r.pass,
        };
        desk.forge.cancel(desk.jobs[1]);
        let (mut memory, stop) = (Memory::default(), CancellationToken::new());
        waiting.waiting_pass(&mut memory, &stop).await.unwrap();
        assert_eq!(desk.forge.job(desk.jobs[1]).unwrap().status, JobStatus::Cancelled);
        let lane = desk.assignments[0].lane;
        let left: Vec<_> = r.queue.list(lane).await.unwrap().into_iter().map(|q| q.task).collect();
        assert_eq!(left, [desk.assignments[0].task, desk.assignments[2].task]);
        let told = desk.forge.count(Method::UpdateTask) + desk.forge.count(Method::UpdateLog);
        waiting.waiting_pass(&mut memory, &stop).await.unwrap();
        assert_eq!(desk.forge.count(Method::UpdateTask) + desk.forge.count(Method::UpdateLog), told, "nothing is due");
        assert_eq!(r.queue.list(lane).await.unwrap().len(), 2);
    })
    .await;
}
