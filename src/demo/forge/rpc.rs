//! The stand-in's end of the protocol: who asks, may they, and Gitea's words for a no.
//!
//! Gitea wraps a gRPC status into HTTP 500 with the code `unknown`, and so does this.

use std::sync::Arc;

use connectrpc::{ConnectError, Encodable, ErrorCode, RequestContext, Response, ServiceRequest, ServiceResult};

use super::{
    Inner,
    faults::Reported,
    state::{Refusal, Runner, State},
};
use crate::proto::{ping, runner as rpc};

/// RunnerService and PingService on one forge.
pub(super) struct Service(pub(super) Arc<Inner>);

impl From<Refusal> for ConnectError {
    fn from(refusal: Refusal) -> Self {
        let message = match refusal {
            Refusal::Plain(message) => message.to_owned(),
            Refusal::Unregistered => "rpc error: code = Unauthenticated desc = unregistered runner".into(),
            Refusal::Internal(message) => format!("rpc error: code = Internal desc = {message}"),
            Refusal::Archived => "rpc error: code = AlreadyExists desc = log file has been archived".into(),
        };
        ConnectError::new(ErrorCode::Unknown, message)
    }
}

impl Service {
    /// Runs `work` as the runner that the headers name, in one step with the check.
    fn as_runner<T>(
        &self,
        ctx: &RequestContext,
        work: impl FnOnce(&mut State, i64) -> Result<T, Refusal>,
    ) -> Result<T, ConnectError> {
        let header = |name: &str| ctx.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let mut state = self.0.state();
        let runner = state.authenticate(header("x-runner-uuid"), header("x-runner-token"))?;
        Ok(work(&mut state, runner)?)
    }

    pub(super) fn register(&self, request: &rpc::RegisterRequest) -> ServiceResult<rpc::RegisterResponse> {
        let runner = self.0.state().register(request)?;
        self.0.announce();
        let token = runner.token.expose().to_owned();
        let runner = rpc::Runner { token, ephemeral: runner.ephemeral, ..shown(runner) };
        Response::ok(rpc::RegisterResponse { runner: Some(runner).into(), ..Default::default() })
    }
}

/// A runner as Declare shows it, without token and `ephemeral`.
fn shown(runner: Runner) -> rpc::Runner {
    rpc::Runner {
        id: runner.id,
        uuid: runner.uuid,
        name: runner.name,
        version: runner.version,
        labels: runner.labels,
        ..Default::default()
    }
}

impl rpc::RunnerService for Service {
    async fn declare<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, rpc::DeclareRequest>,
    ) -> ServiceResult<impl Encodable<rpc::DeclareResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let runner = self.as_runner(&ctx, |state, runner| state.declare(runner, &request))?;
        let answer = rpc::DeclareResponse { runner: Some(shown(runner)).into(), ..Default::default() };
        Ok(Response::new(answer).with_header("x-gitea-actions-capabilities", "job-summary"))
    }

    /// The version is read before the search, as Gitea does it. Whoever hangs up during the search has claimed nothing.
    async fn fetch_task<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, rpc::FetchTaskRequest>,
    ) -> ServiceResult<impl Encodable<rpc::FetchTaskResponse> + Send + use<'a>> {
        let asked = request.to_owned_message().tasks_version;
        let latest = self.as_runner(&ctx, |state, _| Ok(state.version))?;
        let empty = |version: i64| rpc::FetchTaskResponse { tasks_version: version, ..Default::default() };
        if asked == latest {
            return Response::ok(empty(latest));
        }
        let Ok(_permit) = self.0.picks.try_acquire() else {
            // Throttled: the asked version is echoed, so that the runner asks again.
            return Response::ok(empty(asked));
        };
        tokio::time::sleep(self.0.config.pick_time).await;
        let task = self.as_runner(&ctx, |state, runner| state.pick(runner, &self.0.root_url))?;
        if task.is_some() {
            self.0.announce();
        }
        Response::ok(rpc::FetchTaskResponse { task: task.into(), tasks_version: latest, ..Default::default() })
    }

    async fn update_task<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, rpc::UpdateTaskRequest>,
    ) -> ServiceResult<impl Encodable<rpc::UpdateTaskResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let answer = self.as_runner(&ctx, |state, runner| state.update_task(runner, &request))?;
        let result = request.state.result.as_known().unwrap_or(rpc::TaskResult::RESULT_UNSPECIFIED);
        self.0.record().add_report(request.state.id, Reported::State { result, steps: request.state.steps.len() });
        self.0.announce();
        Response::ok(answer)
    }

    async fn update_log<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, rpc::UpdateLogRequest>,
    ) -> ServiceResult<impl Encodable<rpc::UpdateLogResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let ack_index = self.as_runner(&ctx, |state, runner| state.update_log(runner, &request))?;
        let ends = request.index.saturating_add(i64::try_from(request.rows.len()).unwrap_or(i64::MAX));
        self.0.record().add_report(request.task_id, Reported::Rows { rows: request.index..ends, held: ack_index });
        self.0.announce();
        Response::ok(rpc::UpdateLogResponse { ack_index, ..Default::default() })
    }
}

impl ping::PingService for Service {
    async fn ping<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, ping::PingRequest>,
    ) -> ServiceResult<impl Encodable<ping::PingResponse> + Send + use<'a>> {
        let data = format!("Hello, {}!", request.to_owned_message().data);
        Response::ok(ping::PingResponse { data, ..Default::default() })
    }
}
