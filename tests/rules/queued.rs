//! R9: nothing leaves the queue before Gitea has taken the job's end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::{JobSpec, JobStatus, Method};

use crate::{
    support::{eventually, story},
    world::{SOON, World, rows_with},
};

/// So many assignments that only wait to be failed.
async fn refused_in_queue(world: &World, number: f64) {
    eventually(&format!("{number} refused in the queue"), SOON, async || {
        let mut sum = 0.0;
        for state in ["ready", "delayed", "leased"] {
            sum += world.controller.metric(&format!("queue_depth{{lane=\"refused\",state=\"{state}\"}}")).await?;
        }
        (sum == number).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_job_that_cannot_be_served_fails_with_its_reason_though_gitea_takes_no_report_for_a_while_and_over_a_restart() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        world.refuse(Method::UpdateTask);
        world.refuse(Method::UpdateLog);
        let spec = JobSpec::new("nowhere", &["self-hosted"]).run("echo never").run("echo never");
        let job = world.push(spec);
        let task = world.task(job).await;
        refused_in_queue(&world, 1.0).await;
        let tries = world.forge.count(Method::UpdateLog);
        world.see("tries to say why", |forge| (forge.count(Method::UpdateLog) > tries + 2).then_some(())).await;
        refused_in_queue(&world, 1.0).await;
        world.controller.kill9();
        // It looks for lost tasks before it fetches, so it is ready only once Gitea takes reports again.
        world.controller.spawn();
        refused_in_queue(&world, 1.0).await;
        assert_eq!(world.forge.job(job).unwrap().status, JobStatus::Running);
        world.forge.clear_faults();
        world.controller.ready().await;
        let view = world.forge.wait_done(job, Duration::from_secs(70)).await.unwrap();
        assert_eq!(view.status, JobStatus::Failure);
        assert_eq!(rows_with(&view, "runs-on"), 1, "{:#?}", view.log);
        assert_eq!(view.steps.iter().map(|step| step.status).collect::<Vec<_>>(), [JobStatus::Failure, JobStatus::Skipped]);
        assert!(view.steps.iter().all(|step| step.stopped >= step.started && step.started.unwrap() >= view.pushed));
        refused_in_queue(&world, 0.0).await;
        assert_eq!(world.controller.events("executor_created", task), 0);
    })
    .await;
}
