//! The settings: environment variables, read once, all faults reported at once, each with its way out.
//!
//! Names and defaults are in the README's table (`tests/tidy.rs` compares). Nothing is connected to here.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    backend::local::{ForkPullRequests, WithoutIsolation},
    gitea::connect::Proxies,
    ids::{BackendKind, InstanceId},
    queue::jetstream,
    secret::Secret,
};

pub(crate) mod nats;
mod read;
pub mod tools;
mod variables;

pub(crate) use self::read::StoredCredentials;
pub use self::{
    read::{Reader, process_environment},
    variables::VARIABLES,
};

/// Where `register` keeps what Gitea gave, below the state directory.
pub const CREDENTIALS_FILE: &str = "private/credentials.json";

const COMPONENTS: [&str; 3] = ["scheduler", "pod-worker", "vm-worker"];

/// The settings of `serve`, whole and consistent.
#[derive(Debug, Clone)]
pub struct Config {
    pub gitea: GiteaConfig,
    pub state_directory: PathBuf,
    pub queue: QueueConfig,
    pub pod: Option<BackendConfig>,
    pub vm: Option<BackendConfig>,
    pub vm_label: String,
    /// A job whose environment says nothing for so long is given up.
    pub silence_limit: Duration,
    pub local: LocalSettings,
    pub identity: IdentityConfig,
    pub facade: FacadeConfig,
    pub keys: KeyFiles,
    pub http: HttpConfig,
}

#[derive(Debug, Clone)]
pub struct GiteaConfig {
    pub url: String,
    pub ca_file: Option<PathBuf>,
    pub uuid: String,
    pub token: Secret,
    /// May read jobs and runners, for the dashboard; not needed for anything else.
    pub api_token: Option<Secret>,
}

impl GiteaConfig {
    pub fn instance(&self) -> InstanceId {
        InstanceId::of_uuid(&self.uuid)
    }
}

/// Where assignments wait.
#[derive(Debug, Clone)]
pub enum QueueConfig {
    /// In a file of the state directory.
    Embedded,
    JetStream(Box<jetstream::Settings>),
}

/// One backend. Only `local` is in this version.
#[derive(Debug, Clone)]
pub struct BackendConfig {
    pub kind: BackendKind,
    pub capacity: usize,
    pub timeout_seconds: u64,
}

#[derive(Debug, Clone)]
pub struct LocalSettings {
    pub executor_uid: u32,
    pub without_isolation: WithoutIsolation,
    pub fork_prs: ForkPullRequests,
    pub metadata_prefix: String,
    pub runner_bin: Option<PathBuf>,
    pub path: String,
    pub proxy: Vec<(String, String)>,
}

#[derive(Debug, Clone)]
pub struct IdentityConfig {
    pub trust_domain: String,
    pub facade_spiffe_id: String,
}

#[derive(Debug, Clone)]
pub struct FacadeConfig {
    pub listen: SocketAddr,
    /// `None`: follows from the address that was bound.
    pub url: Option<String>,
}

/// `None`: made and kept in the state directory.
#[derive(Debug, Clone)]
pub struct KeyFiles {
    pub capability: Option<PathBuf>,
    pub seal: Option<PathBuf>,
}

#[derive(Debug, Clone)]
pub struct HttpConfig {
    pub listen: SocketAddr,
    pub hosts: Vec<String>,
    pub read_token: Option<Secret>,
    /// Without one nobody drains.
    pub admin_token: Option<Secret>,
    /// With local backends every job reaches loopback, so it is not trusted. The demo has nothing to hide.
    pub trust_loopback: bool,
}

/// How `serve` was asked to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Standalone,
    Full,
}

/// Everything that is wrong, one line each, with the way out.
#[derive(Debug)]
pub struct Faults(pub Vec<String>);

impl std::fmt::Display for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|fault| writeln!(f, "- {fault}"))
    }
}

impl std::error::Error for Faults {}

impl Config {
    /// Reads and checks everything. `environment` is the process's, or a test's.
    pub fn read(environment: BTreeMap<String, String>, mode: Mode) -> Result<Config, Faults> {
        let (config, faults) = Self::read_with_faults(environment, mode);
        if faults.is_empty() { Ok(config) } else { Err(Faults(faults)) }
    }

