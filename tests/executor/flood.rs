//! More log than Gitea takes for a while: nothing is missing, memory stays bounded, and the job does not wait.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use super::{
    assert_success,
    proxy::peak_memory,
    runner_pid,
    small_disk::SmallDisk,
    world::{Setup, World},
};

/// Eight minutes at 50 MB a minute: longer than a restart of Gitea takes, shorter than it waits for a silent job.
const EIGHT_MINUTES: i64 = 400_000;
/// The spool keeps 8 MiB in memory; the rest is the program and what is under way.
const MOST_MEMORY_KIB: u64 = 96 << 10;

fn flooded(rows: i64) -> (World, u32) {
    flooded_in(std::env::temp_dir().as_path(), rows)
}

fn flooded_in(base: &Path, rows: i64) -> (World, u32) {
    let mut setup = Setup::new(&format!("flood {rows}"));
    setup.base = base.to_owned();
    setup.facade.known().flood = Some(0);
    let world = setup.start();
    let pid = runner_pid(&world);
    (world, pid)
}

fn wait(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn lives(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn f20_eight_minutes_of_log_at_50_mb_a_minute_wait_on_disk_for_a_facade_that_is_away_and_all_arrive_in_order() {
    let (mut world, pid) = flooded(EIGHT_MINUTES);
    world.known().away = true;
    wait("the runner ends though nobody takes its log", Duration::from_secs(110), || !lives(pid));
    assert!(!world.known().sealed);
    assert!(world.known().terminal.is_none(), "no verdict before its rows");
    let peak = peak_memory(&world);
    println!("peak memory of the executor: {peak} KiB");
    assert!(peak < MOST_MEMORY_KIB, "{peak} KiB");
    world.known().away = false;
    wait("every row arrives", Duration::from_secs(110), || world.known().flood == Some(EIGHT_MINUTES));
    assert_eq!(world.known().gaps, []);
    assert_eq!(world.ended().code(), Some(0));
    assert_success(&world);
}

#[test]
fn a_hundred_thousand_lines_at_once_do_not_hold_the_job_up_and_all_arrive_in_order() {
    let (mut world, pid) = flooded(100_000);
    world.known().away = true;
    // It ends while nobody takes a row: whatever a row costs at Gitea, the job did not pay it.
    wait("the runner ends though nobody takes its log", Duration::from_secs(60), || !lives(pid));
    world.known().away = false;
    wait("every row arrives", Duration::from_secs(60), || world.known().flood == Some(100_000));
    assert_eq!(world.known().gaps, []);
    assert_eq!(world.ended().code(), Some(0));
    assert_success(&world);
}

#[test]
fn on_a_full_disk_what_is_spooled_stays_and_a_row_marks_the_gap() {
    let Some(disk) = SmallDisk::new("100m") else { return };
    // Of the hundred, 64 MiB are left to the job.
    let (mut world, pid) = flooded_in(disk.path(), 100_000);
    world.known().away = true;
    wait("the runner ends though its log finds no room", Duration::from_secs(60), || !lives(pid));
    world.known().away = false;
    wait("the log is sealed", Duration::from_secs(60), || world.known().sealed);
    assert_eq!(world.known().held(), 2 + 100_000 + 1, "every row has its place, also the last");
    let gaps = world.known().gaps.clone();
    let (first, note) = gaps.first().expect("more than there is room for");
    assert!(*first > 20_000, "what found room stays: {first}");
    assert!(note.contains("rows") && note.contains("missing"), "the first missing row says so: {note}");
    assert!(gaps[1..].iter().all(|(_, row)| row.is_empty()), "the others are empty");
    assert_eq!(world.ended().code(), Some(0));
    assert_success(&world);
}
