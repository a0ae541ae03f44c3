//! Counts what waits at Gitea itself, where the operator gave a token that may read it, and finds jobs that no runner ever gets.
//!
//! For people only: nothing is fetched or withheld by it. A `runs-on` that did not become a label (`Array`, an empty one) is a fault
//! of the workflow that Gitea does not tell anybody.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    gitea::{
        backlog::{self, QueuedJob},
        look::Web,
    },
    secret::Secret,
};

/// Between two looks; each costs Gitea a search.
const PERIOD: Duration = Duration::from_secs(30);
/// Kinds of labels that are told.
const KINDS_MOST: usize = 10;

pub struct Backlog {
    pub web: Web,
    /// Without a slash at the end.
    pub url: String,
    pub token: Secret,
    /// What this runner declares when there is room.
    pub declared: BTreeSet<String>,
    pub seen: watch::Sender<Option<Seen>>,
}

/// The last look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub at: SystemTime,
    /// `Err`: Gitea did not tell, and why.
    pub queued: Result<u64, String>,
    /// Labels that no runner has, with the number of such jobs and the repository of one.
    pub nobodys: Vec<(Vec<String>, u64, String)>,
}

impl Backlog {
    /// Looks until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        loop {
            let look = self.backlog_pass();
            tokio::select! {
                seen = look => drop(self.seen.send_replace(Some(seen))),
                () = stop.cancelled() => return,
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(PERIOD.mul_f64(0.9 + rand::random::<f64>() * 0.2)) => {}
            }
        }
    }

    /// One look.
    pub async fn backlog_pass(&self) -> Seen {
        let at = SystemTime::now();
        match backlog::queued(&self.web, &self.url, &self.token).await {
            Err(why) => Seen { at, queued: Err(why), nobodys: Vec::new() },
            Ok(queued) => {
                let mut runners = backlog::runners(&self.web, &self.url, &self.token).await;
                runners.push(self.declared.clone());
                Seen { at, queued: Ok(queued.total), nobodys: nobodys(&queued.jobs, &runners) }
            }
        }
    }
}

/// Jobs that want a label which no runner has, or labels that no single runner has together.
fn nobodys(jobs: &[QueuedJob], runners: &[BTreeSet<String>]) -> Vec<(Vec<String>, u64, String)> {
    let mut kinds: BTreeMap<&[String], (u64, &str)> = BTreeMap::new();
    for job in jobs {
        if !runners.iter().any(|has| job.labels.iter().all(|label| has.contains(label))) {
            kinds.entry(&job.labels).or_insert((0, &job.repository)).0 += 1;
        }
    }
    kinds.into_iter().take(KINDS_MOST).map(|(labels, (n, example))| (labels.to_vec(), n, example.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_nobodys_unless_one_runner_has_all_its_labels() {
        let labels = |all: &[&str]| all.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>();
        let job = |all: &[&str], repository: &str| QueuedJob { labels: labels(all), repository: repository.into() };
        let runners = [BTreeSet::from_iter(labels(&["self-hosted", "pod"])), BTreeSet::from_iter(labels(&["windows"]))];
        let jobs = [
            job(&["self-hosted", "pod"], "a/fine"),
            job(&["windows"], "a/fine"),
            job(&["Array"], "a/bad"),
            job(&["Array"], "b/bad"),
            job(&[""], "c/empty"),
            job(&["pod", "windows"], "d/both"),
        ];
        let found = nobodys(&jobs, &runners);
        let told: Vec<_> = found.iter().map(|(labels, n, example)| (labels.join("+"), *n, example.as_str())).collect();
        assert_eq!(told, [(String::new(), 1, "c/empty"), ("Array".into(), 2, "a/bad"), ("pod+windows".into(), 1, "d/both")]);
    }
}
