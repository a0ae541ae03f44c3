//! Errors of the runner protocol, sorted by what the caller does about them.
//!
//! Gitea ≤ 1.27 wraps a gRPC status into HTTP 500 with the code `unknown`, newer ones answer the Connect code itself, and a proxy in
//! between answers pages of its own. So code and message are judged together, never the HTTP status (`gitea.md` §2.3).

use std::time::Duration;

use connectrpc::{ConnectError, ErrorCode};

/// What a failed call means for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RpcFault {
    /// Gitea does not know our UUID, or the token is wrong. Confirm it before acting: a database fail-over looks the same.
    Unregistered,
    /// The task, its run or its repository was deleted.
    TaskGone,
    /// The task belongs to another runner.
    NotOurTask,
    /// The log was archived: later rows are dropped for good.
    LogSealed,
    /// The server understood and refuses (the facade: wrong capability, or the job is over). Asking again does not help.
    Denied,
    /// The server has no such call: Actions switched off, or a very old Gitea.
    Unimplemented,
    /// Everything else: ask again later.
    Transient,
}

#[derive(Debug, Clone, thiserror::Error)]
#[error("{code}: {message}")]
pub struct RpcError {
    pub fault: RpcFault,
    /// The Connect code, for the log.
    pub code: &'static str,
    /// The server's words, cut to 500 characters. Gitea's messages hold no secret of ours.
    pub message: String,
}

impl RpcError {
    pub(super) fn timed_out(limit: Duration) -> Self {
        let message = format!("no answer within {} s", limit.as_secs());
        Self { fault: RpcFault::Transient, code: "deadline_exceeded", message }
    }

    pub(super) fn malformed(message: String) -> Self {
        Self { fault: RpcFault::Transient, code: "malformed", message }
    }
}

impl From<ConnectError> for RpcError {
    fn from(error: ConnectError) -> Self {
        let message: String = error.message.unwrap_or_default().chars().take(500).collect();
        let fault = judge(error.code, &message);
        Self { fault, code: error.code.as_str(), message }
    }
}

fn judge(code: ErrorCode, message: &str) -> RpcFault {
    let grpc = |name: &str| code == ErrorCode::Unknown && message.contains(&format!("code = {name} "));
    let is = |own: ErrorCode, name: &str| code == own || grpc(name);
    if message.contains("unregistered runner") && is(ErrorCode::Unauthenticated, "Unauthenticated") {
        return RpcFault::Unregistered;
    }
    if message.contains("invalid runner for task") {
        return RpcFault::NotOurTask;
    }
    if message.contains("resource does not exist") {
        return RpcFault::TaskGone;
    }
    if message.contains("log file has been archived") && is(ErrorCode::AlreadyExists, "AlreadyExists") {
        return RpcFault::LogSealed;
    }
    match code {
        // A page of a proxy is also `permission_denied`; only a Connect error that carries our facade's words is final.
        ErrorCode::PermissionDenied if message.starts_with("denied: ") => RpcFault::Denied,
        ErrorCode::Unimplemented => RpcFault::Unimplemented,
        _ => RpcFault::Transient,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_old_and_new_gitea_mean_the_same() {
        use ErrorCode as C;
        let table = [
            (C::Unknown, "rpc error: code = Unauthenticated desc = unregistered runner", RpcFault::Unregistered),
            (C::Unauthenticated, "unregistered runner", RpcFault::Unregistered),
            // A proxy's own 401 is no word of Gitea's.
            (C::Unauthenticated, "HTTP status 401 Unauthorized", RpcFault::Transient),
            (C::Unknown, "unregistered runner", RpcFault::Transient),
            (C::Unknown, "rpc error: code = Internal desc = update task: resource does not exist", RpcFault::TaskGone),
            (
                C::Unknown,
                "rpc error: code = Internal desc = get task: task with id 9: resource does not exist",
                RpcFault::TaskGone,
            ),
            (C::Unknown, "rpc error: code = Internal desc = update task: invalid runner for task", RpcFault::NotOurTask),
            (C::PermissionDenied, "invalid runner for task", RpcFault::NotOurTask),
            (C::Unknown, "rpc error: code = AlreadyExists desc = log file has been archived", RpcFault::LogSealed),
            (C::AlreadyExists, "log file has been archived", RpcFault::LogSealed),
            (C::Unknown, "rpc error: code = Internal desc = pick task: context deadline exceeded", RpcFault::Transient),
            (C::PermissionDenied, "denied: not the served environment", RpcFault::Denied),
            (C::PermissionDenied, "HTTP status 403 Forbidden", RpcFault::Transient),
            (C::Unimplemented, "HTTP status 404 Not Found", RpcFault::Unimplemented),
            (C::Unavailable, "", RpcFault::Transient),
        ];
        for (code, message, fault) in table {
            assert_eq!(judge(code, message), fault, "{code:?} {message}");
        }
    }
}
