//! The official runner by itself, against the same Gitea: what a job looks like without this product.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{process::Stdio, time::Duration};

use super::{gitea::RealGitea, peers_dir};

/// Runs one waiting job of `label`, and returns when the runner has ended.
pub(crate) async fn run_one_job(gitea: &RealGitea, label: &str) {
    let folder = gitea.base().join(format!("alone-{label}"));
    std::fs::create_dir(&folder).unwrap();
    let labels = format!("{label}:host");
    let register = ["register", "--no-interactive", "--name", label, "--labels", &labels, "--instance", gitea.url(), "--token"];
    let register = register.into_iter().chain([gitea.registration_token()]);
    let calls: [Vec<&str>; 2] = [register.collect(), vec!["daemon", "--once"]];
    for call in calls {
        let mut runner = tokio::process::Command::new(peers_dir().join("bin/gitea-runner"));
        runner.args(&call).current_dir(&folder).env("HOME", &folder).stdin(Stdio::null()).kill_on_drop(true);
        let said = tokio::time::timeout(Duration::from_secs(60), runner.output()).await.expect("the runner ends").unwrap();
        assert!(said.status.success(), "{}: {}", call[0], String::from_utf8_lossy(&said.stderr));
    }
}
