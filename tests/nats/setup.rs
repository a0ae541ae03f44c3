//! `nats-setup`: shows what it would do, does it once, destroys nothing; and moves a stream of the old layout, after which the real
//! controller runs all that waited in it.

use std::{
    collections::BTreeSet,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use gitea_dynamic_runner::{
    assignment::{Assignment, Rules, seal::SealKeys},
    demo::forge::{Forge, ForgeConfig, JobSpec, JobStatus},
    gitea::{RunnerRpc, connect::Proxies},
    ids::TaskId,
    secret::Secret,
};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, SOON},
    support::{
        Gate,
        controller::{Controller, ControllerOptions},
        eventually,
        nats::{Nats, NatsOptions},
        passable, story,
    },
    world::POD,
};

/// The command as the operator runs it.
fn command(nats: &Nats, state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gitea-dynamic-runner"));
    command.arg("nats-setup").args(arguments).env_clear().stdin(Stdio::null());
    command.env("NATS_URL", nats.url()).env("NATS_ADMIN_USER", "admin").env("NATS_ADMIN_PASSWORD", "admin-secret");
    command.env("STATE_DIRECTORY", state);
    if let Some(file) = nats.ca_file() {
        command.env("NATS_CA_FILE", file);
    }
    command
}

/// What it said, and whether it went well.
fn run(nats: &Nats, state: &Path, arguments: &[&str]) -> (bool, String) {
    let said = command(nats, state, arguments).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(!text.contains("admin-secret"), "{text}");
    (said.status.success(), text)
}

fn ran(nats: &Nats, state: &Path, arguments: &[&str]) -> String {
    let (well, said) = run(nats, state, arguments);
    assert!(well, "{said}");
    said
}

