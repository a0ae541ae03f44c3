//! A measurement, not a test: thousands of jobs that only claim and finish, from the stand-in forge through a queue to local environments.
//!
//! `tests/bench.sh load` runs it with the release build and prints the table of `docs/performance.md`. What it asserts is what the
//! design promises for any machine: every job ends green once, and an environment is made soon while slots are free.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/mod.rs"]
mod support;
#[path = "rules/world.rs"]
mod world;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use gitea_dynamic_runner::demo::forge::{ForgeConfig, JobId, JobSpec, JobStatus};
use serde_json::Value;

use self::{
    support::nats::Nats,
    world::{POD, World},
};

/// Slots; never more than a third of them are wanted at once, so there is always a free one.
const CAPACITY: u32 = 32;
const OPEN: usize = 9;

fn jobs() -> usize {
    std::env::var("LOAD_JOBS").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

/// Clock ticks that a process has used so far.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn resident_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

/// Milliseconds from the answer to the fetch to an event of the worker, sorted, by the controller's own log. A worker may be faster than
/// the row that says that the assignment is stored.
fn latencies(log: &str, until: &str) -> Vec<f64> {
    let (mut fetched, mut reached): (HashMap<String, f64>, HashMap<String, f64>) = (HashMap::new(), HashMap::new());
    for line in log.lines() {
        let Ok(row) = serde_json::from_str::<Value>(line) else { continue };
        let (Some(event), Some(assignment)) = (row["event"].as_str(), row["assignment"].as_str()) else { continue };
        // The day does not matter, except at its end.
        let time = row["timestamp"].as_str().unwrap().split_once('T').unwrap().1.trim_end_matches('Z').to_owned();
        let seconds = time.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().unwrap());
        if event == "received" {
            fetched.insert(assignment.to_owned(), seconds - row["persist_ms"].as_f64().unwrap() / 1000.0);
        } else if event == until {
            reached.insert(assignment.to_owned(), seconds);
        }
    }
    let took = |(assignment, reached): (&String, &f64)| {
        let from = fetched[assignment];
        (reached - from + if *reached < from { 86_400.0 } else { 0.0 }) * 1000.0
    };
    let mut found: Vec<f64> = reached.iter().map(took).collect();
    found.sort_by(f64::total_cmp);
    found
}

async fn measure(queue: &str, mut env: Vec<(&'static str, String)>) {
    env.push(("RUST_LOG", "info,async_nats=error,gitea_dynamic_runner::worker=debug".to_owned()));
    let mut world = World::prepare(CAPACITY, ForgeConfig::default(), env).await;
    world.controller.start_again().await;
    let (wanted, began, pid) = (jobs(), Instant::now(), world.controller.pid());
    let (before, idle) = (ticks(pid), resident_mib(pid));
    let (mut pushed, mut open, mut most): (usize, Vec<JobId>, u64) = (0, Vec::new(), 0);
    while pushed < wanted || !open.is_empty() {
        open.retain(|job| {
            let view = world.forge.job(*job).unwrap();
            assert!(!view.status.is_final() || view.status == JobStatus::Success, "{:#?}", view.log);
            !view.status.is_final()
        });
        while open.len() < OPEN && pushed < wanted {
            open.push(world.push(JobSpec::new(&format!("j{pushed}"), &POD).run(":")));
            pushed += 1;
        }
        most = most.max(resident_mib(pid));
        assert!(began.elapsed() < Duration::from_secs(60 + wanted as u64), "it has stalled");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (took, used) = (began.elapsed().as_secs_f64(), (ticks(pid) - before) as f64 / 100.0);
    // `executor_absent` is written just before the create call, `executor_created` when it has returned.
    let (called, made) =
        (latencies(&world.controller.log(), "executor_absent"), latencies(&world.controller.log(), "executor_created"));
    assert_eq!((called.len(), made.len()), (wanted, wanted), "one environment for each job");
    let at = |times: &[f64], part: f64| times[((times.len() - 1) as f64 * part) as usize];
    let metrics = world.controller.metrics().await.unwrap();
    let series = metrics.lines().filter(|line| !line.starts_with('#')).count();
    assert!(series <= 300, "{series} series");
    println!(
        "{queue}: {wanted} jobs in {took:.0} s, {:.1} a second; fetch to create call p50 {:.0} ms, p99 {:.0} ms, most {:.0} ms, to its return \
         p50 {:.0} ms, p99 {:.0} ms; controller {:.1} ms CPU a job; resident {idle} MiB idle, {most} MiB at most; {series} series",
        wanted as f64 / took,
        at(&called, 0.5),
        at(&called, 0.99),
        at(&called, 1.0),
        at(&made, 0.5),
        at(&made, 0.99),
        used * 1000.0 / wanted as f64,
    );
    assert!(at(&called, 0.99) <= 250.0, "p99 is {:.0} ms", at(&called, 0.99));
    world.no_environment(Duration::from_secs(60)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: tests/bench.sh load"]
async fn through_jetstream() {
    let nats = Nats::start().await;
    nats.set_up().await;
    measure("JetStream", nats.env()).await;
    assert_eq!(nats.admin().await.messages("CI_RUNNER").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: tests/bench.sh load"]
async fn through_the_embedded_queue() {
    measure("embedded", Vec::new()).await;
}
