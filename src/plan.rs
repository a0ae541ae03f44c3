//! What to do about the environments of one backend: from what is intended and what is observed to a list of steps.
//!
//! Decides, never acts and never awaits. The same facts give the same steps; a plan carried out leaves nothing to do. Who carries
//! it out is `reconcile`.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant, SystemTime},
};

use crate::{
    claims::{Claim, ClaimPhase, Stop, Verdict},
    environment::{Observed, Phase},
    ids::{AssignmentId, EnvironmentName},
};

/// How long an environment may take from offer to `start`.
pub const CLAIM_LIMIT: Duration = Duration::from_secs(4 * 60);
/// Nothing younger is taken for a stray: the one who made it may not have told anybody yet.
pub const CREATE_LIMIT: Duration = Duration::from_secs(60);
/// Environments that may end without `start` before the job fails (rule R10), and how long they may take together.
const MAX_ATTEMPTS: u32 = 3;
const MAX_TRYING: Duration = Duration::from_secs(15 * 60);
/// How long a stopped environment may take to report its end. Longer than the bridge gives the runner.
pub const STOP_GRACE: Duration = Duration::from_secs(60);
/// The same where the inner runner (≥ 2.0) runs clean-up steps after a cancel.
pub const STOP_GRACE_CLEANUP: Duration = Duration::from_secs(6 * 60);

/// All that a plan looks at.
#[derive(Debug, Clone)]
pub struct Facts {
    pub environments: Vec<Observed>,
    pub claims: Vec<Claim>,
    /// Assignments of this backend that the queue holds; `None`: unknown just now.
    pub queued: Option<HashSet<AssignmentId>>,
    /// Assignments on which somebody acts right now.
    pub busy: HashSet<AssignmentId>,
    pub stop_grace: Duration,
    /// A running environment that asks nothing for so long is given up.
    pub silence_limit: Duration,
    pub now: Instant,
    pub wall: SystemTime,
}

/// Why an environment is removed; the label of `orphans_collected_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Removal {
    /// Its job is over and settled.
    Terminal,
    /// Nobody waits for it.
    Stray,
    /// Another environment serves the same assignment.
    Duplicate,
    /// Gitea gave its task id anew.
    Superseded,
}

/// Why an environment is made again (or, after too many, its job failed).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoStart {
    /// It ended before `start`; how.
    Ended(String),
    /// The same, and the next one would end no better; why.
    Unfit(String),
    /// No `start` within [`CLAIM_LIMIT`].
    ClaimTimeout,
    /// It vanished.
    Vanished,
}

/// For the page that shows what a pass did.
impl std::fmt::Display for NoStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoStart::Ended(how) => write!(f, "ended before its start: {how}"),
            NoStart::Unfit(why) => write!(f, "ended before its start, and another would, too: {why}"),
            NoStart::ClaimTimeout => f.write_str("did not start in time"),
            NoStart::Vanished => f.write_str("vanished"),
        }
    }
}

/// Why the controller ends a job in its environment's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The environment ended without a result; how.
    Lost(String),
    /// It is not there any more.
    Vanished,
    /// It runs, but has asked nothing for longer than the limit.
    Silent(Duration),
    /// It was asked to stop, and ended (how) or did not in time.
    Stopped { stop: Stop, how: Option<String> },
}

impl Ending {
    pub fn verdict(&self) -> Verdict {
        match self {
            Ending::Lost(_) | Ending::Vanished | Ending::Silent(_) => Verdict::Failure,
            Ending::Stopped { stop, .. } => verdict_of(*stop),
        }
    }

    /// The label of `infra_failures_total`, and the word in the job's log.
    pub fn label(&self) -> &'static str {
        match self {
            Ending::Lost(_) => "lost",
            Ending::Vanished => "vanished",
            Ending::Silent(_) => "silent",
            Ending::Stopped { stop: Stop::Cancelled, .. } => "cancelled",
            Ending::Stopped { stop: Stop::Deadline, .. } => "deadline",
            Ending::Stopped { stop: Stop::Gone, .. } => "gone",
        }
    }
}

