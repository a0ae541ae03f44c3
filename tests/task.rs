//! What `task` reads, against real tasks of two Gitea versions and against each hard case that we know of.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, fs, path::Path, sync::OnceLock};

use buffa::Message as _;
use gitea_dynamic_runner::{
    ids::{BackendKind, TaskId},
    proto::{self, runner},
    task::{MAX_PAYLOAD_BYTES, MAX_TASK_BYTES, TaskFacts, TaskFault, Trust, backend_of, read_task},
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn fixtures() -> &'static BTreeMap<String, Vec<u8>> {
    static READ: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    READ.get_or_init(read_fixtures)
}

fn read_fixtures() -> BTreeMap<String, Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gitea-tasks");
    let mut found = BTreeMap::new();
    for prefix in ["", "gitea-1.26.0/"] {
        for entry in fs::read_dir(root.join(prefix)).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if let Some(name) = name.strip_suffix(".bin") {
                let answer = fs::read(entry.path()).unwrap();
                found.insert(format!("{prefix}{name}"), proto::task_of_answer(&answer).unwrap().unwrap());
            }
        }
    }
    found
}

fn shown(facts: &TaskFacts) -> Value {
    json!({
        "id": facts.id.0, "job_key": facts.job_key, "job_name": facts.job_name, "labels": facts.labels, "uses": facts.uses,
        "steps": facts.steps, "needs_docker": facts.needs_docker, "repository": facts.repository.to_string(),
        "workflow": facts.workflow, "git_ref": facts.git_ref, "sha": facts.sha, "event": facts.event, "run_id": facts.run_id,
        "run_number": facts.run_number, "run_attempt": facts.run_attempt, "trust": format!("{:?}", facts.trust),
    })
}

#[test]
fn every_real_task_gives_its_facts() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gitea-tasks/expected.json");
    let expected: BTreeMap<String, Value> = serde_json::from_str(&fs::read_to_string(root).unwrap()).unwrap();
    let fixtures = fixtures();
    assert_eq!(fixtures.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert!(fixtures.len() > 60);
    for (name, raw) in fixtures {
        let facts = read_task(raw).unwrap_or_else(|fault| panic!("{name}: {fault:?}"));
        assert_eq!(shown(&facts), expected[name], "{name}");
        assert_eq!(facts.token.expose().len(), 40, "{name}");
        assert!(!format!("{facts:?}").contains(facts.token.expose()), "{name} shows its token");
    }
}

fn context() -> Value {
    json!({"repository": "acme/app", "repository_owner": "acme", "event_name": "push", "ref": "refs/heads/main", "event": {},
           "run_id": "9007199254740993", "run_number": "5", "run_attempt": "1", "workflow": "ci.yaml", "sha": "", "token": "t0k3n",
           "ref_protected": false})
}

fn task(payload: &str, context: Value) -> runner::Task {
    runner::Task {
        id: 71,
        workflow_payload: Some(payload.as_bytes().to_vec()),
        context: buffa::MessageField::some(serde_json::from_value(context).unwrap()),
        ..Default::default()
    }
}

fn read(payload: &str) -> Result<TaskFacts, TaskFault> {
    read_task(&task(payload, context()).encode_to_vec())
}

/// A payload whose one job has this `runs-on`.
fn labels(runs_on: &str) -> Vec<String> {
    read(&format!("jobs:\n  a:\n    {runs_on}\n    steps: [{{run: x}}]\n"))
        .unwrap_or_else(|fault| panic!("{runs_on}: {fault:?}"))
        .labels
}

/// Expects facts: job key, labels, steps.
fn is(payload: &str, key: &str, labels: &[&str], steps: u32) -> TaskFacts {
    let facts = read(payload).unwrap_or_else(|fault| panic!("{payload}: {fault:?}"));
    assert_eq!((facts.job_key.as_str(), facts.steps), (key, steps), "{payload}");
    assert_eq!(facts.labels, labels, "{payload}");
    facts
}

/// Expects a fault that says this, of a task that can still be failed.
fn is_refused(payload: &str, says: &str) {
    let fault = read(payload).expect_err(&payload[..payload.len().min(200)]);
    assert!(fault.reason.contains(says), "{says:?} is not in {:?}", fault.reason);
    assert!(fault.reason.len() < 1000 && !fault.reason.contains('\n'), "{}", fault.reason);
    assert_eq!((fault.id, fault.repository.as_str()), (Some(TaskId(71)), "acme/app"));
}

