//! A disk so small that it is full at once, for stories about that. Mounting one needs root.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A file system of a few MiB, gone when dropped.
pub(crate) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// `None` where this user may not mount.
    pub(crate) fn new(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        match tmpfs(folder.path(), size, MsFlags::empty()) {
            Ok(()) => Some(Self(folder)),
            Err(error) => {
                eprintln!("NOT RUN: mounting a small file system needs root ({error})");
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn resize(&self, size: &str) {
        tmpfs(self.0.path(), size, MsFlags::MS_REMOUNT).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        umount2(self.0.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

fn tmpfs(path: &Path, size: &str, flags: MsFlags) -> nix::Result<()> {
    mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(format!("size={size}").as_str()))
}
