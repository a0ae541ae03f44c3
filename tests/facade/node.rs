//! A facade with all that it needs, for the stories of `tests/facade`: the embedded authority's identities over real mTLS, a queue on disk,
//! the stand-in forge as Gitea. Only the backend is a list in memory.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use async_trait::async_trait;
use gitea_dynamic_runner::{
    assignment::{Assignment, Rules},
    backend::{Backend, BackendError, Ensured, EnvironmentSpec, Gone, JobNeeds, Mark, Observed},
    claims::{CapabilityKey, Claim, ClaimPhase, Claims, Offered},
    demo::forge::{Forge, ForgeConfig, JobId, JobSpec, JobView},
    executor::facade::Facade as Client,
    facade::Facade,
    gitea::{RpcError, RpcFault, RunnerRpc},
    identity::{self, Identity, ServeLimits, authority::Authority},
    ids::{BackendKind, EnvironmentName, InstanceId, Lane, Nonce, TaskId},
    leader::LeaderPass,
    metrics::{Metrics, ReasonLabel},
    names::header,
    proto::runner::{LogRow, StepState, TaskResult, TaskState, UpdateLogRequest, UpdateTaskRequest},
    queue::{AssignmentQueue, embedded::EmbeddedQueue, held::Leases},
    secret::{Secret, SecretBytes},
};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

pub(crate) const TRUST_DOMAIN: &str = "test.example";
pub(crate) const FACADE: &str = "spiffe://test.example/dynamic-runner/facade";
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Which environments have which marks.
#[derive(Default)]
pub(crate) struct Marks(Mutex<HashMap<String, Vec<Mark>>>);

impl Marks {
    pub(crate) fn of(&self, name: &EnvironmentName) -> Vec<Mark> {
        self.0.lock().unwrap().get(name.as_str()).cloned().unwrap_or_default()
    }

    fn known(&self, name: &EnvironmentName) {
        self.0.lock().unwrap().entry(name.to_string()).or_default();
    }
}

/// The facade only marks; whoever asks for more has left its room.
#[async_trait]
impl Backend for Marks {
    fn kind(&self) -> BackendKind {
        BackendKind::Pod
    }

    fn refuses(&self, _: &JobNeeds) -> Option<String> {
        unreachable!("the facade judges no job")
    }

    async fn list(&self) -> Result<Vec<Observed>, BackendError> {
        unreachable!("the facade lists no environments")
    }

    async fn ensure(&self, _: &EnvironmentSpec, _: &LeaderPass) -> Result<(Ensured, Observed), BackendError> {
        unreachable!("the facade makes no environments")
    }

    async fn mark(&self, name: &EnvironmentName, mark: Mark, _: &LeaderPass) -> Result<(), BackendError> {
        let mut known = self.0.lock().unwrap();
        let marks = known.get_mut(name.as_str()).ok_or(BackendError::NotFound)?;
        if !marks.contains(&mark) {
            marks.push(mark);
        }
        Ok(())
    }

    async fn ensure_halted(&self, _: &EnvironmentName, _: &LeaderPass) -> Result<Gone, BackendError> {
        unreachable!("the facade ends no environments")
    }

    async fn ask_stop(&self, _: &EnvironmentName, _: &LeaderPass) -> Result<(), BackendError> {
        unreachable!("the facade stops no environments")
    }

    async fn ensure_gone(&self, _: &EnvironmentName, _: &LeaderPass) -> Result<Gone, BackendError> {
        unreachable!("the facade ends no environments")
    }

    async fn changed(&self) {}
}

/// A controller's node with the facade served on it.
pub(crate) struct Node {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) forge: Forge,
    pub(crate) claims: Claims,
    pub(crate) queue: Arc<dyn AssignmentQueue>,
    pub(crate) backend: Arc<Marks>,
    pub(crate) metrics: Metrics,
    pub(crate) url: String,
    pub(crate) gitea: RunnerRpc,
    authority: Authority,
    leases: Leases,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

/// One served environment: what its executor knows.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) task: TaskId,
    /// The task as Gitea gave it.
    pub(crate) raw: Vec<u8>,
    pub(crate) name: EnvironmentName,
    pub(crate) spiffe_id: String,
    pub(crate) tls: Arc<rustls::ClientConfig>,
    pub(crate) capability: Secret,
    /// With its own certificate, assignment and capability.
    pub(crate) client: Client,
}

impl Node {
    pub(crate) async fn new() -> Self {
        let node = Self::not_counted().await;
        node.claims.counted();
        node
    }

