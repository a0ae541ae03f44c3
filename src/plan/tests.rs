//! What `plan` decides, case by case, and what must hold for every case.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;
use crate::{
    ids::{BackendKind, InstanceId, Nonce, TaskId},
    secret::SecretBytes,
};

fn name(task: i64, nonce: u8) -> EnvironmentName {
    let nonce: Nonce = format!("{nonce:016x}").parse().unwrap();
    EnvironmentName::new(&InstanceId::of_uuid("u"), TaskId(task), &nonce)
}

fn observed(task: i64, nonce: u8, claimed: bool, terminal: bool, phase: Phase, age: u64) -> Observed {
    let created_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 - age);
    Observed {
        name: name(task, nonce),
        assignment: TaskId(task).assignment(),
        nonce: name(task, nonce).parts().unwrap().2,
        backend: BackendKind::Pod,
        claimed,
        terminal,
        phase,
        repository: "o/r".into(),
        job_key: "k".into(),
        spiffe_id: "spiffe://td/ci/o/r/k".into(),
        steps: 1,
        created_at,
        deadline_at: created_at + Duration::from_secs(14_400),
        uid: None,
        workload_socket: None,
    }
}

fn claim(task: i64, nonce: u8, phase: ClaimPhase, now: Instant) -> Claim {
    Claim {
        assignment: TaskId(task).assignment(),
        backend: BackendKind::Pod,
        name: name(task, nonce),
        nonce: name(task, nonce).parts().unwrap().2,
        spiffe_id: "spiffe://td/ci/o/r/k".into(),
        steps: 1,
        phase,
        offered_at: now,
        heard_at: now,
        fetched_at: SystemTime::UNIX_EPOCH,
        token_hash: None,
        stop: None,
        superseded: false,
        known_steps: Vec::new(),
    }
}

fn offered() -> ClaimPhase {
    ClaimPhase::Offered { raw: SecretBytes::new(vec![]) }
}

fn facts(environments: Vec<Observed>, claims: Vec<Claim>, queued: &[i64]) -> Facts {
    Facts {
        environments,
        claims,
        queued: Some(queued.iter().map(|t| TaskId(*t).assignment()).collect()),
        busy: HashSet::new(),
        stop_grace: STOP_GRACE,
        silence_limit: Duration::from_secs(480),
        now: Instant::now(),
        wall: SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000),
    }
}

#[test]
fn a_claimed_environment_that_ended_fails_its_job_and_is_never_made_again() {
    let now = Instant::now();
    let ended = observed(1, 1, true, false, Phase::Ended("was killed by signal 9".into()), 5);
    let steps = plan(&facts(vec![ended.clone()], vec![claim(1, 1, ClaimPhase::Claimed, now)], &[]));
    assert!(
        matches!(&steps[..], [Step::Settle { why, .. }] if why.verdict() == Verdict::Failure && why.to_string().contains("signal 9"))
    );
    // The same without memory, after a restart.
    let steps = plan(&facts(vec![ended], vec![], &[]));
    assert!(matches!(&steps[..], [Step::Settle { why: Ending::Lost(_), .. }]));
    let steps = plan(&facts(vec![], vec![claim(1, 1, ClaimPhase::Claimed, now)], &[]));
    assert!(matches!(&steps[..], [Step::Settle { why: Ending::Vanished, .. }]));
}

#[test]
fn an_environment_that_ended_before_start_is_made_again() {
    let ended = observed(1, 1, false, false, Phase::Ended("exited with 1".into()), 5);
    let steps = plan(&facts(vec![ended.clone()], vec![claim(1, 1, offered(), Instant::now())], &[1]));
    assert!(matches!(&steps[..], [Step::MakeAgain { why: NoStart::Ended(_), .. }]));
    assert!(matches!(&plan(&facts(vec![ended], vec![], &[1]))[..], [Step::MakeAgain { .. }]));
}

#[test]
fn an_environment_that_does_not_start_in_time_is_made_again() {
    let mut waiting =
        facts(vec![observed(1, 1, false, false, Phase::Running, 5)], vec![claim(1, 1, offered(), Instant::now())], &[1]);
    assert_eq!(plan(&waiting), []);
    waiting.now += CLAIM_LIMIT + Duration::from_secs(1);
    assert!(matches!(&plan(&waiting)[..], [Step::MakeAgain { why: NoStart::ClaimTimeout, .. }]));
}

#[test]
fn after_a_restart_unclaimed_environments_are_adopted_the_oldest_first_and_strays_only_when_old() {
    let (old, young) = (observed(1, 1, false, false, Phase::Running, 9), observed(1, 2, false, false, Phase::Running, 5));
    assert_eq!(plan(&facts(vec![young, old.clone()], vec![], &[1])), [Step::Adopt(old.name)]);
    assert_eq!(plan(&facts(vec![observed(1, 1, false, false, Phase::Running, 59)], vec![], &[])), []);
    let stray = observed(1, 1, false, false, Phase::Running, 61);
    assert!(matches!(&plan(&facts(vec![stray.clone()], vec![], &[]))[..], [Step::Remove { why: Removal::Stray, .. }]));
    // A queue that does not answer is not an empty queue.
    assert_eq!(plan(&Facts { queued: None, ..facts(vec![stray], vec![], &[]) }), []);
}

#[test]
fn a_claim_found_queued_is_taken_out_of_the_queue() {
    let steps = plan(&facts(vec![observed(1, 1, true, false, Phase::Running, 5)], vec![], &[1]));
    assert_eq!(steps, [Step::CompleteDelivery(TaskId(1).assignment()), Step::Adopt(name(1, 1))]);
}

