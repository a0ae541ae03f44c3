//! Where spooled log rows lie: the oldest in memory, the others in files of the environment's own folder.
//!
//! First in, first out, and a row's place never changes: a row that finds no room (disk full) or cannot be read back becomes
//! an empty row, the first of which says so, because the indices of all later rows hang on it (rule R11). Which row Gitea has
//! is the spool's knowledge, not this one's.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use buffa::Message as _;
use buffa_types::google::protobuf::Timestamp;

use crate::proto::runner::LogRow;

/// What a row costs in memory beside its bytes.
const ROW_OVERHEAD: usize = 40;

/// How much is spooled where.
#[derive(Debug, Clone, Copy)]
pub struct StoreLimits {
    /// Bytes of rows in memory; what comes beyond goes to disk.
    pub memory: usize,
    /// Bytes of one file; a file is removed once its last row is in memory again.
    pub segment: u64,
    /// Bytes of the disk that are left free: the job needs them more than its log does.
    pub disk_reserve: u64,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { memory: 8 << 20, segment: 4 << 20, disk_reserve: 64 << 20 }
    }
}

pub(super) struct RowStore {
    folder: PathBuf,
    limits: StoreLimits,
    head: VecDeque<Item>,
    head_bytes: usize,
    tail: VecDeque<Chunk>,
    files_made: u64,
    rows: u64,
}

enum Item {
    Row(Box<[u8]>),
    Lost(Lost),
}

/// A run of rows that are gone; the first to be sent carries the note.
struct Lost {
    rows: u64,
    note: Option<String>,
}

enum Chunk {
    File(Segment),
    Lost(Lost),
}

/// `u32` length (little endian) and an encoded LogRow, again and again.
struct Segment {
    path: PathBuf,
    file: File,
    read: u64,
    written: u64,
    rows: u64,
}

impl RowStore {
    /// `folder` must exist and be this environment's own.
    pub(super) fn new(folder: &Path, limits: StoreLimits) -> Self {
        let (head, tail) = (VecDeque::new(), VecDeque::new());
        Self { folder: folder.to_owned(), limits, head, head_bytes: 0, tail, files_made: 0, rows: 0 }
    }

    /// Rows held, lost ones included.
    pub(super) fn len(&self) -> u64 {
        self.rows
    }

    /// Appends one row. Never fails: see the head of this file.
    pub(super) fn push(&mut self, row: &LogRow) {
        self.rows += 1;
        let bytes = row.encode_to_vec();
        if self.tail.is_empty() && self.head_bytes + bytes.len() <= self.limits.memory {
            self.head_bytes += bytes.len() + ROW_OVERHEAD;
            self.head.push_back(Item::Row(bytes.into_boxed_slice()));
        } else if let Err(error) = self.spill(&bytes) {
            self.lose_at_end(&error);
        }
    }

    /// `rows` rows before the first one, of which nothing is known any more.
    pub(super) fn push_front_lost(&mut self, rows: u64, note: String) {
        if rows > 0 {
            self.rows += rows;
            self.head.push_front(Item::Lost(Lost { rows, note: Some(note) }));
        }
    }

    /// Rows from the first on, at least one if there is one, within both limits; `max_bytes` counts encoded bytes.
    pub(super) fn peek(&mut self, max_rows: u64, max_bytes: usize) -> Vec<LogRow> {
        self.fill();
        let mut taken = Vec::new();
        let mut bytes = 0;
        for item in &self.head {
            let room = max_rows.saturating_sub(taken.len() as u64);
            let row_bytes = if let Item::Row(row) = item { row.len() + 8 } else { 32 };
            if room == 0 || (bytes + row_bytes > max_bytes && !taken.is_empty()) {
                break;
            }
            match item {
                Item::Row(row) => {
                    bytes += row_bytes;
                    // Our own bytes always decode; were they damaged, an empty row keeps the later ones in their places.
                    taken.push(LogRow::decode_from_slice(row).unwrap_or_else(|_| placeholder("")));
                }
                Item::Lost(lost) => {
                    let fits = (max_bytes.saturating_sub(bytes) / row_bytes).max(1) as u64;
                    let rows = lost.rows.min(room).min(fits);
                    bytes += usize::try_from(rows).unwrap_or(usize::MAX).saturating_mul(row_bytes);
                    taken.push(placeholder(lost.note.as_deref().unwrap_or_default()));
                    taken.extend((1..rows).map(|_| placeholder("")));
                    if rows < lost.rows {
                        break;
                    }
                }
            }
        }
        taken
    }

