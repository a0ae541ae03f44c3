//! The passes over facts, each run twice: what they find they repair, and then there is nothing left to do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use gitea_dynamic_runner::{
    assignment::{Assignment, Rules, seal::SealKeys},
    board::Board,
    claims::{CapabilityKey, Claims},
    demo::forge::{Forge, ForgeConfig, JobSpec},
    gitea::RunnerRpc,
    ids::{InstanceId, Lane, TaskId},
    leader::LeaderPass,
    metrics::{Metrics, ResultLabel},
    mirror::{Keep, Mirror, Outcome, Phase},
    queue::{AssignmentQueue, embedded::EmbeddedQueue},
    reconcile::mirror::Keeper,
};
use tokio_util::sync::CancellationToken;

use crate::world::POD;

/// A keeper with a queue, without backends, and three jobs of a forge that wait in the queue.
struct Desk {
    keeper: Keeper,
    assignments: Vec<Assignment>,
    forge: Forge,
    _folder: tempfile::TempDir,
}

async fn desk() -> Desk {
    let folder = tempfile::tempdir().unwrap();
    let forge = Forge::start(ForgeConfig::default()).await.unwrap();
    let (uuid, token) = forge.new_runner("passes", &POD);
    let rpc = RunnerRpc::to_gitea(&forge.url(), None, Some((&uuid, &token))).unwrap();
    rpc.declare("v1", &POD.map(str::to_owned), &[]).await.unwrap();
    forge.push(["a", "b", "c"].map(|name| JobSpec::new(name, &POD).run("true")));
    let rules = Rules { trust_domain: "td".into(), vm_label: "vm".into() };
    let keys = SealKeys::parse(&"1".repeat(64)).unwrap();
    let queue = EmbeddedQueue::open(&folder.path().join("queue.redb")).unwrap();
    let mut assignments = Vec::new();
    for _ in 0..3 {
        let raw = rpc.fetch_task(0).await.unwrap().task.unwrap();
        let assignment = Assignment::of_task(raw.expose().to_vec(), &rules, 1000).unwrap();
        queue.publish(assignment.lane, assignment.task, &assignment.seal(&keys)).await.unwrap();
        assignments.push(assignment);
    }
    let metrics = Metrics::new();
    let pass = LeaderPass::of_database(&queue);
    let keeper = Keeper {
        mirror: Mirror::open(&folder.path().join("mirror.redb"), InstanceId::of_uuid(&uuid), metrics.clone()).unwrap(),
        backends: HashMap::new(),
        slots: HashMap::new(),
        queue: Arc::new(queue),
        claims: Claims::new(CapabilityKey::random()),
        rpc,
        rules,
        keys,
        keep: Keep::default(),
        metrics,
        board: Board::default(),
        pass,
        stop: CancellationToken::new(),
    };
    Desk { keeper, assignments, forge, _folder: folder }
}

impl Desk {
    async fn phase(&self, task: TaskId) -> Option<Phase> {
        self.keeper.mirror.flush().await;
        self.keeper.mirror.ask(move |m| m.job(task)).await.unwrap().map(|job| job.phase)
    }

    fn stranded(&self, result: &'static str) -> u64 {
        self.keeper.metrics.stranded.get_or_create(&ResultLabel { result }).get()
    }

    async fn pass(&self, suspects: &mut HashSet<TaskId>) {
        let facts = self.keeper.look().await.unwrap();
        self.keeper.mirror_pass(&facts).await;
        self.keeper.stranded_pass(&facts, suspects, &self.keeper.pass).await;
    }
}

#[tokio::test]
async fn one_pass_makes_an_empty_mirror_show_the_queue_and_the_second_finds_nothing_to_do() {
    let desk = desk().await;
    let mut suspects = HashSet::new();
    desk.pass(&mut suspects).await;
    for assignment in &desk.assignments {
        assert_eq!(desk.phase(assignment.task).await, Some(Phase::Queued));
        let task = assignment.task;
        let job = desk.keeper.mirror.ask(move |m| m.job(task)).await.unwrap().unwrap();
        assert!(job.rebuilt);
        assert_eq!(
            (job.details.repository, job.details.token_hash),
            (assignment.repository.clone(), Some(assignment.token_hash))
        );
        assert!(desk.keeper.mirror.ask(move |m| m.payload(task)).await.unwrap().is_some());
    }
    assert_eq!(desk.keeper.metrics.mirror_repairs.get(), 3);
    desk.pass(&mut suspects).await;
    assert_eq!(desk.keeper.metrics.mirror_repairs.get(), 3);
    assert!(suspects.is_empty());
}

#[tokio::test]
async fn a_job_missing_in_one_look_is_left_alone_and_in_two_it_is_queued_again_once() {
    let desk = desk().await;
    let mut suspects = HashSet::new();
    desk.pass(&mut suspects).await;
    let task = desk.assignments[0].task;
    desk.phase(task).await;
    assert!(desk.keeper.queue.cancel(Lane::Pod, task).await.unwrap());
    desk.pass(&mut suspects).await;
    assert_eq!((suspects.len(), desk.stranded("republished")), (1, 0));
    assert!(desk.keeper.queue.get(task).await.unwrap().is_none());
    desk.pass(&mut suspects).await;
    assert_eq!(desk.stranded("republished"), 1);
    assert!(desk.keeper.queue.get(task).await.unwrap().is_some());
    desk.pass(&mut suspects).await;
    desk.pass(&mut suspects).await;
    assert_eq!((suspects.len(), desk.stranded("republished")), (0, 1));
    assert_eq!(desk.phase(task).await, Some(Phase::Queued));
}

#[tokio::test]
async fn a_stranded_job_that_may_have_started_is_failed_and_one_that_somebody_acts_on_is_left_alone() {
    let desk = desk().await;
    let mut suspects = HashSet::new();
    desk.pass(&mut suspects).await;
    let (had_one, acted_on) = (desk.assignments[0].task, desk.assignments[1].task);
    let busy = desk.keeper.claims.begin(acted_on.assignment()).unwrap();
    let made = gitea_dynamic_runner::mirror::What::Created { environment: "ci-1".into() };
    desk.keeper.mirror.note(had_one, made);
    for task in [had_one, acted_on] {
        assert!(desk.keeper.queue.cancel(Lane::Pod, task).await.unwrap());
    }
    for _ in 0..3 {
        desk.pass(&mut suspects).await;
    }
    assert_eq!((desk.stranded("failed"), desk.stranded("republished")), (1, 0));
    assert_eq!((desk.phase(had_one).await, desk.phase(acted_on).await), (Some(Phase::Lost), Some(Phase::Queued)));
    let finished = desk.keeper.mirror.ask(move |m| m.finished(had_one)).await.unwrap().unwrap();
    assert_eq!(finished.result, Outcome::Failure);
    let view = desk.forge.job(desk.forge.job_of_task(had_one).unwrap()).unwrap();
    assert!(view.log.iter().any(|row| row.contains("may have been started")), "{:#?}", view.log);
    drop(busy);
    let held = tokio::time::timeout(Duration::from_secs(5), desk.keeper.queue.get(had_one)).await.unwrap();
    assert!(held.unwrap().is_none());
}
