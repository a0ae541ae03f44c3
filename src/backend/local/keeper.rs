//! The keeper: the process that holds one environment while controllers come and go.
//!
//! It records itself, starts the environment's init, keeps its output within bounds, ends it at its deadline even if no controller lives, and writes
//! down how it ended. It has one thread, since a process that has chosen a new PID namespace cannot make threads. Removing is `end`'s business.

use std::{
    fs::{self, File},
    io::{self, PipeReader, Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    fcntl::{Flock, FlockArg},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        stat::{Mode as FileMode, fstat, umask},
    },
    unistd::{getpid, getsid, setsid},
};

use super::{
    cgroup, init,
    order::{self, Mode, Order, Word},
    state::{self, Durable, KeeperRecord, Layout, Status},
};
use crate::{ids::EnvironmentName, process::ProcessIdentity};

/// At the deadline a living controller asks the job to stop, and can say why in its log; the bridge hears it within 3 s. Only then
/// the keeper does, for one that is dead.
const CONTROLLER_FIRST: Duration = Duration::from_secs(5);
/// Bytes of the executor's own output that are kept.
const MAX_LOG: u64 = 1 << 20;
/// Longest sleep of the loop, so that a wrong clock or a lost wake-up costs little.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// `local-keeper`: reads its order from stdin. To be called before any thread is started.
pub fn keeper_main(_args: Vec<std::ffi::OsString>) -> ExitCode {
    let controller = match prepare() {
        Ok(controller) => controller,
        Err(error) => {
            // Read by nobody, unless systemd started us: then it is in the journal.
            writeln!(io::stderr(), "the keeper of an environment could not begin: {error:#}").ok();
            return ExitCode::FAILURE;
        }
    };
    match keep(&controller) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            order::say(&controller, &Word::Ended(format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Signals are blocked first of all, so that a stop in the first moment is kept, not deadly.
fn prepare() -> Result<UnixStream> {
    signals().thread_block()?;
    // What the controller was started with (a shell's pipe, say) is none of a job's business.
    close_fds::set_fds_cloexec_threadsafe(3, &[]);
    crate::process::harden()?;
    umask(FileMode::from_bits_truncate(0o077));
    // Of a session of its own: what is sent to the controller's group or terminal does not reach the environment. Systemd has made one.
    if getsid(None)? != getpid() {
        setsid().context("leave the controller's session")?;
    }
    Ok(order::stdin_socket()?)
}

fn signals() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect()
}

fn keep(controller: &UnixStream) -> Result<()> {
    let (order, line) = order::read_order(controller).context("read the order")?;
    let name: EnvironmentName = order.name.parse()?;
    let layout = Layout { state: order.state.clone() };
    let Some(_lock) = take(&layout, &name)? else { bail!("this environment has its keeper already, or is gone") };
    let own = ProcessIdentity { boot: order.boot.clone(), ..ProcessIdentity::own()? };
    let mut record = KeeperRecord { keeper: own, init: None, started: false, cgroups: order.cgroups.clone() };
    state::write_json(&layout.keeper(&name), &record, Durable::Boot).context("record the keeper")?;
    // From here on the environment has one keeper, for good; whatever happens, its end is written down.
    let text = match Running::start(&order, &line, &layout, &name, &mut record) {
        Ok(mut running) => {
            drop(line);
            running.watch(controller, &order, &mut record)
        }
        Err(error) => format!("could not start: {error:#}"),
    };
    state::write_json(&layout.status(&name), &Status { text: text.clone() }, Durable::Boot).context("record the end")?;
    order::say(controller, &Word::Ended(text));
    Ok(())
}

/// The right to be this environment's keeper: its lock, if it still lies where the controller put it, and nobody had it or ended
/// the environment before.
fn take(layout: &Layout, name: &EnvironmentName) -> Result<Option<Flock<File>>> {
    let file = match fs::OpenOptions::new().write(true).open(layout.lock(name)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.context("open the environment's lock")?,
    };
    let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { return Ok(None) };
    let removed = fstat(lock.as_fd())?.st_nlink == 0;
    let had = layout.keeper(name).exists() || layout.status(name).exists();
    Ok((!removed && !had).then_some(lock))
}

struct Running {
    init: Child,
    /// To the init: a stop. From it: words.
    socket: UnixStream,
    output: PipeReader,
    log: File,
    logged: u64,
    started: bool,
    stop_asked: bool,
    /// Nothing more comes from the init.
    said_all: bool,
    layout: Layout,
    name: EnvironmentName,
}

impl Running {
    fn start(order: &Order, line: &[u8], layout: &Layout, name: &EnvironmentName, record: &mut KeeperRecord) -> Result<Self> {
        cgroup::create(&order.cgroups)?;
        let log = File::create(layout.log(name)).context("open the executor's log")?;
        let (socket, theirs) = UnixStream::pair()?;
        let (output, input) = io::pipe()?;
        match order.mode {
            Mode::Isolated { .. } => unshare(CloneFlags::CLONE_NEWPID).context("make a PID namespace")?,
            Mode::Unisolated => prctl::set_child_subreaper(true)?,
        }
        let mut command = Command::new("/proc/self/exe");
        command.arg("local-init").env_clear().stdin(Stdio::from(OwnedFd::from(theirs))).stdout(input.try_clone()?).stderr(input);
        let init = command.spawn().context("start the environment's init")?;
        drop(command);
        record.init = ProcessIdentity::of(init.id())?.map(|own| ProcessIdentity { boot: order.boot.clone(), ..own });
        let (layout, name) = (layout.clone(), name.clone());
        let mut running =
            Self { init, socket, output, log, logged: 0, started: false, stop_asked: false, said_all: false, layout, name };
        running.save(record)?;
        running.socket.write_all(line).context("hand on the order")?;
        Ok(running)
    }

    fn save(&self, record: &KeeperRecord) -> Result<()> {
        state::write_json(&self.layout.keeper(&self.name), record, Durable::Boot).context("record the environment's init")
    }

    /// Until the environment has ended; the text says how.
    fn watch(&mut self, controller: &UnixStream, order: &Order, record: &mut KeeperRecord) -> String {
        let outcome = self.watch_until_end(controller, order, record);
        // Whatever went wrong: the init must not outlive the one who keeps it.
        self.init.kill().ok();
        let waited = self.init.wait();
        if matches!(order.mode, Mode::Unisolated) {
            init::kill_descendants();
        }
        self.drain().ok();
        match (outcome, waited) {
            (Ok(text), _) => text,
            (Err(error), _) => format!("lost: {error:#}"),
        }
    }

    fn watch_until_end(&mut self, controller: &UnixStream, order: &Order, record: &mut KeeperRecord) -> Result<String> {
        let signals = SignalFd::with_flags(&signals(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let left = state::from_unix_ms(order.deadline_ms).duration_since(SystemTime::now()).unwrap_or_default();
        let deadline = Instant::now() + left + CONTROLLER_FIRST;
        let by_force = deadline + Duration::from_millis(order.grace_ms);
        let (mut stopped, mut word, mut hung_up) = (None, None, false);
        loop {
            let next = if stopped == Some("deadline") { by_force } else { deadline };
            self.wait_for_news(&signals, next, hung_up)?;
            while let Some(signal) = signals.read_signal()? {
                let is_child = Signal::try_from(i32::try_from(signal.ssi_signo)?).is_ok_and(|signal| signal == Signal::SIGCHLD);
                if !is_child && stopped.is_none() {
                    self.stop();
                    stopped = Some("asked to stop");
                }
            }
            hung_up |= self.copy()?;
            if word.is_none() {
                word = self.listen(controller, record)?;
            }
            if let Some(status) = self.init.try_wait()? {
                // Its last word may have come together with its end.
                let last = match word {
                    None => self.listen(controller, record)?,
                    said => said,
                };
                let text = last.unwrap_or_else(|| format!("its init was killed ({status}); out of memory, perhaps"));
                return Ok(stopped.map_or(text.clone(), |why| format!("{why}: {text}")));
            }
            let now = Instant::now();
            if now >= by_force {
                return Ok("deadline: ended by force, it did not stop when asked".into());
            }
            if now >= deadline && stopped != Some("deadline") {
                self.stop();
                stopped = Some("deadline");
            }
        }
    }

    fn wait_for_news(&self, signals: &SignalFd, next: Instant, hung_up: bool) -> Result<()> {
        let wait = next.saturating_duration_since(Instant::now()).min(LONGEST_WAIT) + Duration::from_millis(1);
        let wait = PollTimeout::try_from(wait)?;
        let mut fds = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        if !self.said_all {
            fds.push(PollFd::new(self.socket.as_fd(), PollFlags::POLLIN));
        }
        if !hung_up {
            fds.push(PollFd::new(self.output.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut fds, wait) {
            Err(nix::errno::Errno::EINTR) | Ok(_) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Nothing is said to an init that has not answered its order yet: the stop waits for that.
    fn stop(&mut self) {
        self.stop_asked = true;
        if !self.started {
            return;
        }
        // An init that is gone needs no stop.
        self.socket.write_all(b"stop\n").ok();
    }

    /// Takes the init's words; the text of the last one if that has come.
    fn listen(&mut self, controller: &UnixStream, record: &mut KeeperRecord) -> Result<Option<String>> {
        while !self.said_all && readable(&self.socket)? {
            match order::read_word(&self.socket)? {
                Some(Word::Started) => {
                    record.started = true;
                    self.save(record)?;
                    order::say(controller, &Word::Started);
                    self.started = true;
                    if self.stop_asked {
                        self.stop();
                    }
                }
                Some(Word::Ended(text)) => {
                    self.said_all = true;
                    return Ok(Some(text));
                }
                None => {
                    self.said_all = true;
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Takes what the executor wrote; `true` once nobody can write any more.
    fn copy(&mut self) -> Result<bool> {
        let mut bytes = [0; 16 << 10];
        if !readable(&self.output)? {
            return Ok(false);
        }
        let len = self.output.read(&mut bytes)?;
        let room = usize::try_from(MAX_LOG - self.logged).unwrap_or(0).min(len);
        let (kept, cut) = bytes[..len].split_at(room);
        // A full disk must not stop the job: what cannot be kept is dropped.
        self.log.write_all(kept).ok();
        self.logged += room as u64;
        if !cut.is_empty() && room > 0 {
            self.log.write_all(b"\n[cut here]\n").ok();
        }
        Ok(len == 0)
    }

    /// What is in the pipe at the end. Bounded, since without isolation a lost process may write on.
    fn drain(&mut self) -> Result<()> {
        for _ in 0..256 {
            if !readable(&self.output)? || self.copy()? {
                break;
            }
        }
        Ok(())
    }
}

fn readable(fd: &impl std::os::fd::AsFd) -> Result<bool> {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut fds, PollTimeout::ZERO)? > 0)
}
