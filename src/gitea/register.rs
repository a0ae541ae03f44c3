//! The one call that makes a runner. Not idempotent: a repeated call makes a second runner at Gitea.
//!
//! Whether to register at all, and where the answer is kept, is for the command line.

use std::time::Duration;

use connectrpc::{Spec, StreamType, client::CallOptions};

use super::{RpcError, RunnerRpc};
use crate::{
    proto::runner::{__buffa::view::RegisterResponseView, RegisterRequest},
    secret::Secret,
};

const REGISTER_LIMIT: Duration = Duration::from_secs(30);

/// What Gitea gave: kept for ever, Gitea has no call to renew it.
#[derive(Debug, Clone)]
pub struct Registration {
    pub id: i64,
    pub uuid: String,
    pub token: Secret,
    pub name: String,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error("Gitea answered without a runner")]
    Empty,
}

/// Registers a runner that is not ephemeral. `rpc` needs no credentials; `labels` are bare names.
pub async fn register(
    rpc: &RunnerRpc,
    registration_token: &Secret,
    name: &str,
    version: &str,
    labels: &[String],
    capabilities: &[String],
) -> Result<Registration, RegisterError> {
    let (transport, config) = rpc.parts();
    let request = RegisterRequest {
        name: name.into(),
        token: registration_token.expose().trim().into(),
        version: version.into(),
        labels: labels.to_vec(),
        capabilities: capabilities.to_vec(),
        ..Default::default()
    };
    let spec = Spec::client("/runner.v1.RunnerService/Register", StreamType::Unary);
    let call = connectrpc::client::call_unary::<_, _, RegisterResponseView<'static>>(
        &transport,
        &config,
        spec,
        request,
        CallOptions::default(),
    );
    let answer = tokio::time::timeout(REGISTER_LIMIT, call).await.map_err(|_| RpcError::timed_out(REGISTER_LIMIT))?;
    let runner = answer.map_err(RpcError::from)?.into_owned().runner.into_option().ok_or(RegisterError::Empty)?;
    if runner.uuid.is_empty() || runner.token.is_empty() {
        return Err(RegisterError::Empty);
    }
    Ok(Registration { id: runner.id, uuid: runner.uuid, token: Secret::new(runner.token), name: runner.name })
}
