//! The package: what it installs, what it leaves alone, and what is left when it is purged.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use crate::{
    machine::{Machine, SERVICE, text},
    support::{
        Gate, eventually,
        gitea::{RealGitea, Version, Visibility},
        story,
    },
};

const STORY: Duration = Duration::from_secs(150);
const RUN: Duration = Duration::from_secs(60);
/// Of `systemd-analyze security`; `docs/systemd.md` says it, too.
const EXPOSURE: f64 = 2.5;

/// A job with node that says its cgroup and waits.
fn job_with_node(gate: &Gate) -> String {
    format!(
        r#"
on: push
jobs:
  node:
    runs-on: [self-hosted, pod]
    steps:
      - run: |
          node -e "console.log('node says ' + 6 * 7)"
          cat /proc/self/cgroup
          {sign}
          {wait}
"#,
        sign = gate.sign("started"),
        wait = gate.wait("waiting"),
    )
}

/// Every path of the machine's own disk, but what each machine writes by itself as time goes by.
fn paths(machine: &Machine) -> BTreeSet<String> {
    let by_itself = ["/var/log/", "/var/lib/dpkg/", "/var/lib/systemd/", "/var/cache/"];
    let listed = machine.run(&["find", "/", "-xdev"]);
    listed.lines().filter(|path| !by_itself.iter().any(|folder| path.starts_with(folder))).map(str::to_owned).collect()
}

/// What an unconfigured installation does: nothing, and it says what to do.
fn unconfigured(machine: &Machine, said: &str) {
    assert!(said.contains("set GITEA_URL") && said.contains("register"), "{said}");
    assert_eq!(machine.property(SERVICE, "ActiveState"), "inactive", "an installation starts nothing");
    assert!(!machine.enter(&["systemctl", "start", SERVICE]).status.success());
    assert_eq!(machine.property(SERVICE, "ExecMainStatus"), "78");
    assert_eq!((machine.property(SERVICE, "ActiveState"), machine.property(SERVICE, "NRestarts")), ("failed".into(), "0".into()));
    assert!(machine.journal().contains("run `gitea-dynamic-runner register` once"), "{}", machine.journal());
    for token in ["read-token", "admin-token"] {
        let stat = machine.run(&["stat", "--format=%a %U %s", &format!("/etc/gitea-dynamic-runner/{token}")]);
        assert_eq!(stat, "600 root 43", "{token}");
    }
}

fn checked(machine: &Machine) {
    let verified = machine.enter(&["systemd-analyze", "verify", "--man=no", SERVICE]);
    assert!(verified.status.success(), "{}", text(&verified.stderr));
    assert_eq!(text(&verified.stdout) + &text(&verified.stderr), "", "systemd-analyze verify is content");
    let security = machine.run(&["systemd-analyze", "security", "--no-pager", SERVICE]);
    let overall = security.lines().last().unwrap();
    println!("{overall}");
    let figure: f64 = overall.split_once(": ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    assert!(figure <= EXPOSURE, "{security}");
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/systemd.md")).unwrap();
    assert!(page.contains(&format!("**{EXPOSURE}**")), "docs/systemd.md says the figure");
}

/// `Type=notify`: it is active when `/readyz` is, not before, however long Gitea stays away.
async fn active_when_gitea_answers(machine: &Machine, gitea: &RealGitea) {
    // Shorter than Gitea's absence: what waits for Gitea says that it needs more time.
    machine.drop_in("TimeoutStartSec=5");
    gitea.kill();
    machine.run(&["systemctl", "start", "--no-block", SERVICE]);
    eventually("it says what it waits for", RUN, async || {
        machine.property(SERVICE, "StatusText").contains("not ready: gitea").then_some(())
    })
    .await;
    let began = Instant::now();
    eventually("the start outlasts its limit", RUN, async || {
        assert_eq!(machine.property(SERVICE, "ActiveState"), "activating");
        assert_ne!(machine.readiness().await, Some(200));
        (began.elapsed() > Duration::from_secs(8)).then_some(())
    })
    .await;
    gitea.start_again().await;
    machine.active_anew(0, RUN).await;
    assert_eq!(machine.property(SERVICE, "StatusText"), "ready");
    machine.drop_in("");
}

/// The environment is a unit of its own, and nothing that it was told stands in it.
fn one_environment_outside_the_service(machine: &Machine) {
    let environments = machine.environments();
    assert_eq!(environments.len(), 1, "{environments:?}");
    let (service, environment) = (machine.property(SERVICE, "ControlGroup"), machine.property(&environments[0], "ControlGroup"));
    assert!(environment.ends_with(&environments[0]) && !environment.starts_with(&service), "{environment} and {service}");
    let within = |cgroup: &str| {
        machine.run(&[
            "sh",
            "-c",
            &format!("cat /sys/fs/cgroup/systemd{cgroup}/cgroup.procs 2>/dev/null || cat /sys/fs/cgroup{cgroup}/cgroup.procs"),
        ])
    };
    assert_eq!(within(&service), machine.main_pid().to_string(), "the controller is alone in its cgroup");
    assert!(within(&environment).lines().count() >= 4, "keeper, init, executor and runner");
    let told = machine.run(&["systemctl", "show", &environments[0]]);
    for secret in ["CAPABILITY", "CI_RUNNER", "TOKEN", "Environment=C"] {
        assert!(!told.contains(secret), "{secret} in {told}");
    }
    assert!(told.contains("KillMode=mixed") && told.contains("OOMPolicy=continue") && told.contains("TasksMax=4096"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_installed_package_runs_a_real_job_and_purges_without_a_trace() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let machine = Machine::boot().await;
        let (before, users) = (paths(&machine), machine.run(&["getent", "passwd"]));
        let said = machine.install("0.1.0");
        unconfigured(&machine, &said);
        checked(&machine);
        machine.configure(&gitea);
        active_when_gitea_answers(&machine, &gitea).await;
        machine.run(&["systemctl", "enable", SERVICE]);

        let gate = Gate::new().await;
        let (repository, run) = gitea.run("node", &job_with_node(&gate)).await;
        gate.called("started", RUN).await;
        one_environment_outside_the_service(&machine);
        gate.open();
        assert_eq!(repository.conclusion(run, RUN).await, "success");
        let log = repository.only_log(run).await.join("\n");
        assert!(log.contains("node says 42") && log.contains("/gitea-dynamic-runner-ci-"), "{log}");
        machine.nothing_runs().await;

        // A purge ends what runs, too.
        let gate = Gate::new().await;
        let waits = gitea.repository("waits", Visibility::Public, &[]).await;
        waits.push_workflow(&job_with_node(&gate)).await;
        gate.called("started", RUN).await;
        let removed = machine.run(&["dpkg", "--remove", "gitea-dynamic-runner"]);
        assert!(removed.contains("1 jobs go on"), "{removed}");
        assert_eq!(machine.environments().len(), 1, "a removal leaves jobs alone");
        let purged = machine.run(&["dpkg", "--purge", "gitea-dynamic-runner"]);
        assert!(purged.contains("Gitea still lists the runner"), "{purged}");
        machine.nothing_runs().await;
        assert_eq!(machine.run(&["getent", "passwd"]), users);
        let traces: Vec<_> = paths(&machine).difference(&before).cloned().collect();
        assert!(traces.is_empty(), "{traces:#?}");
        let units = machine.run(&["systemctl", "list-units", "--all", "--plain", "--no-legend", "gitea-dynamic-runner*"]);
        assert_eq!(units, "");
    })
    .await;
}
