//! Names that others rely on: metadata keys, the executor's environment, the headers between bridge and facade.
//!
//! They are fixed: an environment made by one version is found and served by the next.

/// Metadata keys, without their prefix (`METADATA_PREFIX`, default [`metadata::PREFIX`]).
pub mod metadata {
    pub const PREFIX: &str = "ci.ddupan.top";
    // Labels.
    pub const RUNNER: &str = "runner";
    pub const ASSIGNMENT_ID: &str = "assignment-id";
    pub const TASK_ID: &str = "task-id";
    pub const BACKEND: &str = "backend";
    pub const TERMINAL: &str = "terminal";
    pub const INSTANCE: &str = "instance";
    pub const ENVIRONMENT: &str = "environment";
    pub const CLAIMED: &str = "claimed";
    // Annotations.
    pub const REPOSITORY: &str = "repository";
    pub const JOB_KEY: &str = "job-key";
    pub const SPIFFE_ID: &str = "spiffe-id";
    pub const STEPS: &str = "steps";
}

/// Variables that every backend gives to the executor.
pub mod env {
    pub const ASSIGNMENT_ID: &str = "CI_ASSIGNMENT_ID";
    pub const SPIFFE_ID: &str = "CI_SPIFFE_ID";
    pub const CAPABILITY: &str = "CI_RUNNER_CAPABILITY";
    pub const FACADE_URL: &str = "RUNNER_FACADE_URL";
    pub const FACADE_SPIFFE_ID: &str = "RUNNER_FACADE_SPIFFE_ID";
    pub const GITEA_URL: &str = "GITEA_URL";
    pub const SPIFFE_ENDPOINT_SOCKET: &str = "SPIFFE_ENDPOINT_SOCKET";
    /// Optional ones, given where the controller has them.
    pub const GITEA_CA_FILE: &str = "GITEA_CA_FILE";
    pub const RUNNER_BIN: &str = "RUNNER_BIN";
    /// In both spellings that are in use, the one that counts first.
    pub const HTTP_PROXY: [&str; 2] = ["HTTP_PROXY", "http_proxy"];
    pub const HTTPS_PROXY: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];
    pub const NO_PROXY: [&str; 2] = ["NO_PROXY", "no_proxy"];
    /// Where the executor may write (spool, the runner's folder); its working directory if unset.
    pub const WORK_DIRECTORY: &str = "CI_WORK_DIRECTORY";
}

/// Exit codes of the executor that a backend knows.
pub mod executor_exit {
    /// It can never run a job here: another environment would end the same way.
    pub const UNFIT: u8 = 14;
}

/// Request headers from the bridge to the facade.
pub mod header {
    pub const ASSIGNMENT: &str = "x-ci-assignment";
    pub const CAPABILITY: &str = "x-ci-capability";
    /// On a terminal UpdateTask: how the runner ended, `exited` once its process is gone (rule R8).
    pub const RUNNER: &str = "x-ci-runner";
    /// On a terminal UpdateTask: `1` when the executor itself was asked to stop (SIGTERM) or saw a stop.
    pub const STOP_SEEN: &str = "x-ci-stop-seen";
    /// Gitea's answer header of Declare.
    pub const SERVER_CAPABILITIES: &str = "x-gitea-actions-capabilities";
}