    /// As a controller that has just started, and has not yet counted its environments.
    pub(crate) async fn not_counted() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let forge = Forge::start(ForgeConfig::default()).await.unwrap();
        let (uuid, token) = forge.new_runner("controller", &[]);
        let gitea = RunnerRpc::to_gitea(&forge.url(), None, Some((&uuid, &token))).unwrap();
        let labels = ["self-hosted", "pod"].map(str::to_owned);
        gitea.declare("test", &labels, &["cancelling".into()]).await.unwrap();
        let queue = EmbeddedQueue::open(&folder.path().join("queue.redb")).unwrap();
        let pass = LeaderPass::of_database(&queue);
        let queue: Arc<dyn AssignmentQueue> = Arc::new(queue);
        let (claims, metrics, leases) = (Claims::new(CapabilityKey::random()), Metrics::new(), Leases::default());
        let backend = Arc::new(Marks::default());
        let facade = Facade {
            mirror: gitea_dynamic_runner::mirror::Mirror::none(),
            rpc: gitea.clone(),
            claims: claims.clone(),
            queue: Arc::clone(&queue),
            leases: leases.clone(),
            backends: HashMap::from([(BackendKind::Pod, Arc::clone(&backend) as Arc<dyn Backend>)]),
            pass,
            metrics: metrics.clone(),
            server_capabilities: tokio::sync::watch::channel("job-summary".to_owned()).1,
        };
        let authority = Authority::open(&folder.path().join("ca"), TRUST_DOMAIN).unwrap();
        let identity = identity_of(&authority, &folder.path().join("f.sock"), FACADE).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let limits = ServeLimits {
            connections: 64,
            connections_per_peer: 64,
            handshake: Duration::from_secs(10),
            max_age: Duration::from_secs(3600),
        };
        let serving = tokio::spawn(identity::serve(listener, identity.server_config(), facade.router(), limits, stop.clone()));
        Self { folder, forge, claims, queue, backend, metrics, url, gitea, authority, leases, stop, serving }
    }

    /// A job that Gitea gave to the controller, leased, with an environment that is offered its task.
    pub(crate) async fn offered(&self, spec: JobSpec) -> Job {
        let id = self.forge.push([spec]).jobs[0];
        let raw = self.gitea.fetch_task(0).await.unwrap().task.expect("the job's task").expose().to_vec();
        let rules = Rules { trust_domain: TRUST_DOMAIN.into(), vm_label: "vm".into() };
        let made = Assignment::of_task(raw.clone(), &rules, 0).unwrap();
        assert_eq!((made.lane, self.forge.job(id).unwrap().task), (Lane::Pod, Some(made.task)));
        self.queue.publish(Lane::Pod, made.task, b"sealed").await.unwrap();
        self.leases.hold(self.queue.lease(Lane::Pod, LIMIT).await.unwrap().expect("a lease"));
        let nonce = Nonce::random();
        let name = EnvironmentName::new(&InstanceId::of_uuid("test"), made.task, &nonce);
        self.backend.known(&name);
        let claim = Claim {
            assignment: made.id,
            backend: BackendKind::Pod,
            name: name.clone(),
            nonce: nonce.clone(),
            spiffe_id: made.spiffe_id.clone(),
            steps: made.steps,
            phase: ClaimPhase::Offered { raw: SecretBytes::new(raw.clone()) },
            offered_at: Instant::now(),
            heard_at: Instant::now(),
            fetched_at: SystemTime::now(),
            token_hash: Some(made.token_hash),
            stop: None,
            superseded: false,
            known_steps: Vec::new(),
        };
        assert_eq!(self.claims.offer(claim), Offered::Now);
        let tls = self.tls(&nonce, &made.spiffe_id).await;
        let capability = self.claims.key().capability(made.id, &nonce);
        let client = self.client(&tls, made.task, &capability);
        Job { id, task: made.task, raw, name, spiffe_id: made.spiffe_id, tls, capability, client }
    }

    /// As [`Self::offered`], and its executor has called `start`.
    pub(crate) async fn started(&self, spec: JobSpec) -> Job {
        let job = self.offered(spec).await;
        job.client.start().await.unwrap();
        job
    }

    /// A certificate of `spiffe_id` from the socket of an environment.
    pub(crate) async fn tls(&self, nonce: &Nonce, spiffe_id: &str) -> Arc<rustls::ClientConfig> {
        let socket = self.folder.path().join(format!("{nonce}.sock"));
        identity_of(&self.authority, &socket, spiffe_id).await.client_config(FACADE)
    }

    pub(crate) fn client(&self, tls: &Arc<rustls::ClientConfig>, task: TaskId, capability: &Secret) -> Client {
        Client::new(&self.url, Arc::clone(tls), task.assignment(), capability).unwrap()
    }

    pub(crate) fn view(&self, job: &Job) -> JobView {
        self.forge.job(job.id).unwrap()
    }

    /// How often the facade refused for a reason.
    pub(crate) fn denied(&self, reason: &'static str) -> u64 {
        self.metrics.facade_denied.get_or_create(&ReasonLabel { reason }).get()
    }

    /// The end of every story: `last` is let go, and nothing runs any more.
    pub(crate) async fn end<T>(self, last: T) {
        self.stop.cancel();
        tokio::time::timeout(LIMIT, self.serving).await.expect("the facade ends").unwrap();
        self.authority.shutdown().await;
        self.forge.go_down().await;
        drop((self.forge, self.gitea, self.authority, self.folder, last));
        eventually("all tasks have ended", async || tokio::runtime::Handle::current().metrics().num_alive_tasks() == 0).await;
    }
}

