//! R5, R6 and R10: environments between their making and `start`, through crashes and lost answers, and never more than slots.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use gitea_dynamic_runner::{
    demo::forge::{Forge, ForgeConfig, JobSpec, JobStatus, Method},
    ids::{EnvironmentName, Nonce, TaskId},
};
use nix::{sys::signal, unistd::Pid};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::{
    support::{eventually, free_port, story},
    world::{POD, SOON, World, assert_whole, rows_with},
};

/// An environment that has called `start`, in vain: the forge takes no rows, so the controller cannot tell the offset.
async fn unclaimed(world: &World) -> String {
    let name = world.environment().await;
    let asked = world.forge.count(Method::UpdateLog);
    world.see("a start that is refused", |forge| (forge.count(Method::UpdateLog) > asked + 2).then_some(())).await;
    name
}

#[tokio::test(flavor = "multi_thread")]
async fn r5_after_a_crash_an_unclaimed_environment_in_a_pool_of_one_is_offered_at_once_and_runs() {
    story(Duration::from_secs(90), async {
        let mut world = World::start(1).await;
        world.hold_starts();
        let job = world.push(world.quick("patient"));
        let (task, name) = (world.task(job).await, unclaimed(&world).await);
        // Crashes are no attempts (rule R10): more of them than environments may fail.
        for _ in 0..4 {
            world.controller.kill9();
            world.controller.start_again().await;
            assert_eq!(world.controller.environments(), std::slice::from_ref(&name));
        }
        world.forge.clear_faults();
        let view = world.ends_green(job).await;
        assert_eq!(world.controller.events("executor_created", task), 1, "the same environment");
        assert_eq!(world.controller.events("runner_claimed", task), 1);
        assert_eq!(world.started("patient"), 1);
        assert_eq!(rows_with(&view, "ended before"), 0, "{:#?}", view.log);
    })
    .await;
}

/// Kills the executor of the task's only environment, and waits until the controller knows of `ended` environments without `start`.
async fn kill_the_executor(world: &World, task: TaskId, ended: usize) {
    let executor = eventually("an executor", SOON, async || world.controller.executors().first().map(|process| process.pid));
    signal::kill(Pid::from_raw(executor.await), signal::SIGKILL).unwrap();
    let known = || world.controller.events("claim_timeout", task) == ended;
    eventually("the controller knows that it ended", SOON, async || known().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r5_an_environment_that_ends_before_start_is_made_again_and_runs() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        world.hold_starts();
        let job = world.push(world.quick("second try"));
        let task = world.task(job).await;
        kill_the_executor(&world, task, 1).await;
        eventually("another environment", SOON, async || (world.controller.events("executor_created", task) == 2).then_some(()))
            .await;
        world.forge.clear_faults();
        world.ends_green(job).await;
        assert_eq!(world.controller.events("executor_created", task), 2);
        assert_eq!(world.started("second try"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r5_after_three_environments_that_ended_before_start_the_job_fails_with_its_reason() {
    story(Duration::from_secs(120), async {
        let world = World::start(1).await;
        world.hold_starts();
        let job = world.push(world.quick("never"));
        let task = world.task(job).await;
        for ended in 1..=3 {
            kill_the_executor(&world, task, ended).await;
        }
        world.forge.clear_faults();
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "3 environments ended before they could take this job"), 1, "{:#?}", view.log);
        assert!(view.steps.iter().all(|step| step.status.is_final() && step.stopped.is_some()), "{:#?}", view.steps);
        world.no_environment(SOON).await;
        assert_eq!(world.controller.events("executor_created", task), 3);
        assert_eq!(world.started("never"), 0);
    })
    .await;
}

/// What becomes of what passes between environments and facade.
const PASS: u8 = 0;
/// Requests arrive, answers do not.
const SWALLOW: u8 = 1;
/// Nobody gets through.
const REFUSE: u8 = 2;

/// Stands between environments and the facade, and sees only ciphertext.
struct Between {
    mode: Arc<AtomicU8>,
    cuts: watch::Sender<u32>,
}

impl Between {
    async fn start(listen: u16, facade: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", listen)).await.unwrap();
        let (mode, cuts) = (Arc::new(AtomicU8::new(PASS)), watch::Sender::new(0));
        let between = Self { mode: Arc::clone(&mode), cuts: cuts.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if mode.load(Ordering::SeqCst) != REFUSE
                    && let Ok(server) = TcpStream::connect(("127.0.0.1", facade)).await
                {
                    tokio::spawn(carry(client, server, Arc::clone(&mode), cuts.subscribe()));
                }
            }
        });
        between
    }

    /// From now on; connections that are open stay.
    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
    }

    fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

async fn carry(client: TcpStream, server: TcpStream, mode: Arc<AtomicU8>, mut cuts: watch::Receiver<u32>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.into_split(), server.into_split());
    let answers = async {
        let mut bytes = [0; 16 << 10];
        while let Ok(read @ 1..) = from_server.read(&mut bytes).await {
            if mode.load(Ordering::SeqCst) != SWALLOW && to_client.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        // However it ends, both sides see it by the drop.
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
        () = answers => {}
        _ = cuts.changed() => {}
    }
}

