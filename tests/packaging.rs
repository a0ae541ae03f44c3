//! What is shipped beside the program says the truth about it: settings, metrics, alerts, the board, the man page and completions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/mod.rs"]
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use gitea_dynamic_runner::{config::VARIABLES, metrics::Metrics, names::env};
use serde_json::Value;

use crate::support::peers_dir;

const PREFIX: &str = "gitea_dynamic_runner_";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gitea-dynamic-runner"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What an operator may set that is no setting of the controller's alone.
fn others() -> BTreeSet<String> {
    let proxies = [env::HTTP_PROXY, env::HTTPS_PROXY, env::NO_PROXY].map(|[first, _]| first.to_owned());
    proxies.into_iter().chain(["RUST_LOG".to_owned()]).collect()
}

/// NAME=value of each line, and whether it is set.
fn example() -> Vec<(String, String, bool)> {
    let page = page("packaging/env.example");
    let lines = page.lines().filter_map(|line| {
        let (name, value) = line.trim_start_matches('#').split_once('=')?;
        let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
        is_name.then(|| (name.to_owned(), value.to_owned(), !line.starts_with('#')))
    });
    lines.collect()
}

#[test]
fn the_example_names_every_setting_once_and_no_other() {
    let names: Vec<String> = example().into_iter().map(|(name, _, _)| name).collect();
    let once: BTreeSet<String> = names.iter().cloned().collect();
    assert_eq!(once.len(), names.len(), "a name stands twice: {names:?}");
    let wanted: BTreeSet<String> = VARIABLES.map(str::to_owned).into_iter().chain(others()).collect();
    assert_eq!(once, wanted);
}

/// Settings for `check-config`, where files and addresses of the example are ones of a test.
fn check(folder: &Path, settings: &BTreeMap<String, String>) -> Output {
    let mut command = program();
    command.args(["check-config", "--standalone"]).env_clear().envs(settings);
    command.env("PATH", std::env::var("PATH").unwrap()).env("STATE_DIRECTORY", folder);
    if !support::am_root() {
        command.env("LOCAL_UNISOLATED", "1");
    }
    command.output().unwrap()
}

#[test]
fn the_example_is_fine_as_it_is_and_with_every_setting_set() {
    let folder = tempfile::tempdir().unwrap();
    let runner = env!("CARGO_BIN_EXE_gitea-dynamic-runner");
    let registered = [("GITEA_RUNNER_UUID", "u"), ("GITEA_RUNNER_TOKEN", "t"), ("RUNNER_BIN", runner)];
    let registered: BTreeMap<String, String> = registered.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let mut as_shipped: BTreeMap<String, String> =
        example().into_iter().filter(|(_, _, set)| *set).map(|(name, value, _)| (name, value)).collect();
    let needed = check(folder.path(), &as_shipped);
    assert!(text(&needed).contains("register"), "without a registration it says so: {}", text(&needed));
    as_shipped.extend(registered.clone());
    let said = check(folder.path(), &as_shipped);
    assert!(said.status.success(), "{}", text(&said));

    let mut all: BTreeMap<String, String> = example().into_iter().map(|(name, value, _)| (name, value)).collect();
    all.retain(|name, value| !value.is_empty() && !all_of_a_pair(name));
    for (name, value) in &mut all {
        if name.ends_with("_FILE") {
            // Each token must be another one.
            let secret = folder.path().join(name);
            std::fs::write(&secret, format!("a-canary-{name}\n")).unwrap();
            *value = secret.display().to_string();
        }
    }
    all.extend(registered);
    all.remove("GITEA_RUNNER_TOKEN_FILE");
    all.insert("QUEUE".into(), "jetstream".into());
    let said = check(folder.path(), &all);
    assert!(said.status.success(), "{}", text(&said));
    assert!(text(&said).contains("pod: 4 environments at once"), "{}", text(&said));
}

/// Not for the service: set only for `nats-setup`, or by the unit.
fn all_of_a_pair(name: &str) -> bool {
    name == "STATE_DIRECTORY"
}

/// Every name of a metric in a text, without what OpenMetrics appends to a histogram's.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let names = text.split(PREFIX).skip(1);
    let names = names.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap());
    names.map(str::to_owned).collect()
}

