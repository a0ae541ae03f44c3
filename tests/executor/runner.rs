//! The scripted runner: speaks to the bridge as the official one does, one scene a process.

use std::{process::Command, time::Duration};

use gitea_dynamic_runner::{
    gitea::{RpcError, RunnerRpc, tls},
    proto::runner::{LogRow, StepState, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest, UpdateTaskResponse},
};

use super::world::{TASK, flood_row, until};

pub(crate) struct Runner {
    rpc: RunnerRpc,
    rows: i64,
}

/// With this token, or with the one in `.runner`.
fn connect(token: Option<&str>) -> RunnerRpc {
    let said: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(".runner").unwrap()).unwrap();
    let token = token.unwrap_or(said["token"].as_str().unwrap());
    let headers = [("x-runner-uuid", said["uuid"].as_str().unwrap()), ("x-runner-token", token)];
    let headers = headers.into_iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
    RunnerRpc::over_tls(said["address"].as_str().unwrap(), tls::towards_gitea("http://127.0.0.1", None).unwrap(), headers)
        .unwrap()
}

impl Runner {
    async fn begin() -> Self {
        let rpc = connect(None);
        let declared = rpc.declare("v1.0.8", &["self-hosted".into()], &[]).await.unwrap();
        assert_eq!(declared.server_capabilities, "job-summary");
        for _ in 0..2 {
            let task = rpc.fetch_task(0).await.unwrap();
            assert!(task.task.is_some() && task.tasks_version == 1, "the task, also when asked twice");
        }
        let wrong = connect(Some("wrong")).fetch_task(0).await.unwrap_err();
        assert_eq!((wrong.code, wrong.message.as_str()), ("unauthenticated", "unregistered runner"));
        Self { rpc, rows: 0 }
    }

    async fn log(&mut self, rows: Vec<String>, no_more: bool) {
        let count = rows.len() as i64;
        let rows = rows.into_iter().map(|content| LogRow { content, ..Default::default() }).collect();
        let request = UpdateLogRequest { task_id: TASK, index: self.rows, rows, no_more, ..Default::default() };
        self.rows += count;
        assert_eq!(self.rpc.update_log(request).await.unwrap(), self.rows);
    }

    async fn try_state(&self, result: TaskResult) -> Result<UpdateTaskResponse, RpcError> {
        let step = StepState { id: 0, log_index: 0, log_length: self.rows, ..Default::default() };
        let state = TaskState { id: TASK, result: result.into(), steps: vec![step], ..Default::default() };
        let outputs = [("out".to_owned(), "value".to_owned())].into_iter().collect();
        self.rpc.update_task(UpdateTaskRequest { state: state.into(), outputs, ..Default::default() }, &[]).await
    }

    async fn state(&self, result: TaskResult) -> TaskResult {
        let answer = self.try_state(result).await.unwrap();
        assert_eq!(answer.sent_outputs, ["out"]);
        answer.state.as_option().unwrap().result.as_known().unwrap()
    }

    async fn end(mut self, result: TaskResult) {
        self.log(vec!["the end".into()], true).await;
        assert_eq!(self.state(result).await, result);
    }
}

fn numbered(from: i64, count: i64) -> Vec<String> {
    (from..from + count).map(|n| format!("row {n}")).collect()
}

pub(crate) async fn play(scene: &str) {
    for secret in ["CI_RUNNER_CAPABILITY", "GITEA_URL", "RUNNER_FACADE_URL"] {
        assert!(std::env::var_os(secret).is_none(), "{secret} is in the runner's environment");
    }
    std::fs::write("pid", std::process::id().to_string()).unwrap();
    let mut runner = Runner::begin().await;
    let words: Vec<&str> = scene.split(' ').collect();
    match words[..] {
        // Many rows in batches, states between them, a linger between verdict and exit.
        ["rows", count] => {
            let count: i64 = count.parse().unwrap();
            while runner.rows < count {
                runner.log(numbered(runner.rows, 100), false).await;
                runner.state(TaskResult::RESULT_UNSPECIFIED).await;
            }
            assert!(runner.rpc.fetch_task(0).await.unwrap().task.is_none(), "no task after the first report");
            runner.end(TaskResult::RESULT_SUCCESS).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        // As fast as the bridge takes them.
        ["flood", count] => {
            let count: i64 = count.parse().unwrap();
            while runner.rows < count {
                let batch = runner.rows..count.min(runner.rows + 500);
                runner.log(batch.map(flood_row).collect(), false).await;
            }
            runner.end(TaskResult::RESULT_SUCCESS).await;
        }
        ["line", bytes] => {
            runner.log(vec!["ü".repeat(bytes.parse::<usize>().unwrap() / 2)], false).await;
            runner.end(TaskResult::RESULT_SUCCESS).await;
        }
        // As runner 1.0.8 after a cancel: waits for a child of the step, then calls it a success.
        ["cancelled"] => {
            let mut child = Command::new("setsid").args(["sleep", "300"]).spawn().unwrap();
            let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
            runner.log(vec!["sleeping".into()], false).await;
            runner.state(TaskResult::RESULT_UNSPECIFIED).await;
            terminate.recv().await;
            assert_eq!(runner.state(TaskResult::RESULT_UNSPECIFIED).await, TaskResult::RESULT_CANCELLED);
            child.wait().unwrap();
            runner.end(TaskResult::RESULT_SUCCESS).await;
        }
        ["deaf"] => {
            let _terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
            runner.log(vec!["deaf".into()], false).await;
            tokio::time::sleep(Duration::from_secs(300)).await;
        }
        ["dies"] => runner.log(vec!["last words".into()], true).await,
        ["waits"] => {
            until("the story goes on", || std::path::Path::new("go").exists());
            runner.end(TaskResult::RESULT_FAILURE).await;
        }
        _ => panic!("no scene {scene:?}"),
    }
}
