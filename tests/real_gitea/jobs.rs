//! What a job may rely on: its log, its verdict, its repository, its secrets, its needs, artifacts and actions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use http::Method;
use serde_json::json;

use crate::support::{
    Gate,
    controller::{Controller, ControllerOptions},
    eventually,
    gitea::{RealGitea, Repository, Version, Visibility},
    official, story,
};

const STORY: Duration = Duration::from_secs(90);
const RUN: Duration = Duration::from_secs(45);

const TWO_STEPS: &str = r#"
on: [push, workflow_dispatch]
jobs:
  greet:
    runs-on: [RUNS_ON]
    steps:
      - run: |
          echo "first row"
          echo "second row"
      - name: the other step
        run: printf 'no newline at the end'
"#;

/// The runner's own rows, from its greeting on, with what differs from one run to the next taken out.
fn runners_rows(log: &[String]) -> Vec<String> {
    let greeting =
        log.iter().position(|row| row.contains(" received task ")).unwrap_or_else(|| panic!("no greeting in {log:#?}"));
    let about = log[greeting].split_once(" of job ").unwrap().1;
    let mut rows = vec![format!("received a task of job {about}")];
    rows.extend_from_slice(&log[greeting + 1..]);
    // Gitea ≤ 1.26 seals a log only with a row. When the last rows were delivered before the runner said that no more would come,
    // that row is an empty one.
    rows.pop_if(|last| last.is_empty());
    rows
}

async fn a_two_step_job(version: Version) {
    let gitea = RealGitea::start(version, "").await;
    let (alone, run_alone) = gitea.run("alone", &TWO_STEPS.replace("RUNS_ON", "alone")).await;
    official::run_one_job(&gitea, "alone").await;
    assert_eq!(alone.conclusion(run_alone, RUN).await, "success");
    let expected = runners_rows(&alone.only_log(run_alone).await);
    assert!(expected.contains(&"second row".to_owned()), "the yardstick has the job's rows: {expected:#?}");

    let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
    let (repository, run) = gitea.run("greeting", &TWO_STEPS.replace("RUNS_ON", "self-hosted, pod")).await;
    assert_eq!(repository.conclusion(run, RUN).await, "success");
    let job = repository.jobs(run).await.remove(0);
    let steps: Vec<&str> = job.steps.iter().map(|(_, conclusion)| conclusion.as_str()).collect();
    assert_eq!(steps, ["success", "success"]);
    let log = repository.log(job.id).await;
    assert_eq!(runners_rows(&log), expected, "row by row what the official runner alone reports");
    let before = log.iter().position(|row| row.contains("received task")).unwrap();
    assert!(before > 0, "the controller says before it what it did for the job: {log:#?}");
    assert!(!log[..before].iter().any(|row| row.contains(" row")), "no row of the job came early: {log:#?}");
}

#[tokio::test]
async fn a_two_step_job_is_green_with_exactly_the_log_of_the_official_runner() {
    story(STORY, a_two_step_job(Version::Current)).await;
}

#[tokio::test]
async fn on_gitea_1_26_a_two_step_job_is_green_with_exactly_the_log_of_the_official_runner() {
    story(STORY, a_two_step_job(Version::Old)).await;
}

async fn a_red_job(version: Version) {
    let gitea = RealGitea::start(version, "").await;
    let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
    let workflow = r#"
on: push
jobs:
  fall:
    runs-on: [self-hosted, pod]
    steps:
      - run: echo "all is well"
      - run: echo "and now it is not"; exit 3
      - run: echo "never said"
"#;
    let (repository, run) = gitea.run("red", workflow).await;
    assert_eq!(repository.conclusion(run, RUN).await, "failure");
    let job = repository.jobs(run).await.remove(0);
    let steps: Vec<&str> = job.steps.iter().map(|(_, conclusion)| conclusion.as_str()).collect();
    // The REST API of 1.26 gives each step the job's conclusion.
    if version == Version::Current {
        assert_eq!(steps, ["success", "failure", "skipped"]);
    }
    let log = repository.log(job.id).await;
    assert_eq!(log.iter().filter(|row| *row == "and now it is not").count(), 1, "{log:#?}");
    assert!(!log.iter().any(|row| row == "never said"), "{log:#?}");
}

#[tokio::test]
async fn a_failing_step_makes_the_job_red_and_skips_the_rest() {
    story(STORY, a_red_job(Version::Current)).await;
}

