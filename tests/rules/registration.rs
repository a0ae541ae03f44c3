//! Gitea does not know the runner any more: nothing new is fetched, running jobs go on, and it heals by itself.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use connectrpc::ErrorCode;
use gitea_dynamic_runner::demo::forge::{Fault, Method, Times};

use crate::{
    support::{eventually, story},
    world::{SOON, World, assert_whole},
};

#[tokio::test(flavor = "multi_thread")]
async fn an_unregistered_runner_parks_after_a_minute_while_its_running_job_goes_on_and_wakes_when_it_is_known_again() {
    story(Duration::from_secs(220), async {
        let world = World::start(1).await;
        let job = world.push(world.counting("running"));
        world.counts("running", job).await;
        let message = "rpc error: code = Unauthenticated desc = unregistered runner".to_owned();
        for method in [Method::FetchTask, Method::Declare, Method::UpdateTask, Method::UpdateLog] {
            world.forge.inject(method, Fault::Fail { code: ErrorCode::Unknown, message: message.clone() }, Times::UntilCleared);
        }
        let limit = Duration::from_secs(90);
        eventually("the controller says what to do", limit, async || {
            world.controller.readiness().await?.contains("register anew").then_some(())
        })
        .await;
        assert!(world.controller.log().contains("gitea-dynamic-runner register"), "an error names the way out");
        let (asked, counted) = (world.forge.count(Method::FetchTask), world.gate.calls("counting running"));
        eventually("the job goes on", SOON, async || (world.gate.calls("counting running") > counted + 20).then_some(())).await;
        assert!(world.forge.count(Method::FetchTask) <= asked + 1, "it is asked once a minute");
        world.forge.clear_faults();
        eventually("it is known again", limit, async || world.controller.readiness().await?.is_empty().then_some(())).await;
        world.gate.open();
        assert_whole(&world.ends_green(job).await);
        let next = world.push(world.quick("next"));
        world.ends_green(next).await;
    })
    .await;
}
