//! The init: the first process of one environment. When it ends, all of the environment has ended.
//!
//! As root it is PID 1 of a PID namespace, so the kernel kills whatever is left (`setsid`, double forks and ignored signals included); without root it
//! is a subreaper that kills its whole tree. It makes the namespace's mounts, drops every right but the slot's uid, and runs the executor.

use std::{
    io::{self, Write as _},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::Path,
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        resource::{Resource, setrlimit},
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        stat::{Mode as FileMode, umask},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::{
    cgroup,
    order::{self, Mode, Order, Word},
};
use crate::process::{self, Send};

/// Longest time to kill a tree that grows while it is killed.
const KILL_LIMIT: Duration = Duration::from_secs(20);
/// How much a job may keep in `/dev/shm`; its memory limit counts it too.
const SHM: &str = "mode=1777,size=1g";

/// `local-init`: reads its order from stdin. To be called before any thread is started.
pub fn init_main(_args: Vec<std::ffi::OsString>) -> ExitCode {
    let Ok(keeper) = order::stdin_socket() else { return ExitCode::FAILURE };
    let text = run(&keeper).unwrap_or_else(|error| format!("could not start: {error:#}"));
    order::say(&keeper, &Word::Ended(text));
    ExitCode::SUCCESS
}

fn run(keeper: &UnixStream) -> Result<String> {
    process::harden()?;
    // Two ways to notice the keeper's death, since this one does not cover a death before this line: the socket's end is the other.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    SigSet::empty().thread_set_mask()?;
    let (order, line) = order::read_order(keeper).context("read the order")?;
    drop(line);
    cgroup::enter(&order.cgroups)?;
    match &order.mode {
        Mode::Isolated { binds, .. } => make_mounts(binds)?,
        Mode::Unisolated => {
            // Without root this process shares its uid with the job; if it had to die before its tree, the tree would be lost.
            prctl::set_pdeathsig(None)?;
            prctl::set_child_subreaper(true)?;
        }
    }
    let executor = spawn(&order)?;
    order::say(keeper, &Word::Started);
    let unisolated = matches!(order.mode, Mode::Unisolated);
    drop(order);
    let text = watch(keeper, &executor);
    if unisolated {
        kill_descendants();
    }
    text
}

/// Nothing of these mounts is seen outside, and they vanish with the last process here.
fn make_mounts(binds: &[(std::path::PathBuf, std::path::PathBuf)]) -> Result<()> {
    const NONE: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC).context("make a mount namespace")?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE).context("make the mounts private")?;
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("proc"), "/proc", Some("proc"), safe | MsFlags::MS_NOEXEC, NONE).context("mount the environment's own /proc")?;
    for (source, target) in binds {
        mount(Some(source.as_path()), target.as_path(), NONE, MsFlags::MS_BIND, NONE)
            .with_context(|| format!("give the environment a {} of its own", target.display()))?;
    }
    if Path::new("/dev/shm").is_dir() {
        mount(Some("shm"), "/dev/shm", Some("tmpfs"), safe, Some(SHM)).context("mount the environment's own /dev/shm")?;
    }
    Ok(())
}

fn spawn(order: &Order) -> Result<Child> {
    umask(FileMode::from_bits_truncate(0o022));
    prctl::set_no_new_privs()?;
    let (program, args) = order.command.split_first().context("the executor's command is empty")?;
    let mut command = Command::new(program);
    command.args(args).env_clear().envs(order.environment.iter().map(|(k, v)| (k, v))).current_dir(&order.directory);
    command.stdin(Stdio::null());
    if let Mode::Isolated { uid, .. } = order.mode {
        setrlimit(Resource::RLIMIT_NPROC, order.tasks, order.tasks)?;
        // As root, std also drops all supplementary groups when a uid is set.
        command.uid(uid).gid(uid);
    }
    command.spawn().with_context(|| format!("run {program}"))
}

/// Reaps whatever becomes ours, hands on a stop, and returns how the executor ended. Also ends when the keeper is gone.
fn watch(keeper: &UnixStream, executor: &Child) -> Result<String> {
    let pid = Pid::from_raw(i32::try_from(executor.id())?);
    let mask: SigSet = [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    mask.thread_block()?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    loop {
        if let Some(text) = reap(pid)? {
            return Ok(text);
        }
        let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(keeper.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(Duration::from_secs(30))?) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let spoken = fds[1].any().unwrap_or(false);
        while signals.read_signal()?.is_some() {}
        if spoken {
            // One word only, whatever it is; its absence means that the keeper is gone, and the environment ends here.
            let mut word = [0; 64];
            match io::Read::read(&mut &*keeper, &mut word) {
                Ok(0) | Err(_) => return Ok("its keeper was killed".into()),
                // Not reaped yet (that happens above, in this thread only), so the pid is still the executor's.
                Ok(_) => ask(pid),
            }
        }
    }
}

fn ask(executor: Pid) {
    // It may have ended just now; then it needs no asking.
    kill(executor, Signal::SIGTERM).ok();
}

fn reap(executor: Pid) -> Result<Option<String>> {
    loop {
        let status = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(None),
            Err(Errno::EINTR) => continue,
            other => other?,
        };
        match status {
            WaitStatus::Exited(pid, code) if pid == executor => return Ok(Some(describe(ExitStatus::from_raw(code << 8)))),
            WaitStatus::Signaled(pid, signal, _) if pid == executor => {
                return Ok(Some(describe(ExitStatus::from_raw(signal as i32))));
            }
            _ => {}
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (_, Some(signal)) => {
            format!("signal {signal}{}", Signal::try_from(signal).map(|s| format!(" ({s})")).unwrap_or_default())
        }
        _ => status.to_string(),
    }
}

/// Kills every descendant of this process (a subreaper, so that none escapes by a double fork) and reaps them.
pub(super) fn kill_descendants() {
    let until = Instant::now() + KILL_LIMIT;
    while Instant::now() < until {
        // Frozen first: what does not run cannot fork away from the next look.
        let mut frozen = Vec::new();
        while let Ok(rows) = descendants()
            && rows.iter().any(|row| !frozen.contains(row))
            && Instant::now() < until
        {
            for row in rows.into_iter().filter(|row| !frozen.contains(row)).collect::<Vec<_>>() {
                process::send_to(&row, Send::Freeze).ok();
                frozen.push(row);
            }
        }
        for row in &frozen {
            process::send_to(row, Send::Kill).ok();
        }
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => break,
                Err(Errno::ECHILD) => return,
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    writeln!(io::stderr(), "some processes of this environment could not be killed").ok();
}

fn descendants() -> io::Result<Vec<process::Row>> {
    let rows = process::table()?;
    let mut found = vec![std::process::id()];
    let mut tree: Vec<process::Row> = Vec::new();
    loop {
        let before = tree.len();
        for row in &rows {
            if row.runs && found.contains(&row.parent) && !found.contains(&row.pid) {
                found.push(row.pid);
                tree.push(row.clone());
            }
        }
        if tree.len() == before {
            return Ok(tree);
        }
    }
}
