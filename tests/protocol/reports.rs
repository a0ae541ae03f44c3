//! What a forge makes of reports: log rows, states, outputs, ends.

use std::collections::BTreeSet;

use gitea_dynamic_runner::{
    gitea::RpcFault,
    proto::runner::{StepState, TaskResult, TaskState, UpdateTaskRequest},
};

use crate::{
    runner::{Runner, now, result_of},
    under_test::{ForgeUnderTest, Shown},
};

/// Sends one output; tells all keys that the forge holds.
pub(crate) async fn output(runner: &Runner, task: i64, key: &str, value: &str) -> BTreeSet<String> {
    let request = UpdateTaskRequest {
        state: TaskState { id: task, ..Default::default() }.into(),
        outputs: [(key.to_owned(), value.to_owned())].into_iter().collect(),
        ..Default::default()
    };
    runner.report(request).await.unwrap().sent_outputs.into_iter().collect()
}

/// The forge answers how many rows it holds, whatever it was sent; a gap lets nothing in, an overlap is passed over.
pub(crate) async fn rows_are_taken_once_and_without_gaps(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    let task = runner.claim().await.id;
    let log = async |index, rows: &[&str], no_more| runner.log(task, index, rows, no_more).await.unwrap();
    assert_eq!(log(0, &[], false).await, 0);
    assert_eq!(log(3, &["gap"], false).await, 0, "a gap");
    assert_eq!(log(0, &["one", "two"], false).await, 2);
    assert_eq!(log(0, &["one", "two"], false).await, 2, "sent again");
    assert_eq!(log(1, &["two", "three"], false).await, 3, "an overlap");
    assert_eq!(log(5, &["gap"], true).await, 3, "a gap at the end does not seal");
    assert_eq!(log(-7, &["minus"], false).await, 3, "a negative index");
    assert_eq!(log(1, &[], false).await, 3);
    assert_eq!(log(3, &["four\nlines", ""], true).await, 5, "the end");
    assert_eq!(log(3, &["four\nlines", ""], true).await, 5, "the end, sent again");
    assert_eq!(log(5, &[], true).await, 5, "the end, without rows");
    assert_eq!(runner.log(task, 5, &["late"], false).await.unwrap_err().fault, RpcFault::LogSealed);
    assert_eq!(runner.log(task, 4, &["", "late"], true).await.unwrap_err().fault, RpcFault::LogSealed);
    assert_eq!(log(9, &["late"], false).await, 5, "a gap is no new row, sealed or not");
    assert_eq!(runner.end(task, TaskResult::RESULT_SUCCESS, 1).await, TaskResult::RESULT_SUCCESS);
    assert_eq!(forge.log(&job).await, ["one", "two", "three", "four\\nlines", ""]);
}

/// A long row is cut at 64 KiB; many rows in one call are taken.
pub(crate) async fn big_logs_are_taken(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    let task = runner.claim().await.id;
    let long = "x".repeat(70_000);
    assert_eq!(runner.log(task, 0, &[&long], false).await.unwrap(), 1);
    let row = "y".repeat(1000);
    let rows = vec![row.as_str(); 5000];
    assert_eq!(runner.log(task, 1, &rows, true).await.unwrap(), 5001);
    let log = forge.log(&job).await;
    assert_eq!(log.len(), 5001);
    assert_eq!(log[0].len(), 64 << 10);
    assert_eq!(log[5000], row);
    runner.end(task, TaskResult::RESULT_SUCCESS, 1).await;
}

/// `no_more` without rows seals the log on newer versions, and is passed over by older ones.
pub(crate) async fn an_end_of_the_log_without_rows_seals_it(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    forge.push(vec![runner.job("a"), runner.job("b")]).await;
    let (some, none) = (runner.claim().await.id, runner.claim().await.id);
    assert_eq!(runner.log(some, 0, &["one"], false).await.unwrap(), 1);
    assert_eq!(runner.log(some, 1, &[], true).await.unwrap(), 1);
    assert_eq!(runner.log(none, 0, &[], true).await.unwrap(), 0);
    for (task, held) in [(some, 1), (none, 0)] {
        match runner.log(task, held, &["late"], false).await {
            Ok(ack) => assert!(!forge.facts().empty_end_seals && ack == held + 1, "{ack}"),
            Err(error) => assert!(forge.facts().empty_end_seals && error.fault == RpcFault::LogSealed, "{error}"),
        }
        runner.end(task, TaskResult::RESULT_SUCCESS, 1).await;
    }
}

