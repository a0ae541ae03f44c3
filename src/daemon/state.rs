//! The state directory: who may read it, and the keys that are made once and kept there.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use crate::{
    assignment::seal::SealKeys,
    claims::CapabilityKey,
    files::{self, Durable},
    secret::Secret,
};

pub(super) struct StateDirectory {
    pub(super) private: PathBuf,
}

impl StateDirectory {
    /// Makes it where it is missing. The directory itself may be passed through, since jobs live below `env/`; keys and
    /// databases are in `private/`, which only the owner enters.
    pub(super) fn open(directory: &Path) -> anyhow::Result<Self> {
        let private = directory.join("private");
        fs::create_dir_all(&private).with_context(|| format!("make {}", private.display()))?;
        for (folder, mode) in [(directory, 0o711), (private.as_path(), 0o700)] {
            fs::set_permissions(folder, Permissions::from_mode(mode))
                .with_context(|| format!("set mode of {}", folder.display()))?;
        }
        Ok(Self { private })
    }

    pub(super) fn seal_keys(&self, file: Option<&Path>) -> anyhow::Result<SealKeys> {
        let text = self.key("seal.key", file)?;
        SealKeys::parse(text.expose()).map_err(anyhow::Error::msg)
    }

    pub(super) fn capability_key(&self, file: Option<&Path>) -> anyhow::Result<CapabilityKey> {
        let text = self.key("capability.key", file)?;
        CapabilityKey::parse(text.expose()).map_err(anyhow::Error::msg)
    }

    /// The key in `file`, or the one kept here, made at the first start.
    fn key(&self, name: &str, file: Option<&Path>) -> anyhow::Result<Secret> {
        let own = self.private.join(name);
        let path = file.unwrap_or(&own);
        match fs::read_to_string(path) {
            Ok(text) => Ok(Secret::new(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && file.is_none() => {
                let key = Secret::random();
                files::write_private(&own, format!("{}\n", key.expose()).as_bytes(), Durable::Disk)
                    .with_context(|| format!("write {}", own.display()))?;
                Ok(key)
            }
            Err(e) => Err(e).with_context(|| format!("read {}", path.display())),
        }
    }
}
