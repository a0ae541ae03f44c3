//! A real nats-server with the configuration of `docs/nats.md`, on loopback: started, killed, started again on the same data.
//!
//! It is ended by its process id when the value is dropped. What it stores is written at once (`sync_interval: always`), as the document asks.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use gitea_dynamic_runner::{
    queue::jetstream::{
        Names, Settings, User,
        setup::{Missing, Setup},
    },
    secret::Secret,
};
use nix::{sys::signal, unistd::Pid};
use serde_json::{Value, json};

use super::{eventually, free_port, peers_dir, rest::Rest};

const LIMIT: Duration = Duration::from_secs(20);

/// What differs from the document's configuration.
#[derive(Default)]
pub(crate) struct NatsOptions {
    /// With the certificate of a private authority; else plaintext.
    pub(crate) tls: bool,
    /// Where the data are, if not beside the configuration.
    pub(crate) store: Option<PathBuf>,
    /// Texts of the configuration, each with what stands in its place.
    pub(crate) replace: Vec<(&'static str, String)>,
}

pub(crate) struct Nats {
    folder: tempfile::TempDir,
    child: Option<Child>,
    port: u16,
    monitor: u16,
    tls: bool,
}

impl Nats {
    pub(crate) async fn start() -> Self {
        Self::start_with(NatsOptions::default()).await
    }

    pub(crate) async fn start_with(options: NatsOptions) -> Self {
        let folder = tempfile::Builder::new().prefix("n").rand_bytes(4).tempdir().unwrap();
        let mut nats = Self { folder, child: None, port: free_port(), monitor: free_port(), tls: options.tls };
        if options.tls {
            certify(nats.folder.path());
        }
        nats.configure(&options);
        nats.start_again().await;
        nats
    }

    /// Writes the configuration; a running server takes it with [`Self::reload`].
    pub(crate) fn configure(&self, options: &NatsOptions) {
        let page = include_str!("../../docs/nats.md");
        let mut text = page.split("```conf\n").nth(1).unwrap().split("```").next().unwrap().to_owned();
        let store = options.store.clone().unwrap_or_else(|| self.folder.path().join("js"));
        let file = |name: &str| self.folder.path().join(name).display().to_string();
        for (from, to) in [
            ("0.0.0.0:4222", format!("127.0.0.1:{}", self.port)),
            ("127.0.0.1:8222", format!("127.0.0.1:{}", self.monitor)),
            ("/var/lib/nats", store.display().to_string()),
            ("/etc/nats/server.pem", file("server.pem")),
            ("/etc/nats/server.key", file("server.key")),
        ] {
            assert!(text.contains(from), "{from} in docs/nats.md");
            text = text.replace(from, &to);
        }
        if !options.tls {
            let (before, after) = text.split_once("tls {").unwrap();
            text = format!("{before}{}", after.split_once('}').unwrap().1);
        }
        for (from, to) in &options.replace {
            assert!(text.contains(from), "{from} in docs/nats.md");
            text = text.replace(from, to);
        }
        fs::write(self.folder.path().join("nats.conf"), text).unwrap();
    }