#[test]
fn a_stop_gives_grace_and_then_settles_and_the_deadline_is_a_stop() {
    let running = observed(1, 1, true, false, Phase::Running, 5);
    let mut stopped = claim(1, 1, ClaimPhase::Claimed, Instant::now());
    stopped.stop = Some((Stop::Cancelled, Instant::now()));
    let mut facts = facts(vec![running.clone()], vec![stopped.clone()], &[]);
    assert_eq!(plan(&facts), []);
    facts.now += STOP_GRACE + Duration::from_secs(1);
    assert!(matches!(&plan(&facts)[..], [Step::Settle { why, .. }] if why.verdict() == Verdict::Cancelled));
    stopped.stop = None;
    facts.claims = vec![stopped];
    facts.wall += Duration::from_secs(14_400);
    assert_eq!(plan(&facts), [Step::Stop(TaskId(1).assignment())]);
}

#[test]
fn an_environment_whose_task_gitea_does_not_have_goes_without_a_report() {
    let now = Instant::now();
    let mut gone = claim(7, 1, ClaimPhase::Claimed, now);
    gone.stop = Some((Stop::Gone, now));
    let environment = observed(7, 1, true, false, Phase::Running, 5);
    for environments in [vec![environment], vec![]] {
        let steps = plan(&facts(environments, vec![gone.clone()], &[]));
        assert!(matches!(&steps[..], [Step::Remove { why: Removal::Stray, .. }]), "{steps:?}");
    }
}

fn phases() -> impl Strategy<Value = Phase> {
    prop_oneof![Just(Phase::Pending), Just(Phase::Running), Just(Phase::Ended("x".into()))]
}

proptest! {
    /// Whatever the facts: one step for an environment, a terminal one is only removed, a claimed one is never made again.
    #[test]
    fn no_facts_lead_to_two_steps_or_to_a_second_run(
        environments in prop::collection::vec((1i64..4, 0u8..3, any::<bool>(), any::<bool>(), phases(), 0u64..200), 0..8),
        claims in prop::collection::vec((1i64..4, 0u8..3, 0u8..3, any::<bool>(), any::<bool>()), 0..4),
        queued in prop::collection::vec(1i64..4, 0..3),
        later in 0u64..1000,
    ) {
        let mut seen = HashSet::new();
        let environments: Vec<_> = environments.into_iter()
            .filter(|e| seen.insert((e.0, e.1)))
            .map(|(t, n, c, f, p, age)| observed(t, n, c, f, p, age)).collect();
        let mut seen = HashSet::new();
        let now = Instant::now();
        let claims: Vec<_> = claims.into_iter().filter(|c| seen.insert(c.0)).map(|(t, n, phase, stop, superseded)| {
            let phase = [offered(), ClaimPhase::Claimed, ClaimPhase::Terminal][usize::from(phase)].clone();
            let mut claim = claim(t, n, phase, now);
            claim.stop = stop.then_some((Stop::Cancelled, now));
            claim.superseded = superseded;
            claim
        }).collect();
        let mut facts = facts(environments, claims, &queued);
        facts.now += Duration::from_secs(later);
        let steps = plan(&facts);
        let mut named = HashSet::new();
        for step in &steps {
            let (Step::Adopt(name) | Step::Remove { name, .. } | Step::MakeAgain { name, .. } | Step::Settle { name, .. }) = step else { continue };
            prop_assert!(named.insert(name.clone()), "two steps for {name}");
            let environment = facts.environments.iter().find(|e| &e.name == name);
            let claim = facts.claims.iter().find(|c| &c.name == name);
            if environment.is_some_and(|e| e.terminal) {
                prop_assert!(matches!(step, Step::Remove { .. }), "{step:?}");
            }
            if let Step::MakeAgain { .. } = step {
                prop_assert!(!claim.is_some_and(|c| matches!(c.phase, ClaimPhase::Claimed)));
                prop_assert!(claim.is_some() || !environment.is_some_and(|e| e.claimed));
            }
        }
        // Adopting gives each assignment at most one served environment.
        let adopted: Vec<_> = steps.iter().filter_map(|s| match s { Step::Adopt(n) => n.parts(), _ => None }).map(|p| p.1).collect();
        let distinct: HashSet<_> = adopted.iter().collect();
        prop_assert_eq!(distinct.len(), adopted.len());
    }
}

#[test]
fn a_job_is_given_up_after_three_environments_or_fifteen_minutes_or_at_once_when_no_other_would_do() {
    let (ended, minute) = (NoStart::Ended("exit code 1".into()), Duration::from_secs(60));
    assert_eq!(given_up(&ended, 2, minute * 14), None);
    assert!(given_up(&ended, 3, minute).unwrap().starts_with("3 environments"));
    assert!(given_up(&NoStart::ClaimTimeout, 2, minute * 15).unwrap().contains("15 minutes"));
    assert!(given_up(&NoStart::Unfit("no runner".into()), 1, minute).is_some());
}

#[test]
fn a_running_environment_that_says_nothing_is_given_up_and_one_that_speaks_is_not() {
    let running = observed(1, 1, true, false, Phase::Running, 5_000);
    let mut facts = facts(vec![running], vec![claim(1, 1, ClaimPhase::Claimed, Instant::now())], &[]);
    facts.now = facts.claims[0].heard_at + facts.silence_limit;
    assert_eq!(plan(&facts), []);
    facts.now += Duration::from_secs(1);
    assert!(matches!(&plan(&facts)[..], [Step::Settle { why: Ending::Silent(_), .. }]));
    facts.claims[0].heard_at = facts.now;
    assert_eq!(plan(&facts), []);
}