    /// As [`Self::read`], but also what could be read beside the faults, for who looks at the rest (`doctor`). What is faulty has some
    /// value that fits nothing: with faults it is nothing to run by.
    pub fn read_with_faults(environment: BTreeMap<String, String>, mode: Mode) -> (Config, Vec<String>) {
        let mut read = Reader::new(environment);
        let state_directory = read.state_directory();
        let gitea = read_gitea(&mut read, &state_directory);
        let components = read.list("COMPONENTS", "scheduler,pod-worker,vm-worker");
        if !components.iter().any(|c| c == "scheduler") || components.iter().any(|c| !COMPONENTS.contains(&c.as_str())) {
            read.fault(format!(
                "COMPONENTS={}: a list of {}; this version runs as one process, so `scheduler` must be among them",
                components.join(","),
                COMPONENTS.join(", ")
            ));
        }
        if mode == Mode::Full {
            full_system_faults(&mut read);
        }
        let queue = read_queue(&mut read);
        let pod = read_backend(&mut read, BackendKind::Pod, &components, "4");
        let vm = read_backend(&mut read, BackendKind::Vm, &components, "1");
        if pod.is_none() && vm.is_none() {
            read.fault("no backend: set POD_BACKEND=local or VM_BACKEND=local, and name pod-worker or vm-worker in COMPONENTS");
        }
        if let Some(endpoint) = read.optional("SPIFFE_ENDPOINT_SOCKET") {
            read.fault(format!(
                "SPIFFE_ENDPOINT_SOCKET is set ({endpoint}), but this version issues identities by its embedded authority only, and two \
                 authorities are one too many: unset it"
            ));
        }
        let config = Config {
            queue,
            pod,
            vm,
            vm_label: read_vm_label(&mut read),
            // Below the ten minutes after which Gitea gives a silent task up.
            silence_limit: Duration::from_secs(read.number("SILENCE_LIMIT_SECONDS", "480", 10..=86_400)),
            local: read_local(&mut read),
            identity: read_identity(&mut read),
            facade: FacadeConfig {
                listen: read.address("RUNNER_FACADE_LISTEN", "127.0.0.1:8443"),
                url: read.optional("RUNNER_FACADE_URL"),
            },
            keys: KeyFiles { capability: read.file("RUNNER_CAPABILITY_KEY_FILE"), seal: read.file("SEAL_KEY_FILE") },
            http: read_http(&mut read),
            gitea,
            state_directory,
        };
        if !config.facade.listen.ip().is_loopback() {
            read.fault("RUNNER_FACADE_LISTEN: with local backends alone it must be a loopback address, as 127.0.0.1:8443");
        }
        (config, read.into_faults())
    }

    /// Towards Gitea; environments get the same variables.
    pub fn proxies(&self) -> Proxies {
        let pairs = &self.local.proxy;
        Proxies::read(&|name| pairs.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()))
    }

    pub fn backends(&self) -> impl Iterator<Item = &BackendConfig> {
        self.pod.iter().chain(self.vm.iter())
    }
}

fn read_http(read: &mut Reader) -> HttpConfig {
    let (read_token, admin_token) = (read.secret_file("READ_TOKEN_FILE"), read.secret_file("ADMIN_TOKEN_FILE"));
    if let (Some(reader), Some(admin)) = (&read_token, &admin_token)
        && admin.matches(reader.expose())
    {
        read.fault("ADMIN_TOKEN_FILE: its token is that of READ_TOKEN_FILE, so whoever may read could drain: make another");
    }
    HttpConfig {
        listen: read.address("HTTP_LISTEN", "127.0.0.1:9180"),
        hosts: read.list("HTTP_HOSTS", ""),
        read_token,
        admin_token,
        trust_loopback: false,
    }
}

fn read_gitea(read: &mut Reader, state_directory: &Path) -> GiteaConfig {
    let url = read.url("GITEA_URL");
    let ca_file = read.file("GITEA_CA_FILE");
    let api_token = read.secret("GITEA_API_TOKEN");
    let (uuid, token) = (read.optional("GITEA_RUNNER_UUID"), read.secret("GITEA_RUNNER_TOKEN"));
    let (uuid, token) = match (uuid, token) {
        (Some(uuid), Some(token)) => (uuid, token),
        (None, None) => {
            match crate::config::read::credentials(&state_directory.join(CREDENTIALS_FILE)) {
                Ok(Some(known)) => {
                    if !url.is_empty() && known.url != url {
                        read.fault(format!(
                        "GITEA_URL is {url}, but this runner was registered at {}: set GITEA_URL to that, or use another STATE_DIRECTORY and register there",
                        known.url
                    ));
                    }
                    (known.uuid, known.token)
                }
                Ok(None) => {
                    read.fault("no runner: run `gitea-dynamic-runner register` once, or set GITEA_RUNNER_UUID and GITEA_RUNNER_TOKEN_FILE");
                    (String::new(), Secret::new(""))
                }
                Err(e) => {
                    read.fault(e);
                    (String::new(), Secret::new(""))
                }
            }
        }
        _ => {
            read.fault("GITEA_RUNNER_UUID and GITEA_RUNNER_TOKEN (or …_FILE): set both or neither");
            (String::new(), Secret::new(""))
        }
    };
    GiteaConfig { url, ca_file, uuid, token, api_token }
}

