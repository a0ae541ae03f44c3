//! What became of every job: its result and how often it began to run.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::{JobId, JobSpec, JobStatus};

use crate::world::{World, assert_whole};

/// From a restart to the end of the last job.
const LIMIT: Duration = Duration::from_secs(60);

/// One job, and what must become of it.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) job: JobId,
    pub(crate) status: JobStatus,
    /// How often its first step began.
    pub(crate) runs: usize,
}

/// All jobs of a story.
#[derive(Default)]
pub(crate) struct Ledger(Vec<Entry>);

impl Ledger {
    pub(crate) fn push(&mut self, world: &World, name: &'static str, spec: JobSpec, status: JobStatus, runs: usize) -> JobId {
        let job = world.push(spec);
        self.0.push(Entry { name, job, status, runs });
        job
    }

    pub(crate) fn job(&self, name: &str) -> JobId {
        self.0.iter().find(|entry| entry.name == name).unwrap().job
    }

    /// Waits until every job has ended and every environment is gone, then compares.
    pub(crate) async fn balances(&self, world: &World) {
        for entry in &self.0 {
            world.forge.wait_done(entry.job, LIMIT).await.unwrap();
        }
        world.no_environment(LIMIT).await;
        let mut found = Vec::new();
        for entry in &self.0 {
            found.push((entry.name, world.forge.job(entry.job).unwrap().status, world.started(entry.name)));
        }
        let planned: Vec<_> = self.0.iter().map(|entry| (entry.name, entry.status, entry.runs)).collect();
        let logs: Vec<_> = self.0.iter().map(|entry| world.forge.job(entry.job).unwrap().log).collect();
        println!("ledger: {found:?}");
        assert_eq!(found, planned, "{logs:#?}");
        for entry in self.0.iter().filter(|entry| entry.status == JobStatus::Failure && entry.runs == 0) {
            let view = world.forge.job(entry.job).unwrap();
            assert!(!view.log.is_empty(), "{} failed without a reason", entry.name);
        }
        for entry in self.0.iter().filter(|entry| entry.status == JobStatus::Success) {
            let view = world.forge.job(entry.job).unwrap();
            // What a job says last: `done` of a quick one, the count of a counting one.
            match view.log.iter().any(|row| row.starts_with("rows in all")) {
                false => assert_eq!(view.log.iter().filter(|row| *row == "done").count(), 1, "{}: {:#?}", entry.name, view.log),
                true => assert_whole(&view),
            }
        }
    }
}
