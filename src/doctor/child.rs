//! What only another process can try: namespaces of its own, and a connection as another user.
//!
//! A hidden command of this binary, started by the probes. It changes nothing but itself, says why on standard error, and ends.

use std::{
    ffi::OsString,
    net::{TcpStream, ToSocketAddrs as _},
    process::{ExitCode, Stdio},
    time::Duration,
};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::{Gid, Uid, setgid, setgroups, setuid},
};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Of the whole child.
const LIMIT: Duration = Duration::from_secs(10);

/// `doctor-child namespaces` or `doctor-child reach UID HOST:PORT`. Must run before any thread exists.
#[expect(clippy::print_stderr, reason = "for who started it")]
pub fn child_main(args: &[OsString]) -> ExitCode {
    let words: Vec<&str> = args.iter().filter_map(|word| word.to_str()).collect();
    let done = match words.as_slice() {
        ["namespaces"] => unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID).map_err(|e| e.to_string()),
        ["reach", uid, address] => uid.parse().map_err(|e| format!("{e}")).and_then(|uid| reach(uid, address)),
        _ => Err("this command is for `doctor` alone".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn reach(uid: u32, address: &str) -> Result<(), String> {
    let become_user = || {
        setgroups(&[])?;
        setgid(Gid::from_raw(uid))?;
        setuid(Uid::from_raw(uid))
    };
    become_user().map_err(|e| format!("become the user {uid}: {e}"))?;
    let addresses = address.to_socket_addrs().map_err(|e| format!("look up {address}: {e}"))?;
    let mut why = format!("{address} has no address");
    for one in addresses.take(4) {
        match TcpStream::connect_timeout(&one, CONNECT_LIMIT) {
            Ok(_) => return Ok(()),
            Err(e) => why = format!("connect to {one}: {e}"),
        }
    }
    Err(why)
}

/// Starts it and waits.
pub(super) async fn run(args: &[&str]) -> Result<(), String> {
    let mut command = tokio::process::Command::new("/proc/self/exe");
    command.arg("doctor-child").args(args).env_clear().stdin(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(LIMIT, command.output()).await {
        Ok(Ok(output)) if output.status.success() => Ok(()),
        Ok(Ok(output)) => Err(String::from_utf8_lossy(&output.stderr).trim().chars().take(300).collect()),
        Ok(Err(e)) => Err(format!("start {}: {e}", args.join(" "))),
        Err(_) => Err(format!("no end within {} s", LIMIT.as_secs())),
    }
}
