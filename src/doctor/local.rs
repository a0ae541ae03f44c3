//! This machine: the state folder with its disk and keys, and whether environments can be kept apart here.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    fcntl::OFlag,
    sys::{
        statfs::{TMPFS_MAGIC, statfs},
        statvfs::statvfs,
    },
    unistd::{AccessFlags, Uid, User, access, geteuid},
};

use super::{Item, World, child};
use crate::{
    assignment::seal::SealKeys,
    backend::local::{Isolation, Keepers},
    claims::CapabilityKey,
    config::CREDENTIALS_FILE,
    queue::MIN_FREE_BYTES,
};

/// A checkout with its packages has as many files.
const MIN_FREE_INODES: u64 = 20_000;
/// An fsync that takes longer holds up every job.
const SLOW: Duration = Duration::from_millis(500);

pub(super) fn state(world: &World) -> Vec<Item> {
    let folder = &world.config.state_directory;
    if !folder.is_absolute() {
        return vec![Item::unknown("state", "there is no state folder to look at", "set STATE_DIRECTORY")];
    }
    if !folder.exists() {
        let to_do = format!(
            "make it (`install -d -m 711 {0}`), or correct STATE_DIRECTORY: `register` and the controller use the same",
            folder.display()
        );
        return vec![Item::todo("state", format!("{} is not there", folder.display()), to_do)];
    }
    let mut items = vec![modes(world, folder), durable(folder), space(folder)];
    items.extend(keys(world));
    items
}

fn modes(world: &World, folder: &Path) -> Item {
    let (name, private) = ("state", &world.private);
    let shown = folder.display();
    if access(folder, AccessFlags::W_OK | AccessFlags::X_OK).is_err() {
        return Item::todo(
            name,
            format!("{shown} cannot be written by this user"),
            "run as the controller's user, or give the folder to it",
        );
    }
    if let Ok(meta) = fs::metadata(private) {
        if meta.mode() & 0o077 != 0 {
            let to_do = format!("chmod 700 {}", private.display());
            return Item::todo(name, format!("{} is open to others, and keys are in it", private.display()), to_do);
        }
        let us = geteuid();
        if !us.is_root() && meta.uid() != us.as_raw() {
            let said = format!("{} belongs to the user {}, and we are {us}", private.display(), meta.uid());
            return Item::todo(name, said, "run as the controller's user");
        }
    }
    let local = &world.config.local;
    let isolated = matches!(Isolation::choose(local.without_isolation, local.executor_uid), Ok(Isolation::UidPerSlot { .. }));
    let canonical = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    let closed = canonical.ancestors().find(|at| fs::metadata(at).is_ok_and(|meta| meta.permissions().mode() & 0o001 == 0));
    if let Some(closed) = closed.filter(|_| isolated) {
        let said = format!("jobs have users of their own, and these cannot pass through {}", closed.display());
        return Item::todo(name, said, format!("chmod o+x {}, or choose another STATE_DIRECTORY", closed.display()));
    }
    if statfs(folder).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC) {
        return Item::note(
            name,
            format!("{shown} is in memory: jobs that wait are lost when the machine restarts"),
            "choose a STATE_DIRECTORY on a disk",
        );
    }
    Item::fine(name, format!("{shown} is ours"))
}

/// By a file without a name, which nobody sees and which is gone when it is closed.
fn durable(folder: &Path) -> Item {
    let name = "state.fsync";
    let began = Instant::now();
    let written =
        OpenOptions::new().write(true).custom_flags(OFlag::O_TMPFILE.bits()).mode(0o600).open(folder).and_then(|mut file| {
            file.write_all(&[0; 4096])?;
            file.sync_all()
        });
    let shown = folder.display();
    match written {
        Ok(()) if began.elapsed() > SLOW => Item::note(
            name,
            format!("one write to the disk of {shown} took {} ms", began.elapsed().as_millis()),
            "every job waits for such writes: choose a faster disk for STATE_DIRECTORY",
        ),
        Ok(()) => Item::fine(name, format!("the disk takes a write in {} ms", began.elapsed().as_millis())),
        Err(e) if e.kind() == std::io::ErrorKind::Unsupported => Item::unknown(
            name,
            format!("{shown}: its file system has no unnamed files to try with"),
            "the controller's own first write tells",
        ),
        Err(e) => Item::todo(
            name,
            format!("{shown} cannot be written: {e}"),
            "free some space, or mount it writable; nothing is fetched until it can be written",
        ),
    }
}