#[test]
fn alerts_and_the_board_use_only_metrics_and_labels_that_exist() {
    let known = Metrics::new().text();
    // A family without a series is not in the text; `tests/tidy.rs` holds the page against the registrations.
    let documented = page("docs/METRICS.md");
    let exists = |name: &String| documented.contains(&format!("`{}`", name.strip_suffix("_bucket").unwrap_or(name)));
    for file in ["packaging/alerts.yml", "packaging/alerts.test.yml", "packaging/grafana.json"] {
        let used = metrics_in(&page(file));
        assert!(used.len() >= 10, "{file}: {used:?}");
        let unknown: Vec<_> = used.iter().filter(|name| !exists(name)).collect();
        assert!(unknown.is_empty(), "{file} uses {unknown:?}");
    }
    let values = |text: &str, label: &str| -> BTreeSet<String> {
        text.split(&format!("{label}=\"")).skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
    };
    for label in ["state", "reason", "outcome", "code", "method"] {
        let (used, known) = (values(&page("packaging/alerts.test.yml"), label), values(&known, label));
        assert!(used.is_subset(&known), "{label}: {used:?}");
    }
}

#[test]
fn the_board_is_whole() {
    let board: Value = serde_json::from_str(&page("packaging/grafana.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    assert!(panels.len() >= 12);
    for panel in panels {
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()));
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty() && targets.iter().all(|target| target["expr"].as_str().unwrap().contains(PREFIX)), "{panel}");
    }
}

#[test]
fn promtool_takes_the_rules_and_each_alert_fires_where_it_must() {
    let promtool = [peers_dir().join("tools/bin/promtool"), PathBuf::from("promtool")].into_iter();
    let promtool = promtool.into_iter().find(|file| file.is_file() || file.components().count() == 1).unwrap();
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]] {
        let said = Command::new(&promtool).args(arguments).current_dir(root().join("packaging")).output();
        let said = said.unwrap_or_else(|e| panic!("promtool: {e}; tests/run.sh unit fetches it"));
        assert!(said.status.success(), "{}", text(&said));
    }
}

/// As GitHub and Gitea make an anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-').map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn every_alert_has_its_runbook() {
    let rules = page("packaging/alerts.yml");
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let runbooks: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("runbook: \"docs/operations.md#")).collect();
    assert_eq!((alerts.len(), runbooks.len()), (8, 8));
    let operations = page("docs/operations.md");
    let anchors: BTreeSet<String> = operations.lines().filter_map(|line| line.strip_prefix("### ")).map(anchor).collect();
    for runbook in runbooks {
        assert!(anchors.contains(runbook.trim_end_matches('"')), "docs/operations.md has no ### for {runbook}: {anchors:?}");
    }
    for alert in alerts {
        assert!(
            page("packaging/alerts.test.yml").contains(&format!("alertname: {alert}\n        exp_alerts")),
            "{alert} never fires in its test"
        );
        assert!(operations.contains(&format!("`{alert}`")), "docs/operations.md does not name {alert}");
    }
}

#[test]
fn the_man_page_has_every_command_and_setting_and_is_one() {
    let output = program().arg("man").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let man = text(&output);
    let help = text(&program().arg("--help").output().unwrap());
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| !line.starts_with("Commands:"))
        .skip(1)
        .take_while(|line| line.starts_with("  "))
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   ")))
        .collect();
    assert!(commands.len() >= 10, "{help}");
    let plain = man.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "").replace("\\fI", "");
    for command in commands.into_iter().filter(|command| *command != "help") {
        assert!(plain.contains(&format!("gitea-dynamic-runner {command}")), "the man page has no {command}");
    }
    for name in VARIABLES.map(str::to_owned).into_iter().chain(others()) {
        assert!(plain.contains(&name), "the man page has no {name}");
    }
    if let Ok(renderer) =
        Command::new("man").args(["--warnings", "-l", "-"]).stdin(std::process::Stdio::piped()).spawn_with(&output.stdout)
    {
        assert!(renderer.status.success() && renderer.stderr.is_empty(), "{}", text(&renderer));
    }
}

trait SpawnWith {
    fn spawn_with(&mut self, input: &[u8]) -> std::io::Result<Output>;
}

impl SpawnWith for Command {
    fn spawn_with(&mut self, input: &[u8]) -> std::io::Result<Output> {
        use std::{io::Write as _, process::Stdio};
        let mut child = self.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_owned());
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output()?;
        writer.join().unwrap().ok();
        Ok(output)
    }
}

#[test]
fn completions_know_every_command_for_each_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = program().args(["completions", shell]).output().unwrap();
        let script = text(&output);
        assert!(output.status.success() && script.contains("rebuild-mirror") && script.contains("doctor"), "{shell}");
    }
    let bash = program().args(["completions", "bash"]).output().unwrap();
    let parsed =
        Command::new("bash").args(["-n", "/dev/stdin"]).stdin(std::process::Stdio::piped()).spawn_with(&bash.stdout).unwrap();
    assert!(parsed.status.success(), "{}", text(&parsed));
}