/// Without `--standalone` nothing is silently replaced by something smaller.
fn full_system_faults(read: &mut Reader) {
    for (name, what) in [
        ("NATS_URL", "JetStream"),
        ("SPIFFE_ENDPOINT_SOCKET", "SPIRE"),
        ("OPENSANDBOX_API", "OpenSandbox"),
        ("RUNNER_FACADE_URL", "the address at which Pods and VMs reach this controller"),
    ] {
        if read.optional(name).is_none() {
            read.fault(format!("{name} is not set ({what}): set it, or run `serve --standalone` on one machine"));
        }
    }
    read.fault("the full system (JetStream, Kubernetes, OpenSandbox, SPIRE) is not in this version: run `serve --standalone`");
}

fn read_queue(read: &mut Reader) -> QueueConfig {
    match read.or("QUEUE", "embedded").as_str() {
        "embedded" => QueueConfig::Embedded,
        "jetstream" => QueueConfig::JetStream(Box::new(nats::settings(read))),
        other => {
            read.fault(format!("QUEUE={other}: it is `embedded` (a file on this machine) or `jetstream` (a NATS server)"));
            QueueConfig::Embedded
        }
    }
}

fn read_backend(read: &mut Reader, kind: BackendKind, components: &[String], capacity: &'static str) -> Option<BackendConfig> {
    let upper = kind.as_str().to_uppercase();
    let name = format!("{upper}_BACKEND");
    let place = read.optional(&name);
    let wanted = components.iter().any(|c| c == &format!("{kind}-worker"));
    let capacity = read.number(&format!("{upper}_CAPACITY"), capacity, 1..=1000);
    let timeout_seconds = read.number(&format!("{upper}_TIMEOUT_SECONDS"), "14400", 30..=604_800);
    let place = match (kind, place) {
        // A local environment is no VM: only who asks for it gets it.
        (BackendKind::Vm, None) => return None,
        (BackendKind::Pod, None) => "local".to_owned(),
        (_, Some(place)) => place,
    };
    if place != "local" {
        read.fault(format!("{name}={place}: this version has `local` only"));
    }
    wanted.then_some(BackendConfig { kind, capacity: usize::try_from(capacity).unwrap_or(1), timeout_seconds })
}

fn read_vm_label(read: &mut Reader) -> String {
    let label = read.or("VM_RUNNER_LABEL", "vm");
    if !matches!(label.as_str(), "vm" | "vm-dev") {
        read.fault(format!("VM_RUNNER_LABEL={label}: it is `vm` or `vm-dev`"));
    }
    label
}

