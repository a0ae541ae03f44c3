//! What is kept: the queue here or in NATS, the mirror, and the authority of identities.
//!
//! Beside a running controller its databases are left alone, and it is asked itself. Otherwise they are looked at in memory.

use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{Item, World, blocking};
use crate::{
    config::QueueConfig,
    identity::authority::Authority,
    mirror,
    queue::{
        jetstream::{self, ACCEPTED_FILE, Accepted, Found, KNOWN_FILE},
        look::{self, Looked},
    },
};

pub(super) fn lock_of(queue: &QueueConfig) -> &'static str {
    match queue {
        QueueConfig::Embedded => "queue.redb.lock",
        QueueConfig::JetStream(_) => "outbox.redb.lock",
    }
}

/// Who holds the lock, found in the kernel's list: trying it could meet a controller that starts.
pub(super) fn running(lock: &Path) -> Option<u32> {
    let lock = fs::canonicalize(lock).ok()?;
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let holders =
        locks.lines().filter(|line| line.contains("FLOCK")).filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
    holders.into_iter().find(|pid: &u32| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.filter_map(|file| fs::read_link(file.path()).ok()).any(|target| target == lock)
    })
}

pub(super) async fn queue(world: &Arc<World>) -> Vec<Item> {
    match &world.config.queue {
        QueueConfig::Embedded => blocking(world, |world| vec![file(world, "queue", "queue.redb", look::embedded)]).await,
        QueueConfig::JetStream(settings) => {
            let outbox = blocking(world, |world| vec![file(world, "queue", "outbox.redb", look::outbox)]);
            let read =
                |name: &str| -> Option<Accepted> { serde_json::from_slice(&fs::read(world.private.join(name)).ok()?).ok() };
            let (known, accepted) = (read(KNOWN_FILE), read(ACCEPTED_FILE));
            let (outbox, nats) = tokio::join!(outbox, jetstream::examine(settings, known.as_ref(), accepted.as_ref()));
            outbox.into_iter().chain(nats.into_iter().map(|(name, found)| of_nats(name, found))).collect()
        }
    }
}

/// A finding has its way out in it.
fn of_nats(name: &'static str, found: Found) -> Item {
    let more = "docs/nats.md has the server's configuration and what each error means";
    match found {
        Found::Fine => Item::fine(
            name,
            match name {
                "nats.connection" => "both users are let in",
                "nats.publish" => "the producer may put assignments in",
                "nats.stream" => "stream and consumers are as nats-setup makes them",
                _ => "the server writes to its disk before it acknowledges",
            },
        ),
        Found::Weak(said) => Item::note(name, said, more),
        Found::Unknown(said) => Item::unknown(name, said, more),
        Found::Bad(said) => Item::todo(name, said, more),
    }
}

fn file(world: &World, name: &'static str, file: &str, look: fn(&Path) -> Looked) -> Item {
    if let Some(pid) = world.running {
        return Item::fine(name, format!("{file} is open in the running controller ({pid})"));
    }
    let path = world.private.join(file);
    let shown = path.display();
    match look(&path) {
        Looked::Fine(waiting) => Item::fine(name, format!("{shown} can be read; {waiting} assignment(s) in it")),
        Looked::Missing => Item::fine(name, format!("{shown} is not there yet: the first start makes it")),
        Looked::Large(bytes) => Item::unknown(
            name,
            format!("{shown} has {} MiB, too many to be looked at in memory", bytes >> 20),
            "start the controller: it checks the file whole",
        ),
        Looked::Newer(layout) => Item::todo(
            name,
            format!("{shown} has the layout {layout}, which a newer version of this program has made"),
            "run that version again; to go back for good, first let all jobs end under it, then move the file away",
        ),
        Looked::Unreadable(why) => Item::todo(
            name,
            format!("{shown} cannot be read: {why}"),
            "run as the controller's user; if it is damaged, move it away, and cancel and run again the jobs that Gitea shows as running without a log",
        ),
    }
}

pub(super) fn mirror(world: &World) -> Vec<Item> {
    let path = world.private.join(mirror::FILE);
    if !path.exists() {
        return vec![Item::fine("mirror", format!("{} is not there yet: the first start makes it", path.display()))];
    }
    let opened = std::panic::catch_unwind(|| mirror::Reader::open(&path).map(drop));
    vec![match opened
        .unwrap_or_else(|_| Err(format!("{} is damaged: the controller sets it aside when it starts", path.display())))
    {
        Ok(()) => Item::fine("mirror", format!("{} can be read", path.display())),
        Err(why) if why.contains("newer") => Item::todo(
            "mirror",
            why,
            "run that version again, or set the mirror aside with `rebuild-mirror`: no job depends on it",
        ),
        Err(why) => Item::note("mirror", why, "nothing: no job depends on it, and the controller makes it anew"),
    }]
}

/// Its certificate is made anew by the running controller well before this.
const CA_NOTICE: Duration = Duration::from_secs(24 * 3600);

pub(super) fn identity(world: &World) -> Vec<Item> {
    let name = "identity";
    let folder = world.private.join("ca");
    vec![match Authority::look(&folder, &world.config.identity.trust_domain) {
        Ok(None) => Item::fine(name, "there is no authority yet: the first start makes it"),
        Ok(Some(until)) => match until.duration_since(SystemTime::now()) {
            Ok(left) if left > CA_NOTICE => Item::fine(
                name,
                format!("the authority of {} signs for {} days", world.config.identity.trust_domain, left.as_secs() / 86_400),
            ),
            Ok(_) => {
                Item::note(name, "the authority's certificate ends within a day", "start the controller: it has a successor made")
            }
            Err(_) if world.running.is_some() => Item::todo(
                name,
                "the authority's certificate has ended, though the controller runs",
                "look at this machine's clock, and restart the controller",
            ),
            Err(_) => Item::note(
                name,
                "the authority's certificate has ended while nothing ran",
                "nothing: the next start makes a new one",
            ),
        },
        Err(why) => Item::todo(name, why.to_string(), "put private/ca back from a backup, or correct TRUST_DOMAIN"),
    }]
}
