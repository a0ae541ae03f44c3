//! A registered runner of a check's own.

use std::time::Duration;

use buffa::Message as _;
use buffa_types::google::protobuf::Timestamp;
use gitea_dynamic_runner::{
    demo::forge::JobSpec,
    gitea::{RpcError, RunnerRpc, register},
    proto::runner::{LogRow, StepState, Task, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest, UpdateTaskResponse},
    secret::Secret,
};

use crate::{
    support::eventually,
    under_test::{ForgeUnderTest, name},
};

pub(crate) struct Runner {
    pub(crate) rpc: RunnerRpc,
    pub(crate) id: i64,
    pub(crate) uuid: String,
    pub(crate) token: Secret,
    /// No other check's runner declares it.
    pub(crate) label: String,
}

impl Runner {
    /// Registers and declares its label and these capabilities.
    pub(crate) async fn new(forge: &dyn ForgeUnderTest, capabilities: &[&str]) -> Self {
        let (label, secret) = (name(), Secret::new(forge.registration_token()));
        let labels = [label.clone()];
        let made =
            register::register(&RunnerRpc::to_gitea(&forge.url(), None, None).unwrap(), &secret, &label, "test", &labels, &[])
                .await
                .unwrap();
        let rpc = RunnerRpc::to_gitea(&forge.url(), None, Some((&made.uuid, &made.token))).unwrap();
        let runner = Self { rpc, id: made.id, uuid: made.uuid, token: made.token, label };
        runner.declare(&[&runner.label], capabilities).await;
        runner
    }

    pub(crate) async fn declare(&self, labels: &[&str], capabilities: &[&str]) -> String {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        self.rpc.declare("test", &owned(labels), &owned(capabilities)).await.unwrap().server_capabilities
    }

    /// A job for this runner.
    pub(crate) fn job(&self, key: &str) -> JobSpec {
        JobSpec::new(key, &[&self.label]).run("true")
    }

    pub(crate) async fn fetch(&self, version: i64) -> (Option<Task>, i64) {
        let fetched = self.rpc.fetch_task(version).await.unwrap();
        let task = fetched.task.map(|raw| Task::decode_from_slice(raw.expose()).unwrap());
        (task, fetched.tasks_version)
    }

    /// The next task, which is there or will be in a moment.
    pub(crate) async fn claim(&self) -> Task {
        eventually("a task", Duration::from_secs(10), async || self.fetch(0).await.0).await
    }

    pub(crate) async fn version(&self) -> i64 {
        let (task, version) = self.fetch(0).await;
        assert!(task.is_none(), "only an idle runner can look at the version");
        version
    }

    pub(crate) async fn report(&self, request: UpdateTaskRequest) -> Result<UpdateTaskResponse, RpcError> {
        self.rpc.update_task(request, &[]).await
    }

    /// Reports a result, with times and all `steps` ended like the job; tells what the forge answers.
    pub(crate) async fn end(&self, task: i64, result: TaskResult, steps: i64) -> TaskResult {
        let step = |id| StepState { id, result: result.into(), started_at: now(), stopped_at: now(), ..Default::default() };
        let state = TaskState {
            id: task,
            result: result.into(),
            started_at: now(),
            stopped_at: now(),
            steps: (0..steps).map(step).collect(),
            ..Default::default()
        };
        result_of(&self.report(UpdateTaskRequest { state: state.into(), ..Default::default() }).await.unwrap())
    }

    pub(crate) async fn heartbeat(&self, task: i64) -> TaskResult {
        self.end(task, TaskResult::RESULT_UNSPECIFIED, 0).await
    }

    pub(crate) async fn log(&self, task: i64, index: i64, rows: &[&str], no_more: bool) -> Result<i64, RpcError> {
        let row = |row: &&str| LogRow { time: now(), content: (*row).to_owned(), ..Default::default() };
        let rows = rows.iter().map(row).collect();
        self.rpc.update_log(UpdateLogRequest { task_id: task, index, rows, no_more, ..Default::default() }).await
    }
}

pub(crate) fn result_of(answer: &UpdateTaskResponse) -> TaskResult {
    answer.state.result.as_known().unwrap()
}

pub(crate) fn now<T: From<Timestamp>>() -> T {
    T::from(Timestamp::from(std::time::SystemTime::now()))
}
