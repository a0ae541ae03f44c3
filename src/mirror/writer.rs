//! The one thread that writes: notes come in over a bounded channel and go to disk together.
//!
//! Whatever fails here makes the mirror stale and nothing else: notes are counted and dropped, the file is opened again after a
//! pause, set aside if it cannot be trusted, and `reconcile` brings the missing facts back. A job whose note was lost may have
//! been started since, so its envelope goes, too: it must not be queued again from here.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use redb::Database;
use tokio::sync::{mpsc, oneshot};

use super::{
    Note, Shared, apply, file,
    file::{Found, Trouble},
    now_ms,
    rows::Tables,
};
use crate::{failpoint, metrics::ReasonLabel};

/// How long the first note of a transaction waits for others: a commit costs the disk two flushes.
const LINGER: Duration = Duration::from_millis(25);
/// Notes of one transaction at most.
const TOGETHER: usize = 256;
/// A file that failed is opened again at most this often.
const REOPEN_PAUSE: Duration = Duration::from_secs(10);
/// Jobs remembered whose notes were lost; above it, any may be.
const MISSED_MOST: usize = 10_000;

pub(super) enum Order {
    Note(Box<Note>),
    /// Answered when everything before it is on disk, or was dropped.
    Flush(oneshot::Sender<()>),
    /// As `Flush`, and the file is closed for good.
    Close(oneshot::Sender<()>),
}

/// Jobs of which a note was lost since the last write.
#[derive(Debug, Default)]
pub(super) struct Missed {
    tasks: BTreeSet<i64>,
    all: bool,
}

impl Missed {
    pub(super) fn add(&mut self, task: i64) {
        if self.tasks.len() < MISSED_MOST {
            self.tasks.insert(task);
        } else {
            self.all = true;
        }
    }

