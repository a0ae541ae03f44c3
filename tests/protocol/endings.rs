//! Ends that do not come from the runner: cancelled, forgotten, deleted.

use std::time::{Duration, Instant};

use gitea_dynamic_runner::{
    gitea::{RpcFault, RunnerRpc},
    proto::runner::{TaskResult, TaskState, UpdateTaskRequest},
};

use crate::{
    runner::Runner,
    support::eventually,
    under_test::{ForgeUnderTest, Shown, ZOMBIE},
};

/// Without the capability a cancelled job is over at once; the runner learns it, and its rows are still taken.
pub(crate) async fn a_cancel_ends_a_job_at_once_where_the_runner_lacks_the_capability(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    let task = runner.claim().await.id;
    forge.cancel(&job).await;
    assert_eq!(forge.job(&job).await.0, Shown::Cancelled);
    assert_eq!(runner.heartbeat(task).await, TaskResult::RESULT_CANCELLED);
    assert_eq!(runner.log(task, 0, &["on its way"], false).await.unwrap(), 1);
    assert_eq!(runner.end(task, TaskResult::RESULT_SUCCESS, 1).await, TaskResult::RESULT_CANCELLED);
    assert_eq!(forge.job(&job).await.0, Shown::Cancelled);
}

/// With it the job goes on until the runner reports an end, and is cancelled whatever that says. Older versions know nothing of it.
pub(crate) async fn a_cancel_waits_for_a_runner_with_the_capability(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &["cancelling"]).await;
    for result in [TaskResult::RESULT_SUCCESS, TaskResult::RESULT_FAILURE] {
        let job = forge.push(vec![runner.job("a")]).await.remove(0);
        let task = runner.claim().await.id;
        runner.heartbeat(task).await;
        forge.cancel(&job).await;
        let meanwhile = if forge.facts().cancelling { Shown::Running } else { Shown::Cancelled };
        assert_eq!(forge.job(&job).await.0, meanwhile);
        assert_eq!(runner.heartbeat(task).await, TaskResult::RESULT_CANCELLED);
        forge.cancel(&job).await;
        assert_eq!(forge.job(&job).await.0, meanwhile, "cancelled twice");
        assert_eq!(runner.log(task, 0, &["cleaning up"], true).await.unwrap(), 1);
        assert_eq!(runner.end(task, result, 1).await, TaskResult::RESULT_CANCELLED);
        let (end, steps) = forge.job(&job).await;
        assert_eq!(end, Shown::Cancelled);
        if forge.facts().cancelling {
            let step = if result == TaskResult::RESULT_SUCCESS { Shown::Success } else { Shown::Failure };
            assert_eq!(steps, [step], "steps are taken as reported");
        }
    }
}

/// A Declare that does not repeat the capability withdraws it.
pub(crate) async fn a_declare_without_the_capability_withdraws_it(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &["cancelling"]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    runner.claim().await;
    runner.declare(&[&runner.label], &[]).await;
    forge.cancel(&job).await;
    assert_eq!(forge.job(&job).await.0, Shown::Cancelled);
}

/// A job that is cancelled while it waits is never handed out.
pub(crate) async fn a_job_cancelled_while_it_waits_is_not_handed_out(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &["cancelling"]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    forge.cancel(&job).await;
    assert_eq!(forge.job(&job).await.0, Shown::Cancelled);
    assert!(runner.fetch(0).await.0.is_none());
}

