//! Removes a folder that somebody hostile filled, without ever leaving it.
//!
//! No link is followed and no path is longer than one name: every step goes through an open folder. Subfolders are lifted to the top before they are
//! emptied, so neither recursion nor open files grow with their depth. The processes that could still write there are dead before.

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
    time::Instant,
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, open, renameat},
    sys::stat::{FchmodatFlags, Mode, fchmodat},
    unistd::{UnlinkatFlags, unlinkat},
};

/// Names read at once from a folder, which bounds the memory.
const BATCH: usize = 1024;
const FOLDER: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC).union(OFlag::O_RDONLY);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removed {
    All,
    /// The time was up; ask again.
    Partly,
}

/// Removes `parent/name`, whatever it is. `parent` must be a folder that only we can write.
pub(super) fn remove_tree(parent: &Path, name: &str, until: Instant) -> io::Result<Removed> {
    let parent = open(parent, FOLDER, Mode::empty())?;
    let name = CString::new(name)?;
    if removed_alone(parent.as_fd(), &name)? {
        return Ok(Removed::All);
    }
    let top = open_folder(parent.as_fd(), &name)?;
    let mut lifted = 0;
    loop {
        // Reading a folder while it changes may skip names, so it is read anew until nothing is left.
        let names = batch(top.as_fd())?;
        if names.is_empty() {
            break;
        }
        for child in &names {
            if !removed_alone(top.as_fd(), child)? && empty(top.as_fd(), child, &mut lifted, until)? == Removed::Partly {
                return Ok(Removed::Partly);
            }
        }
    }
    if removed_alone(parent.as_fd(), &name)? { Ok(Removed::All) } else { Ok(Removed::Partly) }
}

/// Empties the folder `top/name`; its subfolders become folders of `top`.
fn empty(top: BorrowedFd<'_>, name: &CStr, lifted: &mut u64, until: Instant) -> io::Result<Removed> {
    let folder = open_folder(top, name)?;
    loop {
        if Instant::now() >= until {
            return Ok(Removed::Partly);
        }
        let names = batch(folder.as_fd())?;
        if names.is_empty() {
            removed_alone(top, name)?;
            return Ok(Removed::All);
        }
        for child in &names {
            if !removed_alone(folder.as_fd(), child)? {
                lift(folder.as_fd(), child, top, lifted)?;
            }
        }
    }
}

fn lift(folder: BorrowedFd<'_>, name: &CStr, top: BorrowedFd<'_>, lifted: &mut u64) -> io::Result<()> {
    // A moved folder's own `..` changes, which without root needs the right to write it. Its name was just seen to be a folder, no link.
    fchmodat(folder, name, Mode::S_IRWXU, FchmodatFlags::FollowSymlink)?;
    loop {
        *lifted += 1;
        let new = CString::new(format!("lifted-{lifted}"))?;
        match renameat(folder, name, top, new.as_c_str()) {
            // A job may have made that very name; another number is free.
            Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => {}
            other => return Ok(other?),
        }
    }
}

/// Removes a file, a link, or an empty folder; `false` for a folder with something in it.
fn removed_alone(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(true),
        Err(Errno::EISDIR | Errno::EPERM) => {}
        Err(e) => return Err(e.into()),
    }
    match unlinkat(folder, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn open_folder(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<Dir> {
    let open = || Dir::openat(parent, name, FOLDER, Mode::empty());
    match open() {
        Err(Errno::EACCES) => {}
        Ok(dir) if nix::unistd::geteuid().is_root() => return Ok(dir),
        Ok(_) => {}
        Err(e) => return Err(e.into()),
    }
    // Not root: the owner may have taken its own rights away.
    fchmodat(parent, name, Mode::S_IRWXU, FchmodatFlags::FollowSymlink)?;
    Ok(open()?)
}

fn batch(folder: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    // Opened anew, so that reading starts at the first name.
    let mut again = Dir::openat(folder, c".", FOLDER, Mode::empty())?;
    let mut names = Vec::new();
    for entry in again.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
        if names.len() == BATCH {
            break;
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::{fs, os::unix::fs::PermissionsExt as _, os::unix::fs::symlink, time::Duration};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_hostile_folder_goes_and_nothing_outside_is_touched() {
        let root = tempfile::tempdir().unwrap();
        let (outside, parent) = (root.path().join("outside"), root.path().join("env"));
        fs::create_dir_all(outside.join("sub")).unwrap();
        fs::write(outside.join("kept"), "kept").unwrap();
        fs::set_permissions(outside.join("kept"), fs::Permissions::from_mode(0o640)).unwrap();
        fs::create_dir_all(parent.join("job/dark/inner")).unwrap();
        symlink(&outside, parent.join("job/link")).unwrap();
        symlink("/", parent.join("job/dark/root")).unwrap();
        symlink("..", parent.join("job/dark/inner/up")).unwrap();
        fs::hard_link(outside.join("kept"), parent.join("job/dark/hard")).unwrap();
        fs::create_dir_all(parent.join("job/lifted-1/x/lifted-2/y")).unwrap();
        fs::write(parent.join("job/lifted-2"), "").unwrap();
        for i in 0..3 * BATCH {
            fs::write(parent.join(format!("job/dark/inner/{i}")), "").unwrap();
        }
        fs::set_permissions(parent.join("job/dark"), fs::Permissions::from_mode(0o000)).unwrap();
        assert_eq!(remove_tree(&parent, "job", soon()).unwrap(), Removed::All);
        assert!(!parent.join("job").exists());
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
        assert_eq!(fs::metadata(outside.join("kept")).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(outside.join("sub").is_dir());
        assert_eq!(remove_tree(&parent, "job", soon()).unwrap(), Removed::All, "a missing folder is removed already");
    }

    #[test]
    fn a_link_in_the_folders_own_place_is_removed_itself() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("outside")).unwrap();
        fs::write(root.path().join("outside/kept"), "").unwrap();
        symlink(root.path().join("outside"), root.path().join("job")).unwrap();
        assert_eq!(remove_tree(root.path(), "job", soon()).unwrap(), Removed::All);
        assert!(root.path().join("outside/kept").exists());
        assert!(root.path().join("job").symlink_metadata().is_err());
    }

    #[test]
    fn depth_costs_neither_stack_nor_open_files_and_the_time_is_bounded() {
        // In memory where that is possible: what counts here is not the disk's speed.
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        fs::create_dir(root.path().join("job")).unwrap();
        let mut dir = Dir::open(&root.path().join("job"), FOLDER, Mode::empty()).unwrap();
        for _ in 0..6000 {
            nix::sys::stat::mkdirat(dir.as_fd(), c"d", Mode::S_IRWXU).unwrap();
            dir = Dir::openat(dir.as_fd(), c"d", FOLDER, Mode::empty()).unwrap();
        }
        assert_eq!(remove_tree(root.path(), "job", Instant::now()).unwrap(), Removed::Partly);
        assert_eq!(remove_tree(root.path(), "job", soon()).unwrap(), Removed::All);
    }
}
