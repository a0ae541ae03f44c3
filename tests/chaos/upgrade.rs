//! Two versions of the program in turn, with jobs running: an upgrade and the way back are nothing to a job.
//!
//! The other version is the one that `tests/run.sh` keeps in `PEERS_DIR/previous`; it says which. Environments go on with the binary that made them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use gitea_dynamic_runner::demo::forge::{ForgeConfig, JobId, JobSpec, JobStatus};

use crate::{
    support::{peers_dir, story},
    world::{POD, World, assert_whole, numbered},
};

const JOBS: usize = 20;
/// Of twenty jobs on two cores, a step of all.
const ALL: Duration = Duration::from_secs(60);

/// Signs its name, then writes a numbered row a second until the gate opens: twenty of them shall not be what keeps two cores busy.
fn counting(world: &World, name: &str) -> JobSpec {
    let (sign, ask) = (world.gate.sign(&format!("started {name}")), world.gate.ask(&format!("counting {name}")));
    let script =
        format!("{sign}\ni=0\nuntil {ask}; do\n  echo \"row $i\"\n  i=$((i + 1))\n  sleep 1\ndone\necho \"rows in all: $i\"");
    JobSpec::new(name, &POD).run(&script)
}

/// Every running job has more rows at the forge than before.
async fn all_go_on(world: &World, jobs: &[JobId]) {
    for job in jobs {
        let had = numbered(&world.forge.job(*job).unwrap().log).len();
        let more = world.forge.wait_for("more rows", ALL, |forge| (numbered(&forge.job(*job)?.log).len() > had).then_some(()));
        more.await.unwrap();
    }
}

// The forge answers while the controller is waited for.
#[tokio::test(flavor = "multi_thread")]
async fn two_versions_in_turn_harm_none_of_twenty_running_jobs() {
    story(Duration::from_secs(240), async {
        let mut world = World::prepare(u32::try_from(JOBS).unwrap(), ForgeConfig::default(), Vec::new()).await;
        let new = world.controller.program().to_owned();
        let old = world.controller.place_program(&peers_dir().join("previous/gitea-dynamic-runner"), "previous");
        world.controller.use_program(&old);
        world.controller.start_again().await;
        let running: Vec<JobId> = (0..JOBS).map(|n| world.push(counting(&world, &format!("job {n}")))).collect();
        for n in 0..JOBS {
            world.gate.called(&format!("started job {n}"), ALL).await;
        }
        // One more waits in the queue that the old version wrote.
        let waits = world.push(world.quick("waits"));
        world.waits_with_us(waits).await;
        for program in [&new, &old, &new] {
            world.controller.sigterm();
            world.controller.use_program(program);
            world.controller.spawn();
            world.controller.ready_within(ALL).await;
            all_go_on(&world, &running).await;
        }
        world.gate.open();
        for (n, job) in running.iter().enumerate() {
            let view = world.forge.wait_done(*job, ALL).await.unwrap();
            assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
            // An answer that a stop cut off makes a row be sent again, and Gitea holds it once.
            assert_whole(&view);
            assert_eq!(world.started(&format!("job {n}")), 1, "job {n} ran once");
        }
        assert_eq!(world.forge.wait_done(waits, ALL).await.unwrap().status, JobStatus::Success);
        assert_eq!(world.started("waits"), 1);
    })
    .await;
}