/// Four jobs at once, because a sweep is slow: one silent, one that only says "no new rows", one with heartbeats, one cancelled.
pub(crate) async fn silence_ends_a_job_and_heartbeats_keep_it(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &["cancelling"]).await;
    let keys = ["silent", "rowless", "alive", "chatty"];
    let jobs = forge.push(keys.iter().map(|key| runner.job(key)).collect()).await;
    let cancelled = forge.push(vec![runner.job("cancelled")]).await.remove(0);
    let mut tasks = Vec::new();
    for _ in 0..5 {
        tasks.push(runner.claim().await.id);
    }
    assert_eq!(runner.log(tasks[0], 0, &["the last row"], false).await.unwrap(), 1);
    forge.cancel(&cancelled).await;
    let began = Instant::now();
    let mut rows = 0;
    while began.elapsed() < ZOMBIE + Duration::from_secs(6) {
        runner.log(tasks[1], 0, &[], false).await.unwrap();
        assert_eq!(runner.heartbeat(tasks[2]).await, TaskResult::RESULT_UNSPECIFIED);
        rows = runner.log(tasks[3], rows, &["a new row"], false).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let shown: Vec<_> = futures::future::join_all(jobs.iter().map(|job| forge.job(job))).await;
    let shown: Vec<_> = shown.into_iter().map(|(shown, _)| shown).collect();
    assert_eq!(shown, [Shown::Failure, Shown::Failure, Shown::Running, Shown::Running]);
    assert_eq!(forge.job(&cancelled).await.0, Shown::Cancelled, "a cancelled job stays one");
    assert_eq!(runner.heartbeat(tasks[0]).await, TaskResult::RESULT_FAILURE);
    assert_eq!(runner.end(tasks[0], TaskResult::RESULT_SUCCESS, 1).await, TaskResult::RESULT_FAILURE, "too late");
    assert_eq!(runner.heartbeat(tasks[4]).await, TaskResult::RESULT_CANCELLED);
    assert_eq!(forge.job(&jobs[0]).await, (Shown::Failure, vec![Shown::Failure]));
    assert_eq!(runner.log(tasks[0], 1, &["too late"], false).await.unwrap_err().fault, RpcFault::LogSealed);
    assert_eq!(runner.log(tasks[1], 0, &["late"], false).await.unwrap(), 1, "a log without a row was not archived");
    for task in &tasks[2..4] {
        runner.end(*task, TaskResult::RESULT_SUCCESS, 1).await;
    }
}

/// A deleted runner is unknown at once; its job ends at the sweep.
pub(crate) async fn a_deleted_runner_is_unregistered_and_its_job_fails_later(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    let task = runner.claim().await.id;
    forge.delete_runner(runner.id).await;
    assert_eq!(runner.log(task, 0, &["row"], false).await.unwrap_err().fault, RpcFault::Unregistered);
    assert_eq!(runner.rpc.fetch_task(0).await.unwrap_err().fault, RpcFault::Unregistered);
    assert_eq!(forge.job(&job).await.0, Shown::Running);
    let over = async || (forge.job(&job).await.0 != Shown::Running).then_some(());
    eventually("the sweep", ZOMBIE + Duration::from_secs(10), over).await;
    assert_eq!(forge.job(&job).await.0, Shown::Failure);
}

/// The task of a deleted repository is gone.
pub(crate) async fn the_task_of_a_deleted_repository_is_gone(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    let task = runner.claim().await.id;
    forge.delete_repository(&job).await;
    assert_eq!(runner.log(task, 0, &["row"], false).await.unwrap_err().fault, RpcFault::TaskGone);
    let state = TaskState { id: task, ..Default::default() };
    let gone = runner.report(UpdateTaskRequest { state: state.into(), ..Default::default() }).await.unwrap_err();
    assert_eq!(gone.fault, RpcFault::TaskGone);
}

/// An ephemeral runner has one task in its life.
pub(crate) async fn an_ephemeral_runner_is_gone_after_its_task(forge: &dyn ForgeUnderTest) {
    let (uuid, token, label) = crate::words::register_ephemeral(forge).await;
    let runner =
        Runner { rpc: RunnerRpc::to_gitea(&forge.url(), None, Some((&uuid, &token))).unwrap(), id: 0, uuid, token, label };
    forge.push(vec![runner.job("a"), runner.job("b")]).await;
    let task = runner.claim().await.id;
    assert!(runner.fetch(0).await.0.is_none(), "one at a time");
    assert_eq!(runner.end(task, TaskResult::RESULT_SUCCESS, 1).await, TaskResult::RESULT_SUCCESS);
    assert_eq!(runner.rpc.fetch_task(0).await.unwrap_err().fault, RpcFault::Unregistered);
    assert_eq!(runner.log(task, 0, &["late"], true).await.unwrap_err().fault, RpcFault::Unregistered);
}
