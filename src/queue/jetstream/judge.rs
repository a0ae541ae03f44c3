//! How stream and consumers must be, as one table: the controller judges by it at its start, and `setup` makes them so.
//!
//! Pure: configurations come as the server's JSON, so that what this program does not know is kept when one is changed. Each rule says what
//! goes wrong without it.

use serde_json::{Map, Value, json};

use super::names::Names;
use crate::ids::Lane;

const SECOND: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;

/// One field of a configuration.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    pub(super) key: &'static str,
    /// What `setup` gives a new one.
    pub(super) wanted: Value,
    pub(super) bound: Bound,
    /// Whether the server lets it be changed in place.
    pub(super) change: Change,
    pub(super) why: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bound {
    /// Anything else loses, doubles or delays jobs: refused.
    Exactly,
    /// Less than this works for now: a warning. Unlimited (-1) is more than anything.
    AtLeast(u64),
    /// Only for a new one.
    Free,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    InPlace,
    Never,
}

/// A field that is not as it must be.
#[derive(Debug, Clone)]
pub(super) struct Finding {
    pub(super) rule: Rule,
    pub(super) found: Value,
}

impl Finding {
    pub(super) fn is_refusal(&self) -> bool {
        self.rule.bound == Bound::Exactly
    }

    /// `max_deliver is 1000, not -1 (a job would be given up after so many deliveries)`.
    pub(super) fn text(&self) -> String {
        let Rule { key, wanted, bound, why, .. } = &self.rule;
        match bound {
            Bound::AtLeast(least) => format!("{key} is {}, less than {least} ({why})", self.found),
            Bound::Exactly | Bound::Free => format!("{key} is {}, not {wanted} ({why})", self.found),
        }
    }
}

fn rule(key: &'static str, wanted: Value, bound: Bound, change: Change, why: &'static str) -> Rule {
    Rule { key, wanted, bound, change, why }
}

pub(super) fn stream_rules(names: &Names) -> Vec<Rule> {
    use Bound::{AtLeast, Exactly, Free};
    use Change::{InPlace, Never};
    vec![
        rule(
            "retention",
            json!("workqueue"),
            Exactly,
            Never,
            "what is acknowledged would not leave, and jobs would be delivered again",
        ),
        rule("storage", json!("file"), Exactly, Never, "a restart of the server would lose all jobs that wait"),
        rule("subjects", json!([names.all()]), Exactly, InPlace, "assignments would not be stored"),
        rule("discard", json!("new"), Exactly, InPlace, "a full stream would drop the oldest job"),
        rule("discard_new_per_subject", json!(true), Exactly, InPlace, "a second assignment would push a waiting one out"),
        rule("max_msgs_per_subject", json!(1), Exactly, InPlace, "a task could be stored twice"),
        rule("max_age", json!(0), Exactly, InPlace, "jobs that wait longer would be dropped"),
        rule("allow_direct", json!(true), Exactly, InPlace, "an assignment could not be looked at"),
        rule("deny_purge", json!(false), Exactly, Never, "a cancelled job could not be taken out"),
        rule("sealed", json!(false), Exactly, Never, "nothing could be stored"),
        rule("no_ack", json!(false), Exactly, InPlace, "nobody would know whether a job is stored"),
        rule("max_bytes", json!(4096 * MIB), AtLeast(1024 * MIB), InPlace, "it may be full before the disk is"),
        rule("max_msgs", json!(-1), AtLeast(10_000), InPlace, "it may be full before the disk is"),
        rule("max_msg_size", json!(8 * MIB), AtLeast(8 * MIB), InPlace, "a task with many secrets or a large matrix may not fit"),
        rule(
            "duplicate_window",
            json!(600 * SECOND),
            AtLeast(600 * SECOND),
            InPlace,
            "a publish that is repeated late would be stored twice",
        ),
        rule("num_replicas", json!(1), Free, InPlace, ""),
    ]
}

pub(super) fn dead_rules(names: &Names) -> Vec<Rule> {
    use Bound::{Exactly, Free};
    use Change::{InPlace, Never};
    vec![
        rule("retention", json!("limits"), Exactly, Never, "nobody consumes dead letters"),
        rule("subjects", json!([names.all_dead()]), Exactly, InPlace, "dead letters would not be stored"),
        rule("allow_direct", json!(true), Exactly, InPlace, "dead letters could not be looked at"),
        rule("storage", json!("file"), Free, Never, ""),
        rule("max_age", json!(30 * 24 * 3600 * SECOND), Free, InPlace, ""),
        rule("max_bytes", json!(1024 * MIB), Free, InPlace, ""),
        rule("num_replicas", json!(1), Free, InPlace, ""),
    ]
}