#[tokio::test]
async fn on_gitea_1_26_a_failing_step_makes_the_job_red_and_skips_the_rest() {
    story(STORY, a_red_job(Version::Old)).await;
}

#[tokio::test]
async fn a_job_clones_its_private_repository_through_the_bridge() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let workflow = r#"
on: push
jobs:
  clone:
    runs-on: [self-hosted, pod]
    env:
      TOKEN: ${{ github.token }}
    steps:
      - run: |
          echo "server $GITHUB_SERVER_URL"
          git clone --quiet "${GITHUB_SERVER_URL/:\/\//://x-access-token:$TOKEN@}/$GITHUB_REPOSITORY" copy
          git -C copy rev-parse HEAD | grep -x "$GITHUB_SHA"
          echo "read: $(cat copy/note.txt)"
"#;
        let files = [("note.txt", "kept in the repository\n"), (".gitea/workflows/ci.yaml", workflow)];
        let repository = gitea.repository("secretive", Visibility::Private, &files).await;
        let run = repository.newest_run_after(0).await;
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert_eq!(conclusion, "success", "{log:#?}");
        assert!(log.contains(&"read: kept in the repository".to_owned()), "{log:#?}");
        let server = log.iter().find_map(|row| row.strip_prefix("server http")).unwrap();
        assert!(!gitea.url().ends_with(server), "the job's server is its bridge, not Gitea itself: {server}");
    })
    .await;
}

#[tokio::test]
async fn an_artifact_is_uploaded_through_the_bridge_and_downloaded_from_gitea() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let (repository, run) = gitea.run("artifacts", UPLOAD).await;
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert_eq!(conclusion, "success", "{log:#?}");
        let archive = gitea.web(Method::GET, &format!("/boss/artifacts/actions/runs/{run}/artifacts/greetings")).await;
        assert!(archive.body.starts_with(b"PK"), "a zip archive");
        assert!(archive.text().contains("hello.txt"), "with the file");
    })
    .await;
}

/// The three calls of the artifact protocol of Gitea (version 3), the upload's address turned to the bridge too.
const UPLOAD: &str = r#"
on: push
jobs:
  upload:
    runs-on: [self-hosted, pod]
    steps:
      - run: |
          cat >upload.mjs <<'SCRIPT'
          const base = new URL(`_apis/pipelines/workflows/${process.env.GITHUB_RUN_ID}/artifacts?api-version=6.0-preview`, process.env.ACTIONS_RUNTIME_URL);
          const headers = {authorization: `Bearer ${process.env.ACTIONS_RUNTIME_TOKEN}`};
          const json = {...headers, 'content-type': 'application/json'};
          async function call(method, url, headers, body) {
            const answer = await fetch(url, {method, headers, body});
            const text = await answer.text();
            console.log(method, answer.status);
            if (!answer.ok) throw new Error(text);
            return JSON.parse(text);
          }
          const content = Buffer.from('hello from a job\n'.repeat(1000));
          const made = await call('POST', base, json, JSON.stringify({Type: 'actions_storage', Name: 'greetings'}));
          const given = new URL(made.fileContainerResourceUrl);
          const upload = new URL(given.pathname + given.search, base);
          upload.searchParams.set('itemPath', 'greetings/hello.txt');
          await call('PUT', upload, {...headers, 'content-type': 'application/octet-stream',
            'content-range': `bytes 0-${content.length - 1}/${content.length}`, 'x-tfs-filelength': String(content.length),
            'x-actions-results-md5': (await import('node:crypto')).createHash('md5').update(content).digest('base64')}, content);
          base.searchParams.set('artifactName', 'greetings');
          await call('PATCH', base, json, JSON.stringify({Size: content.length}));
          SCRIPT
          node upload.mjs
"#;

#[tokio::test]
async fn secrets_and_variables_reach_the_job_and_secrets_are_masked_in_its_log() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let repository = gitea.repository("secrets", Visibility::Public, &[]).await;
        repository.secret("PASSPHRASE", "correct-horse-battery").await;
        repository.variable("COLOUR", "vermilion").await;
        let run = repository
            .push_workflow(
                r#"
on: push
jobs:
  use:
    runs-on: [self-hosted, pod]
    env:
      PASSPHRASE: ${{ secrets.PASSPHRASE }}
    steps:
      - run: |
          echo "colour ${{ vars.COLOUR }}, length ${#PASSPHRASE}"
          echo "said aloud: $PASSPHRASE"
          [ "$(printf %s "$PASSPHRASE" | md5sum | cut -d' ' -f1)" = "$(printf %s correct- horse- battery | md5sum | cut -d' ' -f1)" ]
"#,
            )
            .await;
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert_eq!(conclusion, "success", "{log:#?}");
        assert!(log.contains(&"colour vermilion, length 21".to_owned()), "{log:#?}");
        assert!(log.contains(&"said aloud: ***".to_owned()), "{log:#?}");
        assert!(!log.iter().any(|row| row.contains("correct-horse-battery")), "{log:#?}");
    })
    .await;
}

