//! The protocol's surface: words of refusal, JSON, HTTP, and what a task holds.

use std::collections::BTreeSet;

use bytes::Bytes;
use gitea_dynamic_runner::{
    demo::forge::JobSpec,
    gitea::{RpcFault, RunnerRpc, register},
    proto::runner::{TaskState, UpdateTaskRequest},
    secret::Secret,
};
use http::Method;
use serde_json::{Value, json};

use crate::{
    runner::Runner,
    support::rest::Rest,
    under_test::{ForgeUnderTest, name},
};

/// Who is nobody is told so in the same words, whatever is wrong.
pub(crate) async fn nobody_is_told_unregistered_runner(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let wrong = Secret::new("0".repeat(40));
    let nobody = "00000000-0000-4000-8000-000000000000";
    let none = Secret::new("");
    let callers = [(&*runner.uuid, &wrong), (nobody, &runner.token), ("", &none), (&*runner.uuid, &none)];
    for (uuid, token) in callers {
        let rpc = RunnerRpc::to_gitea(&forge.url(), None, Some((uuid, token))).unwrap();
        let errors = [
            rpc.declare("test", &[], &[]).await.unwrap_err(),
            rpc.fetch_task(0).await.unwrap_err(),
            rpc.update_task(UpdateTaskRequest::default(), &[]).await.unwrap_err(),
            rpc.update_log(Default::default()).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.to_string(), "unknown: rpc error: code = Unauthenticated desc = unregistered runner");
            assert_eq!(error.fault, RpcFault::Unregistered);
        }
    }
}

/// Another runner's task and an unknown one are refused in their own words.
pub(crate) async fn the_task_of_another_and_an_unknown_one_are_refused(forge: &dyn ForgeUnderTest) {
    let (runner, other) = (Runner::new(forge, &[]).await, Runner::new(forge, &[]).await);
    forge.push(vec![runner.job("a")]).await;
    let task = runner.claim().await.id;
    let unknown = 4_000_000;
    let report = async |id| {
        let state = TaskState { id, ..Default::default() };
        other.report(UpdateTaskRequest { state: state.into(), ..Default::default() }).await.unwrap_err()
    };
    let words = "unknown: rpc error: code = Internal desc =";
    for (error, fault, words) in [
        (report(task).await, RpcFault::NotOurTask, format!("{words} update task: invalid runner for task")),
        (other.log(task, 0, &["x"], false).await.unwrap_err(), RpcFault::NotOurTask, format!("{words} invalid runner for task")),
        (report(unknown).await, RpcFault::TaskGone, format!("{words} update task: resource does not exist")),
        (
            other.log(unknown, 0, &["x"], false).await.unwrap_err(),
            RpcFault::TaskGone,
            format!("{words} get task: task with id {unknown}: resource does not exist"),
        ),
    ] {
        assert_eq!(error.to_string(), words);
        assert_eq!(error.fault, fault);
    }
}

/// Register refuses in plain words, and each call makes a runner of its own.
pub(crate) async fn register_makes_a_runner_each_time_or_says_why_not(forge: &dyn ForgeUnderTest) {
    let good = forge.registration_token();
    for (token, runner, words) in [
        ("wrong", "name", "runner registration token not found"),
        ("", "name", "missing runner token, name"),
        (&*good, "", "missing runner token, name"),
    ] {
        let error = register::register(
            &RunnerRpc::to_gitea(&forge.url(), None, None).unwrap(),
            &Secret::new(token),
            runner,
            "test",
            &[],
            &[],
        )
        .await
        .unwrap_err();
        assert_eq!(error.to_string(), format!("unknown: {words}"));
    }
    let (token, name) = (Secret::new(good), name());
    let first = register::register(&RunnerRpc::to_gitea(&forge.url(), None, None).unwrap(), &token, &name, "test", &[], &[])
        .await
        .unwrap();
    let second = register::register(&RunnerRpc::to_gitea(&forge.url(), None, None).unwrap(), &token, &name, "test", &[], &[])
        .await
        .unwrap();
    assert_ne!(first.uuid, second.uuid);
    assert_ne!(first.token.expose(), second.token.expose());
    assert_ne!(first.id, second.id);
    assert_eq!(first.token.expose().len(), 40);
    assert_eq!(first.uuid.len(), 36);
}

/// Declare tells what the server can.
pub(crate) async fn declare_tells_the_capabilities_of_the_server(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    assert_eq!(runner.declare(&[&runner.label], &["cancelling", "unheard-of"]).await, forge.facts().server_capabilities);
}

