//! The `github` context of a task: whose job it is, and whose code it runs.
//!
//! All values come from Gitea itself. Strings but for `event` and `ref_protected` (`gitea.md` §3.6); numbers in `event` are doubles.

use buffa_types::google::protobuf::{Struct, Value};

use super::{MAX_REPOSITORY_BYTES, Repository, Trust, cut};
use crate::secret::Secret;

/// Of a single value that is only shown or compared: a ref, a file name, a number.
const MAX_VALUE_BYTES: usize = 1024;

pub(super) struct Context {
    /// Or why there is none, for the job's log.
    pub(super) repository: Result<Repository, String>,
    pub(super) workflow: String,
    pub(super) git_ref: String,
    pub(super) sha: String,
    pub(super) event: String,
    pub(super) run_id: String,
    pub(super) run_number: String,
    pub(super) run_attempt: String,
    pub(super) trust: Trust,
    pub(super) token: Secret,
}

impl Default for Context {
    fn default() -> Self {
        read(&Struct::new())
    }
}

pub(super) fn read(context: &Struct) -> Context {
    let value = |key: &str| cut(&text(context, key), MAX_VALUE_BYTES);
    Context {
        repository: repository(&text(context, "repository"), &text(context, "repository_owner")),
        workflow: value("workflow"),
        git_ref: value("ref"),
        sha: value("sha"),
        event: value("event_name"),
        run_id: value("run_id"),
        run_number: value("run_number"),
        run_attempt: value("run_attempt"),
        trust: trust(context),
        token: Secret::new(text(context, "token")),
    }
}

fn text(context: &Struct, key: &str) -> String {
    let value = context.get(key);
    let number = || value.and_then(Value::as_number).map(|number| number.to_string());
    value.and_then(Value::as_str).map(str::to_owned).or_else(number).unwrap_or_default()
}

fn repository(full: &str, owner: &str) -> Result<Repository, String> {
    let fault = |what: &str| Err(format!("The task's `repository` {:?} {what}; Gitea must have sent it damaged.", cut(full, 80)));
    let Some((before, name)) = full.split_once('/') else {
        return fault("is not `owner/name`");
    };
    if before.is_empty() || name.is_empty() || name.contains('/') || full.len() > MAX_REPOSITORY_BYTES {
        return fault("is not `owner/name`");
    }
    if !owner.is_empty() && owner != before {
        return fault("disagrees with its `repository_owner`");
    }
    Ok(Repository { owner: before.to_owned(), name: name.to_owned() })
}

/// Whose code the job runs, told by the event's body, because Gitea's own flag is not sent and a reusable workflow's child has
/// `workflow_call` for its event. Whatever cannot be told is a pull request's.
fn trust(context: &Struct) -> Trust {
    let event = text(context, "event_name");
    let on_pull_ref = text(context, "ref").starts_with("refs/pull/");
    if event == "pull_request_target" && !on_pull_ref {
        // The base's own workflow, on the base's branch, with the base's secrets.
        return Trust::Own;
    }
    let body = context.get("event").and_then(Value::as_struct);
    match body.and_then(|body| body.get("pull_request")).filter(|pull| !pull.is_null()) {
        Some(pull) if pull.as_struct().is_some_and(is_from_same_repository) => Trust::Own,
        None if !on_pull_ref && !event.starts_with("pull_request") => Trust::Own,
        _ => Trust::PullRequest,
    }
}

/// A pull request from a branch of the repository itself.
///
/// `head.repo` is null when a fork was deleted. For an AGit pull request Gitea gives the base for the head's repository, but
/// leaves `head.label` empty and `head.ref` at `refs/pull/N/head`; no branch of the repository looks so.
fn is_from_same_repository(pull: &Struct) -> bool {
    let side = |name: &str| pull.get(name).and_then(Value::as_struct);
    let (Some(head), Some(base)) = (side("head"), side("base")) else {
        return false;
    };
    let repo_id = |side: &Struct| side.get("repo").and_then(Value::as_struct)?.get("id").and_then(Value::as_number);
    let same = match (repo_id(head), repo_id(base)) {
        #[expect(clippy::float_cmp, reason = "both are whole numbers that Gitea wrote as doubles")]
        (Some(head), Some(base)) => head > 0.0 && head == base,
        _ => false,
    };
    same && !text(head, "label").is_empty() && !text(head, "ref").is_empty() && !text(head, "ref").starts_with("refs/")
}
