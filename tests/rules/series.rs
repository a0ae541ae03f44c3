//! How many series there are: all of them from the start, and no more whatever the jobs do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, path::Path, time::Duration};

use gitea_dynamic_runner::demo::forge::{JobSpec, JobStatus};
use nix::{sys::signal, unistd::Pid};

use crate::{
    support::{eventually, peers_dir, story},
    world::{POD, SOON, World},
};

/// Of the design.
const MOST: usize = 300;

/// Names with labels, without values.
fn series(text: &str) -> BTreeSet<String> {
    let rows = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    rows.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

/// The reference reader of OpenMetrics, in Python, takes it.
fn assert_open_metrics(text: &str, scratch: &Path) {
    let file = scratch.join("metrics");
    std::fs::write(&file, text).unwrap();
    let reader = "import sys; from prometheus_client.openmetrics.parser import text_string_to_metric_families as read\n\
                  print(sum(len(family.samples) for family in read(open(sys.argv[1]).read())))";
    let mut python = std::process::Command::new("python3");
    let read = python.args(["-c", reader]).arg(&file).env("PYTHONPATH", peers_dir().join("tools/python")).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&read.stdout), String::from_utf8_lossy(&read.stderr));
    assert!(read.status.success(), "OpenMetrics (tests/run.sh unit installs the reader): {err}");
    assert_eq!(out.trim().parse::<usize>().unwrap(), series(text).len());
}

#[tokio::test]
async fn jobs_of_every_outcome_make_no_series_that_was_not_there_from_the_start() {
    story(Duration::from_secs(110), async {
        let world = World::start(2).await;
        // Gauges that tell times have no value before their first.
        let told = async || {
            let text = world.controller.metrics().await?;
            ["reconcile_last_success", "fetch_last_success"].iter().all(|name| text.contains(name)).then_some(text)
        };
        let before = eventually("each backend was looked at", SOON, told).await;
        assert_open_metrics(&before, world.base());
        let waits = world.counting("running");
        let running = world.push(waits);
        world.counts("running", running).await;
        let dies = world.push(world.counting("dies"));
        world.counts("dies", dies).await;
        let jobs = [
            world.push(world.quick("cancelled while it waits")),
            world.push(JobSpec::new("nowhere", &["self-hosted", "no-such-label"]).run(":")),
            world.push(JobSpec::new("red", &POD).run("exit 1")),
            world.push(JobSpec::new("green", &POD).run("echo a | cat")),
        ];
        world.waits_with_us(jobs[0]).await;
        world.forge.cancel(jobs[0]);
        // One environment is lost, one job is cancelled while it runs.
        let of_task = format!("-{}-", world.task(dies).await);
        let executor = world.controller.executors().into_iter().find(|process| {
            let cwd = std::fs::read_link(format!("/proc/{}/cwd", process.pid)).unwrap_or_default();
            cwd.to_string_lossy().contains(&of_task)
        });
        signal::kill(Pid::from_raw(executor.expect("its executor runs").pid), signal::SIGKILL).unwrap();
        assert_eq!(world.ended(dies).await.status, JobStatus::Failure);
        world.forge.cancel(running);
        assert_eq!(world.ended(running).await.status, JobStatus::Cancelled);
        for job in [jobs[0], jobs[2], jobs[3]] {
            world.ended(job).await;
        }
        world.gate.open();
        // A result is counted a moment after the forge has it.
        for happened in [
            "jobs_completed_total{backend=\"pod\",outcome=\"success\"}",
            "infra_failures_total{backend=\"pod\",reason=\"lost\"}",
            "jobs_completed_total{backend=\"pod\",outcome=\"cancelled\"}",
        ] {
            let counted = async || world.controller.metric(happened).await.filter(|count| *count >= 1.0);
            eventually(happened, SOON, counted).await;
        }
        let after = world.controller.metrics().await.unwrap();
        let (was, is) = (series(&before), series(&after));
        let new: Vec<_> = is.difference(&was).collect();
        assert!(new.is_empty(), "made by jobs: {new:#?}");
        println!("{} series", is.len());
        assert!(is.len() <= MOST, "{} series", is.len());
        assert_open_metrics(&after, world.base());
    })
    .await;
}
