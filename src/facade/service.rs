//! The calls themselves. Each takes the admitted claim from the request's extensions, and speaks to Gitea with our credentials.

#![expect(refining_impl_trait, reason = "answers borrow nothing; the trait would allow it")]

use std::sync::Arc;

use buffa::Message as _;
use connectrpc::{ConnectError, Encodable, ErrorCode, PreEncoded, RequestContext, Response, ServiceRequest, ServiceResult};

use super::{Admitted, Facade, verdict};
use crate::{
    backend::{BackendError, Mark},
    claims::{Claim, ClaimPhase, Stop},
    failpoint,
    gitea::{RpcError, RpcFault, report},
    metrics::{BackendLabel, BackendOutcome, MethodCode, ReasonLabel, code_label},
    mirror::{Outcome, What},
    names::header,
    proto::{
        self,
        environment::{
            EnvironmentService, HelloRequest, HelloResponse, PollRequest, PollResponse, StartRequest, StartResponse, StopReason,
        },
        runner::{
            DeclareRequest, DeclareResponse, FetchTaskRequest, FetchTaskResponse, RunnerService, TaskResult, TaskState,
            UpdateLogRequest, UpdateLogResponse, UpdateTaskRequest, UpdateTaskResponse,
        },
    },
};

pub(super) struct Service {
    facade: Facade,
}

impl Service {
    pub(super) fn new(facade: Facade) -> Self {
        Self { facade }
    }

    fn claim(ctx: &RequestContext) -> Result<Arc<Claim>, ConnectError> {
        let admitted = ctx.extensions().get::<Admitted>();
        admitted.map(|a| Arc::clone(&a.0)).ok_or_else(|| ConnectError::permission_denied("denied: not admitted"))
    }

    /// The claim as it is now; another request of the same environment may have moved it.
    fn fresh(&self, claim: &Claim) -> Result<Claim, ConnectError> {
        let now = self.facade.claims.get(claim.assignment).filter(|now| now.nonce == claim.nonce);
        now.ok_or_else(|| ConnectError::permission_denied("denied: the environment was revoked"))
    }

    /// Reports count only after `start` (rule R7).
    fn started(&self, claim: &Claim) -> Result<(), ConnectError> {
        match self.fresh(claim)?.phase {
            ClaimPhase::Claimed => Ok(()),
            _ => Err(ConnectError::new(ErrorCode::FailedPrecondition, "the job was not started; call start first")),
        }
    }

    fn own_task(&self, claim: &Claim, task: i64) -> Result<(), ConnectError> {
        if task == claim.assignment.task().0 {
            return Ok(());
        }
        self.facade.metrics.facade_denied.get_or_create(&ReasonLabel { reason: "task" }).inc();
        Err(ConnectError::permission_denied("denied: another job's task"))
    }

    fn count(&self, method: &'static str, code: &'static str) {
        let code = code_label(code);
        self.facade.metrics.report_requests.get_or_create(&MethodCode { method, code }).inc();
    }

    /// Rule R5. Under the lock of the job's log, so that the controller's rows are all in before the offset is told.
    async fn start_job(&self, claim: &Claim) -> Result<i64, ConnectError> {
        let Facade { rpc, claims, queue, leases, backends, pass, metrics, mirror, .. } = &self.facade;
        let lock = claims.report_lock(claim.assignment);
        let _reporting = lock.lock().await;
        let now = self.fresh(claim)?;
        if now.stop.is_some() || now.superseded {
            return Err(ConnectError::permission_denied("denied: the job was stopped"));
        }
        let task = now.assignment.task();
        let offset = report::log_length(rpc, task).await.map_err(|e| to_peer(&e))?;
        let backend = backends.get(&now.backend).ok_or_else(|| ConnectError::unavailable("no such backend"))?;
        // We may die after the mark and before the delivery is completed: reconcile then finds a claimed environment whose
        // assignment is still queued, and completes it. We may die before the answer: the bridge asks again, and as nobody
        // writes rows meanwhile it gets the same offset.
        match backend.mark(&now.name, Mark::Claimed, pass).await {
            Ok(()) => {}
            Err(BackendError::NotFound) => return Err(ConnectError::permission_denied("denied: the environment was revoked")),
            Err(e) => return Err(ConnectError::unavailable(e.to_string())),
        }
        failpoint::reached("start.marked");
        mirror.note(task, What::Claimed { environment: now.name.to_string() });
        leases
            .complete(queue.as_ref(), now.backend.lane(), task)
            .await
            .map_err(|e| ConnectError::unavailable(format!("complete delivery: {e}")))?;
        failpoint::reached("start.completed");
        mirror.note(task, What::Acknowledged);
        claims.claimed(now.assignment, &now.nonce);
        if matches!(now.phase, ClaimPhase::Offered { .. }) {
            let (since_fetch, since_offer) = (now.fetched_at.elapsed().unwrap_or_default(), now.offered_at.elapsed());
            let label = BackendLabel { backend: now.backend.as_str() };
            metrics.job_start_latency.get_or_create(&label).observe(since_fetch.as_secs_f64());
            metrics.environment_provision.get_or_create(&label).observe(since_offer.as_secs_f64());
            tracing::info!(event = "runner_claimed", assignment = %now.assignment, backend = %now.backend, executor = %now.name,
                "environment {} claimed {}", now.name, now.assignment);
            tracing::info!(event = "acked", assignment = %now.assignment, backend = %now.backend, "completed delivery");
        }
        Ok(offset)
    }

