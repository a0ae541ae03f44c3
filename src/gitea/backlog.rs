//! What Gitea's REST API tells of jobs that it has given to nobody yet, with a token that may only read.
//!
//! Paths and words as of Gitea 1.27: `queued` jobs wait for a runner, `waiting` ones for other jobs. Whoever is no administrator sees
//! the jobs of his own repositories. What the answer means is the caller's.

use std::collections::BTreeSet;

use http::StatusCode;
use serde::Deserialize;

use super::look::{Answer, Web};
use crate::secret::Secret;

/// Jobs on one page, and pages that are read: the labels of more jobs are not looked at.
const PAGE: usize = 50;
const PAGES: usize = 10;

/// A job that waits at Gitea.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedJob {
    pub labels: Vec<String>,
    /// `owner/name`; empty where it is not told.
    pub repository: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queued {
    /// All of them.
    pub total: u64,
    /// The first 500.
    pub jobs: Vec<QueuedJob>,
}

#[derive(Deserialize)]
struct Jobs {
    #[serde(default)]
    total_count: u64,
    jobs: Option<Vec<Row>>,
}

#[derive(Deserialize)]
struct Row {
    labels: Option<Vec<String>>,
    #[serde(default)]
    html_url: String,
}

#[derive(Deserialize)]
struct Runners {
    runners: Option<Vec<Runner>>,
}

#[derive(Deserialize)]
struct Runner {
    labels: Option<Vec<Label>>,
}

#[derive(Deserialize)]
struct Label {
    name: String,
}

/// Jobs that wait for a runner.
///
/// # Errors
/// A text for the operator, with the way out.
pub async fn queued(web: &Web, url: &str, token: &Secret) -> Result<Queued, String> {
    let mut scope = "admin";
    let mut found = Queued { total: 0, jobs: Vec::new() };
    for page in 1..=PAGES {
        let path = |scope: &str| format!("{url}/api/v1/{scope}/actions/jobs?status=queued&limit={PAGE}&page={page}");
        let mut answer = web.get(&path(scope), Some(token)).await?;
        if answer.status == StatusCode::FORBIDDEN && scope == "admin" {
            scope = "user";
            answer = web.get(&path(scope), Some(token)).await?;
        }
        let Jobs { total_count, jobs } = read(&answer)?;
        let jobs = jobs.unwrap_or_default();
        found.total = total_count;
        let last = jobs.len() < PAGE;
        found.jobs.extend(jobs.into_iter().map(|row| QueuedJob {
            repository: repository_of(&row.html_url).unwrap_or_default(),
            labels: row.labels.unwrap_or_default(),
        }));
        if last {
            break;
        }
    }
    Ok(found)
}

/// The labels of each runner that Gitea knows; empty where the token may not see them.
pub async fn runners(web: &Web, url: &str, token: &Secret) -> Vec<BTreeSet<String>> {
    let path = format!("{url}/api/v1/admin/actions/runners?limit={PAGE}");
    let Ok(answer) = web.get(&path, Some(token)).await else { return Vec::new() };
    let labels = |runner: Runner| runner.labels.unwrap_or_default().into_iter().map(|label| label.name).collect();
    read::<Runners>(&answer).ok().and_then(|all| all.runners).unwrap_or_default().into_iter().map(labels).collect()
}

fn read<'a, T: Deserialize<'a>>(answer: &'a Answer) -> Result<T, String> {
    match answer.status {
        StatusCode::OK => serde_json::from_slice(&answer.body).map_err(|e| format!("Gitea's answer makes no sense: {e}")),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(format!(
            "Gitea refuses GITEA_API_TOKEN ({}): give it the scopes read:admin, or read:user and read:repository",
            answer.status.as_u16()
        )),
        StatusCode::NOT_FOUND => Err("this Gitea does not tell which jobs wait (1.25 and newer do)".into()),
        status => Err(format!("Gitea answered {status}")),
    }
}

/// Of `…/owner/name/actions/runs/1/jobs/1`.
fn repository_of(url: &str) -> Option<String> {
    let before = url.split("/actions/runs/").next().filter(|before| before.len() < url.len())?;
    let mut parts = before.rsplit('/');
    let (name, owner) = (parts.next()?, parts.next()?);
    Some(format!("{owner}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_read_from_the_jobs_address() {
        for (url, repository) in [
            ("http://127.0.0.1:3000/boss/demo/actions/runs/1/jobs/2", Some("boss/demo")),
            ("https://example.test/git/boss/demo/actions/runs/1", Some("boss/demo")),
            ("https://example.test/boss/demo", None),
            ("", None),
        ] {
            assert_eq!(repository_of(url).as_deref(), repository, "{url}");
        }
    }
}