// The groups of hard cases, numbered as in `docs`: scalars and lists, order, mapping form, missing, expressions, matrix, callers,
// names, containers and steps, YAML itself, context, maps, sizes, `if`.

#[test]
fn group_1_a_scalar_or_a_list_however_it_is_written() {
    for (on, runs_on) in [
        ("\"on\": {push: {branches: [main]}}", "runs-on: vm"),
        ("on: push", "runs-on: \"vm\""),
        ("true: push", "runs-on: 'vm'"),
        ("on: [push]", "runs-on: [vm]"),
        ("on:\n  push:", "runs-on: !!str vm"),
        ("name: x\nyes: push", "runs-on: !!str \"vm\""),
        ("", "runs-on: vm # a comment"),
        ("env: {? [a, b] : c}", "runs-on:\n    - vm"),
    ] {
        is(
            &format!("{on}\njobs:\n  build:\n    name: build\n    {runs_on}\n    steps: [{{run: \"true\"}}]\n"),
            "build",
            &["vm"],
            1,
        );
    }
}

#[test]
fn group_2_order_duplicates_and_case_are_kept() {
    assert_eq!(labels("runs-on: [self-hosted, vm, vm, Linux]"), ["self-hosted", "vm", "vm", "Linux"]);
    assert_eq!(labels("runs-on:\n      - self-hosted\n      - linux"), ["self-hosted", "linux"]);
    assert_eq!(labels("runs-on: [a,b,]"), ["a", "b"]);
}

#[test]
fn group_3_the_mapping_form_is_labels_then_group() {
    assert_eq!(labels("runs-on: {group: gpu, labels: [self-hosted, vm]}"), ["self-hosted", "vm", "gpu"]);
    assert_eq!(labels("runs-on: {group: gpu}"), ["gpu"]);
    assert_eq!(labels("runs-on: {labels: vm}"), ["vm"]);
    assert_eq!(labels("runs-on: {labels: 1.10, group: 42}"), ["1.10", "42"]);
    assert_eq!(labels("runs-on: {labels: [1.10, null], group: null, other: {a: 1}}"), ["1.10"]);
    assert_eq!(labels("runs-on: {}"), [""; 0]);
}

#[test]
fn group_4_missing_and_odd_labels_select_nothing_by_themselves() {
    for none in ["runs-on:", "runs-on: null", "runs-on: ~", "runs-on: []", "name: x", "runs-on: [null, ~]"] {
        assert_eq!(labels(none), [""; 0], "{none}");
        assert!(backend_of(&labels(none), "vm").is_err(), "{none}");
    }
    assert_eq!(labels("runs-on: \"\""), [""]);
    assert_eq!(labels("runs-on: [vm, null, 42, true, 1.10]"), ["vm", "42", "true", "1.10"]);
    for text in [
        "42",
        "1.10",
        "true",
        "True",
        "0x1F",
        "010",
        "1_000",
        "-5",
        "+7",
        "1e3",
        ".inf",
        ".nan",
        "-.inf",
        "1e999",
        "yes",
        "off",
        "2026-01-01",
    ] {
        assert_eq!(labels(&format!("runs-on: {text}")), [text], "scalar {text}");
        assert_eq!(labels(&format!("runs-on: [{text}]")), [text], "list {text}");
    }
    assert_eq!(labels("runs-on: 1.10   # tail"), ["1.10"]);
    assert_eq!(labels("name: &v 1.10\n    runs-on: *v"), ["1.10"]);
    assert_eq!(labels("runs-on: &v 1.10"), ["1.10"]);
    assert_eq!(labels("runs-on: 'null'"), ["null"]);
}

#[test]
fn group_5_expressions_stay_text_and_the_reason_says_what_to_write() {
    for (runs_on, wanted, says) in [
        ("runs-on: ${{ needs.plan.outputs.runner }}", "${{ needs.plan.outputs.runner }}", "unevaluated"),
        ("runs-on: \"${{ fromJSON(vars.LABELS) }}\"", "${{ fromJSON(vars.LABELS) }}", "unevaluated"),
        ("runs-on: \"vm-${{ matrix.size }}\"", "vm-${{ matrix.size }}", "unevaluated"),
        ("runs-on: Array", "Array", "fromJSON"),
        ("runs-on: '[\"self-hosted\",\"vm\"]'", "[\"self-hosted\",\"vm\"]", "looks like a list"),
        ("runs-on: ''", "", "`needs`"),
    ] {
        let labels = labels(runs_on);
        assert_eq!(labels, [wanted]);
        let reason = backend_of(&labels, "vm").unwrap_err();
        assert!(reason.contains(says), "{reason}");
        assert!(reason.contains("`runs-on: [self-hosted, pod]`"), "{reason}");
    }
}

