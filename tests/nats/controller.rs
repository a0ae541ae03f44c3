//! The controller with its queue in JetStream: jobs run through crashes and absences of NATS.

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::ForgeConfig;

use crate::{
    support::{eventually, nats::Nats, story},
    world::World,
};

const LIMIT: Duration = Duration::from_secs(110);

/// NATS is set up, the controller is not started.
async fn prepare(capacity: u32) -> (World, Nats) {
    let nats = Nats::start().await;
    nats.set_up().await;
    let world = World::prepare(capacity, ForgeConfig::default(), nats.env()).await;
    (world, nats)
}

/// Nothing of an ended job is left in the queue.
async fn queue_is_empty(nats: &Nats) {
    let admin = nats.admin().await;
    eventually("the stream is empty", Duration::from_secs(10), async || (admin.messages("CI_RUNNER").await == 0).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_run_through_jetstream_and_leave_nothing_in_it() {
    story(LIMIT, async {
        let (mut world, nats) = prepare(2).await;
        world.controller.start_again().await;
        let jobs: Vec<_> = (0..5).map(|n| world.push(world.quick(&format!("job-{n}")))).collect();
        for job in jobs {
            world.ends_green(job).await;
        }
        queue_is_empty(&nats).await;
    })
    .await;
}
