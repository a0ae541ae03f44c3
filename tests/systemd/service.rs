//! The service comes and goes, hangs, crashes and is upgraded under running jobs; and the machine loses its power.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use crate::{
    machine::{Machine, SERVICE},
    support::{
        Gate, eventually,
        gitea::{RealGitea, Version},
        story,
    },
};

const STORY: Duration = Duration::from_secs(200);
const RUN: Duration = Duration::from_secs(60);

/// Jobs that wait at the gate, by number.
fn jobs(gate: &Gate, numbers: &str) -> String {
    format!(
        r#"
on: push
jobs:
  wait:
    runs-on: [self-hosted, pod]
    strategy:
      matrix:
        n: {numbers}
    steps:
      - run: |
          {sign}
          {wait}
          echo "job ${{{{ matrix.n }}}} has ended"
"#,
        sign = gate.sign("started ${{ matrix.n }}"),
        wait = gate.wait("waiting ${{ matrix.n }}"),
    )
}

/// The environments with the processes that keep them: another one would be another try of the job.
fn keepers(machine: &Machine) -> Vec<(String, String)> {
    let units = machine.environments();
    units.iter().map(|unit| (unit.clone(), machine.property(unit, "MainPID"))).collect()
}

/// Stops a process of the machine as a bug would: it is there, and does nothing.
async fn hang(machine: &Machine, pid: u32) {
    machine.run(&["sh", "-c", &format!("kill -STOP {pid}")]);
    let stopped = || machine.run(&["cut", "-d ", "-f3", &format!("/proc/{pid}/stat")]) == "T";
    eventually("it hangs", RUN, async || stopped().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_jobs_outlive_a_restart_a_hang_an_upgrade_and_a_stop_of_the_service() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let machine = Machine::boot().await;
        machine.install("0.1.0");
        machine.configure(&gitea);
        // The unit's own 30 s would make this story longer, and no other.
        machine.drop_in("WatchdogSec=4");
        machine.run(&["systemctl", "start", SERVICE]);
        let gate = Gate::new().await;
        let (repository, run) = gitea.run("two", &jobs(&gate, "[1, 2]")).await;
        gate.called("started 1", RUN).await;
        gate.called("started 2", RUN).await;
        let kept = keepers(&machine);
        assert_eq!(kept.len(), 2, "{kept:?}");

        let first = machine.main_pid();
        machine.run(&["systemctl", "restart", SERVICE]);
        machine.active_anew(first, RUN).await;
        assert_eq!(keepers(&machine), kept, "a restart is not the jobs'");

        let second = machine.main_pid();
        hang(&machine, second).await;
        machine.active_anew(second, RUN).await;
        assert!(machine.journal().contains("Watchdog timeout"), "{}", machine.journal());
        assert_eq!((machine.property(SERVICE, "NRestarts").as_str(), keepers(&machine)), ("1", kept.clone()));

        let third = machine.main_pid();
        machine.install("0.1.1");
        machine.active_anew(third, RUN).await;
        assert_eq!(keepers(&machine), kept, "an upgrade is not the jobs'");

        machine.run(&["systemctl", "stop", SERVICE]);
        assert_eq!((machine.property(SERVICE, "ActiveState").as_str(), keepers(&machine)), ("inactive", kept.clone()));
        gate.open();
        // Their end is spooled while nobody is there to take it.
        machine.run(&["systemctl", "start", SERVICE]);
        assert_eq!(repository.conclusion(run, RUN).await, "success");
        for job in repository.jobs(run).await {
            assert_eq!(job.conclusion, "success", "{job:?}");
        }
        assert_eq!([gate.calls("started 1"), gate.calls("started 2")], [1, 1], "each ran once");
        machine.nothing_runs().await;
        assert!(!machine.journal().contains("panicked"), "{}", machine.journal());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_before_a_units_order_is_repaired_and_a_job_that_loses_its_machine_fails_with_its_reason() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let mut machine = Machine::boot().await;
        machine.install("0.1.0");
        machine.configure(&gitea);
        machine.run(&["systemctl", "enable", SERVICE]);
        machine.drop_in("Restart=no\nEnvironment=CRASH_AT=local.kept");
        machine.run(&["systemctl", "start", SERVICE]);
        let gate = Gate::new().await;
        let (repository, run) = gitea.run("once", &jobs(&gate, "[1]")).await;
        eventually("it crashes when the unit runs and has no order yet", RUN, async || {
            (machine.property(SERVICE, "ActiveState") == "failed").then_some(())
        })
        .await;
        assert_eq!(machine.property(SERVICE, "ExecMainStatus"), "9");
        eventually("a keeper without an order ends, and its unit with it", RUN, async || {
            machine.environments().is_empty().then_some(())
        })
        .await;
        machine.drop_in("");
        machine.run(&["systemctl", "start", SERVICE]);
        gate.called("started 1", Duration::from_secs(100)).await;
        assert_eq!((machine.environments().len(), gate.calls("started 1")), (1, 1));

        machine.power_cut();
        machine.start().await;
        machine.active_anew(0, RUN).await;
        assert_eq!(repository.conclusion(run, RUN).await, "failure");
        let log = repository.only_log(run).await;
        let reason = log.iter().find(|row| row.contains("lost: ")).unwrap_or_else(|| panic!("{log:#?}"));
        println!("{reason}");
        assert_eq!(gate.calls("started 1"), 1, "what has started is never started again");
        machine.nothing_runs().await;

        // Switched off in order, a machine's jobs are stopped before their controller, which can still report them.
        let gate = Gate::new().await;
        let (repository, run) = gitea.run("off", &jobs(&gate, "[1]")).await;
        gate.called("started 1", RUN).await;
        machine.power_off();
        assert_ne!(repository.conclusion(run, Duration::from_secs(5)).await, "success");
        println!("{:#?}", repository.only_log(run).await.last());
    })
    .await;
}