/// The facade claims the task for its environment, and the environment never hears of it.
async fn lose_the_answer_to_start(world: &World, between: &Between, task: TaskId) {
    let claimed = || world.controller.events("runner_claimed", task) == 1;
    for _ in 0..5 {
        unclaimed(world).await;
        between.set(SWALLOW);
        world.forge.clear_faults();
        // An answer that was on its way already was swallowed, too; then there is no next call, and it is tried anew.
        let waited = tokio::time::timeout(Duration::from_secs(8), async {
            while !claimed() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let lost = waited.await.is_ok();
        if !lost {
            world.hold_starts();
        }
        between.set(PASS);
        between.cut();
        if lost {
            return;
        }
    }
    panic!("no answer to start could be lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn r5_start_is_repeated_after_a_lost_answer_and_no_row_is_lost_or_repeated() {
    story(Duration::from_secs(120), async {
        let (listen, facade) = (free_port(), free_port());
        let env = vec![
            ("RUNNER_FACADE_URL", format!("https://127.0.0.1:{listen}")),
            ("RUNNER_FACADE_LISTEN", format!("127.0.0.1:{facade}")),
        ];
        let mut world = World::prepare(1, ForgeConfig::default(), env).await;
        let between = Between::start(listen, facade).await;
        between.set(REFUSE);
        world.controller.start_again().await;
        let job = world.push(world.counting("twice asked"));
        let task = world.task(job).await;
        // These rows of the controller make an offset that is not 0.
        world.see("the controller's rows", |forge| (forge.job(job)?.log.len() == 2).then_some(())).await;
        world.hold_starts();
        between.set(PASS);
        lose_the_answer_to_start(&world, &between, task).await;
        world.counts("twice asked", job).await;
        world.gate.open();
        let view = world.ends_green(job).await;
        assert_whole(&view);
        assert_eq!(rows_with(&view, "was made for this job"), 1);
        assert_eq!(world.controller.events("runner_claimed", task), 1, "claimed once, asked twice");
        assert_eq!(world.started("twice asked"), 1);
        world.assert_one_reporter(task);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r6_of_two_environments_of_one_assignment_the_older_is_served_and_the_other_removed() {
    story(Duration::from_secs(90), async {
        let mut world = World::start(1).await;
        world.hold_starts();
        let job = world.push(world.quick("served"));
        let (task, older) = (world.task(job).await, unclaimed(&world).await);
        world.controller.kill9();
        // As a create leaves it whose controller died before the environment's process was there.
        let folder = world.controller.state().join("private/environments");
        let mut record: Value = serde_json::from_slice(&std::fs::read(folder.join(format!("{older}.json"))).unwrap()).unwrap();
        let nonce = Nonce::random();
        let younger = EnvironmentName::new(&world.instance(), task, &nonce).to_string();
        record["name"] = younger.as_str().into();
        record["labels"]["ci.ddupan.top/environment"] = nonce.to_string().into();
        record["created_ms"] = (record["created_ms"].as_u64().unwrap() + 1000).into();
        // No two have one uid.
        if let Some(uid) = record["uid"].as_u64() {
            record["uid"] = (uid + 1).into();
        }
        std::fs::write(folder.join(format!("{younger}.json")), record.to_string()).unwrap();
        world.controller.start_again().await;
        eventually("the younger one is removed", SOON, async || {
            (world.controller.environments() == [older.clone()]).then_some(())
        })
        .await;
        world.forge.clear_faults();
        world.ends_green(job).await;
        assert_eq!(world.started("served"), 1);
        assert_eq!(world.controller.events("executor_created", task), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r10_there_are_never_more_environments_than_slots_and_a_slot_is_free_only_when_its_environment_is_gone() {
    story(Duration::from_secs(120), async {
        let world = World::start(2).await;
        let (begin, end) = (world.gate.sign("begin"), world.gate.sign("end"));
        // What it leaves behind makes the environment live longer than its job, were it not killed.
        let script = format!("{begin}\nsetsid sleep 600 &\nsleep 0.3\n{end}");
        let jobs = world.forge.push((0..6).map(|n| JobSpec::new(&format!("m{n}"), &POD).run(&script))).jobs;
        let over = |forge: &Forge| jobs.iter().all(|job| forge.job(*job).is_some_and(|view| view.status.is_final()));
        let mut most = 0;
        while !over(&world.forge) {
            let now = world.controller.environments().len();
            assert!(now <= 2, "{now} environments in 2 slots");
            let at_work = world.gate.calls("begin") - world.gate.calls("end").min(world.gate.calls("begin"));
            assert!(at_work <= 2, "{at_work} jobs at once in 2 slots");
            most = most.max(now);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(most, 2, "both slots were used");
        for job in jobs {
            world.ends_green(job).await;
        }
        world.no_environment(SOON).await;
        // Counted by the next look.
        let used = async || world.controller.metric("capacity_slots{backend=\"pod\",state=\"used\"}").await;
        eventually("no slot is in use", SOON, async || (used().await == Some(0.0)).then_some(())).await;
    })
    .await;
}
