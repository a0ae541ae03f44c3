//! The processes below the executor: found, killed, and reaped.
//!
//! As a child subreaper the executor inherits every orphan of the job, also one that left session and process group; so a walk
//! from the executor downwards finds all of them. That the environment itself is gone is the backend's to prove, not ours.

use std::{collections::BTreeSet, io};

use nix::{
    sys::wait::{WaitPidFlag, waitpid},
    unistd::Pid,
};

use crate::process::{Row, Send, send_to, table};

/// Makes orphans of the job children of this process.
pub(super) fn adopt_orphans() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

/// All running processes below this one, but for `spared`; what is below `spared` counts.
pub(super) fn below(spared: Option<u32>) -> io::Result<Vec<Row>> {
    let table = table()?;
    let mut found = BTreeSet::from([std::process::id()]);
    // Children may have lower pids than parents, so look until nothing new is found; each round finds one or ends.
    loop {
        let before = found.len();
        let children = table.iter().filter(|row| found.contains(&row.parent)).map(|row| row.pid);
        found.extend(children.collect::<Vec<_>>());
        if found.len() == before {
            break;
        }
    }
    found.remove(&std::process::id());
    Ok(table.into_iter().filter(|row| row.runs && found.contains(&row.pid) && Some(row.pid) != spared).collect())
}

/// SIGKILLs those that are still the same processes.
pub(super) fn kill_all(rows: &[Row]) {
    for row in rows {
        if let Err(error) = send_to(row, Send::Kill) {
            tracing::warn!(pid = row.pid, %error, "a process of the job cannot be killed");
        }
    }
}

/// Reaps adopted children that have ended, but for `spared`, whose exit somebody else waits for.
pub(super) fn reap(spared: Option<u32>) {
    // Without a look at the table nothing is reaped; the next look will.
    for row in table().unwrap_or_default() {
        if !row.runs
            && row.parent == std::process::id()
            && Some(row.pid) != spared
            && let Err(error) = waitpid(Pid::from_raw(row.pid.cast_signed()), Some(WaitPidFlag::WNOHANG))
        {
            tracing::debug!(pid = row.pid, %error, "reaped already");
        }
    }
}