#[test]
fn group_6_a_matrix_job_keeps_its_key_and_gets_its_name() {
    let facts = is(
        "jobs:\n  test:\n    name: test (1.10, ubuntu-24.04, map[a:1])\n    runs-on: ubuntu-24.04\n    strategy: {matrix: {go: [1.10], \
         os: [ubuntu-24.04], cfg: [{a: 1}]}, fail-fast: \"false\", max-parallel: \"4\"}\n",
        "test",
        &["ubuntu-24.04"],
        0,
    );
    assert_eq!(facts.job_name, "test (1.10, ubuntu-24.04, map[a:1])");
    assert_eq!(is("jobs: {a: {name: 1.10}}", "a", &[], 0).job_name, "1.10");
    assert_eq!(is("jobs: {a: {name: null}}", "a", &[], 0).job_name, "a");
    assert_eq!(is("jobs: {a: {name: ''}}", "a", &[], 0).job_name, "a");
}

#[test]
fn group_7_callers_are_told_and_no_or_many_jobs_refused() {
    let caller = "jobs: {call: {name: call, uses: ./.gitea/workflows/build.yml, with: {x: 1}, secrets: inherit}}";
    assert_eq!(is(caller, "call", &[], 0).uses.as_deref(), Some("./.gitea/workflows/build.yml"));
    assert_eq!(is("jobs: {a: {uses: null}}", "a", &[], 0).uses, None);
    for none in ["jobs: {}", "jobs: null", "jobs:", "name: x", "", "---\n", "# only a comment", "null"] {
        is_refused(none, "no job");
    }
    is("jobs: {a: null}", "a", &[], 0);
    is_refused("jobs: {a: {runs-on: vm}, b: {runs-on: vm}}", "2 jobs");
    is_refused("jobs: {a: {runs-on: vm}, b: 5, c: {steps: 3}}", "3 jobs");
    is_refused("jobs: {a: {runs-on: vm}, a: {runs-on: pod}}", "2 jobs");
}

#[test]
fn group_8_hostile_keys_and_names_are_kept_as_they_are() {
    let facts = is(
        "jobs:\n  \"构建.测试 🚀\":\n    name: |\n      multi\n      line ${{ github.ref }}\n    runs-on: vm\n",
        "构建.测试 🚀",
        &["vm"],
        0,
    );
    assert_eq!(facts.job_name, "multi\nline ${{ github.ref }}\n");
    for key in ["123", "yes", "~", "null", "true", "1.10", "a/b", "../x", "a b", "0x1F"] {
        is(&format!("jobs:\n  {key}:\n    runs-on: vm\n"), key, &["vm"], 0);
        is(&format!("jobs:\n  '{key}': {{runs-on: vm}}\n"), key, &["vm"], 0);
    }
    is("jobs: {'': {runs-on: vm}}", "", &["vm"], 0);
    is("jobs: {\"a\\u202eb\\u0000\": {runs-on: vm}}", "a\u{202e}b\0", &["vm"], 0);
    is_refused(&format!("jobs:\n  ? {}\n  : {{runs-on: vm}}\n", "k".repeat(1025)), "longer than");
    let long = is(&format!("jobs: {{a: {{name: {}}}}}", "ü".repeat(5000)), "a", &[], 0).job_name;
    assert!(long.len() < 2060 && long.ends_with("ü…"));
}

