//! What the dashboard takes from a real Gitea: links that lead to the run, and what waits there unseen.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use http::Method;
use serde_json::Value;

use crate::support::{
    controller::{Controller, ControllerOptions},
    eventually,
    gitea::{RealGitea, Version},
    story,
};

const STORY: Duration = Duration::from_secs(100);
const RUN: Duration = Duration::from_secs(60);

/// One job that runs, and three that no runner ever gets.
const WORKFLOW: &str = r#"
on: push
jobs:
  served:
    runs-on: [self-hosted, pod]
    steps:
      - run: echo served
  array:
    runs-on: ${{ fromJSON('["self-hosted", "pod"]') }}
    steps:
      - run: echo never
  empty:
    runs-on: ${{ matrix.os }}
    steps:
      - run: echo never
  windows:
    runs-on: windows
    steps:
      - run: echo never
"#;

#[tokio::test]
async fn the_overview_tells_jobs_that_no_runner_gets_and_its_link_leads_to_the_run() {
    story(STORY, tell(Version::Current)).await;
}

#[tokio::test]
async fn the_same_on_the_older_gitea() {
    story(STORY, tell(Version::Old)).await;
}

async fn tell(version: Version) {
    let gitea = RealGitea::start(version, "").await;
    let token = gitea.token().to_owned();
    let options = ControllerOptions { env: vec![("GITEA_API_TOKEN", token.clone())], ..Default::default() };
    let controller = Controller::start(&gitea, options).await;
    let (repository, run) = gitea.run("unseen", WORKFLOW).await;
    let finished = eventually("the served job is over", RUN, async || {
        let jobs = controller.api("/api/v1/jobs?phase=finished").await;
        jobs["jobs"].as_array()?.first().cloned()
    })
    .await;
    assert_eq!((finished["result"].as_str(), finished["job_key"].as_str()), (Some("success"), Some("served")), "{finished:#}");

    let link = finished["run_url"].as_str().unwrap();
    let known = gitea.rest.get(&format!("/repos/{}/{}/actions/runs/{run}", repository.owner, repository.name)).await;
    assert_eq!(Some(link), known["html_url"].as_str(), "our link is Gitea's own");
    let path = link.strip_prefix(gitea.url()).unwrap();
    assert!(gitea.web(Method::GET, path).await.text().contains("unseen"), "the link leads to the run's page");

    let told = eventually("what waits at Gitea is told", RUN, async || {
        let overview = controller.api("/api/v1/overview").await;
        (overview["backlog"]["queued"] == 3).then_some(overview)
    })
    .await;
    let mut nobodys: Vec<_> = told["backlog"]["nobodys"].as_array().unwrap().iter().map(labels).collect();
    nobodys.sort();
    assert_eq!(nobodys, ["", "Array", "windows"], "{told:#}");
    let page = controller.page("/").await;
    assert!(page.contains("Array") && page.contains("did not become a label"), "{page}");
    assert!(!page.contains(&token) && !controller.log().contains(&token), "the token is shown nowhere");
}

fn labels(kind: &Value) -> String {
    assert_eq!((kind["jobs"].as_u64(), kind["example"].as_str()), (Some(1), Some("boss/unseen")), "{kind:#}");
    kind["labels"].as_array().unwrap().iter().map(|label| label.as_str().unwrap()).collect::<Vec<_>>().join(", ")
}