fn refused(nats: &Nats, state: &Path, arguments: &[&str]) -> String {
    let (well, said) = run(nats, state, arguments);
    assert!(!well, "{said}");
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn it_shows_a_plan_does_it_when_told_to_and_then_has_nothing_to_do() {
    let nats = Nats::start_with(NatsOptions { tls: true, ..Default::default() }).await;
    let state = tempfile::tempdir().unwrap();
    let admin = nats.admin().await;
    let streams = async || admin.ok("STREAM.NAMES", json!({})).await["total"].as_u64().unwrap();
    let said = ran(&nats, state.path(), &[]);
    for text in [
        "stream CI_RUNNER would be changed:",
        "retention: \"workqueue\"",
        "consumer pod of CI_RUNNER",
        "taking ci.assignment.refused.>",
        "stream CI_DEAD",
        "Run it again with --yes",
    ] {
        assert!(said.contains(text), "{text} in\n{said}");
    }
    assert_eq!(streams().await, 0, "a plan changes nothing");
    assert!(ran(&nats, state.path(), &["--yes"]).ends_with("Done.\n"));
    let made = [admin.config("STREAM.INFO.CI_RUNNER").await, admin.config("STREAM.INFO.CI_DEAD").await];
    for (key, value) in [
        ("retention", json!("workqueue")),
        ("discard", json!("new")),
        ("max_msgs_per_subject", json!(1)),
        ("discard_new_per_subject", json!(true)),
        ("duplicate_window", json!(600_000_000_000_u64)),
        ("allow_direct", json!(true)),
        ("max_msg_size", json!(8 << 20)),
        ("max_bytes", json!(4_u64 << 30)),
    ] {
        assert_eq!(made[0][key], value, "{key}");
    }
    let said = ran(&nats, state.path(), &["--yes"]);
    assert!(said.ends_with("Nothing to do.\n") && said.matches("is as it must be").count() == 5, "{said}");
    assert_eq!([admin.config("STREAM.INFO.CI_RUNNER").await, admin.config("STREAM.INFO.CI_DEAD").await], made);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_raises_and_corrects_but_never_lowers_and_keeps_what_it_does_not_know() {
    let bench = Bench::new().await;
    let state = tempfile::tempdir().unwrap();
    let (admin, nats) = (bench.nats.admin().await, &bench.nats);
    bench.publish(1).await;
    let larger = json!({ "max_bytes": 6_u64 << 30, "max_msg_size": 9_000_000, "description": "of the operator",
        "subjects": ["ci.assignment.>", "other"], "duplicate_window": 60_000_000_000_u64, "max_age": 3_600_000_000_000_u64 });
    admin.change_stream("CI_RUNNER", larger).await;
    admin.change_consumer("vm", json!({ "max_deliver": 5, "metadata": { "kept": "yes" } })).await;
    let said = ran(nats, state.path(), &[]);
    assert!(said.contains("max_age is 3600000000000, not 0 (jobs that wait longer would be dropped) becomes 0"), "{said}");
    assert!(said.contains("max_deliver is 5, not -1") && !said.contains("max_bytes"), "{said}");
    ran(nats, state.path(), &["--yes"]);
    let config = admin.config("STREAM.INFO.CI_RUNNER").await;
    assert_eq!((&config["max_bytes"], &config["max_msg_size"]), (&json!(6_u64 << 30), &json!(9_000_000)));
    assert_eq!((&config["description"], &config["max_age"]), (&json!("of the operator"), &json!(0)));
    assert_eq!(
        (&config["subjects"], &config["duplicate_window"]),
        (&json!(["ci.assignment.>", "other"]), &json!(600_000_000_000_u64))
    );
    let consumer = admin.config("CONSUMER.INFO.CI_RUNNER.vm").await;
    assert_eq!((&consumer["max_deliver"], &consumer["metadata"]["kept"]), (&json!(-1), &json!("yes")));
    assert_eq!(bench.empty().await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_changed_in_place_is_refused_and_nothing_at_all_is_done() {
    let nats = Nats::start().await;
    let state = tempfile::tempdir().unwrap();
    let admin = nats.admin().await;
    let config = json!({ "name": "CI_RUNNER", "subjects": ["ci.assignment.>"], "retention": "limits", "storage": "file", "num_replicas": 1 });
    admin.ok("STREAM.CREATE.CI_RUNNER", config).await;
    for task in ["1", "1", "2"] {
        admin.publish(&format!("ci.assignment.pod.{task}"), &[], b"x".to_vec()).await;
    }
    let before = admin.config("STREAM.INFO.CI_RUNNER").await;
    let said = refused(&nats, state.path(), &["--yes"]);
    assert!(
        said.contains("CANNOT be made right in place") && said.contains("retention is \"limits\", not \"workqueue\""),
        "{said}"
    );
    assert!(said.contains("move the messages into a stream made by this command"), "{said}");
    assert_eq!(admin.config("STREAM.INFO.CI_RUNNER").await, before);
    assert_eq!(admin.messages("CI_RUNNER").await, 3);

    // Two messages on one subject would be one after the limit.
    admin.ok("STREAM.DELETE.CI_RUNNER", json!({})).await;
    let config = json!({ "name": "CI_RUNNER", "subjects": ["ci.assignment.>"], "retention": "workqueue", "storage": "file", "num_replicas": 1 });
    admin.ok("STREAM.CREATE.CI_RUNNER", config).await;
    for task in ["1", "1", "2"] {
        admin.publish(&format!("ci.assignment.pod.{task}"), &[], b"x".to_vec()).await;
    }
    let said = refused(&nats, state.path(), &["--yes"]);
    assert!(said.contains("ci.assignment.pod.1 hold more than one message"), "{said}");
    assert_eq!(admin.messages("CI_RUNNER").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_there_before_is_not_made_anew_so_a_wrong_key_of_the_server_costs_nothing() {
    let key = |key: &str| NatsOptions {
        replace: vec![("max_file_store: 20GB", format!("max_file_store: 20GB\n  cipher: chachapoly\n  key: \"{key}\""))],
        ..Default::default()
    };
    let nats = Nats::start_with(key("the-right-one")).await;
    nats.set_up().await;
    let mut bench = Bench::over(nats).await;
    bench.is_fine().await;
    bench.publish(1).await;
    let state = tempfile::tempdir().unwrap();
    let private = state.path().join("private");
    std::fs::create_dir(&private).unwrap();
    std::fs::copy(bench.folder().join("nats-known.json"), private.join("nats-known.json")).unwrap();
    bench.nats.stop();
    bench.nats.configure(&key("another"));
    bench.nats.start_again().await;
    let said = refused(&bench.nats, state.path(), &["--yes"]);
    assert!(said.contains("it was there before and is not now") && said.contains("wrong key"), "{said}");
    bench.is_unfit("a wrong key of its encryption looks the same").await;
    bench.nats.stop();
    bench.nats.configure(&key("the-right-one"));
    bench.nats.start_again().await;
    bench.is_fine().await;
    assert_eq!(bench.empty().await, [1]);
    ran(&bench.nats, state.path(), &["--yes"]);

    // Lost for good, and a person says so.
    bench.nats.admin().await.ok("STREAM.DELETE.CI_RUNNER", json!({})).await;
    refused(&bench.nats, state.path(), &["--yes"]);
    let said = ran(&bench.nats, state.path(), &["--yes", "--replace-lost"]);
    assert!(said.contains("The stream CI_RUNNER is accepted"), "{said}");
    std::fs::copy(private.join("nats-accepted.json"), bench.folder().join("nats-accepted.json")).unwrap();
    bench.is_fine().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_are_missing_are_all_named() {
    let said =
        Command::new(env!("CARGO_BIN_EXE_gitea-dynamic-runner")).arg("nats-setup").env_clear().env("HOME", "/").output().unwrap();
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(78));
    for name in ["NATS_URL", "NATS_ADMIN_USER", "NATS_ADMIN_PASSWORD"] {
        assert!(text.contains(&format!("{name} is not set")), "{text}");
    }
}

/// The layout of the system before this: each backend one subject, and one consumer that takes it.
async fn old_layout(nats: &Nats) {
    let admin = nats.admin().await;
    let config = json!({ "name": "CI_RUNNER", "subjects": ["ci.assignment.pod", "ci.assignment.vm"], "retention": "workqueue",
        "storage": "file", "discard": "old", "num_replicas": 1 });
    admin.ok("STREAM.CREATE.CI_RUNNER", config).await;
    for lane in ["pod", "vm"] {
        let config = json!({ "durable_name": lane, "ack_policy": "explicit", "deliver_policy": "all", "max_deliver": 1000,
            "filter_subject": format!("ci.assignment.{lane}"), "max_ack_pending": 4, "ack_wait": 300_000_000_000_u64 });
        admin
            .ok(&format!("CONSUMER.DURABLE.CREATE.CI_RUNNER.{lane}"), json!({ "stream_name": "CI_RUNNER", "config": config }))
            .await;
    }
}

/// The tasks of the stream, in its order, by their subjects.
async fn in_stream(nats: &Nats) -> Vec<String> {
    let admin = nats.admin().await;
    let mut found = Vec::new();
    let state = admin.ok("STREAM.INFO.CI_RUNNER", json!({})).await["state"].clone();
    for seq in state["first_seq"].as_u64().unwrap()..=state["last_seq"].as_u64().unwrap() {
        let message = admin.api("STREAM.MSG.GET.CI_RUNNER", json!({ "seq": seq })).await;
        found.extend(message["message"]["subject"].as_str().map(str::to_owned));
    }
    found
}

/// Twenty jobs that the forge has given out to this runner, each sealed as the controller seals.
async fn given_out(
    forge: &Forge,
    uuid: &str,
    token: &Secret,
    gate: &Gate,
    keys: &SealKeys,
    rules: &Rules,
) -> Vec<(TaskId, Vec<u8>)> {
    let jobs = (0..20).map(|n| JobSpec::new(&format!("job-{n}"), &POD).run(&gate.sign(&format!("ran {n}"))));
    forge.push(jobs);
    let rpc = RunnerRpc::to_gitea_through(&Proxies::none(), &forge.url(), None, Some((uuid, token))).unwrap();
    rpc.declare("test", &POD.map(str::to_owned), &[]).await.unwrap();
    let mut given = Vec::new();
    while given.len() < 20 {
        let fetched = rpc.fetch_task(0).await.unwrap().task.expect("a job waits");
        let assignment = Assignment::of_task(fetched.expose().to_vec(), rules, 1_790_000_000_000).unwrap();
        given.push((assignment.task, assignment.seal(keys)));
    }
    given
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_assignments_in_the_old_layout_are_moved_in_order_through_crashes_and_the_controller_runs_them_all() {
    story(Duration::from_secs(150), async {
        let (nats, forge, gate) = (Nats::start().await, Forge::start(ForgeConfig::default()).await.unwrap(), Gate::new().await);
        old_layout(&nats).await;
        let base = tempfile::Builder::new().prefix("g").rand_bytes(4).tempdir().unwrap();
        passable(base.path());
        let (uuid, token) = forge.new_runner("of the old system", &[]);
        let mut env = nats.env();
        env.extend([("GITEA_RUNNER_UUID", uuid.clone()), ("GITEA_RUNNER_TOKEN", token.expose().to_owned())]);
        env.push(("VM_BACKEND", String::new()));
        let options = ControllerOptions { pod_capacity: 4, env, ..Default::default() };
        let mut controller = Controller::prepare(base.path(), &forge.url(), None, options);
        let private = controller.state().join("private");
        std::fs::create_dir_all(&private).unwrap();
        std::fs::write(private.join("seal.key"), "5a".repeat(32)).unwrap();
        let keys = SealKeys::parse(&"5a".repeat(32)).unwrap();
        let rules = Rules { trust_domain: "dynamic-runner.development".into(), vm_label: "vm".into() };
        let mut given = given_out(&forge, &uuid, &token, &gate, &keys, &rules).await;
        // Their order in the queue is not that of their ids.
        given.rotate_left(7);

        let admin = nats.admin().await;
        for (n, (task, sealed)) in given.iter().enumerate() {
            let (id, assignment) = (task.to_string(), task.assignment().to_string());
            let headers: &[(&str, &str)] = match n % 4 {
                0 => &[("Task-Id", &id), ("Nats-Msg-Id", "something else")],
                1 => &[("Nats-Msg-Id", &id)],
                2 => &[("Nats-Msg-Id", &assignment)],
                // Only its envelope says it.
                _ => &[],
            };
            let unique: Vec<(&str, &str)> =
                headers.iter().copied().filter(|(name, value)| *name != "Nats-Msg-Id" || *value != "something else").collect();
            admin.publish("ci.assignment.pod", &unique, sealed.clone()).await;
        }
        // A worker of the old system holds one, and will never acknowledge it.
        let mut inbox = admin.0.subscribe("_INBOX_admin.pulled").await.unwrap();
        let pull = json!({ "batch": 1, "expires": 1_000_000_000 }).to_string();
        let next = "$JS.API.CONSUMER.MSG.NEXT.CI_RUNNER.pod";
        admin.0.publish_with_reply(next, "_INBOX_admin.pulled", pull.into()).await.unwrap();
        let held = futures::StreamExt::next(&mut inbox).await.unwrap();
        assert_eq!(held.payload, given[0].1);

        let state = controller.state();
        let said = refused(&nats, &state, &["--yes"]);
        assert!(said.contains("old layout") && said.contains("nats-setup --migrate"), "{said}");
        let said = refused(&nats, &state, &["--migrate"]);
        assert!(said.contains("20 message(s) of the old layout") && said.contains("add --yes"), "{said}");
        assert_eq!(in_stream(&nats).await, vec!["ci.assignment.pod"; 20], "nothing was moved");
        for wait in [30, 45, 60, 60] {
            let mut child =
                command(&nats, &state, &["--migrate", "--yes"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            tokio::time::sleep(Duration::from_millis(wait)).await;
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let said = ran(&nats, &state, &["--migrate", "--yes"]);
        assert!(said.ends_with("Done.\n") || said.ends_with("Nothing to do.\n"), "{said}");
        let expected: Vec<_> = given.iter().map(|(task, _)| format!("ci.assignment.pod.{task}")).collect();
        assert_eq!(in_stream(&nats).await, expected, "each once, in the old order");
        assert_eq!(admin.config("STREAM.INFO.CI_RUNNER").await["max_msgs_per_subject"], json!(1));
        assert!(ran(&nats, &state, &["--migrate", "--yes"]).contains("There is nothing of the old layout."));

        controller.start_again().await;
        let ended = async || {
            let jobs = forge.jobs();
            jobs.iter().all(|job| job.status.is_final()).then_some(jobs)
        };
        let jobs = eventually("all twenty have ended", Duration::from_secs(90), ended).await;
        assert!(
            jobs.iter().all(|job| job.status == JobStatus::Success),
            "{:?}",
            jobs.iter().map(|job| job.status).collect::<Vec<_>>()
        );
        let ran: BTreeSet<_> = (0..20).filter(|n| gate.calls(&format!("ran {n}")) == 1).collect();
        assert_eq!(ran.len(), 20, "each ran, and once");
        eventually("the stream is empty", SOON, async || (admin.messages("CI_RUNNER").await == 0).then_some(())).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_names_no_task_stays_in_the_old_layout_and_is_told_and_a_second_copy_goes_to_the_dead_letters() {
    let nats = Nats::start().await;
    old_layout(&nats).await;
    let (admin, state) = (nats.admin().await, tempfile::tempdir().unwrap());
    for (id, payload) in [("7", "first"), ("8", "other"), ("gitea-task-7", "second"), ("no-number", "unreadable")] {
        admin.publish("ci.assignment.vm", &[("Nats-Msg-Id", id)], payload.as_bytes().to_vec()).await;
    }
    let said = refused(&nats, state.path(), &["--migrate", "--yes"]);
    assert!(said.contains("message 4 on ci.assignment.vm names no task") && said.contains("SEAL_KEY_FILE"), "{said}");
    assert!(said.contains("2 message(s) moved, 1 double(s)"), "{said}");
    assert_eq!(in_stream(&nats).await, ["ci.assignment.vm", "ci.assignment.vm.7", "ci.assignment.vm.8"]);
    assert_eq!(admin.messages("CI_DEAD").await, 1);
    let said = refused(&nats, state.path(), &["--yes"]);
    assert!(said.contains("--migrate"), "not finished: {said}");
    let question: Value = json!({ "seq": 4 });
    admin.ok("STREAM.MSG.DELETE.CI_RUNNER", question).await;
    assert!(ran(&nats, state.path(), &["--migrate", "--yes"]).ends_with("Done.\n"));
    assert_eq!(in_stream(&nats).await, ["ci.assignment.vm.7", "ci.assignment.vm.8"]);
}