/// For the job's log.
impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ending::Lost(how) => write!(f, "The environment ended without a result: {how}.")?,
            Ending::Vanished => f.write_str("The environment vanished while the job ran.")?,
            Ending::Silent(limit) => write!(f, "The environment was not heard of for {} s, and was removed.", limit.as_secs())?,
            Ending::Stopped { stop, how: Some(how) } => write!(f, "{} ({how}).", reason_of(*stop))?,
            Ending::Stopped { stop, how: None } => write!(f, "{}.", reason_of(*stop))?,
        }
        write!(f, " [{}]", self.label())
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Found without a claim (a restart): count it as a slot and serve it.
    Adopt(EnvironmentName),
    /// Claimed, but its delivery was not completed before a crash.
    CompleteDelivery(AssignmentId),
    Remove {
        name: EnvironmentName,
        assignment: AssignmentId,
        why: Removal,
    },
    /// Revoke, delete, and back to the queue.
    MakeAgain {
        name: EnvironmentName,
        assignment: AssignmentId,
        why: NoStart,
    },
    /// Revoke, halt, end the job at Gitea with this verdict, then delete.
    Settle {
        name: EnvironmentName,
        assignment: AssignmentId,
        why: Ending,
    },
    /// Ask the job to stop.
    Stop(AssignmentId),
}

/// For the page that shows what a pass did.
impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Step::Adopt(name) => write!(f, "took over {name}"),
            Step::CompleteDelivery(assignment) => write!(f, "took {assignment} out of the queue"),
            Step::Remove { name, why, .. } => write!(f, "removes {name} ({})", why.label()),
            Step::MakeAgain { name, why, .. } => write!(f, "replaces {name} ({why})"),
            Step::Settle { name, why, .. } => write!(f, "settles the job of {name} ({})", why.label()),
            Step::Stop(assignment) => write!(f, "asks {assignment} to stop (deadline)"),
        }
    }
}

impl Removal {
    pub fn label(self) -> &'static str {
        match self {
            Removal::Terminal => "terminal",
            Removal::Stray => "stray",
            Removal::Duplicate => "duplicate",
            Removal::Superseded => "superseded",
        }
    }
}

/// The steps for one backend, in no particular order; at most one for each environment and one for each delivery.
pub fn plan(facts: &Facts) -> Vec<Step> {
    let claims: HashMap<_, _> = facts.claims.iter().map(|c| (c.assignment, c)).collect();
    let mut steps = Vec::new();
    for environment in &facts.environments {
        let assignment = environment.assignment;
        if facts.busy.contains(&assignment) {
            continue;
        }
        if environment.claimed && facts.queued.as_ref().is_some_and(|q| q.contains(&assignment)) {
            // Unless Gitea gave the same id anew: then what is queued is another job (rule R4).
            if !claims.get(&assignment).is_some_and(|c| c.superseded) {
                steps.push(Step::CompleteDelivery(assignment));
            }
        }
        let step = match claims.get(&assignment) {
            _ if environment.terminal => Some(remove(environment, Removal::Terminal)),
            Some(claim) if claim.superseded => Some(remove(environment, Removal::Superseded)),
            Some(claim) if claim.name != environment.name => Some(remove(environment, Removal::Duplicate)),
            Some(claim) => served(facts, claim, environment),
            None => unserved(facts, environment),
        };
        steps.extend(step);
    }
    let seen: HashSet<_> = facts.environments.iter().map(|e| &e.name).collect();
    let vanished = facts.claims.iter().filter(|c| !seen.contains(&c.name) && !facts.busy.contains(&c.assignment));
    steps.extend(vanished.map(vanished_step));
    steps
}

/// Whether the job fails now that another of its environments ended without `start`, and why; `None`: one more is made.
pub fn given_up(why: &NoStart, ended: u32, tried_for: Duration) -> Option<String> {
    match why {
        NoStart::Unfit(_) => Some("no environment can take this job".into()),
        _ if ended >= MAX_ATTEMPTS => Some(format!("{ended} environments ended before they could take this job")),
        _ if tried_for >= MAX_TRYING => {
            Some(format!("no environment took this job within {} minutes", MAX_TRYING.as_secs() / 60))
        }
        _ => None,
    }
}

fn remove(environment: &Observed, why: Removal) -> Step {
    Step::Remove { name: environment.name.clone(), assignment: environment.assignment, why }
}

