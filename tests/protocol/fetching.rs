//! Who gets which job, and when: versions, labels, order, throttling, disabled runners.

use std::collections::BTreeSet;

use futures::future::join_all;
use gitea_dynamic_runner::{
    demo::forge::{JobSpec, RunWhen},
    proto::runner::TaskResult,
};

use crate::{
    runner::Runner,
    under_test::{ForgeUnderTest, Shown},
};

/// A waiting job is invisible at the current version; any other finds it. Handing it out moves nothing.
pub(crate) async fn the_version_decides_whether_a_job_is_looked_for(forge: &dyn ForgeUnderTest) {
    let (runner, observer) = (Runner::new(forge, &[]).await, Runner::new(forge, &[]).await);
    let before = observer.version().await;
    assert!(before >= 1, "{before}");
    forge.push(vec![runner.job("a"), runner.job("b"), runner.job("c")]).await;
    let current = observer.version().await;
    assert_eq!(current, before + 1, "a push of three jobs moves the version once");
    let (task, version) = runner.fetch(current).await;
    assert!(task.is_none(), "at the current version nothing is looked for");
    assert_eq!(version, current);
    for asked in [before, 0, current + 100] {
        let (task, version) = runner.fetch(asked).await;
        assert!(task.is_some(), "version {asked} is not the current {current}");
        assert_eq!(version, current, "handing out moves nothing");
    }
    let (task, version) = runner.fetch(0).await;
    assert!(task.is_none());
    assert_eq!(version, current);
}

/// A job's end moves the version only if others of its repository wait.
pub(crate) async fn an_end_moves_the_version_only_while_others_wait(forge: &dyn ForgeUnderTest) {
    let (runner, observer) = (Runner::new(forge, &[]).await, Runner::new(forge, &[]).await);
    forge.push(vec![runner.job("a"), runner.job("b")]).await;
    let first = runner.claim().await;
    let current = observer.version().await;
    runner.end(first.id, TaskResult::RESULT_SUCCESS, 1).await;
    let after = observer.version().await;
    assert_eq!(after, current + i64::from(forge.facts().end_moves_version));
    let second = runner.claim().await;
    runner.end(second.id, TaskResult::RESULT_SUCCESS, 1).await;
    assert_eq!(observer.version().await, after, "none waits any more");
}

/// Parallel fetches of one runner get a job each, none twice; the oldest first.
pub(crate) async fn every_job_is_handed_out_once_and_the_oldest_first(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let older = forge.push(vec![runner.job("old")]).await;
    // Gitea orders by whole seconds, then by number.
    forge.push((0..5).map(|at| runner.job(&format!("new{at}"))).collect()).await;
    let (first, _) = runner.fetch(0).await;
    assert_eq!(forge.job(&older[0]).await.0, Shown::Running, "the oldest goes first");
    let fetched = join_all((0..8).map(|_| runner.fetch(0))).await;
    let mut tasks: Vec<_> = fetched.into_iter().filter_map(|(task, _)| task).chain(first).map(|task| task.id).collect();
    while let (Some(task), _) = runner.fetch(0).await {
        tasks.push(task.id);
    }
    assert_eq!(tasks.len(), 6);
    assert_eq!(tasks.iter().collect::<BTreeSet<_>>().len(), 6, "none twice: {tasks:?}");
    for task in tasks.iter().rev() {
        assert_eq!(runner.end(*task, TaskResult::RESULT_SUCCESS, 1).await, TaskResult::RESULT_SUCCESS, "in any order");
    }
}

/// Whoever asks while 16 search is answered with the version that it asked with, and finds its job later.
pub(crate) async fn a_throttled_fetch_echoes_the_version_that_it_asked_with(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    forge.push((0..40).map(|at| runner.job(&format!("j{at}"))).collect()).await;
    let fetched = join_all((0..40).map(|_| runner.fetch(0))).await;
    let mut tasks: BTreeSet<i64> = fetched.iter().filter_map(|(task, _)| task.as_ref()).map(|task| task.id).collect();
    assert!(tasks.len() >= 16 || !forge.facts().throttles, "16 search at once: {}", tasks.len());
    for (task, version) in &fetched {
        if task.is_none() && forge.facts().throttles {
            assert_eq!(*version, 0, "40 jobs wait for 40 fetches, so an empty answer is a throttled one");
        }
    }
    while let (Some(task), _) = runner.fetch(0).await {
        tasks.insert(task.id);
    }
    assert_eq!(tasks.len(), 40);
}