pub(super) fn consumer_rules(names: &Names, lane: Lane) -> Vec<Rule> {
    use Bound::{AtLeast, Exactly};
    use Change::{InPlace, Never};
    vec![
        rule("durable_name", json!(lane.as_str()), Exactly, Never, "the server would forget it"),
        rule("deliver_subject", json!(""), Exactly, Never, "jobs would be pushed although no slot is free"),
        rule("deliver_policy", json!("all"), Exactly, Never, "jobs stored before it was made would never be delivered"),
        rule("ack_policy", json!("explicit"), Exactly, Never, "a job would count as done when it is delivered"),
        rule("filter_subject", json!(names.of_lane(lane)), Exactly, InPlace, "it would take other assignments than its lane's"),
        rule(
            "max_deliver",
            json!(-1),
            Exactly,
            InPlace,
            "a job would be given up after so many deliveries, and never be seen again",
        ),
        rule("max_ack_pending", json!(-1), Exactly, InPlace, "jobs that wait for another try would hold up all others"),
        rule("headers_only", json!(false), Exactly, InPlace, "deliveries would be empty"),
        rule("inactive_threshold", json!(0), Exactly, InPlace, "the server would delete it while the controller is away"),
        rule("max_expires", json!(0), Exactly, InPlace, "pulls would be turned down"),
        rule(
            "ack_wait",
            json!(60 * SECOND),
            AtLeast(45 * SECOND),
            InPlace,
            "a delivery that is being worked on would be given again",
        ),
    ]
}

/// The server leaves out what is empty.
fn found(config: &Value, rule: &Rule) -> Value {
    let empty = match &rule.wanted {
        Value::Bool(_) => json!(false),
        Value::Number(_) => json!(0),
        Value::Array(_) => json!([]),
        _ => json!(""),
    };
    config.get(rule.key).filter(|value| !value.is_null()).cloned().unwrap_or(empty)
}

fn fits(rule: &Rule, found: &Value) -> bool {
    match (rule.bound, &rule.wanted, found) {
        (Bound::Free, ..) => true,
        // More subjects than ours are the operator's.
        (Bound::Exactly, Value::Array(wanted), Value::Array(found)) => wanted.iter().all(|one| found.contains(one)),
        (Bound::Exactly, wanted, found) => wanted == found,
        (Bound::AtLeast(least), _, found) => found.as_i64().is_some_and(|n| n < 0 || u64::try_from(n).is_ok_and(|n| n >= least)),
    }
}

pub(super) fn judge(config: &Value, rules: &[Rule]) -> Vec<Finding> {
    let findings = rules.iter().filter_map(|rule| {
        let found = found(config, rule);
        (!fits(rule, &found)).then(|| Finding { rule: rule.clone(), found })
    });
    findings.collect()
}

/// A whole configuration.
pub(super) fn wanted(rules: &[Rule]) -> Map<String, Value> {
    let fields = rules.iter().filter(|rule| rule.wanted != json!("") && rule.wanted != json!(false) && rule.wanted != json!(0));
    fields.map(|rule| (rule.key.to_owned(), rule.wanted.clone())).collect()
}

/// Whether the stream has the subjects of the old layout, in which a lane was one subject.
pub(super) fn is_flat(config: &Value, names: &Names) -> bool {
    let subjects = config.get("subjects").and_then(Value::as_array).cloned().unwrap_or_default();
    Lane::ALL.into_iter().any(|lane| subjects.contains(&json!(names.flat(lane))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn what_setup_makes_is_what_the_controller_wants() {
        let names = Names::default();
        let mut sets = vec![stream_rules(&names), dead_rules(&names)];
        sets.extend(Lane::ALL.map(|lane| consumer_rules(&names, lane)));
        for rules in sets {
            let config = Value::Object(wanted(&rules));
            let findings: Vec<_> = judge(&config, &rules).iter().map(Finding::text).collect();
            assert!(findings.is_empty(), "{findings:?}");
        }
    }

    #[test]
    fn each_field_that_is_otherwise_is_found_and_says_why() {
        let rules = stream_rules(&Names::default());
        let mut config = wanted(&rules);
        config.insert("retention".into(), json!("limits"));
        config.insert("max_bytes".into(), json!(1000));
        config.insert("max_msg_size".into(), json!(-1));
        config.remove("discard_new_per_subject");
        let findings = judge(&Value::Object(config), &rules);
        let told: Vec<_> = findings.iter().map(|finding| (finding.rule.key, finding.is_refusal())).collect();
        assert_eq!(told, [("retention", true), ("discard_new_per_subject", true), ("max_bytes", false)]);
        assert!(findings[0].text().starts_with("retention is \"limits\", not \"workqueue\" ("), "{}", findings[0].text());
        assert!(findings[2].text().starts_with("max_bytes is 1000, less than 1073741824 ("), "{}", findings[2].text());
    }

    #[test]
    fn more_subjects_than_ours_are_fine_and_flat_ones_are_seen() {
        let names = Names::default();
        let rules = stream_rules(&names);
        let mut config = wanted(&rules);
        config.insert("subjects".into(), json!(["other", "ci.assignment.>"]));
        assert!(judge(&Value::Object(config.clone()), &rules).is_empty());
        assert!(!is_flat(&Value::Object(config.clone()), &names));
        config.insert("subjects".into(), json!(["ci.assignment.pod", "ci.assignment.vm"]));
        assert!(is_flat(&Value::Object(config), &names));
    }
}
