//! Who may say what at the facade: every refusal of rule R6, over real mTLS, with the stand-in forge as Gitea.
//!
//! Each story looks at both ends: what the one who asks is told, and that nothing of the other job has moved at Gitea, in the queue or in
//! the environment's marks. How a job runs through the facade is told in other files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use gitea_dynamic_runner::{
    backend::Mark,
    claims::Stop,
    demo::forge::{JobSpec, JobStatus, Method},
    gitea::{RpcFault, report},
    ids::Nonce,
    names::header,
    proto::runner::TaskResult,
    secret::Secret,
};
use node::{Connection, FACADE, Job, Node, all_denied, denied_anew, eventually, every_call, row, state};

use self::forger::{Forger, trusting, uri};

#[path = "../support/forger.rs"]
mod forger;
mod node;

const NOT_SERVED: &str = "denied: not the served environment";
const NO_ASSIGNMENT: &str = "denied: no such assignment is served";
const ANOTHER_TASK: &str = "denied: another job's task";
const EXITED: (&str, &str) = (header::RUNNER, "exited");

fn job(key: &str) -> JobSpec {
    JobSpec::new(key, &["self-hosted", "pod"]).run("true").secret("PASSWORD", &format!("secret of {key}"))
}

/// All of a job that another job could have changed.
async fn traces(node: &Node, job: &Job) -> String {
    let queued = node.queue.get(job.task).await.unwrap().is_some();
    format!("{:?} {:?} {queued}", node.view(job), node.backend.of(&job.name))
}