    fn is_empty(&self) -> bool {
        self.tasks.is_empty() && !self.all
    }
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    /// Held, not read.
    _lock: File,
    /// Of the file as we left it: another under its name, or one that somebody else wrote to, is not ours any more.
    place: Option<Place>,
    next_try: Option<Instant>,
    warned: bool,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, lock: File) -> Self {
        Self { shared, _lock: lock, place: None, next_try: None, warned: false }
    }

    /// Until it is told to close, or nobody can tell it anything any more.
    pub(super) fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        while let Some(first) = orders.blocking_recv() {
            std::thread::sleep(LINGER);
            let mut batch = vec![first];
            while batch.len() < TOGETHER
                && let Ok(order) = orders.try_recv()
            {
                batch.push(order);
            }
            let (mut notes, mut waiting, mut closing) = (Vec::new(), Vec::new(), false);
            for order in batch {
                match order {
                    Order::Note(note) => notes.push(*note),
                    Order::Flush(done) => waiting.push(done),
                    Order::Close(done) => {
                        closing = true;
                        waiting.push(done);
                    }
                }
            }
            if !notes.is_empty() {
                failpoint::reached("mirror.noted");
            }
            self.write(&notes);
            if self.is_open() && self.shared.missed().is_empty() {
                self.shared.current_ms.store(now_ms(), Ordering::Relaxed);
            }
            for note in &notes {
                self.shared.payload_bytes.fetch_sub(note.payload_len(), Ordering::Relaxed);
            }
            if closing {
                self.close();
            }
            for done in waiting {
                // Whoever waited may have given up.
                done.send(()).ok();
            }
            if closing {
                return;
            }
        }
        self.close();
    }

    /// Opens the file for the first time; only what forbids a start is an error.
    pub(super) fn open_first(&mut self) -> Result<(), Trouble> {
        match self.open() {
            Err(trouble @ (Trouble::Newer(_) | Trouble::InUse(_))) => Err(trouble),
            Err(trouble) => {
                self.failed(&trouble);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn write(&mut self, notes: &[Note]) {
        self.check_place();
        if !self.ensure_open() {
            return self.drop_notes(notes);
        }
        if notes.is_empty() && self.shared.missed().is_empty() {
            return;
        }
        match self.commit(notes) {
            Ok(()) => {}
            Err(Trouble::Damaged(why)) => {
                self.distrust(&why);
                // Into the new file, once: if that fails, too, it is the disk.
                if !self.ensure_open() || self.commit(notes).is_err() {
                    self.drop_notes(notes);
                }
            }
            Err(trouble) => {
                self.failed(&trouble);
                self.drop_notes(notes);
            }
        }
    }

    fn commit(&mut self, notes: &[Note]) -> Result<(), Trouble> {
        let missed = std::mem::take(&mut *self.shared.missed());
        let database = self.shared.database.read().unwrap_or_else(PoisonError::into_inner);
        let Some(database) = database.as_ref() else { return Err(Trouble::Unavailable("it is not open".into())) };
        let written = file::write(database, |txn| {
            let mut tables = Tables::open(txn)?;
            if missed.all {
                tables.drop_all_payloads()?;
            }
            for task in &missed.tasks {
                tables.drop_payload(crate::ids::TaskId(*task))?;
            }
            notes.iter().try_for_each(|note| apply::apply(&mut tables, note))
        });
        match &written {
            Ok(()) => {
                let now = now_ms();
                self.shared.metrics.mirror_last_write.set(now as f64 / 1000.0);
                self.warned = false;
                self.place = place(&self.shared.path).or(self.place);
            }
            Err(_) => {
                let mut now_missed = self.shared.missed();
                now_missed.all |= missed.all;
                missed.tasks.into_iter().for_each(|task| now_missed.add(task));
            }
        }
        written
    }

    /// Somebody may have removed, replaced or cut the file under us; writing on would write to nowhere.
    fn check_place(&mut self) {
        if self.is_open() && self.place.is_some() && place(&self.shared.path) != self.place {
            self.put(None);
            self.next_try = None;
        }
    }

    fn is_open(&self) -> bool {
        self.shared.database.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn ensure_open(&mut self) -> bool {
        if self.is_open() {
            return true;
        }
        if self.next_try.is_some_and(|at| at > Instant::now()) {
            return false;
        }
        match self.open() {
            Ok(()) => true,
            Err(trouble) => {
                self.failed(&trouble);
                false
            }
        }
    }

    fn open(&mut self) -> Result<(), Trouble> {
        let was_open = self.place.is_some();
        let (database, found) = file::open(&self.shared.path, &self.shared.instance, now_ms())?;
        let reason = match found {
            Found::Whole => None,
            Found::SetAside(reason) => Some(reason),
            Found::Nothing if was_open => Some("vanished"),
            Found::Nothing => None,
        };
        if let Some(reason) = reason {
            self.shared.metrics.mirror_rebuilds.get_or_create(&ReasonLabel { reason }).inc();
        }
        if reason == Some("vanished") {
            tracing::warn!("the mirror's file vanished while we ran; it is made anew, and timelines begin again");
        }
        self.place = place(&self.shared.path);
        self.put(Some(database));
        self.next_try = None;
        Ok(())
    }

    /// The file opens, and still what is in it makes no sense.
    fn distrust(&mut self, why: &str) {
        self.put(None);
        self.next_try = None;
        match file::aside(&self.shared.path, "damaged", why, now_ms()) {
            Ok(_) => {
                self.shared.metrics.mirror_rebuilds.get_or_create(&ReasonLabel { reason: "damaged" }).inc();
                // A new one is no second loss.
                self.place = None;
            }
            Err(trouble) => self.failed(&trouble),
        }
    }

    fn failed(&mut self, trouble: &Trouble) {
        self.put(None);
        self.next_try = Some(Instant::now() + REOPEN_PAUSE);
        self.shared.metrics.mirror_write_errors.inc();
        if !self.warned {
            self.warned = true;
            tracing::warn!(?trouble, "failed to write the mirror; jobs go on, what is shown of them is old until it works again");
        }
    }

    fn drop_notes(&self, notes: &[Note]) {
        for note in notes {
            self.shared.lost(note.task.0);
        }
    }

    fn put(&self, database: Option<Database>) {
        let mut place = self.shared.database.write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *place, database);
        drop(place);
        // Closing writes, and a file that was cut under us may make it panic.
        if catch_unwind(AssertUnwindSafe(|| drop(old))).is_err() {
            tracing::debug!("the mirror's file did not close well");
        }
    }

    fn close(&mut self) {
        self.put(None);
    }
}

/// Device, number, length, and when it was written last.
type Place = (u64, u64, u64, (i64, i64));

fn place(path: &Path) -> Option<Place> {
    let meta = fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.len(), (meta.mtime(), meta.mtime_nsec())))
}