/// One connection of an environment, held open.
pub(crate) struct Connection {
    sender: hyper::client::conn::http1::SendRequest<Full<bytes::Bytes>>,
    headers: [(&'static str, String); 2],
}

impl Connection {
    pub(crate) async fn of(node: &Node, job: &Job) -> Self {
        let tcp = TcpStream::connect(node.url.trim_start_matches("https://")).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let tls = tokio_rustls::TlsConnector::from(Arc::clone(&job.tls)).connect(name, tcp).await.unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls)).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        let headers =
            [(header::ASSIGNMENT, job.task.assignment().to_string()), (header::CAPABILITY, job.capability.expose().to_owned())];
        Self { sender, headers }
    }

    /// The status of an answer to Hello.
    pub(crate) async fn hello(&mut self) -> anyhow::Result<http::StatusCode> {
        self.sender.ready().await?;
        let mut request = hyper::Request::post("/api/actions/environment.v1.EnvironmentService/Hello").header("host", "facade");
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let request = request.header("content-type", "application/json").body(Full::new("{}".into()))?;
        let answer = tokio::time::timeout(LIMIT, self.sender.send_request(request)).await??;
        let status = answer.status();
        answer.into_body().collect().await?;
        Ok(status)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

/// Every call that an environment has, about `task`, with what became of it.
pub(crate) async fn every_call(client: &Client, task: TaskId) -> Vec<(&'static str, Result<(), RpcError>)> {
    vec![
        ("Hello", client.hello().await.map(|_| ())),
        ("FetchTask", client.fetch_task().await.map(|fetched| assert!(fetched.task.is_none(), "a task was given out"))),
        ("Start", client.start().await.map(|_| ())),
        ("Poll", client.poll().await.map(|_| ())),
        ("UpdateLog", client.update_log(row(task, 0, "forged")).await.map(|_| ())),
        ("UpdateTask", client.update_task(state(task, TaskResult::RESULT_FAILURE), &[]).await.map(|_| ())),
    ]
}

/// Each call is denied for good, with these words.
pub(crate) async fn all_denied(client: &Client, task: TaskId, words: &str) {
    for (call, answer) in every_call(client, task).await {
        let error = answer.expect_err(call);
        assert_eq!((error.fault, error.message.as_str()), (RpcFault::Denied, words), "{call}");
    }
}

/// After its connections were closed: waits until a call is denied, and not lost with one of them.
pub(crate) async fn denied_anew(client: &Client) {
    let denied = async || client.hello().await.is_err_and(|error| error.fault == RpcFault::Denied);
    eventually("a denial on a new connection", denied).await;
}

/// One log row.
pub(crate) fn row(task: TaskId, index: i64, text: &str) -> UpdateLogRequest {
    let row = LogRow { content: text.to_owned(), ..Default::default() };
    UpdateLogRequest { task_id: task.0, index, rows: vec![row], ..Default::default() }
}

/// A state with one step that has the same result.
pub(crate) fn state(task: TaskId, result: TaskResult) -> UpdateTaskRequest {
    let step = StepState { id: 0, result: result.into(), ..Default::default() };
    let state = TaskState { id: task.0, result: result.into(), steps: vec![step], ..Default::default() };
    UpdateTaskRequest { state: state.into(), ..Default::default() }
}

pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn identity_of(authority: &Authority, socket: &Path, id: &str) -> Identity {
    authority.ensure_socket(socket, id, None).await.unwrap();
    Identity::connect(&format!("unix://{}", socket.display()), TRUST_DOMAIN, id, LIMIT).await.unwrap()
}
