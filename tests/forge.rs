//! Stories of the stand-in forge's own means: trouble on order, outages, backups, and the tiny upstream beside the protocol.
//! What it shares with Gitea is in `tests/protocol.rs`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use connectrpc::ErrorCode;
use futures::future::join_all;
use gitea_dynamic_runner::{
    demo::forge::{Fault, Forge, ForgeConfig, JobSpec, JobStatus, Method, Times},
    gitea::{RpcFault, RunnerRpc},
    ids::TaskId,
    proto::runner::{LogRow, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest},
};

const LIMIT: Duration = Duration::from_secs(10);

async fn forge() -> (Forge, RunnerRpc) {
    forge_with(ForgeConfig::default()).await
}

async fn forge_with(config: ForgeConfig) -> (Forge, RunnerRpc) {
    let forge = Forge::start(config).await.unwrap();
    let (uuid, token) = forge.new_runner("r", &["pod"]);
    let rpc = RunnerRpc::to_gitea(&forge.url(), None, Some((&uuid, &token))).unwrap();
    (forge, rpc)
}

fn job(key: &str) -> JobSpec {
    JobSpec::new(key, &["pod"]).run("true")
}

fn end(task: i64) -> UpdateTaskRequest {
    let result = TaskResult::RESULT_SUCCESS.into();
    UpdateTaskRequest { state: TaskState { id: task, result, ..Default::default() }.into(), ..Default::default() }
}

#[tokio::test]
async fn a_lost_answer_is_work_done_and_a_lost_request_is_not() {
    let (forge, rpc) = forge().await;
    let jobs = forge.push([job("a"), job("b")]).jobs;
    forge.inject(Method::FetchTask, Fault::LoseRequest, Times::Next(1));
    assert_eq!(rpc.fetch_task(0).await.unwrap_err().fault, RpcFault::Transient);
    assert_eq!(forge.job(jobs[0]).unwrap().status, JobStatus::Waiting);
    forge.inject(Method::FetchTask, Fault::LoseAnswer, Times::Next(1));
    assert_eq!(rpc.fetch_task(0).await.unwrap_err().fault, RpcFault::Transient);
    let lost = forge.job(jobs[0]).unwrap();
    assert_eq!((lost.status, lost.fetched, lost.task), (JobStatus::Running, 1, Some(TaskId(1))));
    assert!(rpc.fetch_task(0).await.unwrap().task.is_some(), "the next job, not the lost one");
    assert_eq!(forge.job(jobs[0]).unwrap().fetched, 1);
    assert_eq!(forge.count(Method::FetchTask), 3);
}

#[tokio::test]
async fn faults_strike_their_call_as_often_as_ordered() {
    let (forge, rpc) = forge().await;
    let fail = Fault::Fail { code: ErrorCode::Unavailable, message: "later".into() };
    forge.inject(Method::FetchTask, fail.clone(), Times::Next(2));
    forge.inject(Method::Declare, Fault::Page(401), Times::UntilCleared);
    for _ in 0..2 {
        assert_eq!(rpc.fetch_task(0).await.unwrap_err().to_string(), "unavailable: later");
    }
    assert!(rpc.fetch_task(0).await.is_ok());
    for _ in 0..3 {
        let page = rpc.declare("v", &[], &[]).await.unwrap_err();
        assert_eq!(page.fault, RpcFault::Transient, "a proxy's page is no word of the forge: {page}");
    }
    forge.clear_faults();
    rpc.declare("v", &[], &[]).await.unwrap();
    forge.inject(Method::Declare, Fault::Delay(Duration::from_millis(300)), Times::Next(1));
    let began = Instant::now();
    rpc.declare("v", &[], &[]).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(300));
    let seen = forge.seen();
    assert_eq!(seen.iter().filter(|seen| seen.method == Some(Method::Declare)).count(), 5);
    assert!(seen.iter().all(|seen| seen.method != Some(Method::Declare) || seen.bytes == 3), "1 field of 1 byte");
}