fn space(folder: &Path) -> Item {
    let (name, shown) = ("state.disk", folder.display());
    let stats = match statvfs(folder) {
        Ok(stats) => stats,
        Err(e) => return Item::unknown(name, format!("read the free space of {shown}: {e}"), "look at it with `df`"),
    };
    let free = stats.blocks_available().saturating_mul(stats.fragment_size());
    if free < MIN_FREE_BYTES {
        let said = format!("{} MiB are free at {shown}, {} MiB are needed to take jobs", free >> 20, MIN_FREE_BYTES >> 20);
        return Item::todo(name, said, "free some space; a running controller goes on by itself then");
    }
    // File systems without a fixed number of inodes say 0 of 0.
    if stats.files() > 0 && stats.files_available() < MIN_FREE_INODES {
        let said = format!("{} files more fit into the file system of {shown}", stats.files_available());
        return Item::todo(name, said, "remove files, or use a file system with more inodes: one checkout may have as many");
    }
    Item::fine(name, format!("{} MiB are free", free >> 20))
}

/// What a kept key is read by; its error has nothing of the key in it.
type Parse = fn(&str) -> Result<(), String>;

fn keys(world: &World) -> Vec<Item> {
    let own = |name: &str| world.private.join(name);
    let files = &world.config.keys;
    let seal = files.seal.clone().unwrap_or_else(|| own("seal.key"));
    let capability = files.capability.clone().unwrap_or_else(|| own("capability.key"));
    let parses: [(&std::path::PathBuf, Parse); 2] =
        [(&seal, |text| SealKeys::parse(text).map(drop)), (&capability, |text| CapabilityKey::parse(text).map(drop))];
    let waits = own("queue.redb").exists() || own("outbox.redb").exists();
    let mut items: Vec<Item> = parses.iter().filter_map(|(path, parse)| key(path, *parse, waits)).collect();
    let credentials = world.config.state_directory.join(CREDENTIALS_FILE);
    items.extend(open_to_others(&credentials));
    items.extend(open_to_others(&own("ca/ca.pem")));
    if items.is_empty() {
        items.push(Item::fine("state.keys", "keys and credentials are for this user only"));
    }
    items
}

/// A fault, if there is one.
fn key(path: &Path, parse: Parse, waits: bool) -> Option<Item> {
    let (name, shown) = ("state.keys", path.display());
    let text = match fs::read_to_string(path).map(zeroize::Zeroizing::new) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !waits => return None,
        Err(e) => {
            let to_do = "put it back from a backup: what was sealed with it, and environments that run, need it";
            return Some(Item::todo(name, format!("{shown} cannot be read: {e}"), to_do));
        }
    };
    if let Err(why) = parse(&text) {
        return Some(Item::todo(name, format!("{shown} holds no key: {why}"), "put it back from a backup"));
    }
    open_to_others(path)
}

fn open_to_others(path: &Path) -> Option<Item> {
    let mode = fs::metadata(path).ok()?.permissions().mode();
    let said = || format!("{} can be read by others (mode {:o})", path.display(), mode & 0o777);
    (mode & 0o077 != 0).then(|| Item::todo("state.keys", said(), format!("chmod 600 {}", path.display())))
}

pub(super) async fn isolation(world: &Arc<World>) -> Vec<Item> {
    let (name, local) = ("isolation", &world.config.local);
    let base = match Isolation::choose(local.without_isolation, local.executor_uid) {
        Ok(Isolation::UidPerSlot { base }) => base,
        Ok(Isolation::Unisolated) => {
            let said = "LOCAL_UNISOLATED=1: every job can read everything of this user, the runner's credentials included";
            return vec![Item::note(name, said, "start as root, unless this is for trying things out")];
        }
        Err(why) => return vec![Item::todo(name, why, "run `doctor` as the controller's user, too")],
    };
    if matches!(Keepers::here(), Keepers::Units { .. }) {
        let said = format!("users from {base} on, in units of their own that systemd starts");
        return vec![Item::fine(name, said), uids(world, base)];
    }
    let mut items = vec![match child::run(&["namespaces"]).await {
        Ok(()) => Item::fine(name, format!("users from {base} on, with namespaces of their own")),
        Err(why) => Item::todo(
            name,
            format!("a namespace cannot be made: {why}"),
            "let the service make PID and mount namespaces (in a container: CAP_SYS_ADMIN; sysctl user.max_pid_namespaces), or set LOCAL_UNISOLATED=1",
        ),
    }];
    items.push(uids(world, base));
    items
}

fn uids(world: &World, base: u32) -> Item {
    let name = "isolation.users";
    let slots = world.config.backends().map(|backend| backend.capacity).sum::<usize>().max(1);
    let last = base.saturating_add(u32::try_from(slots).unwrap_or(u32::MAX)).saturating_sub(1);
    let known: Vec<String> =
        (base..=last).filter_map(|uid| User::from_uid(Uid::from_raw(uid)).ok()?.map(|user| user.name)).collect();
    if known.is_empty() {
        return Item::fine(name, format!("the user ids {base} to {last} are nobody's"));
    }
    let said = format!("of the user ids {base} to {last} some are people's or services': {}", known.join(", "));
    Item::note(name, said, "they are left out, so other ids are used; set POD_EXECUTOR_UID to a range that nobody has")
}
