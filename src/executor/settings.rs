//! The executor's settings: the variables that every backend gives to it (`names::env`).
//!
//! Also what of them the runner and its job may see: an own, short list, never the capability.

use std::path::PathBuf;

use anyhow::Context as _;

use crate::{gitea::connect::Proxies, ids::AssignmentId, names::env, secret::Secret};

/// What the runner inherits, if we have it.
const INHERITED: [&str; 5] = ["PATH", "HOME", "TMPDIR", "LANG", env::SPIFFE_ENDPOINT_SOCKET];
/// The bridge is here; a step that sent its clone to a proxy would not find it.
const LOOPBACK: &str = "127.0.0.1,localhost";

pub struct Settings {
    pub assignment: AssignmentId,
    pub capability: Secret,
    pub spiffe_id: String,
    /// The trust domain of `spiffe_id`.
    pub trust_domain: String,
    pub facade_url: String,
    pub facade_spiffe_id: String,
    pub gitea_url: String,
    pub gitea_ca_file: Option<PathBuf>,
    /// Towards Gitea only.
    pub proxies: Proxies,
    /// `unix:///…`
    pub workload_api: String,
    /// Path, or name in PATH, of the official runner.
    pub runner: String,
    /// Where the executor may write.
    pub work: PathBuf,
    /// All that the runner's process sees.
    pub job_environment: Vec<(String, String)>,
}

impl Settings {
    /// `variable` looks a variable up; empty ones count as missing.
    pub fn from_environment(variable: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let get = |name: &str| variable(name).filter(|value| !value.is_empty());
        let need = |name: &str| get(name).with_context(|| format!("{name} is not set; the backend must give it to the executor"));
        let spiffe_id = need(env::SPIFFE_ID)?;
        let trust_domain =
            spiffe_id.strip_prefix("spiffe://").and_then(|rest| rest.split('/').next()).filter(|td| !td.is_empty());
        let work = match get(env::WORK_DIRECTORY) {
            Some(folder) => PathBuf::from(folder),
            None => std::env::current_dir().context("find the working directory")?,
        };
        Ok(Self {
            assignment: need(env::ASSIGNMENT_ID)?.parse().context(env::ASSIGNMENT_ID)?,
            capability: Secret::new(need(env::CAPABILITY)?),
            trust_domain: trust_domain.with_context(|| format!("{} is no SPIFFE ID", env::SPIFFE_ID))?.to_owned(),
            facade_url: need(env::FACADE_URL)?,
            facade_spiffe_id: need(env::FACADE_SPIFFE_ID)?,
            gitea_url: need(env::GITEA_URL)?,
            gitea_ca_file: get(env::GITEA_CA_FILE).map(PathBuf::from),
            proxies: Proxies::read(&get),
            workload_api: need(env::SPIFFE_ENDPOINT_SOCKET)?,
            runner: get(env::RUNNER_BIN).unwrap_or_else(|| "gitea-runner".to_owned()),
            work,
            job_environment: job_environment(&get, &spiffe_id),
            spiffe_id,
        })
    }
}

fn job_environment(get: &dyn Fn(&str) -> Option<String>, spiffe_id: &str) -> Vec<(String, String)> {
    let given = |name: &&str| Some(((*name).to_owned(), get(name)?));
    let mut job: Vec<(String, String)> = INHERITED.iter().filter_map(given).collect();
    let own = job.len();
    job.extend(env::HTTP_PROXY.iter().chain(&env::HTTPS_PROXY).filter_map(given));
    if job.len() > own {
        let more = env::NO_PROXY.iter().find_map(|name| get(name)).map_or_else(String::new, |names| format!(",{names}"));
        job.extend(env::NO_PROXY.map(|name| (name.to_owned(), format!("{LOOPBACK}{more}"))));
    }
    job.push((env::SPIFFE_ID.to_owned(), spiffe_id.to_owned()));
    job
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn variable(name: &str) -> Option<String> {
        let value = match name {
            env::ASSIGNMENT_ID => "gitea-task-7",
            env::SPIFFE_ID => "spiffe://td.test/ci/o/r/build",
            env::CAPABILITY => "canary",
            env::FACADE_URL => "https://127.0.0.1:8443",
            env::FACADE_SPIFFE_ID => "spiffe://td.test/controller",
            env::GITEA_URL => "https://git.test/",
            env::SPIFFE_ENDPOINT_SOCKET => "unix:///run/s.sock",
            "PATH" => "/bin",
            "GITEA_RUNNER_TOKEN" | "NATS_WORKER_PASSWORD" => "canary-too",
            "https_proxy" => "http://proxy.test:3128",
            "no_proxy" => "git.test",
            _ => return None,
        };
        Some(value.to_owned())
    }

    #[test]
    fn the_job_sees_a_short_list_and_never_the_capability() {
        let settings = Settings::from_environment(&variable).unwrap();
        assert_eq!(settings.trust_domain, "td.test");
        assert!(settings.job_environment.iter().all(|(_, value)| !value.contains("canary")));
        let names: Vec<&str> = settings.job_environment.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["PATH", "SPIFFE_ENDPOINT_SOCKET", "https_proxy", "NO_PROXY", "no_proxy", "CI_SPIFFE_ID"]);
        assert!(settings.job_environment.contains(&("no_proxy".into(), "127.0.0.1,localhost,git.test".into())));
    }

    #[test]
    fn a_missing_variable_is_named() {
        for missing in [env::ASSIGNMENT_ID, env::CAPABILITY, env::FACADE_URL, env::GITEA_URL] {
            let settings = Settings::from_environment(&|name| variable(name).filter(|_| name != missing));
            assert!(settings.err().unwrap().to_string().contains(missing));
        }
    }
}
