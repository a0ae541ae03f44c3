//! A facade, a Gitea and an executor process around one job, for the stories in `tests/executor.rs`.

use std::{
    collections::BTreeSet,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use buffa::Message as _;
use connectrpc::{ConnectError, Encodable, ErrorCode, PreEncoded, RequestContext, Response, ServiceRequest, ServiceResult};
use gitea_dynamic_runner::{
    names::{env, header},
    proto::{
        answer_with_task,
        environment::{
            EnvironmentService, EnvironmentServiceExt, HelloRequest, HelloResponse, PollRequest, PollResponse, StartRequest,
            StartResponse, StopReason,
        },
        runner::{
            DeclareRequest, DeclareResponse, FetchTaskRequest, FetchTaskResponse, RunnerService, RunnerServiceExt, Task,
            TaskResult, TaskState, UpdateLogRequest, UpdateLogResponse, UpdateTaskRequest, UpdateTaskResponse,
        },
    },
};

pub(crate) const TASK: i64 = 7;
pub(crate) const CAPABILITY: &str = "canary-capability";
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// What the facade (and Gitea behind it) knows, and how it behaves.
#[derive(Default)]
pub(crate) struct Known {
    pub(crate) task: Vec<u8>,
    pub(crate) rows: Vec<String>,
    /// Rows beyond those, which were held against what they must be and not kept: more than a test's memory should hold.
    pub(crate) flood: Option<i64>,
    /// Rows of the flood that came as something else: number and content.
    pub(crate) gaps: Vec<(i64, String)>,
    pub(crate) sealed: bool,
    pub(crate) states: Vec<TaskState>,
    pub(crate) outputs: BTreeSet<String>,
    pub(crate) terminal: Option<Terminal>,
    pub(crate) starts: u32,
    pub(crate) polls: u32,
    /// Nothing is answered but `unavailable`.
    pub(crate) away: bool,
    /// So many requests are carried out and then answered `unavailable`.
    pub(crate) lose_answers: u32,
    pub(crate) deny: bool,
    pub(crate) task_gone: bool,
    pub(crate) stop: StopReason,
    /// The result in answers to UpdateTask.
    pub(crate) answer: TaskResult,
    pub(crate) runner_keeps_order: bool,
    /// While it lives, a terminal report is a fault.
    pub(crate) runner_pid: Option<u32>,
}

#[derive(Debug, Clone)]
pub(crate) struct Terminal {
    pub(crate) state: TaskState,
    pub(crate) runner: String,
    pub(crate) stop_seen: bool,
}

impl Known {
    /// Rows of the log.
    pub(crate) fn held(&self) -> i64 {
        self.rows.len() as i64 + self.flood.unwrap_or_default()
    }
}

/// A kilobyte that says which row it is.
pub(crate) fn flood_row(number: i64) -> String {
    format!("{number:>12} {}", "x".repeat(1011))
}

#[derive(Clone, Default)]
pub(crate) struct Facade(Arc<Mutex<Known>>);

impl Facade {
    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap()
    }

    /// Before a call is carried out.
    fn enter(&self, ctx: &RequestContext) -> Result<MutexGuard<'_, Known>, ConnectError> {
        let known = self.known();
        let is = |name: &str, value: &str| ctx.header(name).is_some_and(|given| given == value);
        if known.deny || !is(header::ASSIGNMENT, "gitea-task-7") || !is(header::CAPABILITY, CAPABILITY) {
            return Err(ConnectError::new(ErrorCode::PermissionDenied, "denied: not the served environment"));
        }
        if known.away {
            return Err(ConnectError::new(ErrorCode::Unavailable, "away"));
        }
        Ok(known)
    }
}

/// After it was carried out.
fn leave<T>(mut known: MutexGuard<'_, Known>, answer: T) -> ServiceResult<T> {
    if known.lose_answers > 0 {
        known.lose_answers -= 1;
        return Err(ConnectError::new(ErrorCode::Unavailable, "answer lost"));
    }
    Response::ok(answer)
}

impl EnvironmentService for Facade {
    async fn hello<'a>(
        &'a self,
        ctx: RequestContext,
        _: ServiceRequest<'_, HelloRequest>,
    ) -> ServiceResult<impl Encodable<HelloResponse> + Send + use<'a>> {
        leave(self.enter(&ctx)?, HelloResponse { server_capabilities: "job-summary".into(), ..Default::default() })
    }

    async fn start<'a>(
        &'a self,
        ctx: RequestContext,
        _: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<impl Encodable<StartResponse> + Send + use<'a>> {
        let mut known = self.enter(&ctx)?;
        known.starts += 1;
        let log_offset = if known.starts > 1 { 2 } else { known.held() };
        leave(known, StartResponse { log_offset, ..Default::default() })
    }

    async fn poll<'a>(
        &'a self,
        ctx: RequestContext,
        _: ServiceRequest<'_, PollRequest>,
    ) -> ServiceResult<impl Encodable<PollResponse> + Send + use<'a>> {
        let mut known = self.enter(&ctx)?;
        known.polls += 1;
        let stop = known.stop.into();
        leave(known, PollResponse { stop, ..Default::default() })
    }
}