/// Each result shows as its own state, and the first end stays, whatever comes later.
pub(crate) async fn the_first_end_stays(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let ends = [
        (TaskResult::RESULT_SUCCESS, Shown::Success),
        (TaskResult::RESULT_FAILURE, Shown::Failure),
        (TaskResult::RESULT_CANCELLED, Shown::Cancelled),
        (TaskResult::RESULT_SKIPPED, Shown::Skipped),
    ];
    for (result, shown) in ends {
        let job = forge.push(vec![runner.job("a")]).await.remove(0);
        let task = runner.claim().await.id;
        assert_eq!(runner.heartbeat(task).await, TaskResult::RESULT_UNSPECIFIED);
        assert_eq!(forge.job(&job).await.0, Shown::Running);
        assert_eq!(runner.end(task, result, 1).await, result);
        for (other, _) in ends {
            assert_eq!(runner.end(task, other, 1).await, result, "contradicted by {other:?}");
        }
        assert_eq!(runner.heartbeat(task).await, result);
        assert_eq!(forge.job(&job).await, (shown, vec![shown]));
        assert_eq!(runner.log(task, 0, &["a row after the end"], true).await.unwrap(), 1);
        assert_eq!(forge.log(&job).await, ["a row after the end"]);
    }
}

/// Steps are known by their number. One that began and is left out later counts as running again; a number that no step has is
/// passed over.
pub(crate) async fn steps_are_taken_by_number(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a").run("second").run("third")]).await.remove(0);
    let task = runner.claim().await.id;
    let step = |id, result: TaskResult| StepState {
        id,
        result: result.into(),
        started_at: now(),
        stopped_at: now(),
        log_index: 1,
        log_length: 2,
        ..Default::default()
    };
    let steps =
        vec![step(0, TaskResult::RESULT_FAILURE), step(99, TaskResult::RESULT_FAILURE), step(-1, TaskResult::RESULT_FAILURE)];
    let state = TaskState { id: task, steps, ..Default::default() };
    let answer = runner.report(UpdateTaskRequest { state: state.into(), ..Default::default() }).await.unwrap();
    assert_eq!(result_of(&answer), TaskResult::RESULT_UNSPECIFIED);
    assert_eq!(answer.state.id, task);
    if forge.facts().shows_steps {
        assert_eq!(forge.job(&job).await.1, [Shown::Failure, Shown::Waiting, Shown::Waiting]);
    }
    let steps = vec![step(2, TaskResult::RESULT_SKIPPED)];
    let state = TaskState { id: task, result: TaskResult::RESULT_SUCCESS.into(), stopped_at: now(), steps, ..Default::default() };
    runner.report(UpdateTaskRequest { state: state.into(), ..Default::default() }).await.unwrap();
    // The first step ended in the report before, and this one leaves it out.
    let reported = vec![Shown::Running, Shown::Waiting, Shown::Skipped];
    let shown = if forge.facts().shows_steps { reported } else { vec![Shown::Success; 3] };
    assert_eq!(forge.job(&job).await, (Shown::Success, shown));
}

/// An end that tells neither steps nor times is taken.
pub(crate) async fn an_end_without_steps_and_times_is_taken(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    let job = forge.push(vec![runner.job("a")]).await.remove(0);
    let state = TaskState { id: runner.claim().await.id, result: TaskResult::RESULT_SUCCESS.into(), ..Default::default() };
    let answer = runner.report(UpdateTaskRequest { state: state.into(), ..Default::default() }).await.unwrap();
    assert_eq!(result_of(&answer), TaskResult::RESULT_SUCCESS);
    let step = if forge.facts().shows_steps { Shown::Waiting } else { Shown::Success };
    assert_eq!(forge.job(&job).await, (Shown::Success, vec![step]));
}

/// The first value of a key stays; a key over 255 bytes or a value over 1 MiB is dropped without a word. All kept keys are told.
pub(crate) async fn outputs_are_kept_once_and_within_limits(forge: &dyn ForgeUnderTest) {
    let runner = Runner::new(forge, &[]).await;
    forge.push(vec![runner.job("a"), runner.job("b").needs("a")]).await;
    let task = runner.claim().await.id;
    let set = |keys: &[&str]| keys.iter().map(|&key| key.to_owned()).collect::<BTreeSet<_>>();
    let (fits, long) = ("k".repeat(255), "k".repeat(256));
    assert_eq!(output(&runner, task, "one", "first").await, set(&["one"]));
    assert_eq!(output(&runner, task, "one", "second").await, set(&["one"]));
    assert_eq!(output(&runner, task, &long, "v").await, set(&["one"]));
    assert_eq!(output(&runner, task, &fits, "").await, set(&["one", &fits]));
    assert_eq!(output(&runner, task, "large", &"v".repeat((1 << 20) + 1)).await, set(&["one", &fits]));
    assert_eq!(output(&runner, task, "most", &"v".repeat(1 << 20)).await, set(&["one", &fits, "most"]));
    runner.end(task, TaskResult::RESULT_SUCCESS, 1).await;
    assert_eq!(output(&runner, task, "late", "v").await, set(&["one", &fits, "most", "late"]), "an end does not close outputs");
    let next = runner.claim().await;
    let outputs = &next.needs["a"].outputs;
    assert_eq!(outputs["one"], "first");
    assert_eq!(outputs[&fits], "");
    assert_eq!(outputs["most"].len(), 1 << 20);
    runner.end(next.id, TaskResult::RESULT_SUCCESS, 1).await;
}
