//! Reading single settings, collecting what is wrong with them.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::Faults;
use crate::{names::env, secret::Secret};

/// The process's environment; a value that is no UTF-8 is read as if it were cut at the first bad byte, and fails its own check.
pub fn process_environment() -> BTreeMap<String, String> {
    std::env::vars_os().map(|(k, v)| (k.to_string_lossy().into_owned(), v.to_string_lossy().into_owned())).collect()
}

/// `credentials.json`: what `register` got from Gitea.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoredCredentials {
    pub(crate) url: String,
    pub(crate) id: i64,
    pub(crate) uuid: String,
    pub(crate) token: String,
    pub(crate) name: String,
}

pub(super) struct Credentials {
    pub(super) url: String,
    pub(super) uuid: String,
    pub(super) token: Secret,
}

/// `Ok(None)`: not registered yet.
pub(super) fn credentials(file: &Path) -> Result<Option<Credentials>, String> {
    let text = match std::fs::read(file) {
        Ok(text) => zeroize::Zeroizing::new(text),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("{}: read: {e}", file.display())),
    };
    // The error of the parser may quote the token, so it is not shown.
    let stored: StoredCredentials = serde_json::from_slice(&text)
        .map_err(|_| format!("{}: is damaged; restore it from a backup, or remove it and register anew", file.display()))?;
    Ok(Some(Credentials { url: stored.url, uuid: stored.uuid, token: Secret::new(stored.token) }))
}

pub struct Reader {
    environment: BTreeMap<String, String>,
    faults: Vec<String>,
}

impl Reader {
    pub fn new(environment: BTreeMap<String, String>) -> Self {
        Self { environment, faults: Vec::new() }
    }

    pub fn fault(&mut self, fault: impl Into<String>) {
        self.faults.push(fault.into());
    }

    pub fn finish<T>(self, value: T) -> Result<T, Faults> {
        if self.faults.is_empty() { Ok(value) } else { Err(Faults(self.faults)) }
    }

    pub fn into_faults(self) -> Vec<String> {
        self.faults
    }

    /// Unset and empty are the same.
    pub fn optional(&self, name: &str) -> Option<String> {
        self.environment.get(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty())
    }

    pub fn or(&self, name: &str, default: &str) -> String {
        self.optional(name).unwrap_or_else(|| default.to_owned())
    }

    pub fn list(&self, name: &str, default: &str) -> Vec<String> {
        self.or(name, default).split(',').map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()).collect()
    }

    pub fn number(&mut self, name: &str, default: &str, range: RangeInclusive<u64>) -> u64 {
        let text = self.or(name, default);
        match text.parse() {
            Ok(number) if range.contains(&number) => number,
            _ => {
                self.fault(format!("{name}={text}: a number from {} to {}", range.start(), range.end()));
                *range.start()
            }
        }
    }

    pub fn flag(&mut self, name: &str) -> bool {
        match self.optional(name).as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => {
                let fault = format!("{name}={other}: it is 0 or 1");
                self.fault(fault);
                false
            }
        }
    }

    pub fn url(&mut self, name: &str) -> String {
        let Some(text) = self.optional(name) else {
            self.fault(format!("{name} is not set: the address of Gitea, as in its ROOT_URL"));
            return String::new();
        };
        let parsed = text.parse::<http::Uri>().ok();
        let fine =
            parsed.is_some_and(|u| matches!(u.scheme_str(), Some("http" | "https")) && u.host().is_some() && u.query().is_none());
        if !fine {
            self.fault(format!("{name}={text}: it must be an http:// or https:// address without a query"));
        }
        text.trim_end_matches('/').to_owned()
    }

    pub fn address(&mut self, name: &str, default: &str) -> SocketAddr {
        let text = self.or(name, default);
        let full = if text.starts_with(':') { format!("127.0.0.1{text}") } else { text.clone() };
        full.parse().unwrap_or_else(|_| {
            self.fault(format!("{name}={text}: an address and a port, as {default}"));
            SocketAddr::from(([127, 0, 0, 1], 0))
        })
    }

    pub fn file(&mut self, name: &str) -> Option<PathBuf> {
        let path = PathBuf::from(self.optional(name)?);
        if let Err(e) = std::fs::File::open(&path) {
            self.fault(format!("{name}={}: open: {e}", path.display()));
        }
        Some(path)
    }

    pub fn secret_file(&mut self, name: &str) -> Option<Secret> {
        let path = self.file(name)?;
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            // That it cannot be opened was told.
            Err(_) if std::fs::File::open(&path).is_err() => return None,
            Err(e) => {
                self.fault(format!("{name}={}: read: {e}", path.display()));
                return None;
            }
        };
        if text.trim().is_empty() {
            self.fault(format!("{name}={}: the file is empty", path.display()));
        }
        Some(Secret::new(text.trim()))
    }

    /// `NAME`, or the content of the file that `NAME_FILE` names.
    pub fn secret(&mut self, name: &str) -> Option<Secret> {
        let file = format!("{name}_FILE");
        match (self.optional(name), self.optional(&file)) {
            (Some(_), Some(_)) => {
                self.fault(format!("{name} and {file} are both set: keep one"));
                None
            }
            (Some(text), None) => Some(Secret::new(text)),
            (None, _) => self.secret_file(&file),
        }
    }

    pub fn state_directory(&mut self) -> PathBuf {
        // systemd gives several, separated by colons; the first is ours.
        let set = self.optional("STATE_DIRECTORY").and_then(|s| s.split(':').next().map(PathBuf::from));
        let home = self.optional("HOME").map(|home| PathBuf::from(home).join(".local/state/gitea-dynamic-runner"));
        let directory = match (set, nix::unistd::geteuid().is_root()) {
            (Some(directory), _) => directory,
            (None, true) => PathBuf::from("/var/lib/gitea-dynamic-runner"),
            (None, false) => home.unwrap_or_default(),
        };
        if !directory.is_absolute() {
            self.fault(format!("STATE_DIRECTORY={}: it must be an absolute path", directory.display()));
        }
        directory
    }

    /// The proxy variables in both spellings; they apply only towards Gitea.
    pub fn proxy(&self) -> Vec<(String, String)> {
        let names = [env::HTTP_PROXY, env::HTTPS_PROXY, env::NO_PROXY];
        names.iter().flatten().filter_map(|name| Some(((*name).to_owned(), self.optional(name)?))).collect()
    }
}