/// Labels match exactly, and all of a job's must be declared.
pub(crate) async fn labels_match_exactly(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let label = runner.label.clone();
    let upper = label.to_uppercase();
    let host = format!("{label}:host");
    let jobs =
        [("case", vec![&*upper]), ("schema", vec![&*host]), ("both", vec![&*label, "never-declared"]), ("fits", vec![&*label])];
    let handles = forge.push(jobs.iter().map(|(key, labels)| JobSpec::new(key, labels).run("true")).collect()).await;
    runner.claim().await;
    assert!(runner.fetch(0).await.0.is_none(), "only one job fits");
    assert_eq!(forge.job(&handles[3]).await.0, Shown::Running);
    runner.declare(&[&label, "never-declared"], &[]).await;
    runner.claim().await;
    assert_eq!(forge.job(&handles[2]).await.0, Shown::Running, "a declared label counts at once");
    // Nobody else shall get the rest.
    forge.cancel(&handles[0]).await;
}

/// Without the label a waiting job stays; declared again it is invisible at the current version, and 0 finds it.
pub(crate) async fn a_withdrawn_label_holds_jobs_back_and_does_not_touch_running_ones(forge: &dyn ForgeUnderTest) {
    let (runner, observer) = (Runner::new(forge, &[]).await, Runner::new(forge, &[]).await);
    forge.push(vec![runner.job("runs")]).await;
    let running = runner.claim().await;
    runner.declare(&["something-else"], &[]).await;
    let before = observer.version().await;
    forge.push(vec![runner.job("waits")]).await;
    let current = observer.version().await;
    assert_eq!(current, before + 1, "the version moves for jobs that nobody serves too");
    assert!(runner.fetch(0).await.0.is_none(), "withdrawn");
    assert_eq!(runner.heartbeat(running.id).await, TaskResult::RESULT_UNSPECIFIED);
    assert_eq!(runner.log(running.id, 0, &["still here"], false).await.unwrap(), 1);
    runner.declare(&[&runner.label], &[]).await;
    assert!(runner.fetch(current).await.0.is_none(), "Declare moves no version");
    assert!(runner.fetch(0).await.0.is_some());
}

/// A runner without labels gets jobs without labels, and no others.
pub(crate) async fn a_runner_without_labels_gets_only_jobs_without_labels(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let handles = forge.push(vec![runner.job("labelled"), JobSpec::new("bare", &[]).run("true")]).await;
    runner.declare(&[], &[]).await;
    runner.claim().await;
    assert_eq!(forge.job(&handles[1]).await.0, Shown::Running);
    assert!(runner.fetch(0).await.0.is_none());
}

/// A disabled runner gets nothing. Switching either way moves the version, so it looks again at once when enabled.
pub(crate) async fn a_disabled_runner_gets_nothing_until_it_is_enabled(forge: &dyn ForgeUnderTest) {
    let (runner, observer) = (Runner::new(forge, &[]).await, Runner::new(forge, &[]).await);
    let before = observer.version().await;
    forge.set_disabled(runner.id, true).await;
    assert_eq!(observer.version().await, before + 1);
    forge.push(vec![runner.job("a")]).await;
    let (task, version) = runner.fetch(0).await;
    assert!(task.is_none(), "disabled");
    assert_eq!(version, before + 2);
    forge.set_disabled(runner.id, false).await;
    assert_eq!(observer.version().await, before + 3);
    assert!(runner.fetch(version).await.0.is_some(), "enabling moved the version");
}

/// Needs: outputs and results come along; a failed need skips a job unless it runs always.
pub(crate) async fn needs_bring_results_and_outputs_and_a_failed_one_skips(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let mut always = runner.job("always").needs("plan").needs("broken");
    always.run_when = RunWhen::Always;
    let jobs = vec![
        runner.job("plan"),
        runner.job("broken"),
        runner.job("build").needs("plan"),
        runner.job("never").needs("broken"),
        always,
    ];
    let handles = forge.push(jobs).await;
    for key in ["plan", "broken"] {
        let task = runner.claim().await;
        assert_eq!(key_of(&task), key);
        assert!(task.needs.is_empty());
        if key == "plan" {
            crate::reports::output(&runner, task.id, "where", "here").await;
        }
        let result = if key == "plan" { TaskResult::RESULT_SUCCESS } else { TaskResult::RESULT_FAILURE };
        runner.end(task.id, result, 1).await;
    }
    for _ in 0..2 {
        let task = runner.claim().await;
        let plan = &task.needs["plan"];
        assert_eq!(plan.result, TaskResult::RESULT_SUCCESS);
        assert_eq!(plan.outputs["where"], "here");
        match key_of(&task).as_str() {
            "build" => assert_eq!(task.needs.len(), 1),
            "always" => assert_eq!(task.needs["broken"].result, TaskResult::RESULT_FAILURE),
            other => panic!("{other} was handed out"),
        }
        runner.end(task.id, TaskResult::RESULT_SUCCESS, 1).await;
    }
    assert_eq!(forge.job(&handles[3]).await.0, Shown::Skipped);
    assert!(runner.fetch(0).await.0.is_none());
}

fn key_of(task: &gitea_dynamic_runner::proto::runner::Task) -> String {
    use buffa_types::google::protobuf::value::Kind;
    match &task.context.fields["job"].kind {
        Some(Kind::StringValue(key)) => key.clone(),
        other => panic!("{other:?}"),
    }
}
