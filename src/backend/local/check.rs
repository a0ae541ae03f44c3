//! What must hold of the configuration before the first environment is made; each fault says the way out.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use super::{Isolation, Keepers, LocalConfig, state::Layout};
use crate::{
    backend::BackendError,
    ids::{EnvironmentName, Nonce, TaskId},
};

/// Longest path of a Unix socket (unix(7): 108 bytes with the closing zero).
const MAX_SOCKET_PATH: usize = 107;

pub(super) fn config(config: &LocalConfig, layout: &Layout) -> Result<(), BackendError> {
    let fault = |text: String| Err(BackendError::Permanent(text));
    let state = &config.state_directory;
    if !state.is_absolute() || state.to_str().is_none() {
        return fault(format!("STATE_DIRECTORY {} must be an absolute path in UTF-8", state.display()));
    }
    let name = EnvironmentName::new(&config.instance, TaskId(i64::MAX), &Nonce::random());
    // The longest of our sockets.
    let socket = layout.order_socket(&name);
    if socket.as_os_str().len() > MAX_SOCKET_PATH {
        let room = MAX_SOCKET_PATH - (socket.as_os_str().len() - state.as_os_str().len()).min(MAX_SOCKET_PATH);
        return fault(format!("STATE_DIRECTORY {} is too long for a socket below it: at most {room} bytes", state.display()));
    }
    if config.executor.is_empty() {
        return fault("the executor's command is empty".into());
    }
    if let Isolation::UidPerSlot { base } = config.isolation {
        if let Some(right) = missing_right(&config.keepers) {
            return fault(format!(
                "giving every job a uid and namespaces of its own needs {right}: start as root with it, or set LOCAL_UNISOLATED=1"
            ));
        }
        if base == 0 || base > i32::MAX as u32 {
            return fault(format!("POD_EXECUTOR_UID {base} is no uid for jobs: choose one that no user has, such as 2000"));
        }
    }
    layout
        .create()
        .map_err(|error| BackendError::Permanent(format!("{error}: make STATE_DIRECTORY a folder that this user can write")))?;
    if let Isolation::UidPerSlot { .. } = config.isolation {
        reachable(state)?;
    }
    layout.refuse_newer()
}

/// What this process lacks to keep environments apart; a container's root often has not all of it.
pub(super) fn missing_right(keepers: &Keepers) -> Option<&'static str> {
    // capabilities(7): the bit numbers.
    const TO_LOOK_AFTER: [(u32, &str); 3] = [(0, "CAP_CHOWN"), (1, "CAP_DAC_OVERRIDE"), (5, "CAP_KILL")];
    const TO_MAKE: [(u32, &str); 3] = [(6, "CAP_SETGID"), (7, "CAP_SETUID"), (21, "CAP_SYS_ADMIN")];
    let to_make: &[_] = match keepers {
        Keepers::Children => &TO_MAKE,
        // Systemd makes them, with rights of its own.
        Keepers::Units { .. } => &[],
    };
    if !nix::unistd::geteuid().is_root() {
        return Some("root");
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).map(str::trim).unwrap_or_default();
    let effective = u64::from_str_radix(effective, 16).unwrap_or(0);
    TO_LOOK_AFTER.iter().chain(to_make).find(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name)
}

/// A job's user must pass through every folder above its own.
fn reachable(state: &Path) -> Result<(), BackendError> {
    let state = fs::canonicalize(state)
        .map_err(|error| BackendError::Permanent(format!("STATE_DIRECTORY {}: {error}", state.display())))?;
    for folder in state.ancestors() {
        let mode = fs::metadata(folder)
            .map_err(|error| BackendError::Permanent(format!("{}: {error}", folder.display())))?
            .permissions()
            .mode();
        if mode & 0o001 == 0 {
            let folder = folder.display();
            return Err(BackendError::Permanent(format!(
                "jobs of the local backend have users of their own, and these cannot pass through {folder}: chmod o+x {folder}, or choose another STATE_DIRECTORY"
            )));
        }
    }
    Ok(())
}
