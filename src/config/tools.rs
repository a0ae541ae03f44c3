//! The programs that jobs need: looked for at start, so that what will not work is said before a job meets it.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

/// What was found.
#[derive(Debug, Clone)]
pub struct Tools {
    pub runner: Option<Runner>,
    /// What will not work, a sentence each.
    pub missing: Vec<String>,
}

/// The inner runner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runner {
    pub path: PathBuf,
    /// As it says itself; empty if it does not.
    pub version: String,
}

impl Runner {
    /// Only a runner ≥ 2.0 goes on with clean-up steps after a cancel, so only for one is `cancelling` declared (rule R8).
    pub fn cleans_up(&self) -> bool {
        let digits = self.version.trim_start_matches('v');
        digits.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major >= 2)
    }
}

/// Looks for `runner_bin` (or `gitea-runner`, `act_runner`), git and node in `path`.
pub async fn look(runner_bin: Option<&Path>, path: &str) -> Tools {
    let named = runner_bin.map(Path::to_path_buf);
    let runner = match named {
        Some(named) if named.components().count() > 1 => named.is_file().then_some(named),
        Some(named) => find(&named.to_string_lossy(), path),
        None => find("gitea-runner", path).or_else(|| find("act_runner", path)),
    };
    let mut missing = Vec::new();
    let runner = match runner {
        Some(path) => Some(Runner { version: version_of(&path).await, path }),
        None => {
            missing.push("no official runner was found, so no job can run: install gitea-runner, or set RUNNER_BIN".to_owned());
            None
        }
    };
    for (tool, without) in [
        ("git", "checkouts and `uses:` of actions will fail"),
        ("node", "JavaScript actions (`uses: actions/checkout@v4` among them) will fail"),
        ("bash", "`run:` steps use sh"),
    ] {
        if find(tool, path).is_none() {
            missing.push(format!("{tool} was not found in PATH: {without}"));
        }
    }
    Tools { runner, missing }
}

/// What a program in `path` says to `--version`, from its first digit on; `None`: there is no such program.
pub async fn version(name: &str, path: &str) -> Option<String> {
    Some(version_of(&find(name, path)?).await)
}

fn find(name: &str, path: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let runs = |file: &PathBuf| std::fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    path.split(':').filter(|d| !d.is_empty()).map(|d| Path::new(d).join(name)).find(runs)
}

/// `gitea-runner version v1.0.8` → `v1.0.8`.
async fn version_of(runner: &Path) -> String {
    let mut command = tokio::process::Command::new(runner);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).env_clear();
    let Ok(Ok(output)) = tokio::time::timeout(Duration::from_secs(10), command.output()).await else { return String::new() };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = text.split_whitespace().find(|w| w.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit()));
    word.unwrap_or_default().chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_runner_that_cleans_up_is_declared_so() {
        let cleans_up = |version: &str| Runner { path: PathBuf::new(), version: version.into() }.cleans_up();
        assert!(!cleans_up("v1.0.8") && !cleans_up("") && !cleans_up("dev") && !cleans_up("0.2.13"));
        assert!(cleans_up("v2.0.0") && cleans_up("3.3.1"));
    }

    #[tokio::test]
    async fn what_is_missing_is_said_with_what_will_not_work() {
        let tools = look(None, "/nonexistent").await;
        assert!(tools.runner.is_none());
        assert_eq!(tools.missing.len(), 4);
        assert!(tools.missing[0].contains("RUNNER_BIN"));
    }
}
