//! An environment that cannot or does not do its job: the job ends with a reason that says which, and is run by nobody else.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::{ForgeConfig, JobStatus};
use nix::{sys::signal, unistd::Pid};

use crate::{
    support::story,
    world::{SOON, World, rows_with},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_environment_falls_silent_is_given_up_before_gitea_does_and_fails_with_that_reason() {
    story(Duration::from_secs(90), async {
        let settings = vec![("SILENCE_LIMIT_SECONDS", "10".to_owned())];
        let mut world = World::prepare(1, ForgeConfig::default(), settings).await;
        world.controller.start_again().await;
        let silent = world.push(world.counting("silent"));
        world.counts("silent", silent).await;
        // Frozen, it neither ends nor asks.
        let executor = world.controller.executors().remove(0);
        signal::kill(Pid::from_raw(executor.pid), signal::SIGSTOP).unwrap();
        let view = world.forge.wait_done(silent, Duration::from_secs(30)).await.unwrap();
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "was not heard of for 10 s"), 1, "{:#?}", view.log);
        world.no_environment(SOON).await;
        // Counted after Gitea has its end, and before the environment is gone.
        assert_eq!(world.controller.metric("infra_failures_total{backend=\"pod\",reason=\"silent\"}").await, Some(1.0));
        assert_eq!(world.started("silent"), 1, "it is never run again");
        // Its slot is free again.
        let next = world.push(world.quick("next"));
        world.ends_green(next).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_fails_at_the_first_environment_that_says_that_none_can_do_it() {
    story(Duration::from_secs(60), async {
        let mut world = World::prepare(1, ForgeConfig::default(), Vec::new()).await;
        let runner = world.base().join("runner");
        std::fs::copy(env!("CARGO_BIN_EXE_gitea-dynamic-runner"), &runner).unwrap();
        world.controller.set("RUNNER_BIN", Some(runner.display().to_string()));
        world.controller.start_again().await;
        // Without one the controller would not have started; an upgrade of the runner that failed halfway takes it away later.
        std::fs::remove_file(&runner).unwrap();
        let job = world.push(world.quick("unlucky"));
        let view = world.ended(job).await;
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "RUNNER_BIN"), 1, "{:#?}", view.log);
        let task = view.task.unwrap();
        assert_eq!(world.controller.events("executor_created", task), 1, "it is not tried again");
        world.no_environment(SOON).await;
        assert_eq!(world.started("unlucky"), 0);
    })
    .await;
}
