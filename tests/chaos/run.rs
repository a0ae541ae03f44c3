//! A seeded run: hundreds of jobs while NATS and the controller are killed in turn, again and again. Then the books must balance.
//!
//! `CHAOS_SEED` repeats a run's choices (not the machine's timing); `CHAOS_JOBS` makes it longer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use gitea_dynamic_runner::{
    demo::forge::{ForgeConfig, JobId, JobSpec, JobStatus, JobView},
    ids::TaskId,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::{
    support::{nats::Nats, story},
    world::{POD, World, rows_with},
};

const JOBS: usize = 320;
const KILLS_EACH: usize = 20;
const CAPACITY: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Green,
    Red,
    /// No backend serves it.
    Refused,
    /// Its user cancels it at some moment; it may have ended before.
    Cancelled,
}

struct Job {
    name: String,
    kind: Kind,
    id: JobId,
}

/// What became of the jobs, each in one column.
#[derive(Debug, Default)]
struct Books {
    green: usize,
    red: usize,
    refused: usize,
    cancelled: usize,
    /// The window that cannot be closed (R3): failed with its reason, never begun.
    lost_fetch: Vec<TaskId>,
    /// Without an end.
    lost: usize,
    /// Begun more than once.
    doubled: usize,
    /// Another end than its own.
    wrong: Vec<String>,
}

fn spec(world: &World, name: &str, kind: Kind) -> JobSpec {
    let sign = world.gate.sign(&format!("started {name}"));
    match kind {
        Kind::Green => JobSpec::new(name, &POD).run(&format!("{sign}\necho done")),
        Kind::Red => JobSpec::new(name, &POD).run(&format!("{sign}\nexit 3")),
        Kind::Refused => JobSpec::new(name, &["self-hosted"]).run("echo never"),
        Kind::Cancelled => JobSpec::new(name, &POD).run(&format!("{sign}\nsleep 0.5\necho done")),
    }
}

fn book(books: &mut Books, job: &Job, view: &JobView, runs: usize) {
    books.doubled += usize::from(runs > 1);
    let whole = rows_with(view, "done") == 1;
    match (job.kind, view.status) {
        (_, status) if !status.is_final() => books.lost += 1,
        (_, JobStatus::Failure) if runs == 0 && rows_with(view, "it did not reach its disk") == 1 => {
            books.lost_fetch.extend(view.task);
        }
        (Kind::Green | Kind::Cancelled, JobStatus::Success) if runs == 1 && whole => books.green += 1,
        (Kind::Red, JobStatus::Failure) if runs == 1 => books.red += 1,
        (Kind::Refused, JobStatus::Failure) if runs == 0 && rows_with(view, "runs-on") == 1 => books.refused += 1,
        (Kind::Cancelled, JobStatus::Cancelled) => books.cancelled += 1,
        (kind, status) => books.wrong.push(format!("{} ({kind:?}): {status:?}, begun {runs} times: {:#?}", job.name, view.log)),
    }
}

/// The two victims in turn, until each had its kills.
struct Killer {
    kills: [usize; 2],
    next: Instant,
}

impl Killer {
    fn done(&self) -> bool {
        self.kills.iter().all(|kills| *kills >= KILLS_EACH)
    }

    async fn strike(&mut self, world: &mut World, nats: &mut Nats, random: &mut StdRng) {
        if self.next > Instant::now() {
            return;
        }
        if self.kills[0] <= self.kills[1] {
            nats.kill9();
            // Sometimes back at once, sometimes long enough that jobs come meanwhile.
            tokio::time::sleep(Duration::from_millis(random.random_range(20..1500))).await;
            nats.start_again().await;
            self.kills[0] += 1;
        } else {
            world.controller.kill9();
            tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
            world.controller.spawn();
            self.kills[1] += 1;
        }
        self.next = Instant::now() + Duration::from_millis(random.random_range(200..2500));
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_doubled_or_wrong_while_nats_and_the_controller_are_killed_in_turn() {
    let seed = number("CHAOS_SEED", rand::random::<u64>() >> 16);
    let wanted = usize::try_from(number("CHAOS_JOBS", JOBS as u64)).unwrap();
    println!("seed {seed}: repeat with CHAOS_SEED={seed}");
    story(Duration::from_secs(840), async {
        let mut random = StdRng::seed_from_u64(seed);
        let mut nats = Nats::start().await;
        nats.set_up().await;
        let mut world = World::prepare(CAPACITY, ForgeConfig::default(), nats.env()).await;
        world.controller.start_again().await;
        let mut killer = Killer { kills: [0, 0], next: Instant::now() + Duration::from_secs(2) };
        let (mut jobs, mut to_cancel) = (Vec::new(), Vec::new());
        let began = Instant::now();
        loop {
            let open = jobs.iter().filter(|job: &&Job| !world.forge.job(job.id).unwrap().status.is_final()).count();
            if jobs.len() >= wanted && killer.done() && open == 0 {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(780), "{open} jobs have no end; seed {seed}");
            // Jobs for as long as there are kills, and a backlog at all times.
            if open < 24 && (jobs.len() < wanted || !killer.done()) {
                for _ in 0..random.random_range(1..12) {
                    let kind = match random.random_range(0..100) {
                        0..10 => Kind::Red,
                        10..15 => Kind::Refused,
                        15..22 => Kind::Cancelled,
                        _ => Kind::Green,
                    };
                    let name = format!("job{}", jobs.len());
                    let id = world.push(spec(&world, &name, kind));
                    if kind == Kind::Cancelled {
                        to_cancel.push((id, Instant::now() + Duration::from_millis(random.random_range(0..4000))));
                    }
                    jobs.push(Job { name, kind, id });
                }
            }
            to_cancel.retain(|(id, at)| {
                let due = *at <= Instant::now();
                if due {
                    world.forge.cancel(*id);
                }
                !due
            });
            if !killer.done() || jobs.len() < wanted {
                killer.strike(&mut world, &mut nats, &mut random).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        world.controller.ready().await;
        world.no_environment(Duration::from_secs(60)).await;
        let mut books = Books::default();
        for job in &jobs {
            book(&mut books, job, &world.forge.job(job.id).unwrap(), world.started(&job.name));
        }
        println!(
            "seed {seed}: {} jobs in {:.0} s, nats-server killed {} times, the controller {} times\n{books:?}",
            jobs.len(),
            began.elapsed().as_secs_f64(),
            killer.kills[0],
            killer.kills[1]
        );
        assert_eq!((books.lost, books.doubled, &books.wrong), (0, 0, &Vec::new()), "seed {seed}");
        for task in &books.lost_fetch {
            assert!(world.controller.events("lost_fetch", *task) > 0, "the controller knows of task {task}; seed {seed}");
        }
        assert_eq!(nats.admin().await.messages("CI_RUNNER").await, 0, "nothing stays in the stream");
    })
    .await;
}