/// A task holds the 36 keys of the context, the job's own YAML, its secrets and variables, and one token in three places.
pub(crate) async fn a_task_holds_what_its_job_needs(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = JobSpec::new("the-job", &[&runner.label]).run("true").secret("DEPLOY", "hunter2").var("COLOUR", "blue");
    let handle = forge.push(vec![job]).await.remove(0);
    let task = runner.claim().await;
    let context = serde_json::to_value(&*task.context).unwrap();
    let keys: BTreeSet<&str> = context.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = "action action_path action_ref action_repository action_status actor api_url base_ref env event event_name \
        event_path gitea_default_actions_url gitea_runtime_token graphql_url head_ref job path ref ref_name ref_protected ref_type \
        repository repositoryUrl repository_owner retention_days run_attempt run_id run_number secret_source server_url sha token \
        triggering_actor workflow workspace";
    assert_eq!(keys, expected.split_whitespace().collect());
    assert_eq!(context["job"], "the-job");
    assert_eq!(context["repository"], handle.repository);
    assert_eq!(context["run_id"], handle.run.to_string());
    assert_eq!(context["server_url"], format!("{}/", forge.url()));
    assert_eq!(context["gitea_default_actions_url"], forge.url());
    assert_eq!(context["event"]["repository"]["full_name"], handle.repository);
    assert_eq!(context["gitea_runtime_token"].as_str().unwrap().split('.').count(), 3);
    let token = context["token"].as_str().unwrap();
    assert_eq!(token.len(), 40);
    assert_eq!(task.secrets["GITHUB_TOKEN"], token);
    assert_eq!(task.secrets["GITEA_TOKEN"], token);
    assert_eq!(task.secrets["DEPLOY"], "hunter2");
    assert_eq!(task.vars["COLOUR"], "blue");
    let payload = String::from_utf8(task.workflow_payload.unwrap()).unwrap();
    let read = JobSpec::from_workflow(&payload).unwrap();
    assert_eq!((read.key.as_str(), read.labels, read.steps.len()), ("the-job", vec![runner.label.clone()], 1));
}

/// JSON works as well as protobuf, with numbers as strings and unknown fields passed over.
pub(crate) async fn json_is_spoken_too(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    forge.push(vec![runner.job("a")]).await;
    let call = async |method: &str, body: Value| {
        let (status, text) = post(forge, Some(&runner), method, "application/json", body.to_string().into()).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let fetched = call("FetchTask", json!({"tasksVersion": "0", "unknownField": {"a": 1}})).await;
    let task = fetched["task"]["id"].as_str().unwrap().to_owned();
    assert!(fetched["tasksVersion"].as_str().unwrap().parse::<i64>().unwrap() > 0);
    assert_eq!(fetched["task"]["context"]["job"], "a");
    assert!(fetched["task"]["workflowPayload"].is_string());
    let rows = json!([{"time": "2026-11-29T12:00:00Z", "content": "hello"}]);
    let acked = call("UpdateLog", json!({"taskId": task, "index": "0", "rows": rows, "noMore": true})).await;
    assert_eq!(acked["ackIndex"], "1");
    let state = json!({"id": task, "result": "RESULT_SUCCESS", "stoppedAt": "2026-11-29T12:00:01Z"});
    let ended = call("UpdateTask", json!({"state": state, "outputs": {"a": "b"}})).await;
    assert_eq!(ended["state"]["result"], "RESULT_SUCCESS");
    assert_eq!(ended["sentOutputs"], json!(["a"]));
}

/// HTTP says no where it is not the protocol.
pub(crate) async fn what_is_not_the_protocol_is_refused_by_http(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let got = Rest::anonymous(&forge.url()).send(Method::GET, &path("FetchTask"), &[], Bytes::new()).await.unwrap();
    assert_eq!(got.status, 405);
    assert_eq!(post(forge, Some(&runner), "FetchTask", "text/html", Bytes::new()).await.0, 415);
    assert_eq!(post(forge, Some(&runner), "NoSuchMethod", "application/proto", Bytes::new()).await.0, 404);
    let (status, text) = post(forge, Some(&runner), "FetchTask", "application/proto", Bytes::from_static(&[0xff; 9])).await;
    assert_eq!(status, 400, "{text}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["code"], "invalid_argument");
    let (status, text) = post(forge, None, "FetchTask", "application/json", "{}".into()).await;
    assert_eq!(status, 500);
    let words = "rpc error: code = Unauthenticated desc = unregistered runner";
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"code": "unknown", "message": words}));
}

/// An ephemeral runner's UUID, token and label. Its Register goes as JSON, because the product never asks for one.
pub(crate) async fn register_ephemeral(forge: &dyn ForgeUnderTest) -> (String, Secret, String) {
    let label = name();
    let body = json!({"name": label, "token": forge.registration_token(), "labels": [label], "ephemeral": true});
    let (status, text) = post(forge, None, "Register", "application/json", body.to_string().into()).await;
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["runner"]["ephemeral"], true);
    let word = |key: &str| answer["runner"][key].as_str().unwrap().to_owned();
    (word("uuid"), Secret::new(word("token")), label)
}

fn path(method: &str) -> String {
    format!("/api/actions/runner.v1.RunnerService/{method}")
}

async fn post(forge: &dyn ForgeUnderTest, runner: Option<&Runner>, method: &str, kind: &str, body: Bytes) -> (u16, String) {
    let mut headers = vec![("content-type", kind)];
    if let Some(runner) = runner {
        headers.extend([("x-runner-uuid", runner.uuid.as_str()), ("x-runner-token", runner.token.expose())]);
    }
    let answer = Rest::anonymous(&forge.url()).send(Method::POST, &path(method), &headers, body).await.unwrap();
    (answer.status.as_u16(), answer.text())
}
