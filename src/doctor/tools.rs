//! The programs that jobs need, and whether they are of a version that fits.

use std::{path::Path, sync::Arc};

use super::{Item, World};
use crate::config::tools;

/// The first that speaks the wire protocol by which actions/checkout fetches; `actions/checkout` falls back to archives below it.
const OLDEST_GIT: u32 = 2;
const OLDEST_GIT_MINOR: u32 = 18;
/// What actions of 2024 and later ask for.
const OLDEST_NODE: u32 = 20;

pub(super) async fn probe(world: &Arc<World>) -> Vec<Item> {
    let local = &world.config.local;
    let found = tools::look(local.runner_bin.as_deref(), &local.path).await;
    let (git, node) = tokio::join!(tools::version("git", &local.path), tools::version("node", &local.path));
    vec![runner(found.runner), of_git(git), of_node(node), bash(&local.path)]
}

fn runner(found: Option<tools::Runner>) -> Item {
    match found {
        None => Item::todo(
            "runner",
            "no official runner was found, so no job can run",
            "install gitea-runner into PATH, or set RUNNER_BIN",
        ),
        Some(runner) if runner.version.is_empty() => Item::todo(
            "runner",
            format!("{} does not say a version", runner.path.display()),
            "make it executable for everybody, and of this machine's architecture; it must be the official runner (https://gitea.com/gitea/runner)",
        ),
        Some(runner) => Item::fine("runner", format!("{} is {}", runner.path.display(), runner.version)),
    }
}

fn of_git(version: Option<String>) -> Item {
    let without = "install git in PATH: checkouts and `uses:` of actions fail without it";
    let Some(version) = version else { return Item::todo("git", "git was not found in PATH", without) };
    match numbers(&version) {
        Some(found) if found < (OLDEST_GIT, OLDEST_GIT_MINOR) => Item::todo(
            "git",
            format!("git is {version}; actions/checkout needs {OLDEST_GIT}.{OLDEST_GIT_MINOR} or newer"),
            "upgrade git",
        ),
        Some(_) => Item::fine("git", format!("git {version}")),
        None => Item::todo("git", "git does not say its version", without),
    }
}

fn of_node(version: Option<String>) -> Item {
    let without = "install node in PATH: JavaScript actions (`uses: actions/checkout@v4` among them) fail without it";
    let Some(version) = version else { return Item::todo("node", "node was not found in PATH", without) };
    match numbers(&version) {
        Some((major, _)) if major < OLDEST_NODE => Item::note(
            "node",
            format!("node is {version}; present actions ask for {OLDEST_NODE} or newer"),
            format!("install node {OLDEST_NODE} or newer if actions fail with syntax errors"),
        ),
        Some(_) => Item::fine("node", format!("node {version}")),
        None => Item::todo("node", "node does not say its version", without),
    }
}

fn bash(path: &str) -> Item {
    if path.split(':').any(|folder| Path::new(folder).join("bash").is_file()) {
        Item::fine("bash", "bash is in PATH")
    } else {
        Item::note("bash", "bash was not found in PATH: `run:` steps use sh", "install bash if steps are written for it")
    }
}

/// `v20.11.1` → (20, 11).
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.').map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn an_unfit_version_is_told_from_a_fit_one() {
        let state = |item: Item| item.state;
        assert_eq!(state(of_git(Some("2.17.1".into()))), State::Todo);
        assert_eq!(state(of_git(Some("2.39.5".into()))), State::Fine);
        assert_eq!(state(of_git(None)), State::Todo);
        assert_eq!(state(of_node(Some("v18.20.4".into()))), State::Note);
        assert_eq!(state(of_node(Some("v22.1.0".into()))), State::Fine);
    }
}