// ---- One job's identity and capability, another job's things ---------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_job_reaches_its_own_task_log_and_state() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    assert_eq!(a.client.hello().await.unwrap(), "job-summary");
    assert_eq!(a.client.fetch_task().await.unwrap().task.unwrap().expose(), a.raw);
    assert_eq!(a.client.start().await.unwrap(), 0);
    assert_eq!(a.client.update_log(row(a.task, 0, "hello")).await.unwrap(), 1);
    a.client.update_task(state(a.task, TaskResult::RESULT_SUCCESS), &[EXITED]).await.unwrap();
    let view = node.view(&a);
    assert_eq!((view.status, view.log), (JobStatus::Success, vec!["hello".to_owned()]));
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_gives_a_job_its_own_task_whatever_waits_beside_it() {
    let node = Node::new().await;
    let (b, a) = (node.offered(job("b")).await, node.offered(job("a")).await);
    for _ in 0..3 {
        assert_eq!(a.client.fetch_task().await.unwrap().task.unwrap().expose(), a.raw);
    }
    a.client.start().await.unwrap();
    assert!(a.client.fetch_task().await.unwrap().task.is_none(), "after start there is nothing more to have");
    assert_eq!(b.client.fetch_task().await.unwrap().task.unwrap().expose(), b.raw);
    node.end((a, b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_cannot_write_into_another_jobs_log() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("a")).await, node.started(job("b")).await);
    let before = traces(&node, &b).await;
    let error = a.client.update_log(row(b.task, 0, "forged")).await.unwrap_err();
    assert_eq!((error.fault, error.message.as_str()), (RpcFault::Denied, ANOTHER_TASK));
    assert_eq!(traces(&node, &b).await, before);
    assert_eq!(node.denied("task"), 1);
    node.end((a, b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_cannot_report_another_jobs_state() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("a")).await, node.started(job("b")).await);
    let before = traces(&node, &b).await;
    for result in [TaskResult::RESULT_UNSPECIFIED, TaskResult::RESULT_SUCCESS, TaskResult::RESULT_FAILURE] {
        let error = a.client.update_task(state(b.task, result), &[EXITED]).await.unwrap_err();
        assert_eq!((error.fault, error.message.as_str()), (RpcFault::Denied, ANOTHER_TASK));
    }
    assert_eq!(traces(&node, &b).await, before);
    assert_eq!(node.denied("task"), 3);
    node.end((a, b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capability_opens_no_other_assignment() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("a")).await, node.offered(job("b")).await);
    let before = traces(&node, &b).await;
    all_denied(&node.client(&a.tls, b.task, &a.capability), b.task, "denied: the certificate is another job's").await;
    // Not even the right capability helps with another job's certificate.
    all_denied(&node.client(&a.tls, b.task, &b.capability), b.task, "denied: the certificate is another job's").await;
    assert_eq!(traces(&node, &b).await, before);
    assert_eq!(node.denied("identity"), 12);
    node.end((a, b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn matrix_siblings_with_one_spiffe_id_cannot_reach_each_other() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("matrix")).await, node.offered(job("matrix")).await);
    assert_eq!(a.spiffe_id, b.spiffe_id);
    let before = traces(&node, &b).await;
    all_denied(&node.client(&a.tls, b.task, &a.capability), b.task, NOT_SERVED).await;
    let rows = a.client.update_log(row(b.task, 0, "forged")).await.unwrap_err();
    let end = a.client.update_task(state(b.task, TaskResult::RESULT_FAILURE), &[EXITED]).await.unwrap_err();
    assert_eq!([rows.message.as_str(), end.message.as_str()], [ANOTHER_TASK; 2]);
    assert_eq!(traces(&node, &b).await, before);
    assert_eq!(b.client.start().await.unwrap(), 0, "and it starts as if nothing had been");
    node.end((a, b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_of_a_first_attempt_cannot_reach_the_rerun() {
    let node = Node::new().await;
    let first = node.started(job("again")).await;
    first.client.update_task(state(first.task, TaskResult::RESULT_FAILURE), &[EXITED]).await.unwrap();
    node.claims.revoke(first.task.assignment());
    node.claims.forget(first.task.assignment());
    denied_anew(&first.client).await;
    let second = node.offered(job("again")).await;
    assert_eq!(first.spiffe_id, second.spiffe_id);
    let before = traces(&node, &second).await;
    all_denied(&first.client, first.task, NO_ASSIGNMENT).await;
    all_denied(&first.client, second.task, NO_ASSIGNMENT).await;
    all_denied(&node.client(&first.tls, second.task, &first.capability), second.task, NOT_SERVED).await;
    assert_eq!(traces(&node, &second).await, before);
    node.end((first, second)).await;
}

// ---- Environments that are not served any more -----------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn another_environment_of_the_same_assignment_is_refused() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    let before = traces(&node, &a).await;
    let other = node.claims.key().capability(a.task.assignment(), &Nonce::random());
    let cut = Secret::new(&a.capability.expose()[..62]);
    for capability in [other, cut, Secret::new(""), Secret::new("no hex")] {
        all_denied(&node.client(&a.tls, a.task, &capability), a.task, NOT_SERVED).await;
    }
    assert_eq!(traces(&node, &a).await, before);
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_environment_that_wakes_up_is_refused_and_its_successor_served() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    let mut connection = Connection::of(&node, &a).await;
    assert!(connection.hello().await.unwrap().is_success());
    let claim = node.claims.revoke(a.task.assignment()).unwrap();
    denied_anew(&a.client).await;
    all_denied(&a.client, a.task, NO_ASSIGNMENT).await;
    eventually("its connection is closed", async || connection.is_closed()).await;
    let nonce = Nonce::random();
    node.claims.offer(gitea_dynamic_runner::claims::Claim { nonce: nonce.clone(), ..claim });
    let successor = node.claims.key().capability(a.task.assignment(), &nonce);
    let successor = node.client(&node.tls(&nonce, &a.spiffe_id).await, a.task, &successor);
    all_denied(&a.client, a.task, NOT_SERVED).await;
    assert_eq!(successor.start().await.unwrap(), 0);
    all_denied(&a.client, a.task, NOT_SERVED).await;
    assert_eq!(successor.update_log(row(a.task, 0, "mine")).await.unwrap(), 1);
    assert_eq!(node.view(&a).log, ["mine"]);
    node.end((a, successor, connection)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_environment_whose_task_gitea_gave_anew_is_refused() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    assert!(node.claims.supersede(a.task.assignment()));
    all_denied(&a.client, a.task, "denied: the environment was revoked").await;
    assert_eq!(node.denied("revoked"), 6);
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_terminal_state_everything_is_refused_and_the_connections_close() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("a")).await, node.started(job("b")).await);
    let (mut mine, mut also, mut others) =
        (Connection::of(&node, &a).await, Connection::of(&node, &a).await, Connection::of(&node, &b).await);
    for connection in [&mut mine, &mut also, &mut others] {
        assert!(connection.hello().await.unwrap().is_success());
    }
    a.client.update_task(state(a.task, TaskResult::RESULT_SUCCESS), &[EXITED]).await.unwrap();
    assert_eq!(node.backend.of(&a.name), [Mark::Claimed, Mark::Terminal]);
    eventually("its connections are closed", async || mine.is_closed() && also.is_closed()).await;
    let before = traces(&node, &a).await;
    denied_anew(&a.client).await;
    all_denied(&a.client, a.task, "denied: the job is over").await;
    assert_eq!(traces(&node, &a).await, before);
    assert!(others.hello().await.unwrap().is_success(), "another job's connection was closed");
    node.end((a, b, mine, also, others)).await;
}

// ---- Certificates ----------------------------------------------------------------------------------------------------

/// With an otherwise right assignment and capability, this certificate gets nowhere, and the facade sees no request.
async fn not_let_in(node: &Node, job: &Job, tls: Arc<rustls::ClientConfig>) {
    let seen = node.forge.seen().len();
    for (call, answer) in every_call(&node.client(&tls, job.task, &job.capability), job.task).await {
        assert_eq!(answer.expect_err(call).fault, RpcFault::Transient, "{call} came as far as the facade");
    }
    assert_eq!(node.forge.seen().len(), seen);
}

fn forger(node: &Node, job: &Job) -> Forger {
    Forger::with_the_key_in(&node.folder.path().join("ca"), &job.spiffe_id)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_certificate_nobody_gets_in() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    // The same client with an honest certificate gets in, so the refusals here and below have one cause each.
    node.client(&forger(&node, &a).client(|_| {}), a.task, &a.capability).hello().await.unwrap();
    not_let_in(&node, &a, Arc::new(trusting().with_no_client_auth())).await;
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_another_trust_domain_does_not_get_in() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    let foreign = a.spiffe_id.replace(node::TRUST_DOMAIN, "other.example");
    not_let_in(&node, &a, forger(&node, &a).client(|params| params.subject_alt_names = vec![uri(&foreign)])).await;
    // And the same ID by an authority that is not ours.
    let folder = tempfile::tempdir().unwrap();
    let theirs = gitea_dynamic_runner::identity::authority::Authority::open(folder.path(), node::TRUST_DOMAIN).unwrap();
    not_let_in(&node, &a, Forger::with_the_key_in(folder.path(), &a.spiffe_id).client(|_| {})).await;
    node.end((a, theirs)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_does_not_get_in() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    let ago = |seconds| std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
    let expired = forger(&node, &a).client(|params| (params.not_before, params.not_after) = (ago(600).into(), ago(5).into()));
    not_let_in(&node, &a, expired).await;
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_own_identity_is_no_jobs() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    not_let_in(&node, &a, node.tls(&Nonce::random(), FACADE).await).await;
    node.end(a).await;
}

// ---- Limits ----------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_more_than_2_mib_is_refused_and_gitea_sees_nothing_of_it() {
    let node = Node::new().await;
    let a = node.started(job("a")).await;
    assert_eq!(a.client.update_log(row(a.task, 0, &"x".repeat(1 << 20))).await.unwrap(), 1);
    let seen = node.forge.count(Method::UpdateLog);
    for size in [(2 << 20) + 1, 16 << 20] {
        // The answer may come before the body is sent, and then the client sees a broken connection instead.
        let error = a.client.update_log(row(a.task, 1, &"x".repeat(size))).await.unwrap_err();
        assert_eq!(error.fault, RpcFault::Transient, "{error}");
    }
    assert_eq!(node.forge.count(Method::UpdateLog), seen);
    assert_eq!(a.client.update_log(row(a.task, 1, "small")).await.unwrap(), 2, "it may go on");
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_is_slowed_and_the_other_jobs_are_not() {
    let node = Node::new().await;
    let (wild, calm) = (node.started(job("wild")).await, node.started(job("calm")).await);
    let refused = async {
        loop {
            let flood = futures::future::join_all((0..2).map(|_| wild.client.poll())).await;
            if let Some(error) = flood.into_iter().find_map(Result::err) {
                return error;
            }
        }
    };
    let refused = tokio::time::timeout(node::LIMIT, refused).await.expect("a limit");
    assert_eq!(refused.code, "resource_exhausted", "{refused}");
    for _ in 0..50 {
        let (_, calm) = tokio::join!(wild.client.poll(), calm.client.poll());
        calm.unwrap();
    }
    assert!(node.denied("rate") > 0);
    eventually("the wild one is let in again", async || wild.client.poll().await.is_ok()).await;
    node.end((wild, calm)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_costs_its_connection_and_the_other_jobs_nothing() {
    let node = Node::new().await;
    let (wild, calm) = (node.started(job("wild")).await, node.started(job("calm")).await);
    let mut others = Connection::of(&node, &calm).await;
    for _ in 0..20 {
        let mut refused = Connection::of(&node, &Job { capability: calm.capability.clone(), ..wild.clone() }).await;
        assert_eq!(refused.hello().await.unwrap(), http::StatusCode::FORBIDDEN, "it is told before it is closed");
        eventually("its connection is closed", async || refused.is_closed()).await;
        assert!(others.hello().await.unwrap().is_success());
    }
    assert_eq!(node.denied("capability"), 20);
    node.end((wild, calm, others)).await;
}

// ---- When ------------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn before_the_environments_are_counted_an_unknown_one_is_put_off_and_not_denied() {
    let node = Node::not_counted().await;
    let a = node.offered(job("a")).await;
    let claim = node.claims.revoke(a.task.assignment()).unwrap();
    for (call, answer) in every_call(&a.client, a.task).await {
        let error = answer.expect_err(call);
        assert_eq!((error.fault, error.code), (RpcFault::Transient, "unavailable"), "{call}");
    }
    assert_eq!(node.denied("not_yet"), 6);
    node.claims.offer(claim);
    node.claims.counted();
    a.client.start().await.unwrap();
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_start_nothing_is_reported() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    let before = traces(&node, &a).await;
    let rows = a.client.update_log(row(a.task, 0, "early")).await.unwrap_err();
    let end = a.client.update_task(state(a.task, TaskResult::RESULT_SUCCESS), &[EXITED]).await.unwrap_err();
    assert_eq!([rows.code, end.code], ["failed_precondition"; 2]);
    assert_eq!(traces(&node, &a).await, before);
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn start_may_be_asked_again_and_answers_the_same_offset() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    report::say(&node.gitea, a.task, &["waits for a slot".into(), "environment created".into()]).await.unwrap();
    assert!(node.queue.get(a.task).await.unwrap().is_some());
    for _ in 0..3 {
        assert_eq!(a.client.start().await.unwrap(), 2);
    }
    assert!(node.queue.get(a.task).await.unwrap().is_none(), "the delivery is completed");
    assert_eq!(node.backend.of(&a.name), [Mark::Claimed]);
    assert_eq!(a.client.update_log(row(a.task, 2, "mine")).await.unwrap(), 3);
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_was_stopped_does_not_start() {
    let node = Node::new().await;
    let a = node.offered(job("a")).await;
    node.claims.stop(a.task.assignment(), Stop::Cancelled);
    let error = a.client.start().await.unwrap_err();
    assert_eq!((error.fault, error.message.as_str()), (RpcFault::Denied, "denied: the job was stopped"));
    assert_eq!(node.backend.of(&a.name), []);
    assert!(node.queue.get(a.task).await.unwrap().is_some());
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn success_without_the_runners_exit_is_no_success_at_gitea() {
    let node = Node::new().await;
    let a = node.started(job("a")).await;
    a.client.update_task(state(a.task, TaskResult::RESULT_SUCCESS), &[]).await.unwrap();
    assert_eq!(node.view(&a).status, JobStatus::Failure);
    node.end(a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn success_after_a_stop_is_no_success_at_gitea() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("a")).await, node.started(job("b")).await);
    let success = |job: &Job| state(job.task, TaskResult::RESULT_SUCCESS);
    a.client.update_task(success(&a), &[EXITED, (header::STOP_SEEN, "1")]).await.unwrap();
    assert_eq!(node.view(&a).status, JobStatus::Failure);
    node.forge.cancel(b.id);
    // The next heartbeat brings the word of it.
    b.client.update_task(state(b.task, TaskResult::RESULT_UNSPECIFIED), &[]).await.unwrap();
    b.client.update_task(success(&b), &[EXITED]).await.unwrap();
    assert_eq!(node.view(&b).status, JobStatus::Cancelled);
    node.end((a, b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_is_counted_with_its_reason() {
    let node = Node::new().await;
    let (a, b) = (node.started(job("a")).await, node.started(job("b")).await);
    let stranger = gitea_dynamic_runner::ids::TaskId(4711);
    node.client(&a.tls, stranger, &a.capability).hello().await.unwrap_err();
    node.client(&a.tls, b.task, &a.capability).hello().await.unwrap_err();
    node.client(&a.tls, a.task, &b.capability).hello().await.unwrap_err();
    a.client.update_log(row(b.task, 0, "forged")).await.unwrap_err();
    b.client.update_task(state(b.task, TaskResult::RESULT_FAILURE), &[]).await.unwrap();
    denied_anew(&b.client).await;
    let text = node.metrics.text();
    for reason in ["assignment", "identity", "capability", "task", "terminal"] {
        let line = format!("gitea_dynamic_runner_facade_denied_total{{reason=\"{reason}\"}} 1\n");
        assert!(text.contains(&line), "{reason}:\n{text}");
    }
    node.end((a, b)).await;
}
