//! Private files that are replaced whole or not at all, for every room that keeps some.
//!
//! What is in them, and who may change them at the same time, is for the rooms. Folders are made elsewhere: their modes differ.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// What a written file outlives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durable {
    /// A crash of the machine.
    Disk,
    /// A crash of the process; worth nothing after a boot.
    Boot,
}

/// Replaces `path` by a file that only we may read (0600). There is one writer at a time. We may die before the new file has its
/// name: then the old one is whole, and the `.new` beside it goes with the next write.
pub fn write_private(path: &Path, bytes: &[u8], durable: Durable) -> io::Result<()> {
    write_by(&with_suffix(path, ".new"), path, bytes, durable)
}

/// As [`write_private`], by a file `beside` it in the same folder, which each of several writers names otherwise.
pub fn write_by(beside: &Path, path: &Path, bytes: &[u8], durable: Durable) -> io::Result<()> {
    remove(beside)?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(beside)?;
    file.write_all(bytes)?;
    if durable == Durable::Disk {
        file.sync_all()?;
    }
    crate::failpoint::reached("files.written");
    fs::rename(beside, path)?;
    if durable == Durable::Disk { sync_folder_of(path) } else { Ok(()) }
}

/// A file that is missing is removed already.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Makes names in the folder of `path`, made or removed, outlive a crash of the machine.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_private_whatever_a_crash_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        fs::write(folder.path().join("key.new"), "half of a lo").unwrap();
        fs::set_permissions(folder.path().join("key.new"), fs::Permissions::from_mode(0o644)).unwrap();
        for (text, durable) in [("long", Durable::Disk), ("b", Durable::Boot)] {
            write_private(&file, text.as_bytes(), durable).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        remove(&file).unwrap();
        remove(&file).unwrap();
    }
}