#[test]
fn group_9_containers_and_real_steps_are_counted() {
    let docker = |job: &str| read(&format!("jobs:\n  a:\n    {job}\n")).unwrap().needs_docker;
    assert_eq!(docker("container: node:22").as_deref(), Some("`container:`"));
    assert_eq!(
        docker("container: {image: \"${{ matrix.img }}\", options: \"-v /:/host\", credentials: {username: u}}").unwrap(),
        "`container:`"
    );
    assert_eq!(docker("container: ${{ vars.IMAGE }}").as_deref(), Some("`container:`"));
    assert_eq!(docker("services: {db: {image: postgres:17, ports: [\"5432:5432\"]}}").as_deref(), Some("`services:`"));
    assert_eq!(docker("services: ${{ fromJSON(vars.S) }}").as_deref(), Some("`services:`"));
    assert_eq!(docker("steps: [{uses: \"docker://alpine:3\"}]").as_deref(), Some("`uses: docker://alpine:3`"));
    assert_eq!(docker("steps: [{uses: \"DOCKER://alpine:3\"}]").as_deref(), Some("`uses: DOCKER://alpine:3`"));
    for none in [
        "container:",
        "container: ''",
        "container: {}",
        "services: {}",
        "services: null",
        "services: []",
        "steps: [{uses: ./docker}]",
    ] {
        assert_eq!(docker(none), None, "{none}");
    }
    let facts = is(
        "jobs:\n  a:\n    runs-on: vm\n    steps: [null, {uses: \"docker://alpine:3\"}, {uses: ./local}, {run: \"x\", timeout-minutes: \
         \"${{ vars.T }}\"}, ~, {}]",
        "a",
        &["vm"],
        4,
    );
    assert_eq!(facts.needs_docker.as_deref(), Some("`uses: docker://alpine:3`"));
    is("jobs: {a: {steps: null}}", "a", &[], 0);
    is("jobs: {a: {steps: []}}", "a", &[], 0);
}