impl RunnerService for Facade {
    async fn declare<'a>(
        &'a self,
        _: RequestContext,
        _: ServiceRequest<'_, DeclareRequest>,
    ) -> ServiceResult<impl Encodable<DeclareResponse> + Send + use<'a>> {
        Err::<Response<DeclareResponse>, _>(ConnectError::new(ErrorCode::Internal, "no bridge declares itself"))
    }

    async fn fetch_task<'a>(
        &'a self,
        ctx: RequestContext,
        _: ServiceRequest<'_, FetchTaskRequest>,
    ) -> ServiceResult<impl Encodable<FetchTaskResponse> + Send + use<'a>> {
        let known = self.enter(&ctx)?;
        let answer = PreEncoded::<FetchTaskResponse>::from_bytes_unchecked(answer_with_task(&known.task, 1));
        leave(known, answer)
    }

    async fn update_task<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, UpdateTaskRequest>,
    ) -> ServiceResult<impl Encodable<UpdateTaskResponse> + Send + use<'a>> {
        let mut known = self.enter(&ctx)?;
        if known.task_gone {
            return Err(ConnectError::new(
                ErrorCode::Unknown,
                "rpc error: code = Internal desc = update task: resource does not exist",
            ));
        }
        let request = request.to_owned_message();
        let state = request.state.into_option().unwrap();
        known.outputs.extend(request.outputs.into_keys());
        // The official runner itself reports rows that it has not sent yet.
        for step in state.steps.iter().filter(|_| known.runner_keeps_order) {
            assert!(step.log_index + step.log_length <= known.held(), "a state overtook its rows");
        }
        if state.result != TaskResult::RESULT_UNSPECIFIED && known.terminal.is_none() {
            if let Some(pid) = known.runner_pid {
                assert!(!Path::new(&format!("/proc/{pid}")).exists(), "a verdict while the runner lives");
            }
            let text = |name: &str| ctx.header(name).map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
            let (runner, stop_seen) = (text(header::RUNNER), text(header::STOP_SEEN) == "1");
            known.terminal = Some(Terminal { state: state.clone(), runner, stop_seen });
        }
        known.states.push(state);
        let state = TaskState { id: TASK, result: known.answer.into(), ..Default::default() };
        let sent_outputs = known.outputs.iter().cloned().collect();
        leave(known, UpdateTaskResponse { state: state.into(), sent_outputs, ..Default::default() })
    }

    async fn update_log<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, UpdateLogRequest>,
    ) -> ServiceResult<impl Encodable<UpdateLogResponse> + Send + use<'a>> {
        let mut known = self.enter(&ctx)?;
        assert!(request.bytes().len() <= 2 << 20, "larger than the facade takes");
        let request = request.to_owned_message();
        let held = known.held();
        if request.index <= held && !known.sealed {
            let Known { flood, gaps, rows, .. } = &mut *known;
            for row in request.rows.into_iter().skip((held - request.index) as usize) {
                match flood {
                    Some(number) if row.content != "the end" => {
                        if row.content != flood_row(*number) {
                            gaps.push((*number, row.content));
                        }
                        *number += 1;
                    }
                    _ => rows.push(row.content),
                }
            }
            known.sealed |= request.no_more;
        }
        let ack_index = known.held();
        leave(known, UpdateLogResponse { ack_index, ..Default::default() })
    }
}

/// One job with everything around it. Dropping it kills the executor if it still runs.
pub(crate) struct World {
    pub(crate) facade: Facade,
    pub(crate) folder: tempfile::TempDir,
    executor: Child,
    _runtime: tokio::runtime::Runtime,
}

pub(crate) struct Setup {
    pub(crate) facade: Facade,
    /// A scene of `runner_process`, with its arguments.
    pub(crate) scene: String,
    /// Another program than the scripted runner.
    pub(crate) runner: Option<PathBuf>,
    pub(crate) gitea_url: String,
    /// Where the environment's folder is made.
    pub(crate) base: PathBuf,
}

