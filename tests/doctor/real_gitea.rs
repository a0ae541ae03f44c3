//! At a real Gitea: what it says of token, labels and ROOT_URL, and behind a proxy with TLS and a sub-path.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use http::Method;
use serde_json::json;

use crate::support::{
    controller::{Controller, ControllerOptions},
    doctor::doctor,
    front::Front,
    gitea::{RealGitea, Version, Visibility},
    passable, story,
};

const STORY: Duration = Duration::from_secs(100);
const RUN: Duration = Duration::from_secs(60);

fn token(gitea: &RealGitea) -> String {
    gitea.token().to_owned()
}

#[tokio::test]
async fn token_labels_and_the_runners_state_are_told_as_gitea_has_them() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        gitea.repository("open", Visibility::Public, &[]).await;
        let mut controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let said = doctor(controller.command()).await;
        assert_eq!((said.to_do(), said.code), (vec![], 0), "{:#?}", said.items);
        for name in ["gitea.version", "gitea.clock", "gitea.token", "gitea.root_url", "controller"] {
            assert_eq!(said.state(name), "fine", "{:#?}", said.item(name));
        }
        // Without an API token nobody tells which labels are declared.
        assert_eq!(said.state("gitea.labels"), "unknown");
        controller.set("GITEA_API_TOKEN", Some(token(&gitea)));
        let said = doctor(controller.command()).await;
        assert_eq!(said.state("gitea.labels"), "fine", "{:#?}", said.item("gitea.labels"));
        assert!(!said.text.contains(&token(&gitea)));

        // Disabled in Gitea, as a person does it.
        let runners = gitea.rest.get("/admin/actions/runners").await;
        let id = runners["runners"][0]["id"].as_i64().unwrap();
        let runner = format!("/admin/actions/runners/{id}");
        gitea.rest.api(Method::PATCH, &runner, Some(json!({"disabled": true}))).await;
        doctor(controller.command()).await.assert_to_do("gitea.labels", "is disabled in Gitea", "enable it");

        controller.sigterm();
        gitea.rest.api(Method::DELETE, &runner, None).await;
        doctor(controller.command()).await.assert_to_do("gitea.token", "was deleted there", "register");
    })
    .await;
}

#[tokio::test]
async fn a_root_url_that_nobody_reaches_is_told() {
    story(STORY, async {
        let gitea =
            RealGitea::start(Version::Current, "[server]\nROOT_URL = http://127.0.0.1:9/\nPUBLIC_URL_DETECTION = never\n").await;
        gitea.repository("open", Visibility::Public, &[]).await;
        let mut controller = Controller::start(&gitea, ControllerOptions::default()).await;
        controller.sigterm();
        let said = doctor(controller.command()).await;
        said.assert_to_do("gitea.root_url", "http://127.0.0.1:9, which cannot be reached", "ROOT_URL in Gitea's app.ini");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_private_authority_and_a_sub_path_a_job_checks_its_repository_out() {
    story(STORY, async {
        let folder = tempfile::Builder::new().prefix("f").rand_bytes(4).tempdir().unwrap();
        passable(folder.path());
        let front = Front::start(folder.path(), "/git").await;
        let gitea = RealGitea::start(Version::Current, &format!("[server]\nROOT_URL = {}/\n", front.url())).await;
        front.lead_to(gitea.port());
        let env = vec![("GITEA_URL", front.url()), ("GITEA_CA_FILE", front.ca_file().display().to_string())];
        let mut controller = Controller::start(&gitea, ControllerOptions { env, ..Default::default() }).await;
        let checkout = "on: push\njobs:\n  one:\n    runs-on: [self-hosted, pod]\n    steps:\n      - run: |\n          \
             git clone -q \"$GITHUB_SERVER_URL/$GITHUB_REPOSITORY.git\" it\n          cat it/README.md\n          curl -fsS \"$GITHUB_API_URL/version\"\n";
        let (repository, run) = gitea.run("checked-out", checkout).await;
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert_eq!(conclusion, "success", "{log:#?}");
        assert!(log.iter().any(|row| row.contains("# checked-out")), "{log:#?}");

        let said = doctor(controller.command()).await;
        assert_eq!(said.to_do(), Vec::<&str>::new(), "{:#?}", said.items);
        assert_eq!(said.state("gitea.root_url"), "fine", "{:#?}", said.item("gitea.root_url"));
        // Without the authority, and without the sub-path.
        controller.set("GITEA_CA_FILE", None);
        doctor(controller.command()).await.assert_to_do("gitea", "does not answer", "set GITEA_CA_FILE");
        controller.set("GITEA_CA_FILE", Some(front.ca_file().display().to_string()));
        controller.set("GITEA_URL", Some(front.url().trim_end_matches("/git").to_owned()));
        doctor(controller.command()).await.assert_to_do("gitea", "not Gitea's API", "sub-path");
    })
    .await;
}
