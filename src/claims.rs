//! Which environment serves which assignment right now, and who may speak for it (rules R5–R8).
//!
//! In memory only: after a restart it is rebuilt from the backends' metadata. It remembers and answers; what to do about what it
//! holds is `plan`'s, and it never asks a neighbour.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime},
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::capability::CapabilityKey;
use crate::{
    ids::{AssignmentId, BackendKind, EnvironmentName, Nonce},
    proto::runner::StepState,
    secret::SecretBytes,
};

mod capability;

/// Connections that one environment may have at once. Its bridge uses one or two.
const MAX_CONNECTIONS: usize = 4;

/// Why a job shall stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Gitea says so: its user cancelled, or Gitea gave the job up.
    Cancelled,
    /// The environment's time is over.
    Deadline,
    /// Gitea does not have the task any more, or not for us. There is nothing to report: what comes under this id later is another
    /// job (rule R4).
    Gone,
}

/// How a task ends when the controller ends it. SUCCESS is not among them: only an environment can earn that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Failure,
    Cancelled,
}

#[derive(Debug, Clone)]
pub enum ClaimPhase {
    /// The environment may fetch the task, and `start`.
    Offered { raw: SecretBytes },
    /// `start` was answered: the job is this environment's for good.
    Claimed,
    /// Gitea accepted the terminal state; nothing is served any more.
    Terminal,
}

/// The one environment that is served for an assignment.
#[derive(Debug, Clone)]
pub struct Claim {
    pub assignment: AssignmentId,
    pub backend: BackendKind,
    pub name: EnvironmentName,
    pub nonce: Nonce,
    pub spiffe_id: String,
    pub steps: u32,
    pub phase: ClaimPhase,
    pub offered_at: Instant,
    /// When the environment last asked anything, at the earliest when it was offered or adopted. A bridge asks every two seconds.
    pub heard_at: Instant,
    /// When Gitea gave us the task, where known; else when the environment was made.
    pub fetched_at: SystemTime,
    /// Of the task's token, where known: tells a repeated delivery from a restored Gitea (rule R4).
    pub token_hash: Option<[u8; 32]>,
    pub stop: Option<(Stop, Instant)>,
    /// Gitea gave the same task id anew (it was restored from a backup): this environment must go, unreported (rule R4).
    pub superseded: bool,
    /// The last states that the environment reported, for a terminal report in its place.
    pub known_steps: Vec<StepState>,
}

/// Why a request is refused; the label of `facade_denied_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// After a start, before the environments were counted: ask again.
    #[error("not ready: the controller is still counting its environments")]
    NotYet,
    #[error("denied: no such assignment is served")]
    Assignment,
    #[error("denied: the certificate is another job's")]
    Identity,
    #[error("denied: not the served environment")]
    Capability,
    #[error("denied: the environment was revoked")]
    Revoked,
    #[error("denied: the job is over")]
    Terminal,
    /// Others of its connections must end first.
    #[error("too many connections of one environment")]
    Connections,
}