impl Setup {
    pub(crate) fn new(scene: &str) -> Self {
        let facade = Facade::default();
        facade.known().task = Task { id: TASK, ..Default::default() }.encode_to_vec();
        facade.known().rows = vec!["controller 0".into(), "controller 1".into()];
        facade.known().runner_keeps_order = true;
        Self { facade, scene: scene.into(), runner: None, gitea_url: "http://127.0.0.1:9/".into(), base: std::env::temp_dir() }
    }

    pub(crate) fn start(self) -> World {
        let folder = tempfile::tempdir_in(&self.base).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let service = Arc::new(self.facade.clone());
        let router = EnvironmentServiceExt::register(service.clone(), connectrpc::Router::new());
        let router = RunnerServiceExt::register(service, router);
        let router = axum::Router::new().nest_service("/api/actions", router.into_axum_service());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, router).await });
        let runner = self.runner.unwrap_or_else(|| scripted_runner(folder.path(), &self.scene));
        let executor = test_process("executor_process")
            .envs([
                (env::ASSIGNMENT_ID, "gitea-task-7"),
                (env::CAPABILITY, CAPABILITY),
                (env::SPIFFE_ID, "spiffe://td.test/ci/o/r/build"),
                (env::FACADE_SPIFFE_ID, "spiffe://td.test/controller"),
                (env::SPIFFE_ENDPOINT_SOCKET, "unix:///nowhere"),
                (env::FACADE_URL, &format!("http://{address}")),
                (env::GITEA_URL, &self.gitea_url),
                (env::RUNNER_BIN, runner.to_str().unwrap()),
                (env::WORK_DIRECTORY, folder.path().to_str().unwrap()),
            ])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        World { facade: self.facade, folder, executor, _runtime: runtime }
    }
}

impl World {
    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.facade.known()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.executor.id()
    }

    /// Waits for the executor's end; it must leave no process.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        until("the executor ends", || {
            status = self.executor.try_wait().unwrap();
            status.is_some()
        });
        let folder = self.folder.path().to_str().unwrap();
        assert!(!processes().iter().any(|line| line.contains(folder)), "processes are left: {:?}", processes());
        // There is none where no job could be begun.
        let spool = std::fs::read_dir(self.folder.path().join("spool"));
        assert_eq!(spool.map_or(0, Iterator::count), 0, "the spool is not empty");
        status.unwrap()
    }

    pub(crate) fn rows(&self) -> Vec<String> {
        self.known().rows.iter().skip(2).cloned().collect()
    }

    pub(crate) fn terminal(&self) -> Terminal {
        self.known().terminal.clone().expect("a verdict at the facade")
    }

    /// Address and token of the bridge, once the runner has them.
    pub(crate) fn bridge(&self) -> (String, String) {
        let file = self.folder.path().join("runner/.runner");
        until("the bridge is announced", || std::fs::read_to_string(&file).is_ok_and(|text| text.ends_with('}')));
        let said: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let text = |key: &str| said[key].as_str().unwrap().to_owned();
        (text("address").trim_start_matches("http://").to_owned(), text("token"))
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid() as i32), signal).unwrap();
    }

    /// Lets a runner go on that waits for it.
    pub(crate) fn go(&self) {
        std::fs::write(self.folder.path().join("runner/go"), "").unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Ok(None) = self.executor.try_wait() {
            self.executor.kill().unwrap();
            self.executor.wait().unwrap();
        }
    }
}

/// A test of this binary as a process of its own: the executor kills all that is below it, and that must not be us.
pub(crate) fn test_process(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

fn scripted_runner(folder: &Path, scene: &str) -> PathBuf {
    let path = folder.join("fake-runner");
    let exe = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'gitea-runner version v1.0.8'; exit; fi\n\
         [ \"$1 $2 $3\" = 'daemon --once -c' ] || exit 64\nexport FAKE_RUNNER='{scene}'\n\
         exec '{}' runner_process --exact --ignored --nocapture --test-threads=1 >/dev/null\n",
        exe.display()
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    path
}

/// Command line and working directory of every process that we can see.
fn processes() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    entries
        .filter_map(|path| Some((std::fs::read(path.join("cmdline")).ok()?, std::fs::read_link(path.join("cwd")).ok()?)))
        .map(|(line, cwd)| format!("{} in {}", String::from_utf8_lossy(&line).replace('\0', " "), cwd.display()))
        .collect()
}

/// Looks again and again, for a minute.
pub(crate) fn until(what: &str, mut look: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !look() {
        assert!(Instant::now() < limit, "not within {} s: {what}", LIMIT.as_secs());
        std::thread::sleep(Duration::from_millis(10));
    }
}
