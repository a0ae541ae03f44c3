//! The end of an environment: all of it, and nothing else.
//!
//! One pass does what it can within a few seconds and says whether anything is left; asking again goes on where it stopped, also after a crash,
//! because the record is the last thing to go. Nothing that a job wrote is believed here.

use std::{
    fs::{self, File},
    io,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use nix::fcntl::{Flock, FlockArg};

use super::{
    cgroup,
    remove::{Removed, remove_tree},
    state::{self, Durable, KeeperRecord, Layout, Record, Status},
    unit,
};
use crate::{
    backend::Gone,
    failpoint, files,
    ids::EnvironmentName,
    process::{self, ProcessIdentity, Send},
};

/// How long one pass tries before it says `Leaving`.
const PASS: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// Logs of environments that no job ever ran in are kept, the newest of them: they say why.
const KEPT_LOGS: usize = 64;

/// One pass towards no process: `Gone` once none is left, and then none starts any more. Record and folder stay.
pub(super) fn halt(layout: &Layout, name: &EnvironmentName) -> io::Result<Gone> {
    let Some(record) = layout.read_record(name)? else { return Ok(Gone::Gone) };
    let halted = halted(layout, name, &record, Instant::now() + PASS)?;
    Ok(if halted.is_some() { Gone::Gone } else { Gone::Leaving })
}

/// One pass towards nothing. `claimed`: a job ran in it, so that its log goes too.
pub(super) fn end(layout: &Layout, name: &EnvironmentName, claimed: bool) -> io::Result<Gone> {
    let Some(record) = layout.read_record(name)? else { return Ok(Gone::Gone) };
    let until = Instant::now() + PASS;
    let Some(_lock) = halted(layout, name, &record, until)? else { return Ok(Gone::Leaving) };
    if remove_tree(&layout.env_root(), name.as_str(), until)? == Removed::Partly {
        return Ok(Gone::Leaving);
    }
    failpoint::reached("local.emptied");
    state::unlink(&layout.socket(name))?;
    state::unlink(&layout.order_socket(name))?;
    if claimed {
        state::unlink(&layout.log(name))?;
    }
    prune_logs(&layout.logs())?;
    layout.remove_records(name)?;
    failpoint::reached("local.forgotten");
    // A crash before this line may bring the record back: then it names an environment of which nothing is left, and ends once more.
    files::sync_folder_of(&layout.record(name))?;
    Ok(Gone::Gone)
}

/// Kills all of it. The lock that it returns keeps late keepers out while it is held, the status that it writes for ever.
fn halted(layout: &Layout, name: &EnvironmentName, record: &Record, until: Instant) -> io::Result<Option<Flock<File>>> {
    let this_boot = record.boot == process::boot_id()?;
    let keeper = state::read_json::<KeeperRecord>(&layout.keeper(name));
    // Of an earlier boot no process is left, and the file may be half written.
    let keeper = if this_boot { keeper? } else { keeper.unwrap_or_default() };
    if let Some(keeper) = &keeper {
        kill(keeper, record)?;
    }
    // A keeper that has the lock but is not on record yet is met at the next pass.
    let file = state::open_lock(&layout.lock(name))?;
    let lock = wait_for(until, || Ok(Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock).ok()))?;
    let Some(lock) = lock else { return Ok(None) };
    let init = keeper.as_ref().and_then(|keeper| keeper.init.as_ref());
    let gone = wait_for(until, || Ok((is_gone(init)? && nobody_left(layout, name, record, keeper.as_ref())?).then_some(())))?;
    if gone.is_none() {
        return Ok(None);
    }
    // Its unit ended with its keeper. One that was asked for and has not begun yet is stopped here.
    if this_boot
        && let Some(unit) = &record.unit
        && !unit::ensure_stopped(unit, until)?
    {
        return Ok(None);
    }
    if this_boot && !layout.status(name).exists() {
        state::write_json(&layout.status(name), &Status { text: "ended by the controller".into() }, Durable::Boot)?;
    }
    Ok(Some(lock))
}

fn kill(keeper: &KeeperRecord, record: &Record) -> io::Result<()> {
    keeper.keeper.send(Send::Kill)?;
    // Without a namespace the init must live on until it has killed its tree, which it does when its keeper is gone.
    if let (Some(init), Some(_)) = (&keeper.init, record.uid) {
        init.send(Send::Kill)?;
    }
    Ok(())
}

fn is_gone(process: Option<&ProcessIdentity>) -> io::Result<bool> {
    process.map_or(Ok(true), |process| Ok(!process.is_alive()?))
}

/// Kills what is left in the environment's groups and of its uid; `true` once there was nothing.
fn nobody_left(layout: &Layout, name: &EnvironmentName, record: &Record, keeper: Option<&KeeperRecord>) -> io::Result<bool> {
    let mut nobody = true;
    for dir in keeper.map(|keeper| keeper.cgroups.as_slice()).unwrap_or_default() {
        nobody &= cgroup::remove(&dir.path)?;
    }
    let folder = layout.env(name);
    for row in process::table()?.into_iter().filter(|row| row.runs && row.pid != std::process::id()) {
        let ours = match record.uid {
            Some(uid) => process::uids_of(row.pid)?.is_some_and(|(real, effective)| real == uid || effective == uid),
            // A trace that most processes carry: enough for a stray that outlived its init, no proof.
            None => lies_in(row.pid, &folder),
        };
        if ours {
            nobody = false;
            process::send_to(&row, Send::Kill)?;
        }
    }
    Ok(nobody)
}

/// Whether a process works in the folder or has it as its HOME.
fn lies_in(pid: u32, folder: &Path) -> bool {
    let home = format!("HOME={}", folder.join("home").display());
    fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
        || fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|all| all.split(|b| *b == 0).any(|variable| variable == home.as_bytes()))
}

fn wait_for<T>(until: Instant, mut look: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
    loop {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        sleep(LOOK_AGAIN);
    }
}

fn prune_logs(folder: &Path) -> io::Result<()> {
    let mut logs = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // One that another pass removes right now is no fault.
        if let Ok(time) = entry.metadata().and_then(|m| m.modified()) {
            logs.push((time, entry.path()));
        }
    }
    logs.sort();
    for (_, path) in logs.iter().rev().skip(KEPT_LOGS) {
        state::unlink(path)?;
    }
    Ok(())
}