    /// Passes a state on to Gitea, with the result that rule R8 allows.
    async fn report(
        &self,
        claim: &Claim,
        mut request: UpdateTaskRequest,
        ctx: &RequestContext,
    ) -> Result<UpdateTaskResponse, ConnectError> {
        let Facade { rpc, claims, mirror, .. } = &self.facade;
        let now = self.fresh(claim)?;
        let state = request.state.get_or_insert_default();
        if now.known_steps.is_empty() && state.steps.iter().any(|step| step.started_at.is_set()) {
            mirror.note(now.assignment.task(), What::FirstStep);
        }
        claims.steps_reported(now.assignment, &state.steps);
        let reported = state.result.as_known().unwrap_or(TaskResult::ResultFailure);
        let terminal = reported != TaskResult::ResultUnspecified;
        if terminal {
            let flag = |name, value: &str| ctx.header(name).is_some_and(|v| v.as_bytes() == value.as_bytes());
            let ending = verdict::Ending {
                stop: now.stop.map(|(stop, _)| stop),
                stop_seen: flag(header::STOP_SEEN, "1"),
                exited: flag(header::RUNNER, "exited"),
            };
            let result = verdict::verdict(reported, &state.steps, ending);
            if result != reported {
                tracing::info!(assignment = %now.assignment, ?reported, ?result, ?ending, "replaced the runner's result");
            }
            state.result = result.into();
        }
        let sent = state.clone();
        let answer = match rpc.update_task(request, &[]).await {
            Ok(answer) => answer,
            // Gitea does not want it any more; for the environment that is the end.
            Err(e) if terminal && matches!(e.fault, RpcFault::TaskGone | RpcFault::NotOurTask) => {
                UpdateTaskResponse { state: buffa::MessageField::some(sent.clone()), ..Default::default() }
            }
            Err(e) => {
                self.count("UpdateTask", e.code);
                if matches!(e.fault, RpcFault::TaskGone | RpcFault::NotOurTask) {
                    claims.stop(now.assignment, Stop::Gone);
                }
                return Err(to_peer(&e));
            }
        };
        self.count("UpdateTask", "ok");
        if terminal {
            self.ended(&now, &sent).await?;
        } else if answer.state.result.as_known() != Some(TaskResult::ResultUnspecified) {
            // A user's cancel, or Gitea gave the job up: this answer is the only word of it.
            claims.stop(now.assignment, Stop::Cancelled);
        }
        Ok(answer)
    }

    /// Gitea has the result: mark the environment, and let it go.
    async fn ended(&self, claim: &Claim, state: &TaskState) -> Result<(), ConnectError> {
        let Facade { claims, backends, pass, metrics, mirror, .. } = &self.facade;
        // We may die before the mark: the environment reports again, Gitea keeps its first result, and the mark is set then.
        failpoint::reached("terminal.accepted");
        if let Some(backend) = backends.get(&claim.backend) {
            match backend.mark(&claim.name, Mark::Terminal, pass).await {
                Ok(()) | Err(BackendError::NotFound) => {}
                Err(e) => return Err(ConnectError::unavailable(format!("mark environment: {e}"))),
            }
        }
        failpoint::reached("terminal.marked");
        if matches!(self.fresh(claim).map(|c| c.phase), Ok(ClaimPhase::Terminal)) {
            return Ok(());
        }
        let outcome = match state.result.as_known() {
            Some(TaskResult::ResultSuccess) => "success",
            Some(TaskResult::ResultCancelled) => "cancelled",
            Some(TaskResult::ResultSkipped) => "skipped",
            _ => "failure",
        };
        metrics.jobs_completed.get_or_create(&BackendOutcome { backend: claim.backend.as_str(), outcome }).inc();
        tracing::info!(assignment = %claim.assignment, backend = %claim.backend, executor = %claim.name, outcome,
            "job {} ended with {outcome}", claim.assignment);
        mirror.finished(claim.assignment.task(), Outcome::of(state.result.as_known()), None, claim.token_hash);
        claims.terminal(claim.assignment, &claim.nonce);
        Ok(())
    }
}

