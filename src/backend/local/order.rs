//! What the controller tells a keeper, and a keeper its init: one line each way over a socket on stdin, so that no secret is ever an argument.
//!
//! The three are the same binary, started one from the other, so the form may change with any version.

use std::{
    io::{self, BufRead as _, Read as _, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::cgroup::CgroupDir;

/// Far above any real order: a few kilobytes.
const MAX_ORDER: u64 = 1 << 20;
const MAX_WORD: u64 = 4096;

/// All that it takes to run one executor.
#[derive(Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) name: String,
    pub(super) state: PathBuf,
    pub(super) command: Vec<String>,
    /// The executor's whole environment, with the capability: this is why it has no `Debug`.
    pub(super) environment: Vec<(String, String)>,
    pub(super) directory: PathBuf,
    pub(super) mode: Mode,
    pub(super) cgroups: Vec<CgroupDir>,
    pub(super) tasks: u64,
    /// The boot id as the controller sees it. In a container a keeper that systemd started may see another one in its mounts.
    pub(super) boot: String,
    /// Unix milliseconds.
    pub(super) deadline_ms: u64,
    /// Milliseconds from the deadline to the end by force.
    pub(super) grace_ms: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Mode {
    Isolated {
        uid: u32,
        /// What lies over what: source and target.
        binds: Vec<(PathBuf, PathBuf)>,
    },
    Unisolated,
}

/// What a keeper says to its controller, and an init to its keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Word {
    Started,
    /// The executor has ended, or never came to run; the text says how.
    Ended(String),
}

impl Order {
    pub(super) fn line(&self) -> io::Result<Zeroizing<Vec<u8>>> {
        let mut line = Zeroizing::new(serde_json::to_vec(self)?);
        line.push(b'\n');
        Ok(line)
    }
}

/// The socket that a helper got as its stdin.
pub(super) fn stdin_socket() -> io::Result<UnixStream> {
    Ok(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// The order, and its line as it came, to be handed on.
pub(super) fn read_order(socket: &UnixStream) -> io::Result<(Order, Zeroizing<Vec<u8>>)> {
    let line = Zeroizing::new(read_line(socket, MAX_ORDER)?);
    Ok((serde_json::from_slice(&line)?, line))
}

/// `None` once the other side is gone.
pub(super) fn read_word(socket: &UnixStream) -> io::Result<Option<Word>> {
    let line = read_line(socket, MAX_WORD)?;
    Ok(Word::parse(&String::from_utf8_lossy(&line)))
}

/// Whoever should hear it may be gone; that changes nothing for the speaker.
pub(super) fn say(mut socket: &UnixStream, word: &Word) {
    let line = match word {
        Word::Started => "started\n".to_owned(),
        Word::Ended(text) => {
            let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect();
            format!("ended {text}\n")
        }
    };
    socket.write_all(line.as_bytes()).ok();
}

impl Word {
    pub(super) fn parse(line: &str) -> Option<Self> {
        match line.trim_end_matches('\n') {
            "started" => Some(Word::Started),
            line => line.strip_prefix("ended ").map(|text| Word::Ended(text.to_owned())),
        }
    }
}

/// One byte at a time would be slow for orders, and a buffer may swallow what follows; nothing follows an order before its answer,
/// and words are read one at a time by whoever waits for them.
fn read_line(socket: &UnixStream, limit: u64) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    if limit == MAX_WORD {
        let mut byte = [0];
        while (line.len() as u64) < limit && !line.ends_with(b"\n") && (&mut &*socket).read(&mut byte)? == 1 {
            line.push(byte[0]);
        }
    } else {
        io::BufReader::new(socket).take(limit).read_until(b'\n', &mut line)?;
    }
    Ok(line)
}
