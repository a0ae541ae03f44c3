//! How often one environment may call: a token bucket each, so that a wild job slows only itself. And how often refusals are logged.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::ids::AssignmentId;

/// A bridge at full speed sends some 20 requests a second.
const PER_SECOND: f64 = 100.0;
const BURST: f64 = 200.0;
/// Buckets older than this are full again and need not be kept.
const KEEP_SECONDS: f64 = 60.0;

#[derive(Default)]
pub(super) struct Rates(Mutex<HashMap<AssignmentId, (f64, Instant)>>);

impl Rates {
    pub(super) fn allow(&self, assignment: AssignmentId) -> bool {
        self.allow_at(assignment, Instant::now())
    }

    fn allow_at(&self, assignment: AssignmentId, now: Instant) -> bool {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() > 1000 {
            buckets.retain(|_, (_, last)| now.saturating_duration_since(*last).as_secs_f64() < KEEP_SECONDS);
        }
        let (tokens, last) = buckets.entry(assignment).or_insert((BURST, now));
        *tokens = (*tokens + now.saturating_duration_since(*last).as_secs_f64() * PER_SECOND).min(BURST);
        *last = now;
        let allowed = *tokens >= 1.0;
        if allowed {
            *tokens -= 1.0;
        }
        allowed
    }
}

/// Lets one line a second into the log, so that a wild job cannot fill it.
#[derive(Default)]
pub(super) struct OnceASecond(Mutex<Option<Instant>>);

impl OnceASecond {
    pub(super) fn may_be_said(&self, now: Instant) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let may = last.is_none_or(|last| now.saturating_duration_since(last) >= Duration::from_secs(1));
        if may {
            *last = Some(now);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::TaskId;

    #[test]
    fn a_burst_passes_and_a_flood_does_not_and_others_are_not_slowed() {
        let (rates, now) = (Rates::default(), Instant::now());
        let (wild, calm) = (TaskId(1).assignment(), TaskId(2).assignment());
        let passed = (0..1000).filter(|_| rates.allow_at(wild, now)).count();
        assert_eq!(passed, 200);
        assert!(rates.allow_at(calm, now));
        assert!(rates.allow_at(wild, now + Duration::from_secs(1)));
    }

    #[test]
    fn one_refusal_a_second_is_said() {
        let (refusals, now) = (OnceASecond::default(), Instant::now());
        let said = |after| refusals.may_be_said(now + Duration::from_millis(after));
        assert_eq!([0, 1, 999, 1000, 1500, 2001].map(said), [true, false, false, true, false, true]);
    }
}