/// Gitea's error in the words by which the bridge knows it again.
fn to_peer(error: &RpcError) -> ConnectError {
    match error.fault {
        RpcFault::TaskGone => ConnectError::new(ErrorCode::NotFound, "resource does not exist"),
        RpcFault::NotOurTask => ConnectError::new(ErrorCode::PermissionDenied, "invalid runner for task"),
        RpcFault::LogSealed => ConnectError::new(ErrorCode::AlreadyExists, "log file has been archived"),
        _ => ConnectError::unavailable(format!("Gitea: {error}")),
    }
}

impl RunnerService for Service {
    async fn declare(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, DeclareRequest>,
    ) -> ServiceResult<impl Encodable<DeclareResponse> + Send + use<>> {
        Self::claim(&ctx)?;
        let request = request.to_owned_message();
        let runner = proto::runner::Runner { version: request.version, labels: request.labels, ..Default::default() };
        let capabilities = self.facade.server_capabilities.borrow().clone();
        let answer = DeclareResponse { runner: buffa::MessageField::some(runner), ..Default::default() };
        Response::ok(answer).map(|r| r.with_header(header::SERVER_CAPABILITIES, capabilities))
    }

    async fn fetch_task(
        &self,
        ctx: RequestContext,
        _: ServiceRequest<'_, FetchTaskRequest>,
    ) -> ServiceResult<impl Encodable<FetchTaskResponse> + Send + use<>> {
        let claim = Self::claim(&ctx)?;
        let answer = match &self.fresh(&claim)?.phase {
            ClaimPhase::Offered { raw } => proto::answer_with_task(raw.expose(), 1),
            _ => FetchTaskResponse { tasks_version: 1, ..Default::default() }.encode_to_vec(),
        };
        Response::ok(PreEncoded::<FetchTaskResponse>::from_bytes_unchecked(answer))
    }

    async fn update_task(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, UpdateTaskRequest>,
    ) -> ServiceResult<impl Encodable<UpdateTaskResponse> + Send + use<>> {
        let claim = Self::claim(&ctx)?;
        let request = request.to_owned_message();
        self.own_task(&claim, request.state.id)?;
        let lock = self.facade.claims.report_lock(claim.assignment);
        let _reporting = lock.lock().await;
        self.started(&claim)?;
        Response::ok(self.report(&claim, request, &ctx).await?)
    }

    async fn update_log(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, UpdateLogRequest>,
    ) -> ServiceResult<impl Encodable<UpdateLogResponse> + Send + use<>> {
        let claim = Self::claim(&ctx)?;
        let request = request.to_owned_message();
        self.own_task(&claim, request.task_id)?;
        // One report at a time, so that when the controller settles a job in its environment's place, none of the environment's
        // is still under way (rule R7).
        let lock = self.facade.claims.report_lock(claim.assignment);
        let _reporting = lock.lock().await;
        self.started(&claim)?;
        let rows = u64::try_from(request.rows.len()).unwrap_or(0);
        match self.facade.rpc.update_log(request).await {
            Ok(ack_index) => {
                self.count("UpdateLog", "ok");
                self.facade.metrics.log_rows.inc_by(rows);
                Response::ok(UpdateLogResponse { ack_index, ..Default::default() })
            }
            Err(e) => {
                self.count("UpdateLog", e.code);
                if matches!(e.fault, RpcFault::TaskGone | RpcFault::NotOurTask) {
                    self.facade.claims.stop(claim.assignment, Stop::Gone);
                }
                Err(to_peer(&e))
            }
        }
    }
}

impl EnvironmentService for Service {
    async fn hello(
        &self,
        ctx: RequestContext,
        _: ServiceRequest<'_, HelloRequest>,
    ) -> ServiceResult<impl Encodable<HelloResponse> + Send + use<>> {
        let claim = Self::claim(&ctx)?;
        tracing::info!(event = "backend_ready", assignment = %claim.assignment, backend = %claim.backend, executor = %claim.name,
            "environment {} is there", claim.name);
        let server_capabilities = self.facade.server_capabilities.borrow().clone();
        Response::ok(HelloResponse { server_capabilities, ..Default::default() })
    }

    async fn start(
        &self,
        ctx: RequestContext,
        _: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<impl Encodable<StartResponse> + Send + use<>> {
        let claim = Self::claim(&ctx)?;
        let log_offset = self.start_job(&claim).await?;
        Response::ok(StartResponse { log_offset, ..Default::default() })
    }

    async fn poll(
        &self,
        ctx: RequestContext,
        _: ServiceRequest<'_, PollRequest>,
    ) -> ServiceResult<impl Encodable<PollResponse> + Send + use<>> {
        let claim = Self::claim(&ctx)?;
        let stop = match self.fresh(&claim)?.stop {
            None => StopReason::STOP_REASON_NONE,
            Some((Stop::Cancelled | Stop::Gone, _)) => StopReason::STOP_REASON_CANCELLED,
            Some((Stop::Deadline, _)) => StopReason::STOP_REASON_DEADLINE,
        };
        Response::ok(PollResponse { stop: stop.into(), ..Default::default() })
    }
}