    pub(crate) fn reload(&self) {
        signal::kill(self.pid(), signal::SIGHUP).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.as_ref().unwrap().id()).unwrap())
    }

    /// Answers on return.
    pub(crate) async fn start_again(&mut self) {
        self.spawn();
        eventually("nats-server answers", LIMIT, async || self.ask("/varz").await.then_some(())).await;
    }

    fn spawn(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.folder.path().join("log")).unwrap();
        let mut command = Command::new(peers_dir().join("tools/bin/nats-server"));
        command.args(["-c", "nats.conf"]).current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        for user in ["ADMIN", "PRODUCER", "WORKER", "SYS"] {
            command.env(format!("NATS_{user}_PASSWORD"), format!("{}-secret", user.to_lowercase()));
        }
        let child = command.spawn().unwrap_or_else(|error| panic!("nats-server: {error}; tests/run.sh nats installs it"));
        self.child = Some(child);
    }

    async fn ask(&self, path: &str) -> bool {
        let rest = Rest::anonymous(&self.monitor_url());
        rest.send(http::Method::GET, path, &[], "".into()).await.is_ok_and(|answer| answer.status.is_success())
    }

    pub(crate) fn kill9(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn stop(&mut self) {
        signal::kill(self.pid(), signal::SIGTERM).unwrap();
        self.child.take().unwrap().wait().unwrap();
    }

    /// It hangs until [`Self::thaw`].
    pub(crate) fn freeze(&self) {
        signal::kill(self.pid(), signal::SIGSTOP).unwrap();
    }

    pub(crate) fn thaw(&self) {
        signal::kill(self.pid(), signal::SIGCONT).unwrap();
    }

    pub(crate) fn monitor_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.monitor)
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn ca_file(&self) -> Option<PathBuf> {
        self.tls.then(|| self.folder.path().join("ca.pem"))
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn settings(&self) -> Settings {
        Settings {
            url: self.url(),
            ca_file: self.ca_file(),
            producer: user("producer"),
            worker: user("worker"),
            names: Names::default(),
            monitor_url: Some(self.monitor_url()),
        }
    }

    /// The controller's settings for it.
    pub(crate) fn env(&self) -> Vec<(&'static str, String)> {
        let mut env = vec![
            ("QUEUE", "jetstream".to_owned()),
            ("NATS_URL", self.url()),
            ("NATS_PRODUCER_USER", "producer".to_owned()),
            ("NATS_PRODUCER_PASSWORD", "producer-secret".to_owned()),
            ("NATS_WORKER_USER", "worker".to_owned()),
            ("NATS_WORKER_PASSWORD", "worker-secret".to_owned()),
            ("NATS_MONITOR_URL", self.monitor_url()),
        ];
        env.extend(self.ca_file().map(|file| ("NATS_CA_FILE", file.display().to_string())));
        env
    }

    /// A client as one of the users.
    pub(crate) async fn client(&self, name: &str) -> async_nats::Client {
        let user = user(name);
        let mut options = async_nats::ConnectOptions::with_user_and_password(user.name, user.password.expose().to_owned())
            .custom_inbox_prefix(format!("_INBOX_{name}"))
            .request_timeout(Some(Duration::from_secs(2)));
        if let Some(file) = self.ca_file() {
            options = options.add_root_certificates(file).require_tls(true);
        }
        options.connect(self.url()).await.unwrap()
    }

    pub(crate) async fn admin(&self) -> Admin {
        Admin(self.client("admin").await)
    }

    /// Stream, consumers and dead letters, by the product's own hand.
    pub(crate) async fn set_up(&self) {
        let setup = Setup::connect(&self.settings(), &user("admin"), 1).await.unwrap();
        let plan = setup.plan(None, Missing::MakeNew).await.unwrap();
        assert!(!plan.refused(), "{plan}");
        setup.carry_out(&plan).await.unwrap();
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
        if std::thread::panicking() {
            let log = self.log();
            eprintln!("nats-server's last rows:\n{}", log.lines().rev().take(20).collect::<Vec<_>>().join("\n"));
        }
    }
}

pub(crate) fn user(name: &str) -> User {
    User { name: name.into(), password: Secret::new(format!("{name}-secret")) }
}

/// Somebody who may do everything, by raw questions: what the product never does must be done somehow.
pub(crate) struct Admin(pub(crate) async_nats::Client);

impl Admin {
    /// `subject` without `$JS.API.`.
    pub(crate) async fn api(&self, subject: &str, question: Value) -> Value {
        let answer = self.0.request(format!("$JS.API.{subject}"), question.to_string().into()).await.unwrap();
        serde_json::from_slice(&answer.payload).unwrap()
    }

    pub(crate) async fn ok(&self, subject: &str, question: Value) -> Value {
        let answer = self.api(subject, question).await;
        assert!(answer.get("error").is_none(), "{subject}: {answer}");
        answer
    }

    pub(crate) async fn config(&self, subject: &str) -> Value {
        self.ok(subject, json!({})).await["config"].clone()
    }

    /// Changes fields of the stream.
    pub(crate) async fn change_stream(&self, stream: &str, change: Value) {
        let mut config = self.config(&format!("STREAM.INFO.{stream}")).await;
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        self.ok(&format!("STREAM.UPDATE.{stream}"), config).await;
    }

    pub(crate) async fn change_consumer(&self, lane: &str, change: Value) {
        let mut config = self.config(&format!("CONSUMER.INFO.CI_RUNNER.{lane}")).await;
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let question = json!({ "stream_name": "CI_RUNNER", "config": config, "action": "update" });
        self.ok(&format!("CONSUMER.DURABLE.CREATE.CI_RUNNER.{lane}"), question).await;
    }

    /// How many messages there are.
    pub(crate) async fn messages(&self, stream: &str) -> u64 {
        self.ok(&format!("STREAM.INFO.{stream}"), json!({})).await["state"]["messages"].as_u64().unwrap()
    }

    /// Publishes with headers, acknowledged.
    pub(crate) async fn publish(&self, subject: &str, headers: &[(&str, &str)], payload: Vec<u8>) {
        let mut map = async_nats::HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, *value);
        }
        let answer = self.0.request_with_headers(subject.to_owned(), map, payload.into()).await.unwrap();
        let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
        assert!(answer.get("error").is_none(), "{subject}: {answer}");
    }
}

/// A private authority, and a certificate of it for 127.0.0.1.
pub(crate) fn certify(folder: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let (key, mut params) = (KeyPair::generate().unwrap(), CertificateParams::default());
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(rcgen::DnType::CommonName, "a private authority");
    fs::write(folder.join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    let server = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&server, &issuer).unwrap();
    fs::write(folder.join("server.pem"), certificate.pem()).unwrap();
    fs::write(folder.join("server.key"), server.serialize_pem()).unwrap();
}