#[tokio::test]
async fn outputs_of_a_job_reach_the_job_that_needs_it() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let workflow = r#"
on: push
jobs:
  build:
    runs-on: [self-hosted, pod]
    outputs:
      version: ${{ steps.count.outputs.version }}
    steps:
      - id: count
        run: echo "version=1.$((40 + 2))" >>"$GITHUB_OUTPUT"
  release:
    needs: build
    runs-on: [self-hosted, pod]
    steps:
      - run: echo "released ${{ needs.build.outputs.version }} after ${{ needs.build.result }}"
"#;
        let (repository, run) = gitea.run("outputs", workflow).await;
        assert_eq!(repository.conclusion(run, RUN).await, "success");
        let log = log_of(&repository, run, "release").await;
        assert!(log.contains(&"released 1.42 after success".to_owned()), "{log:#?}");
    })
    .await;
}

async fn log_of(repository: &Repository<'_>, run: i64, name: &str) -> Vec<String> {
    let jobs = repository.jobs(run).await;
    let job = jobs.iter().find(|job| job.name == name).unwrap_or_else(|| panic!("no job {name} in {jobs:?}"));
    repository.log(job.id).await
}

#[tokio::test]
async fn a_composite_action_of_the_server_runs() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let action = r#"
name: Greet
description: Greets somebody.
inputs:
  who: {description: Whom., required: true}
outputs:
  greeting: {description: What was said., value: "${{ steps.say.outputs.greeting }}"}
runs:
  using: composite
  steps:
    - id: say
      shell: bash
      run: |
        echo "Good morning, ${{ inputs.who }}"
        echo "greeting=said to ${{ inputs.who }}" >>"$GITHUB_OUTPUT"
"#;
        gitea.repository("greet", Visibility::Public, &[("action.yml", action)]).await.tag("v1").await;
        let workflow = r#"
on: push
jobs:
  use:
    runs-on: [self-hosted, pod]
    steps:
      - id: greet
        uses: boss/greet@v1
        with: {who: world}
      - run: echo "output ${{ steps.greet.outputs.greeting }}"
"#;
        let (repository, run) = gitea.run("greeter", workflow).await;
        let conclusion = repository.conclusion(run, RUN).await;
        let log = repository.only_log(run).await;
        assert_eq!(conclusion, "success", "{log:#?}");
        for row in ["Good morning, world", "output said to world"] {
            assert!(log.iter().any(|given| given == row), "{row}: {log:#?}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_dispatched_job_gets_its_inputs_and_runs_again_when_it_is_rerun() {
    story(STORY, async {
        let gitea = RealGitea::start(Version::Current, "").await;
        let gate = Gate::new().await;
        gate.open();
        let _controller = Controller::start(&gitea, ControllerOptions::default()).await;
        let workflow = format!(
            r#"
on:
  workflow_dispatch:
    inputs:
      word:
        required: true
jobs:
  say:
    runs-on: [self-hosted, pod]
    steps:
      - run: |
          test ! -e "$HOME/left-by-the-run-before" && touch "$HOME/left-by-the-run-before"
          {}
          echo "the word is ${{{{ inputs.word }}}}"
"#,
            gate.sign("said")
        );
        let files = [(".gitea/workflows/ci.yaml", workflow.as_str())];
        let repository = gitea.repository("dispatched", Visibility::Public, &files).await;
        repository.dispatch("ci.yaml", json!({"word": "quince"})).await;
        let run = repository.newest_run_after(0).await;
        assert_eq!(repository.conclusion(run, RUN).await, "success");
        let log = repository.only_log(run).await;
        assert!(log.iter().any(|row| row == "the word is quince"), "{log:#?}");
        repository.rerun(run).await;
        eventually("it runs again", RUN, async || (gate.calls("said") == 2).then_some(())).await;
        assert_eq!(repository.conclusion(run, RUN).await, "success", "in an environment without what the first run left");
    })
    .await;
}