/// An environment that a claim names.
fn served(facts: &Facts, claim: &Claim, environment: &Observed) -> Option<Step> {
    let (name, assignment) = (claim.name.clone(), claim.assignment);
    let settle = |why| Some(Step::Settle { name: name.clone(), assignment, why });
    let ended = environment.phase.ended().map(str::to_owned);
    match (&claim.phase, &claim.stop) {
        (_, Some((Stop::Gone, _))) => Some(remove(environment, Removal::Stray)),
        // Gitea has it, the marker is missing yet: settling again is a no-op at Gitea and sets it.
        (ClaimPhase::Terminal, _) => Some(remove(environment, Removal::Terminal)),
        (ClaimPhase::Offered { .. }, Some((stop, _))) => settle(Ending::Stopped { stop: *stop, how: None }),
        (ClaimPhase::Offered { .. }, None) => {
            let why = match no_start(&environment.phase) {
                Some(why) => why,
                None if facts.now.saturating_duration_since(claim.offered_at) > CLAIM_LIMIT => NoStart::ClaimTimeout,
                None => return None,
            };
            Some(Step::MakeAgain { name, assignment, why })
        }
        (ClaimPhase::Claimed, Some((stop, since))) => {
            let over = facts.now.saturating_duration_since(*since) > facts.stop_grace;
            let late = || over.then(|| "it did not end in time".to_owned());
            ended.or_else(late).and_then(|how| settle(Ending::Stopped { stop: *stop, how: Some(how) }))
        }
        (ClaimPhase::Claimed, None) => match ended {
            Some(how) => settle(Ending::Lost(how)),
            None if environment.deadline_at <= facts.wall => Some(Step::Stop(assignment)),
            None if facts.now.saturating_duration_since(claim.heard_at) > facts.silence_limit => {
                settle(Ending::Silent(facts.silence_limit))
            }
            None => None,
        },
    }
}

fn no_start(phase: &Phase) -> Option<NoStart> {
    match phase {
        Phase::Pending | Phase::Running => None,
        Phase::Ended(how) => Some(NoStart::Ended(how.clone())),
        Phase::Unfit(why) => Some(NoStart::Unfit(why.clone())),
    }
}

/// An environment that no claim names: found after a restart, or nobody's.
fn unserved(facts: &Facts, environment: &Observed) -> Option<Step> {
    let (name, assignment) = (environment.name.clone(), environment.assignment);
    if environment.claimed {
        return match environment.phase.ended() {
            Some(how) => Some(Step::Settle { name, assignment, why: Ending::Lost(how.to_owned()) }),
            None => oldest(facts, environment).then_some(Step::Adopt(name)),
        };
    }
    let queued = facts.queued.as_ref()?.contains(&assignment);
    let age = facts.wall.duration_since(environment.created_at).unwrap_or_default();
    match no_start(&environment.phase) {
        Some(why) if queued => Some(Step::MakeAgain { name, assignment, why }),
        None if queued => oldest(facts, environment).then_some(Step::Adopt(name)),
        _ if age > CREATE_LIMIT => Some(remove(environment, Removal::Stray)),
        _ => None,
    }
}

/// Of several unclaimed environments of one assignment the oldest is served (rule R6).
fn oldest(facts: &Facts, environment: &Observed) -> bool {
    let rivals = facts.environments.iter().filter(|e| e.assignment == environment.assignment && !e.terminal);
    let first = rivals.min_by_key(|e| (!e.claimed, e.created_at, e.name.clone()));
    first.is_some_and(|first| first.name == environment.name)
}

fn vanished_step(claim: &Claim) -> Step {
    let (name, assignment) = (claim.name.clone(), claim.assignment);
    match (&claim.phase, &claim.stop) {
        _ if claim.superseded => Step::Remove { name, assignment, why: Removal::Superseded },
        (ClaimPhase::Terminal, _) => Step::Remove { name, assignment, why: Removal::Terminal },
        (_, Some((Stop::Gone, _))) => Step::Remove { name, assignment, why: Removal::Stray },
        (_, Some((stop, _))) => Step::Settle { name, assignment, why: Ending::Stopped { stop: *stop, how: None } },
        (ClaimPhase::Offered { .. }, None) => Step::MakeAgain { name, assignment, why: NoStart::Vanished },
        (ClaimPhase::Claimed, None) => Step::Settle { name, assignment, why: Ending::Vanished },
    }
}

pub fn verdict_of(stop: Stop) -> Verdict {
    match stop {
        Stop::Cancelled | Stop::Gone => Verdict::Cancelled,
        Stop::Deadline => Verdict::Failure,
    }
}

fn reason_of(stop: Stop) -> &'static str {
    match stop {
        Stop::Cancelled => "The job was cancelled",
        Stop::Deadline => "The environment reached its time limit (deadline)",
        Stop::Gone => "Gitea does not have the job any more",
    }
}

#[cfg(test)]
mod tests;