#[tokio::test]
async fn an_outage_refuses_connections_and_loses_no_state() {
    let (forge, rpc) = forge().await;
    let id = forge.push([job("a")]).jobs[0];
    assert!(rpc.fetch_task(0).await.unwrap().task.is_some());
    forge.go_down().await;
    forge.go_down().await;
    assert_eq!(rpc.update_task(end(1), &[]).await.unwrap_err().fault, RpcFault::Transient);
    assert_eq!(forge.job(id).unwrap().status, JobStatus::Running);
    forge.come_up().await.unwrap();
    rpc.update_task(end(1), &[]).await.unwrap();
    assert_eq!(forge.wait_done(id, LIMIT).await.unwrap().status, JobStatus::Success);
    let url = forge.url();
    forge.restart().await.unwrap();
    assert_eq!(forge.url(), url);
    assert!(rpc.fetch_task(0).await.is_ok());
}

#[tokio::test]
async fn a_restored_backup_gives_the_same_numbers_again_with_other_tokens() {
    let (forge, rpc) = forge().await;
    let id = forge.push([job("a")]).jobs[0];
    let backup = forge.backup();
    let first = rpc.fetch_task(0).await.unwrap().task.unwrap();
    let rows = vec![LogRow { content: "row".into(), ..Default::default() }];
    let request = UpdateLogRequest { task_id: 1, rows, ..Default::default() };
    assert_eq!(rpc.update_log(request).await.unwrap(), 1);
    forge.restore(backup);
    assert_eq!(forge.job(id).unwrap().status, JobStatus::Waiting);
    assert_eq!(rpc.update_task(end(1), &[]).await.unwrap_err().fault, RpcFault::TaskGone);
    let second = rpc.fetch_task(0).await.unwrap().task.unwrap();
    assert_eq!(forge.job(id).unwrap().task, Some(TaskId(1)));
    assert_ne!(first.expose(), second.expose());
    assert!(forge.job(id).unwrap().log.is_empty());
}

#[tokio::test]
async fn sixteen_searches_at_once_throttle_the_others() {
    let (forge, rpc) = forge_with(ForgeConfig { pick_time: Duration::from_millis(500), ..ForgeConfig::default() }).await;
    forge.push((0..20).map(|at| job(&format!("j{at}"))));
    let fetched = join_all((0..20).map(|_| rpc.fetch_task(0))).await;
    let fetched: Vec<_> = fetched.into_iter().map(Result::unwrap).collect();
    assert_eq!(fetched.iter().filter(|fetched| fetched.task.is_some()).count(), 16);
    assert_eq!(fetched.iter().filter(|fetched| fetched.task.is_none() && fetched.tasks_version == 0).count(), 4);
}

#[tokio::test]
async fn who_hangs_up_during_the_search_has_claimed_nothing() {
    let (forge, rpc) = forge_with(ForgeConfig { pick_time: Duration::from_secs(1), ..ForgeConfig::default() }).await;
    let id = forge.push([job("a")]).jobs[0];
    let hung_up = tokio::time::timeout(Duration::from_millis(300), rpc.fetch_task(0)).await;
    assert!(hung_up.is_err());
    assert_eq!(forge.job(id).unwrap().status, JobStatus::Waiting);
    assert!(rpc.fetch_task(0).await.unwrap().task.is_some());
    assert_eq!(forge.job(id).unwrap().fetched, 1, "not claimed by the one who had gone");
}

#[tokio::test]
async fn a_wait_that_fails_says_what_for() {
    let (forge, _) = forge().await;
    let id = forge.push([job("a")]).jobs[0];
    let error = forge.wait_done(id, Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(format!("{error:#}").split(": ").next().unwrap(), "it is Some(Waiting)");
    assert!(format!("{error:#}").contains("the end of job 1"));
}
