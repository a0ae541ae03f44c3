//! R11: Gitea goes away, forgets, or goes back in time while jobs run; their rows and results wait in the environment.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::{ForgeConfig, JobSpec, JobStatus};

use crate::{
    support::{Gate, eventually, story},
    world::{POD, SOON, World, assert_whole, numbered},
};

const AWAY: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn r11_gitea_away_for_30_seconds_amid_one_job_and_at_the_end_of_another_costs_no_row_and_no_result() {
    story(Duration::from_secs(150), async {
        let world = World::start(2).await;
        let to_end = Gate::new().await;
        let script = format!(
            "i=0\nuntil {}; do echo \"row $i\"; i=$((i+1)); sleep 0.1; done\necho \"rows in all: $i\"\n{}",
            to_end.ask("ending"),
            to_end.sign("last")
        );
        let (amid, at_end) = (world.push(world.counting("amid")), world.push(JobSpec::new("at end", &POD).run(&script)));
        world.counts("amid", amid).await;
        to_end.called("ending", SOON).await;
        world.see("its rows", |forge| (numbered(&forge.job(at_end)?.log).len() > 3).then_some(())).await;
        world.forge.go_down().await;
        to_end.open();
        to_end.called("last", SOON).await;
        // The length of the outage is what this story is about.
        tokio::time::sleep(AWAY).await;
        let written = world.gate.calls("counting amid");
        world.forge.come_up().await.unwrap();
        eventually("the other job goes on", SOON, async || (world.gate.calls("counting amid") > written).then_some(())).await;
        world.gate.open();
        for job in [amid, at_end] {
            let view = world.forge.wait_done(job, Duration::from_secs(60)).await.unwrap();
            assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
            assert_whole(&view);
            assert!(view.sealed);
        }
        assert_eq!(world.started("amid"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_after_a_restored_backup_the_gap_is_filled_with_placeholders_and_the_job_ends_green() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let job = world.push(world.counting("counter"));
        world.counts("counter", job).await;
        let backup = world.forge.backup();
        let kept = world.forge.job(job).unwrap().log.len();
        world.see("more rows", |forge| (forge.job(job)?.log.len() > kept + 20).then_some(())).await;
        world.forge.restore(backup);
        world.see("rows after the gap", |forge| (forge.job(job)?.log.len() > kept + 30).then_some(())).await;
        world.gate.open();
        let view = world.ends_green(job).await;
        // Each number stands where it would stand had nothing been lost.
        let first = view.log.iter().position(|row| row == "row 0").unwrap();
        let places = view.log.iter().enumerate().filter_map(|(at, row)| Some((at, row.strip_prefix("row ")?.parse().ok()?)));
        let places: Vec<(usize, usize)> = places.collect();
        assert!(places.iter().all(|(at, number)| *at == first + number), "{:#?}", view.log);
        let said: usize = view.log.iter().find_map(|row| row.strip_prefix("rows in all: ")?.parse().ok()).unwrap();
        let lost = view.log[kept..].iter().take_while(|row| !row.starts_with("row ")).count();
        assert_eq!(places.len() + lost, said, "placeholders stand for exactly what was lost");
        assert!(lost >= 20);
        assert_eq!(world.started("counter"), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_the_environment_of_a_job_that_gitea_deleted_goes_away() {
    story(Duration::from_secs(90), async {
        let world = World::start(1).await;
        let job = world.push(world.counting("deleted"));
        world.counts("deleted", job).await;
        world.forge.forget(job);
        world.no_environment(SOON).await;
        let next = world.push(world.quick("next"));
        world.ends_green(next).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_the_environment_of_a_job_that_gitea_gave_up_and_sealed_goes_away() {
    story(Duration::from_secs(90), async {
        let config = ForgeConfig {
            endless_timeout: Duration::from_secs(6),
            sweep_every: Duration::from_millis(200),
            ..Default::default()
        };
        let mut world = World::prepare(1, config, Vec::new()).await;
        world.controller.start_again().await;
        let job = world.push(world.counting("endless"));
        world.counts("endless", job).await;
        let view = world.ended(job).await;
        assert_eq!((view.status, view.sealed), (JobStatus::Failure, true));
        world.no_environment(SOON).await;
        let after = world.forge.job(job).unwrap();
        assert_eq!((after.status, after.log.len()), (JobStatus::Failure, view.log.len()), "what Gitea decided stays");
        let next = world.push(world.quick("next"));
        world.ends_green(next).await;
    })
    .await;
}