impl Denied {
    pub fn label(self) -> &'static str {
        match self {
            Denied::NotYet => "not_yet",
            Denied::Assignment => "assignment",
            Denied::Identity => "identity",
            Denied::Capability => "capability",
            Denied::Revoked => "revoked",
            Denied::Terminal => "terminal",
            Denied::Connections => "connections",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offered {
    Now,
    /// Another environment is served for this assignment already; this one must go.
    AnotherServes,
}

/// How often, and since when, an assignment was tried.
#[derive(Debug, Clone, Copy)]
pub struct Attempts {
    pub ended: u32,
    /// When the first environment was offered.
    pub since: Instant,
}

struct Entry {
    claim: Claim,
    connections: HashMap<u64, CancellationToken>,
}

#[derive(Default)]
struct State {
    /// All environments that existed at the start are in.
    counted: bool,
    entries: HashMap<AssignmentId, Entry>,
    /// Assignments on which somebody acts right now; nobody else may.
    busy: HashSet<AssignmentId>,
    /// Environments that ended without `start`, by assignment (rule R10).
    attempts: HashMap<AssignmentId, Attempts>,
    /// Creates that failed, by assignment. Not attempts: there was no environment.
    create_failures: HashMap<AssignmentId, u32>,
    /// Assignments to stop that have no environment yet.
    stops: HashSet<AssignmentId>,
    /// Who may write to the job's log: one at a time.
    reports: HashMap<AssignmentId, Arc<tokio::sync::Mutex<()>>>,
}

/// A shared handle.
#[derive(Clone)]
pub struct Claims {
    state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
    key: Arc<CapabilityKey>,
}

/// The right to act on an assignment, alone, until dropped.
pub struct Busy {
    assignment: AssignmentId,
    claims: Claims,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.claims.lock().busy.remove(&self.assignment);
        self.claims.touch();
    }
}

impl Claims {
    pub fn new(key: CapabilityKey) -> Self {
        Self { state: Arc::default(), changed: watch::Sender::new(0), key: Arc::new(key) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while holding it; if something did, the data is still whole, for every change is one statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on an unknown assignment is refused for good.
    pub fn counted(&self) {
        self.lock().counted = true;
    }

    pub fn key(&self) -> &CapabilityKey {
        &self.key
    }

    /// Changes whenever something here did; a hint to look.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn touch(&self) {
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// Nobody else acts on the assignment while the answer lives; `None`: somebody does.
    pub fn begin(&self, assignment: AssignmentId) -> Option<Busy> {
        self.lock().busy.insert(assignment).then(|| Busy { assignment, claims: self.clone() })
    }

    /// All assignments on which somebody acts right now.
    pub fn busy(&self) -> Vec<AssignmentId> {
        self.lock().busy.iter().copied().collect()
    }

    pub fn is_busy(&self, assignment: AssignmentId) -> bool {
        self.lock().busy.contains(&assignment)
    }

    /// The lock under which rows are written into the job's log while the controller is the reporter.
    pub fn report_lock(&self, assignment: AssignmentId) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(self.lock().reports.entry(assignment).or_default())
    }

    /// From now on this environment is served. Of several, the first.
    pub fn offer(&self, mut claim: Claim) -> Offered {
        let mut state = self.lock();
        if state.stops.remove(&claim.assignment) {
            claim.stop = Some((Stop::Cancelled, Instant::now()));
        }
        match state.entries.get(&claim.assignment) {
            Some(entry) if entry.claim.nonce != claim.nonce => Offered::AnotherServes,
            Some(_) => Offered::Now,
            None => {
                state.entries.insert(claim.assignment, Entry { claim, connections: HashMap::new() });
                drop(state);
                self.touch();
                Offered::Now
            }
        }
    }

    pub fn get(&self, assignment: AssignmentId) -> Option<Claim> {
        self.lock().entries.get(&assignment).map(|e| e.claim.clone())
    }

    pub fn of_backend(&self, backend: BackendKind) -> Vec<Claim> {
        let state = self.lock();
        state.entries.values().map(|e| &e.claim).filter(|c| c.backend == backend).cloned().collect()
    }

    /// Who asks? Every request of an environment passes here (rule R6).
    pub fn admit(&self, assignment: AssignmentId, spiffe_id: &str, capability: &str) -> Result<Claim, Denied> {
        let unknown = if self.lock().counted { Denied::Assignment } else { Denied::NotYet };
        let claim = self.get(assignment).ok_or(unknown)?;
        if claim.spiffe_id != spiffe_id {
            return Err(Denied::Identity);
        }
        if !self.key.verify(assignment, &claim.nonce, capability) {
            return Err(Denied::Capability);
        }
        if claim.superseded {
            return Err(Denied::Revoked);
        }
        match claim.phase {
            ClaimPhase::Terminal => Err(Denied::Terminal),
            _ => {
                // Not a change that anybody waits for, so nobody is woken.
                if let Some(entry) = self.lock().entries.get_mut(&assignment) {
                    entry.claim.heard_at = Instant::now();
                }
                Ok(claim)
            }
        }
    }

    /// Remembers a connection of the served environment, to close it at the terminal state.
    pub fn connected(&self, assignment: AssignmentId, id: u64, connection: &CancellationToken) -> Result<(), Denied> {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(&assignment) else { return Err(Denied::Assignment) };
        entry.connections.retain(|_, c| !c.is_cancelled());
        if !entry.connections.contains_key(&id) {
            if entry.connections.len() >= MAX_CONNECTIONS {
                return Err(Denied::Connections);
            }
            entry.connections.insert(id, connection.clone());
        }
        Ok(())
    }

    /// `start` was made durable. The task's bytes are forgotten.
    pub fn claimed(&self, assignment: AssignmentId, nonce: &Nonce) {
        self.change(assignment, |claim| {
            if &claim.nonce == nonce && matches!(claim.phase, ClaimPhase::Offered { .. }) {
                claim.phase = ClaimPhase::Claimed;
            }
        });
    }

    /// Gitea accepted the terminal state: nothing is served from here on.
    pub fn terminal(&self, assignment: AssignmentId, nonce: &Nonce) {
        let mut state = self.lock();
        if let Some(entry) = state.entries.get_mut(&assignment).filter(|e| &e.claim.nonce == nonce) {
            entry.claim.phase = ClaimPhase::Terminal;
            entry.connections.drain().for_each(|(_, c)| c.cancel());
        }
        drop(state);
        self.touch();
    }

    /// Stops the job, or keeps in mind to stop it if its environment is only being made. The first reason stays.
    pub fn stop(&self, assignment: AssignmentId, stop: Stop) {
        let mut state = self.lock();
        match state.entries.get_mut(&assignment) {
            Some(entry) => {
                entry.claim.stop.get_or_insert((stop, Instant::now()));
            }
            None => {
                state.stops.insert(assignment);
            }
        }
        drop(state);
        self.touch();
    }

    /// Whether somebody asked to stop an assignment that has no environment yet.
    pub fn stop_pending(&self, assignment: AssignmentId) -> bool {
        self.lock().stops.contains(&assignment)
    }

    /// Gitea gave the task id anew: whatever serves it must go first. `true` if something does.
    pub fn supersede(&self, assignment: AssignmentId) -> bool {
        let mut found = false;
        self.change(assignment, |claim| {
            claim.superseded = true;
            found = true;
        });
        found
    }

    pub fn steps_reported(&self, assignment: AssignmentId, steps: &[StepState]) {
        if let Some(entry) = self.lock().entries.get_mut(&assignment) {
            for step in steps.iter().filter(|s| (0..i64::from(entry.claim.steps)).contains(&s.id)) {
                match entry.claim.known_steps.iter_mut().find(|s| s.id == step.id) {
                    Some(known) => *known = step.clone(),
                    None => entry.claim.known_steps.push(step.clone()),
                }
            }
        }
    }

    /// The environment is refused from now on (revoked); its connections close. Answers what was known.
    pub fn revoke(&self, assignment: AssignmentId) -> Option<Claim> {
        let mut state = self.lock();
        let entry = state.entries.remove(&assignment);
        drop(state);
        self.touch();
        entry.map(|entry| {
            entry.connections.values().for_each(CancellationToken::cancel);
            entry.claim
        })
    }

    /// One more environment, offered at `since`, ended without `start`; answers how many now, and since when.
    pub fn count_attempt(&self, assignment: AssignmentId, since: Instant) -> Attempts {
        let mut state = self.lock();
        let attempts = state.attempts.entry(assignment).or_insert(Attempts { ended: 0, since });
        attempts.ended += 1;
        *attempts
    }

    /// What was counted before a restart (rule R10); never less than what is counted now.
    pub fn restore_attempts(&self, assignment: AssignmentId, attempts: u32) {
        let mut state = self.lock();
        let known = state.attempts.entry(assignment).or_insert(Attempts { ended: 0, since: Instant::now() });
        known.ended = known.ended.max(attempts);
    }

    /// One more create failed; answers how many now.
    pub fn count_create_failure(&self, assignment: AssignmentId) -> u32 {
        let mut state = self.lock();
        let failures = state.create_failures.entry(assignment).or_default();
        *failures += 1;
        *failures
    }

    /// The assignment is over: nothing of it is remembered.
    pub fn forget(&self, assignment: AssignmentId) {
        let mut state = self.lock();
        state.attempts.remove(&assignment);
        state.create_failures.remove(&assignment);
        state.stops.remove(&assignment);
        state.reports.remove(&assignment);
        state.entries.remove(&assignment);
    }

    fn change(&self, assignment: AssignmentId, change: impl FnOnce(&mut Claim)) {
        if let Some(entry) = self.lock().entries.get_mut(&assignment) {
            change(&mut entry.claim);
        }
        self.touch();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::ids::{InstanceId, TaskId};

    fn claim(task: i64, nonce: &Nonce) -> Claim {
        let task = TaskId(task);
        Claim {
            assignment: task.assignment(),
            backend: BackendKind::Pod,
            name: EnvironmentName::new(&InstanceId::of_uuid("u"), task, nonce),
            nonce: nonce.clone(),
            spiffe_id: "spiffe://td/ci/o/r/test".into(),
            steps: 2,
            phase: ClaimPhase::Offered { raw: SecretBytes::new(vec![1]) },
            offered_at: Instant::now(),
            heard_at: Instant::now(),
            fetched_at: SystemTime::now(),
            token_hash: None,
            stop: None,
            superseded: false,
            known_steps: Vec::new(),
        }
    }

    #[test]
    fn two_jobs_with_one_spiffe_id_cannot_reach_each_other() {
        let claims = Claims::new(CapabilityKey::random());
        let (a, b) = (Nonce::random(), Nonce::random());
        assert_eq!(claims.admit(TaskId(1).assignment(), "", "").unwrap_err(), Denied::NotYet);
        claims.counted();
        claims.offer(claim(1, &a));
        claims.offer(claim(2, &b));
        let (one, two) = (TaskId(1).assignment(), TaskId(2).assignment());
        let (of_a, id) = (claims.key().capability(one, &a), "spiffe://td/ci/o/r/test");
        assert!(claims.admit(one, id, of_a.expose()).is_ok());
        assert_eq!(claims.admit(two, id, of_a.expose()).unwrap_err(), Denied::Capability);
        assert_eq!(claims.admit(one, "spiffe://td/ci/o/r/x", of_a.expose()).unwrap_err(), Denied::Identity);
        // Another environment of the same assignment is not the served one.
        let other = claims.key().capability(one, &Nonce::random());
        assert_eq!(claims.admit(one, id, other.expose()).unwrap_err(), Denied::Capability);
        assert_eq!(claims.admit(one, id, "").unwrap_err(), Denied::Capability);
        claims.terminal(one, &a);
        assert_eq!(claims.admit(one, id, of_a.expose()).unwrap_err(), Denied::Terminal);
        claims.revoke(two);
        assert_eq!(claims.admit(two, id, claims.key().capability(two, &b).expose()).unwrap_err(), Denied::Assignment);
    }

    #[test]
    fn the_first_environment_is_served_and_a_stop_before_it_is_not_forgotten() {
        let claims = Claims::new(CapabilityKey::random());
        let (a, b) = (Nonce::random(), Nonce::random());
        let one = TaskId(1).assignment();
        claims.stop(one, Stop::Cancelled);
        assert!(claims.stop_pending(one));
        assert_eq!(claims.offer(claim(1, &a)), Offered::Now);
        assert_eq!(claims.offer(claim(1, &b)), Offered::AnotherServes);
        assert_eq!(claims.get(one).unwrap().stop.unwrap().0, Stop::Cancelled);
        let tokens: Vec<_> = (0..5).map(|_| CancellationToken::new()).collect();
        for (id, token) in tokens[..4].iter().enumerate() {
            claims.connected(one, id as u64, token).unwrap();
            claims.connected(one, id as u64, token).unwrap();
        }
        assert_eq!(claims.connected(one, 4, &tokens[4]).unwrap_err(), Denied::Connections);
        // One that has ended makes room.
        tokens[0].cancel();
        claims.connected(one, 4, &tokens[4]).unwrap();
        claims.terminal(one, &a);
        assert!(tokens.iter().all(CancellationToken::is_cancelled));
    }

    #[test]
    fn only_one_acts_on_an_assignment() {
        let claims = Claims::new(CapabilityKey::random());
        let one = TaskId(1).assignment();
        let busy = claims.begin(one);
        assert!(busy.is_some() && claims.begin(one).is_none());
        drop(busy);
        assert!(claims.begin(one).is_some());
    }
}