#[test]
fn group_10_yaml_is_read_in_any_dress_and_bombs_do_not_go_off() {
    for payload in [
        "\u{feff}jobs: {a: {runs-on: [self-hosted, pod], steps: [{run: x}]}}",
        "\n\n\njobs: {a: {runs-on: [self-hosted, pod], steps: [{run: x}]}}",
        "---\njobs: {a: {runs-on: [self-hosted, pod], steps: [{run: x}]}}\n...\n",
        "%YAML 1.2\n---\njobs: {a: {runs-on: [self-hosted, pod], steps: [{run: x}]}}\n",
        "jobs:\r\n  a:\r\n    runs-on:\r\n      - self-hosted\r\n      - pod\r\n    steps:\r\n      - run: x\r\n",
        "jobs: {a: {runs-on: [self-hosted, pod], steps: [{run: x}]}}\n---\njobs: {b: {runs-on: vm}, c: {}}\n",
        "x: &l [self-hosted, pod]\njobs: {a: {runs-on: *l, steps: [{run: x}]}}",
        "x: &j {runs-on: [self-hosted, pod], steps: [{run: x}]}\njobs: {a: *j}",
        "x: &j {runs-on: [self-hosted, pod], steps: [{run: x}]}\njobs: {a: {<<: *j, name: n}}",
        "x: &j {runs-on: vm, steps: [{run: x}]}\njobs: {a: {<<: *j, runs-on: [self-hosted, pod]}}",
        "env: {A: 1, A: 2}\njobs: {a: {runs-on: [self-hosted, pod], env: {B: 1, B: 1}, steps: [{run: x, with: {c: 1, c: 2}}]}}",
        "env: {A: .inf, B: !!binary aGk=, C: !custom x, 1: 2, [a]: b}\njobs: {a: {runs-on: [self-hosted, pod], steps: [{run: x}]}}",
    ] {
        is(payload, "a", &["self-hosted", "pod"], 1);
    }
    is_refused("jobs: {a: {runs-on: vm, runs-on: pod}}", "runs-on");
    is_refused("jobs: {a: {runs-on: vm}}\n]", "cannot be read");
    is_refused("? [a, b]\n: c\njobs: {a: {runs-on: vm}}", "cannot be read");
    is_refused("jobs: [a]", "cannot be read");
    is_refused("jobs: {a: [", "cannot be read");
    is_refused("jobs: {a: {runs-on: [[vm]]}}", "cannot be read");
    is_refused("\tjobs: x", "cannot be read");
    is_refused("x: &a [*a]\njobs: {a: {}}", "cannot be read");
    // A billion laughs, where it would be looked at and where it would not.
    let mut bomb = String::from("l0: &l0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
    for level in 1..12 {
        let aliases = vec![format!("*l{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("l{level}: &l{level} [{aliases}]\n"));
    }
    is_refused(&format!("{bomb}jobs: {{a: {{runs-on: vm}}}}"), "cannot be read");
    is_refused(&format!("{bomb}jobs: {{a: {{runs-on: *l11}}}}"), "cannot be read");
    for (open, close) in [("[", "]"), ("{a: ", "}")] {
        let deep = |depth| format!("x: {}{}\njobs: {{a: {{runs-on: vm}}}}", open.repeat(depth), close.repeat(depth));
        is(&deep(30), "a", &["vm"], 0);
        is_refused(&deep(40), "Depth");
        is_refused(&deep(100_000), "cannot be read");
    }
    // Depth that only aliases make.
    let chain = |length| (1..length).map(|at| format!("l{at}: &l{at} [*l{}]\n", at - 1)).collect::<String>();
    is(&format!("l0: &l0 [x]\n{}jobs: {{a: {{runs-on: vm}}}}", chain(20)), "a", &["vm"], 0);
    is_refused(&format!("l0: &l0 [x]\n{}jobs: {{a: {{runs-on: vm}}}}", chain(1000)), "cannot be read");
    is_refused(&format!("jobs: {{a: {{runs-on: [{}]}}}}", "x,".repeat(65)), "labels");
    is_refused(&format!("jobs: {{a: {{runs-on: {}}}}}", "x".repeat(256)), "labels");
}

#[test]
fn a_fault_in_the_workflow_shows_none_of_its_text() {
    let fault = read("env: {PASSWORD: canary}\njobs: {a: {runs-on: [{canary: canary}]}}").unwrap_err();
    assert!(!fault.reason.contains("canary"), "{}", fault.reason);
}

/// Facts of a plain job in this context (laid over the usual one).
fn read_in(over: Value) -> Result<TaskFacts, TaskFault> {
    let mut whole = context();
    for (key, value) in over.as_object().unwrap() {
        whole[key] = value.clone();
    }
    read_task(&task("jobs: {build: {runs-on: [self-hosted, pod], steps: [{run: x}, {run: y}]}}", whole).encode_to_vec())
}

#[test]
fn group_11_the_repository_is_taken_apart_and_checked() {
    let facts = read_in(json!({"repository": "Org.Name/repo-name_1.x", "repository_owner": "Org.Name"})).unwrap();
    assert_eq!((facts.repository.owner.as_str(), facts.repository.name.as_str()), ("Org.Name", "repo-name_1.x"));
    assert_eq!(read_in(json!({"repository_owner": ""})).unwrap().repository.to_string(), "acme/app");
    // The job's key is the payload's: up to Gitea 1.23 `context.job` is a row number.
    assert_eq!(read_in(json!({"job": "4711"})).unwrap().job_key, "build");
    for over in [
        json!({"repository": "", "job": "4711"}),
        json!({"repository": "app"}),
        json!({"repository": "/app"}),
        json!({"repository": "acme/"}),
        json!({"repository": "acme/app/x"}),
        json!({"repository": null}),
        json!({"repository": {"a": 1}}),
        json!({"repository": format!("acme/{}", "x".repeat(600))}),
        json!({"repository_owner": "Acme"}),
    ] {
        let fault = read_in(over.clone()).expect_err(&over.to_string());
        assert!(fault.reason.contains("`repository`"), "{}", fault.reason);
        assert_eq!((fault.id, fault.steps, fault.run_id.as_str()), (Some(TaskId(71)), 2, "9007199254740993"));
    }
    let nothing = runner::Task { id: 71, workflow_payload: Some(b"jobs: {a: {steps: [{}]}}".to_vec()), ..Default::default() };
    assert_eq!(read_task(&nothing.encode_to_vec()).unwrap_err().steps, 1);
}

#[test]
fn group_11_values_are_kept_as_they_came() {
    let facts = read_in(json!({
        "ref": "refs/pull/12/head", "head_ref": "feature/ünïcode;$(id)", "run_attempt": "3", "event": {"repository": {"id": 9.007199254740993e15}},
        "server_url": "https://git.example.com/sub/", "sha": "f".repeat(64), "event_name": "workflow_dispatch",
    }))
    .unwrap();
    assert_eq!(
        (facts.git_ref.as_str(), facts.run_id.as_str(), facts.run_attempt.as_str()),
        ("refs/pull/12/head", "9007199254740993", "3")
    );
    assert_eq!((facts.sha.len(), facts.workflow.as_str(), facts.run_number.as_str()), (64, "ci.yaml", "5"));
    // No token may be shown, and a token that is only among the secrets is found there.
    let mut bare = task("jobs: {a: {runs-on: vm}}", json!({"repository": "a/b", "gitea_runtime_token": "canary.b.c"}));
    bare.secrets.insert("GITEA_TOKEN".into(), "canary".into());
    let facts = read_task(&bare.encode_to_vec()).unwrap();
    assert_eq!(facts.token.expose(), "canary");
    assert!(!format!("{facts:?}").contains("canary"));
}

#[test]
fn group_11_trust_is_told_by_the_events_body() {
    let pull = |head: Value, base: Value| json!({"pull_request": {"head": head, "base": base}});
    let branch = |id: i64| json!({"repo": {"id": id}, "ref": "topic", "label": "topic"});
    let main = json!({"repo": {"id": 7}, "ref": "main", "label": "main"});
    let own = pull(branch(7), main.clone());
    let fork = pull(branch(8), main.clone());
    let gone = pull(json!({"repo": null, "ref": "topic", "label": "topic"}), main.clone());
    let agit = pull(json!({"repo": {"id": 7}, "ref": "refs/pull/3/head", "label": ""}), main.clone());
    let pr = "refs/pull/3/head";
    let heads = "refs/heads/main";
    for (event, git_ref, body, wanted) in [
        ("push", heads, json!({}), Trust::Own),
        ("push", heads, Value::Null, Trust::Own),
        ("schedule", heads, json!({}), Trust::Own),
        ("issue_comment", heads, json!({"issue": {"pull_request": {}}, "is_pull": true}), Trust::Own),
        ("workflow_run", heads, json!({"workflow_run": {"event": "pull_request"}}), Trust::Own),
        ("push", heads, json!({"pull_request": null}), Trust::Own),
        ("pull_request", pr, own.clone(), Trust::Own),
        ("pull_request", pr, fork.clone(), Trust::PullRequest),
        ("pull_request", pr, gone.clone(), Trust::PullRequest),
        ("pull_request", pr, agit.clone(), Trust::PullRequest),
        ("pull_request", pr, pull(json!({"repo": {"id": 7}, "ref": "refs/for/main"}), main.clone()), Trust::PullRequest),
        (
            "pull_request",
            pr,
            pull(json!({"repo": {"id": 7}, "ref": "refs/pull/3/head", "label": "x"}), main.clone()),
            Trust::PullRequest,
        ),
        ("pull_request", pr, pull(json!({"repo": {"id": 7}, "ref": "topic"}), main.clone()), Trust::PullRequest),
        ("pull_request", pr, pull(json!({"repo": {}, "ref": "t", "label": "t"}), json!({"repo": {}})), Trust::PullRequest),
        ("pull_request", pr, pull(branch(0), branch(0)), Trust::PullRequest),
        ("pull_request", pr, pull(json!({"repo": {"id": "7"}, "ref": "t", "label": "t"}), main.clone()), Trust::PullRequest),
        ("pull_request", pr, json!({"pull_request": "x"}), Trust::PullRequest),
        ("pull_request", pr, json!({"pull_request": {}}), Trust::PullRequest),
        ("pull_request", pr, json!({}), Trust::PullRequest),
        ("pull_request", pr, Value::Null, Trust::PullRequest),
        ("pull_request_review", pr, fork.clone(), Trust::PullRequest),
        ("pull_request_review", pr, own.clone(), Trust::Own),
        ("pull_request_target", heads, fork.clone(), Trust::Own),
        ("pull_request_target", heads, agit.clone(), Trust::Own),
        ("pull_request_target", pr, fork.clone(), Trust::PullRequest),
        // A reusable workflow's child: whether it was `pull_request` or `pull_request_target` can't be told any more.
        ("workflow_call", pr, own, Trust::Own),
        ("workflow_call", pr, fork.clone(), Trust::PullRequest),
        ("workflow_call", heads, fork, Trust::PullRequest),
        ("workflow_call", heads, gone, Trust::PullRequest),
        ("workflow_call", heads, agit, Trust::PullRequest),
        ("workflow_call", heads, json!({"inputs": {}}), Trust::Own),
        ("workflow_call", pr, json!({"inputs": {}}), Trust::PullRequest),
        ("push", pr, json!({}), Trust::PullRequest),
    ] {
        let facts = read_in(json!({"event_name": event, "ref": git_ref, "event": body})).unwrap();
        assert_eq!(facts.trust, wanted, "{event} on {git_ref} with {body}");
    }
}

#[test]
fn group_12_and_13_big_maps_and_tasks_of_many_megabytes_are_read() {
    let mut big = task("jobs: {a: {runs-on: vm}}", context());
    big.secrets.insert("PEM".into(), "-----BEGIN\nx\n-----END\n".into());
    big.secrets.insert("EMPTY".into(), String::new());
    big.secrets.insert("Empty".into(), "x".repeat(64 << 10));
    for at in 0..6 {
        let outputs = [("big".to_owned(), "o".repeat(1 << 20))].into_iter().collect();
        big.needs.insert(format!("n{at}"), runner::TaskNeed { outputs, ..Default::default() });
    }
    let raw = big.encode_to_vec();
    assert!(raw.len() > 6 << 20);
    assert_eq!(read_task(&raw).unwrap().job_key, "a");
}

#[test]
fn group_13_too_much_is_refused_with_the_id_kept() {
    let mut huge = task("jobs: {a: {runs-on: vm}}", context());
    huge.vars.insert("x".into(), "x".repeat(MAX_TASK_BYTES));
    let fault = read_task(&huge.encode_to_vec()).unwrap_err();
    assert_eq!(fault.id, Some(TaskId(71)));
    assert!(fault.reason.contains("larger than 32 MiB"), "{}", fault.reason);
    is_refused(&"#".repeat(MAX_PAYLOAD_BYTES + 1), "larger than 8 MiB");
    is(&format!("jobs: {{a: {{runs-on: vm}}}}\n{}", "#".repeat(MAX_PAYLOAD_BYTES - 100)), "a", &["vm"], 0);
    let mut bytes = task("", context());
    bytes.workflow_payload = Some(b"jobs: {a: {name: \xff}}".to_vec());
    assert!(read_task(&bytes.encode_to_vec()).unwrap_err().reason.contains("UTF-8"));
}

#[test]
fn group_14_a_condition_is_left_to_the_runner() {
    is("jobs: {a: {if: false, runs-on: [self-hosted, vm], steps: [{run: x}]}}", "a", &["self-hosted", "vm"], 1);
}

#[test]
fn a_backend_is_named_by_exactly_one_label() {
    let backend = |labels: &[&str], vm: &str| backend_of(&labels.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>(), vm);
    assert_eq!(backend(&["self-hosted", "pod"], "vm"), Ok(BackendKind::Pod));
    assert_eq!(backend(&["vm", "self-hosted", "vm"], "vm"), Ok(BackendKind::Vm));
    assert_eq!(backend(&["self-hosted", "vm-dev"], "vm-dev"), Ok(BackendKind::Vm));
    // A label beyond those was declared once, or Gitea would not have given the job.
    assert_eq!(backend(&["self-hosted", "pod", "gpu"], "vm"), Ok(BackendKind::Pod));
    for (labels, vm, says) in [
        (&[][..], "vm", "no `runs-on`"),
        (&["pod"], "vm", "without `self-hosted`"),
        (&["self-hosted"], "vm", "neither `pod` nor `vm`"),
        (&["self-hosted", "vm"], "vm-dev", "neither `pod` nor `vm-dev`"),
        (&["self-hosted", "pod", "vm"], "vm", "names both"),
        (&["pod", "vm"], "vm", "names both"),
        (&["Self-Hosted", "pod"], "vm", "letter by letter"),
        (&["self-hosted", "POD"], "vm", "letter by letter"),
        (&["self-hosted", " pod "], "vm", "letter by letter"),
        (&["self-hosted", ""], "vm", "is empty"),
        (&["self-hosted", "Array"], "vm", "fromJSON"),
    ] {
        let reason = backend(labels, vm).unwrap_err();
        assert!(reason.contains(says), "{labels:?}: {reason}");
        assert!(reason.contains(&format!("`runs-on: [self-hosted, {vm}]`")), "{reason}");
    }
    let hostile = "\u{1b}[2J\n".repeat(100);
    let reason = backend(&[hostile.as_str(); 64], "vm").unwrap_err();
    assert!(reason.len() < 2000 && !reason.chars().any(char::is_control), "{reason}");
}

#[test]
fn a_damaged_task_keeps_its_id_and_steps_as_far_as_they_can_be_read() {
    let whole = task("jobs: {a: {steps: [{run: x}, {run: y}]}}", context()).encode_to_vec();
    let no_task_inside = |raw: &[u8]| read_task(raw).unwrap_err();
    // Field 3, the context, is no message.
    let mut bad = whole.clone();
    bad.extend([3 << 3 | 2, 3, 0xff, 0xff, 0xff]);
    let fault = no_task_inside(&bad);
    assert_eq!((fault.id, fault.steps), (Some(TaskId(71)), 2));
    assert!(fault.reason.contains("cannot be decoded"), "{}", fault.reason);
    // A secret that is not UTF-8.
    let fault = no_task_inside(&[8, 71, 4 << 3 | 2, 5, 1 << 3 | 2, 3, 0xff, 0xff, 0xff]);
    assert_eq!((fault.id, fault.steps), (Some(TaskId(71)), 0));
    // Cut in the middle of a field.
    let fault = no_task_inside(&[8, 71, 2 << 3 | 2, 0xff, 0xff, 3, b'x']);
    assert_eq!(fault.id, Some(TaskId(71)));
    // The id comes last, behind a field that is well formed but of the wrong kind.
    assert_eq!(no_task_inside(&[2 << 3, 5, 8, 71]).id, Some(TaskId(71)));
    for nameless in
        [&[][..], &[8, 0], &[8, 0xff, 0xff], &[0xff; 40], b"hello", &[8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]]
    {
        assert_eq!(no_task_inside(nameless).id, None, "{nameless:?}");
    }
}

/// Text that looks like a workflow often enough to get past the first error.
fn yamlish() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("jobs:"),
        Just("jobs: {"),
        Just("  a:"),
        Just("    runs-on:"),
        Just("runs-on: "),
        Just("steps: ["),
        Just("name: "),
        Just("uses: "),
        Just("container: "),
        Just("services: "),
        Just("&x "),
        Just("*x"),
        Just("<<: *x"),
        Just("- "),
        Just("? "),
        Just(": "),
        Just("{"),
        Just("}"),
        Just("["),
        Just("]"),
        Just(", "),
        Just("\n"),
        Just("\n  "),
        Just("\n    "),
        Just("\r\n"),
        Just("\t"),
        Just("|\n"),
        Just(">-\n"),
        Just("---\n"),
        Just("...\n"),
        Just("%YAML 1.2\n"),
        Just("!!str "),
        Just("!!int "),
        Just("!x "),
        Just("!!binary "),
        Just("null"),
        Just("~"),
        Just("1.10"),
        Just("42"),
        Just("true"),
        Just(".nan"),
        Just("\"a\\u0000\""),
        Just("'x'"),
        Just("# c\n"),
        Just("\u{feff}"),
        Just("ü"),
        Just("self-hosted"),
        Just("pod"),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

fn answers(raw: &[u8]) -> Result<(), TestCaseError> {
    match read_task(raw) {
        Ok(facts) => {
            prop_assert!(facts.id.0 > 0);
            prop_assert!(facts.job_key.len() <= 1024 && facts.job_name.len() <= 2060 && facts.labels.len() <= 64);
            if let Err(reason) = backend_of(&facts.labels, "vm") {
                prop_assert!(!reason.is_empty() && !reason.chars().any(char::is_control));
            }
        }
        Err(fault) => {
            prop_assert!(!fault.reason.is_empty() && fault.reason.len() < 1500);
            prop_assert!(fault.id.is_none_or(|id| id.0 > 0));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_give_facts_or_a_reason(raw in prop::collection::vec(any::<u8>(), 0..300)) {
        answers(&raw)?;
        let mut tail = vec![8, 71];
        tail.extend(raw);
        answers(&tail)?;
    }

    #[test]
    fn any_workflow_gives_facts_or_a_reason(payload in prop_oneof![yamlish(), any::<String>()]) {
        let raw = task(&payload, context()).encode_to_vec();
        answers(&raw)?;
        if let Err(fault) = read_task(&raw) {
            prop_assert_eq!(fault.id, Some(TaskId(71)));
        }
    }

    #[test]
    fn a_real_task_with_a_few_bytes_changed_gives_facts_or_a_reason(
        which in any::<prop::sample::Index>(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<prop::sample::Index>()
    ) {
        let fixtures = fixtures();
        let names: Vec<_> = fixtures.keys().filter(|name| !name.starts_with("big")).collect();
        let mut raw = fixtures[*which.get(&names)].clone();
        for (at, byte) in changes {
            let at = at.index(raw.len());
            raw[at] = byte;
        }
        answers(&raw)?;
        raw.truncate(cut.index(raw.len()));
        answers(&raw)?;
    }
}
