//! Any bytes as a task, and any text as the workflow inside one: always facts or a reason, never a panic.
//!
//! Good seeds: the tasks in `tests/fixtures/gitea-tasks`, and workflow files.
#![no_main]

use buffa::Message as _;
use gitea_dynamic_runner::{
    proto::runner,
    task::{backend_of, read_task},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    answers(data);
    // FetchTaskResponse, as the fixtures are.
    if let Ok(Some(task)) = gitea_dynamic_runner::proto::task_of_answer(data) {
        answers(&task);
    }
    let with_workflow = runner::Task { id: 71, workflow_payload: Some(data.to_vec()), ..Default::default() };
    answers(&with_workflow.encode_to_vec());
});

fn answers(raw: &[u8]) {
    match read_task(raw) {
        Ok(facts) => {
            assert!(facts.id.0 > 0);
            if let Err(reason) = backend_of(&facts.labels, "vm") {
                assert!(!reason.is_empty());
            }
        }
        Err(fault) => assert!(!fault.reason.is_empty()),
    }
}