fn read_local(read: &mut Reader) -> LocalSettings {
    let uid = read.number("POD_EXECUTOR_UID", "2000", 1..=4_000_000_000);
    LocalSettings {
        executor_uid: u32::try_from(uid).unwrap_or(2000),
        without_isolation: if read.flag("LOCAL_UNISOLATED") { WithoutIsolation::Accepted } else { WithoutIsolation::Refused },
        fork_prs: if read.flag("LOCAL_FORK_PRS") { ForkPullRequests::Accepted } else { ForkPullRequests::Refused },
        metadata_prefix: read.or("METADATA_PREFIX", crate::names::metadata::PREFIX),
        runner_bin: read.optional("RUNNER_BIN").map(PathBuf::from),
        path: read.or("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        proxy: read.proxy(),
    }
}

fn read_identity(read: &mut Reader) -> IdentityConfig {
    let trust_domain = read.or("TRUST_DOMAIN", "dynamic-runner.development");
    let fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'_');
    if trust_domain.len() > crate::spiffe_name::MAX_TRUST_DOMAIN || !trust_domain.bytes().all(fine) || trust_domain.is_empty() {
        read.fault(format!(
            "TRUST_DOMAIN={trust_domain}: at most {} lower-case letters, digits, dots and dashes",
            crate::spiffe_name::MAX_TRUST_DOMAIN
        ));
    }
    let facade_spiffe_id = read.or("RUNNER_FACADE_SPIFFE_ID", &format!("spiffe://{trust_domain}/dynamic-runner/facade"));
    if !facade_spiffe_id.starts_with(&format!("spiffe://{trust_domain}/"))
        || crate::spiffe_name::is_job(&facade_spiffe_id, &trust_domain)
    {
        read.fault(format!(
            "RUNNER_FACADE_SPIFFE_ID={facade_spiffe_id}: it must be in spiffe://{trust_domain}/, and not below /ci/ or /ci-pr/"
        ));
    }
    IdentityConfig { trust_domain, facade_spiffe_id }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn every_fault_is_told_at_once_with_its_way_out() {
        let state = tempfile::tempdir().unwrap();
        let faults = Config::read(
            environment(&[
                ("STATE_DIRECTORY", state.path().to_str().unwrap()),
                ("GITEA_URL", "ftp://x"),
                ("GITEA_RUNNER_UUID", "only-one-of-two"),
                ("POD_CAPACITY", "many"),
                ("QUEUE", "jetstream"),
                ("NATS_URL", "https://nats"),
                ("NATS_STREAM", "CI.RUNNER"),
                ("NATS_SUBJECT_BASE", "ci.>"),
                ("NATS_MONITOR_URL", "nats:8222"),
                ("NATS_WORKER_USER", "worker"),
                ("NATS_WORKER_PASSWORD", "one"),
                ("NATS_WORKER_PASSWORD_FILE", "and another"),
                ("VM_BACKEND", "opensandbox"),
                ("VM_RUNNER_LABEL", "VM"),
                ("TRUST_DOMAIN", "UPPER"),
                ("SPIFFE_ENDPOINT_SOCKET", "unix:///run/spire.sock"),
                ("RUNNER_FACADE_LISTEN", "0.0.0.0:8443"),
                ("LOCAL_UNISOLATED", "maybe"),
                ("READ_TOKEN_FILE", "/nonexistent/token"),
            ]),
            Mode::Standalone,
        )
        .unwrap_err()
        .to_string();
        for part in [
            "GITEA_URL",
            "set both or neither",
            "POD_CAPACITY",
            "NATS_URL=https://nats",
            "NATS_STREAM=CI.RUNNER",
            "NATS_SUBJECT_BASE=ci.>",
            "NATS_MONITOR_URL=nats:8222",
            "NATS_PRODUCER_USER is not set",
            "NATS_PRODUCER_PASSWORD is not set",
            "NATS_WORKER_PASSWORD and NATS_WORKER_PASSWORD_FILE are both set",
            "VM_BACKEND",
            "VM_RUNNER_LABEL",
            "TRUST_DOMAIN",
            "SPIFFE_ENDPOINT_SOCKET",
            "loopback",
            "LOCAL_UNISOLATED",
            "READ_TOKEN_FILE",
        ] {
            assert!(faults.contains(part), "{part} in\n{faults}");
        }
    }

    #[test]
    fn the_full_system_names_what_it_misses_and_does_not_fall_back() {
        let faults = Config::read(environment(&[("GITEA_URL", "http://127.0.0.1:1")]), Mode::Full).unwrap_err().to_string();
        for name in ["NATS_URL", "OPENSANDBOX_API", "SPIFFE_ENDPOINT_SOCKET", "--standalone"] {
            assert!(faults.contains(name), "{name} in\n{faults}");
        }
    }

    #[test]
    fn a_small_configuration_is_enough() {
        let state = tempfile::tempdir().unwrap();
        let config = Config::read(
            environment(&[
                ("STATE_DIRECTORY", state.path().to_str().unwrap()),
                ("GITEA_URL", "http://127.0.0.1:3000/"),
                ("GITEA_RUNNER_UUID", "u"),
                ("GITEA_RUNNER_TOKEN", "canary"),
            ]),
            Mode::Standalone,
        )
        .unwrap();
        assert_eq!(config.backends().map(|b| (b.kind, b.capacity)).collect::<Vec<_>>(), [(BackendKind::Pod, 4)]);
        assert!(!format!("{config:?}").contains("canary"));
    }
}