    /// Forgets the first `rows` rows.
    pub(super) fn trim(&mut self, mut rows: u64) {
        rows = rows.min(self.rows);
        self.rows -= rows;
        while rows > 0 {
            match self.head.front_mut() {
                Some(Item::Lost(lost)) if lost.rows > rows => {
                    lost.rows -= rows;
                    lost.note = None;
                    rows = 0;
                }
                Some(Item::Lost(lost)) => {
                    rows -= lost.rows;
                    self.head.pop_front();
                }
                Some(Item::Row(row)) => {
                    self.head_bytes = self.head_bytes.saturating_sub(row.len() + ROW_OVERHEAD);
                    rows -= 1;
                    self.head.pop_front();
                }
                // What is trimmed was peeked, so it is in memory; were it not, the tail is loaded on.
                None if self.tail.is_empty() => return,
                None => self.fill(),
            }
        }
    }

    /// Forgets everything and removes the files.
    pub(super) fn clear(&mut self) {
        self.rows = 0;
        self.head.clear();
        self.head_bytes = 0;
        for chunk in self.tail.drain(..) {
            if let Chunk::File(segment) = chunk {
                segment.remove();
            }
        }
    }

    /// Moves rows from disk to memory until half of it is used.
    fn fill(&mut self) {
        while self.head_bytes < self.limits.memory / 2 || self.head.is_empty() {
            match self.tail.front_mut() {
                None => return,
                Some(Chunk::Lost(_)) => {
                    if let Some(Chunk::Lost(lost)) = self.tail.pop_front() {
                        self.head.push_back(Item::Lost(lost));
                    }
                }
                Some(Chunk::File(segment)) => {
                    match segment.next() {
                        Ok(row) => {
                            self.head_bytes += row.len() + ROW_OVERHEAD;
                            self.head.push_back(Item::Row(row));
                        }
                        Err(error) => {
                            tracing::warn!(rows = segment.rows, %error, "log rows cannot be read back from the spool");
                            let note = format!("[{} log rows are missing here: read spool: {error}]", segment.rows);
                            self.head.push_back(Item::Lost(Lost { rows: segment.rows, note: Some(note) }));
                            segment.rows = 0;
                        }
                    }
                    if segment.rows == 0
                        && let Some(Chunk::File(done)) = self.tail.pop_front()
                    {
                        done.remove();
                    }
                }
            }
        }
    }

    fn spill(&mut self, row: &[u8]) -> io::Result<()> {
        let free = nix::sys::statvfs::statvfs(&self.folder)?;
        #[expect(clippy::useless_conversion, reason = "these types differ between platforms")]
        let free = u64::from(free.blocks_available()).saturating_mul(u64::from(free.fragment_size()));
        if free < self.limits.disk_reserve.saturating_add(row.len() as u64) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "the disk is full"));
        }
        let fits = matches!(self.tail.back(), Some(Chunk::File(last)) if last.written < self.limits.segment);
        if !fits {
            let path = self.folder.join(format!("rows-{:06}", self.files_made));
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            self.files_made += 1;
            self.tail.push_back(Chunk::File(Segment { path, file, read: 0, written: 0, rows: 0 }));
        }
        match self.tail.back_mut() {
            Some(Chunk::File(last)) => last.append(row),
            _ => Err(io::Error::other("no file to write to")),
        }
    }

    fn lose_at_end(&mut self, error: &io::Error) {
        if let Some(Chunk::File(empty)) = self.tail.pop_back_if(|last| matches!(last, Chunk::File(s) if s.rows == 0)) {
            empty.remove();
        }
        if let Some(Chunk::Lost(lost)) = self.tail.back_mut() {
            lost.rows += 1;
            return;
        }
        tracing::warn!(%error, "log rows are dropped: the spool cannot be written");
        let note = format!("[log rows are missing from here on: write spool: {error}]");
        self.tail.push_back(Chunk::Lost(Lost { rows: 1, note: Some(note) }));
    }
}

impl Drop for RowStore {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Segment {
    fn append(&mut self, row: &[u8]) -> io::Result<()> {
        let len = u32::try_from(row.len()).map_err(io::Error::other)?;
        let record = [&len.to_le_bytes(), row].concat();
        // A write that fails half-way is written over by the next: `written` moves only after a whole record.
        self.file.write_all_at(&record, self.written)?;
        self.written += record.len() as u64;
        self.rows += 1;
        Ok(())
    }

    fn next(&mut self) -> io::Result<Box<[u8]>> {
        let mut len = [0; 4];
        self.file.read_exact_at(&mut len, self.read)?;
        let len = u64::from(u32::from_le_bytes(len));
        // A job of the same user can write into the file; a length beyond its end must not become an allocation.
        if self.read + 4 + len > self.written {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "damaged file"));
        }
        let mut row = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut row, self.read + 4)?;
        self.read += 4 + len;
        self.rows -= 1;
        Ok(row.into_boxed_slice())
    }

    fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(%error, "a spool file stays until the environment is removed");
        }
    }
}

/// A row of ours, with the present time.
pub(super) fn placeholder(content: &str) -> LogRow {
    LogRow { time: Timestamp::from(SystemTime::now()).into(), content: content.to_owned(), ..Default::default() }
}
