//! What this machine says about a process, and what a process does to protect itself.
//!
//! A pid alone names nobody: it is given again. Boot, pid, start time and uid together name exactly one process, and nothing here sends a
//! signal before all four agree, through a pidfd that was opened first. Used by the controller, by the local backend's helpers and by the executor.

use std::{fs, io, os::fd::OwnedFd};

use nix::{
    errno::Errno,
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// One process of one boot; written down, it still names the same process or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: u32,
    /// Clock ticks from boot to its start (field 22 of `/proc/PID/stat`, proc(5)).
    pub start: u64,
    /// Its real uid.
    pub uid: u32,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
}

/// Which signal to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Send {
    /// SIGTERM.
    Terminate,
    /// SIGSTOP.
    Freeze,
    /// SIGKILL.
    Kill,
}

/// What became of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    Sent,
    /// That process has ended; whoever has its pid now got nothing.
    Ended,
}

/// A line of the process table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub pid: u32,
    pub parent: u32,
    pub start: u64,
    /// Whether it can still run; a zombie cannot.
    pub runs: bool,
}

impl ProcessIdentity {
    /// Of a process that runs now; `None` if there is none (a zombie counts as none).
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        let boot = boot_id()?;
        let Some(row) = table_row(pid)?.filter(|row| row.runs) else { return Ok(None) };
        let Some(uid) = uid_of(pid)? else { return Ok(None) };
        Ok(Some(Self { pid, start: row.start, uid, boot }))
    }

    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id())?.ok_or_else(|| io::Error::other("this process is not in /proc"))
    }

    /// Whether exactly this process still runs. An error means unknown.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(Self::of(self.pid)?.is_some_and(|now| now == *self))
    }

    /// Sends a signal to exactly this process.
    pub fn send(&self, signal: Send) -> io::Result<Sent> {
        // The pidfd comes first: from then on the number can be given to somebody else without harm.
        let Some(process) = open(self.pid)? else { return Ok(Sent::Ended) };
        if !self.is_alive()? {
            return Ok(Sent::Ended);
        }
        deliver(&process, signal)
    }
}

/// Makes this process unreadable to others of its uid (memory, environment) and forbids core files. Call it before a secret is read.
pub fn harden() -> io::Result<()> {
    prctl::set_dumpable(false)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    Ok(())
}

/// This boot's id.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Every process that this one can see.
pub fn table() -> io::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        rows.extend(table_row(pid)?);
    }
    Ok(rows)
}

/// Real and effective uid of a process's status; `None` if it is gone.
pub fn uids_of(pid: u32) -> io::Result<Option<(u32, u32)>> {
    let Some(status) = read(pid, "status")? else { return Ok(None) };
    let mut uids =
        status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default().split_whitespace().map(str::parse);
    match (uids.next(), uids.next()) {
        (Some(Ok(real)), Some(Ok(effective))) => Ok(Some((real, effective))),
        _ => Err(io::Error::other(format!("/proc/{pid}/status has no Uid line"))),
    }
}

/// Sends a signal to the process that a row of the table showed, if it is still that one.
pub fn send_to(row: &Row, signal: Send) -> io::Result<Sent> {
    let Some(process) = open(row.pid)? else { return Ok(Sent::Ended) };
    match table_row(row.pid)? {
        Some(now) if now.start == row.start => deliver(&process, signal),
        _ => Ok(Sent::Ended),
    }
}

fn uid_of(pid: u32) -> io::Result<Option<u32>> {
    Ok(uids_of(pid)?.map(|(real, _)| real))
}

/// One process's line; `None` if it is gone.
pub fn table_row(pid: u32) -> io::Result<Option<Row>> {
    read(pid, "stat")?.map(|stat| parse(pid, &stat)).transpose()
}

/// The command name is in parentheses and may hold anything, so the fields are counted from the last one.
fn parse(pid: u32, stat: &str) -> io::Result<Row> {
    let fields: Vec<&str> = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    match (fields.first(), number(1).and_then(|n| u32::try_from(n).ok()), number(19)) {
        (Some(state), Some(parent), Some(start)) => Ok(Row { pid, parent, start, runs: !matches!(*state, "Z" | "X" | "x") }),
        _ => Err(io::Error::other(format!("/proc/{pid}/stat has an unknown form"))),
    }
}

fn read(pid: u32, file: &str) -> io::Result<Option<String>> {
    match fs::read(format!("/proc/{pid}/{file}")) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(None),
        Err(e) => Err(e),
    }
}

fn open(pid: u32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        // EINVAL: the number is a thread's now, so the process is gone.
        Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn deliver(process: &OwnedFd, signal: Send) -> io::Result<Sent> {
    let signal = match signal {
        Send::Terminate => Signal::TERM,
        Send::Freeze => Signal::STOP,
        Send::Kill => Signal::KILL,
    };
    match pidfd_send_signal(process, signal) {
        Ok(()) => Ok(Sent::Sent),
        Err(rustix::io::Errno::SRCH) => Ok(Sent::Ended),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_command_name_cannot_forge_the_fields() {
        let stat = "7 (x) Z 1 1 (y) S 42 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2";
        assert_eq!(parse(7, stat).unwrap(), Row { pid: 7, parent: 42, start: 987_654, runs: true });
        assert!(parse(7, "7 (x").is_err());
    }

    #[test]
    fn a_signal_reaches_exactly_the_process_that_was_meant() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let right = ProcessIdentity::of(child.id()).unwrap().unwrap();
        for wrong in [
            ProcessIdentity { start: right.start + 1, ..right.clone() },
            ProcessIdentity { uid: right.uid + 1, ..right.clone() },
            ProcessIdentity { boot: "another".into(), ..right.clone() },
        ] {
            assert!(!wrong.is_alive().unwrap());
            assert_eq!(wrong.send(Send::Kill).unwrap(), Sent::Ended);
        }
        assert!(child.try_wait().unwrap().is_none(), "a wrong identity killed it");
        assert_eq!(right.send(Send::Kill).unwrap(), Sent::Sent);
        child.wait().unwrap();
        assert_eq!(right.send(Send::Kill).unwrap(), Sent::Ended);
        assert!(!right.is_alive().unwrap());
    }
}
