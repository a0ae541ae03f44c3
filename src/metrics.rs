//! Every metric, by name and labels, in one place.
//!
//! Label values come from closed sets, never from a job, so the number of series does not grow with load. Who counts what is
//! up to the rooms; what the names mean is in `docs/METRICS.md`.

use std::sync::{Arc, atomic::AtomicU64};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};

use crate::ids::{BackendKind, Lane};

type Text = &'static str;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    pub result: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    pub reason: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LaneLabel {
    pub lane: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BackendLabel {
    pub backend: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BackendState {
    pub backend: Text,
    pub state: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LaneState {
    pub lane: Text,
    pub state: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BackendOutcome {
    pub backend: Text,
    pub outcome: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BackendReason {
    pub backend: Text,
    pub reason: Text,
}
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct MethodCode {
    pub method: Text,
    pub code: Text,
}

/// What is passed on to Gitea for jobs.
pub const METHODS: [&str; 2] = ["UpdateTask", "UpdateLog"];
/// How that ends. Whatever else a server may say is `other`: a closed set, so that nobody makes series for us.
pub const CODES: [&str; 9] = [
    "ok",
    "unknown",
    "unavailable",
    "deadline_exceeded",
    "unauthenticated",
    "permission_denied",
    "not_found",
    "internal",
    "other",
];

/// The label for a Connect code.
pub fn code_label(code: &str) -> Text {
    CODES.into_iter().find(|known| *known == code).unwrap_or("other")
}

/// Seconds, from a fast fetch to a slow boot.
const BUCKETS: [f64; 14] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0, 300.0, 900.0];

/// Handles to all metrics; clones count into the same ones.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub leader: Gauge,
    pub fetch_requests: Family<ResultLabel, Counter>,
    pub fetch_duration: Histogram,
    pub fetch_last_success: Gauge<f64, AtomicU64>,
    pub assignments: Family<LaneLabel, Counter>,
    pub assignment_persist_duration: Histogram,
    pub assignments_unpersisted: Gauge,
    pub lost_fetches: Counter,
    pub queue_depth: Family<LaneState, Gauge>,
    pub queue_outbox: Gauge,
    pub queue_store_used: Gauge,
    pub queue_store_limit: Gauge,
    pub stuck_deliveries: Counter,
    pub capacity_slots: Family<BackendState, Gauge>,
    pub capacity_limit: Family<BackendLabel, Gauge>,
    pub jobs_inflight: Family<BackendState, Gauge>,
    pub environment_silence: Family<BackendLabel, Gauge<f64, AtomicU64>>,
    pub jobs_completed: Family<BackendOutcome, Counter>,
    pub job_start_latency: Family<BackendLabel, Histogram, fn() -> Histogram>,
    pub environment_creates: Family<BackendOutcome, Counter>,
    pub environment_provision: Family<BackendLabel, Histogram, fn() -> Histogram>,
    pub infra_failures: Family<BackendReason, Counter>,
    pub cancellations: Family<ReasonLabel, Counter>,
    pub recovered_jobs: Family<ResultLabel, Counter>,
    pub orphans_collected: Family<BackendReason, Counter>,
    pub reconcile_duration: Histogram,
    pub reconcile_last_success: Family<BackendLabel, Gauge<f64, AtomicU64>>,
    pub report_requests: Family<MethodCode, Counter>,
    pub log_rows: Counter,
    pub facade_denied: Family<ReasonLabel, Counter>,
    pub mirror_dropped: Counter,
    pub mirror_write_errors: Counter,
    pub mirror_rebuilds: Family<ReasonLabel, Counter>,
    pub mirror_last_write: Gauge<f64, AtomicU64>,
    pub mirror_repairs: Counter,
    pub stranded: Family<ResultLabel, Counter>,
    pub repeated_tasks: Counter,
    pub drain_state: Gauge,
    pub http_denied: Family<ReasonLabel, Counter>,
    pub http_dropped: Family<ReasonLabel, Counter>,
}

fn seconds() -> Histogram {
    Histogram::new(BUCKETS)
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("gitea_dynamic_runner");
        let mut m = Self {
            registry: Arc::new(Registry::default()),
            leader: Gauge::default(),
            fetch_requests: Family::default(),
            fetch_duration: seconds(),
            fetch_last_success: Gauge::default(),
            assignments: Family::default(),
            assignment_persist_duration: seconds(),
            assignments_unpersisted: Gauge::default(),
            lost_fetches: Counter::default(),
            queue_depth: Family::default(),
            queue_outbox: Gauge::default(),
            queue_store_used: Gauge::default(),
            queue_store_limit: Gauge::default(),
            stuck_deliveries: Counter::default(),
            capacity_slots: Family::default(),
            capacity_limit: Family::default(),
            jobs_inflight: Family::default(),
            environment_silence: Family::default(),
            jobs_completed: Family::default(),
            job_start_latency: Family::new_with_constructor(seconds),
            environment_creates: Family::default(),
            environment_provision: Family::new_with_constructor(seconds),
            infra_failures: Family::default(),
            cancellations: Family::default(),
            recovered_jobs: Family::default(),
            orphans_collected: Family::default(),
            reconcile_duration: seconds(),
            reconcile_last_success: Family::default(),
            report_requests: Family::default(),
            log_rows: Counter::default(),
            facade_denied: Family::default(),
            mirror_dropped: Counter::default(),
            mirror_write_errors: Counter::default(),
            mirror_rebuilds: Family::default(),
            mirror_last_write: Gauge::default(),
            mirror_repairs: Counter::default(),
            stranded: Family::default(),
            repeated_tasks: Counter::default(),
            drain_state: Gauge::default(),
            http_denied: Family::default(),
            http_dropped: Family::default(),
        };
        m.register(&mut registry);
        m.initialise();
        m.registry = Arc::new(registry);
        m
    }

    fn register(&self, r: &mut Registry) {
        r.register("build", "The running version", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        r.register("leader", "1 while this process acts", self.leader.clone());
        r.register("fetch_requests", "FetchTask calls by how they ended", self.fetch_requests.clone());
        r.register_with_unit("fetch_duration", "FetchTask, request to answer", Unit::Seconds, self.fetch_duration.clone());
        r.register("fetch_last_success_timestamp_seconds", "Last answered FetchTask", self.fetch_last_success.clone());
        r.register("assignments", "Tasks fetched and stored, by lane", self.assignments.clone());
        let persist = self.assignment_persist_duration.clone();
        r.register_with_unit("assignment_persist_duration", "FetchTask answer to durable", Unit::Seconds, persist);
        r.register("assignments_unpersisted", "Fetched tasks not yet durable", self.assignments_unpersisted.clone());
        r.register("lost_fetch", "Tasks given by Gitea that never became durable (rule R3)", self.lost_fetches.clone());
        r.register("queue_depth", "Assignments in the queue", self.queue_depth.clone());
        r.register("queue_outbox", "Assignments not yet handed to the queue's server", self.queue_outbox.clone());
        r.register("queue_store_used_bytes", "What the queue's store holds", self.queue_store_used.clone());
        r.register("queue_store_limit_bytes", "With as much it takes nothing more", self.queue_store_limit.clone());
        r.register("stuck_deliveries", "Assignments that the queue's server had given up", self.stuck_deliveries.clone());
        r.register("capacity_slots", "Slots by state", self.capacity_slots.clone());
        r.register("capacity_limit", "Configured capacity", self.capacity_limit.clone());
        r.register("jobs_inflight", "Environments by state", self.jobs_inflight.clone());
        let silence = self.environment_silence.clone();
        r.register("environment_silence_seconds", "Of the running job that was not heard of for longest", silence);
        r.register("jobs_completed", "Jobs by outcome", self.jobs_completed.clone());
        r.register_with_unit("job_start_latency", "Fetch to claim", Unit::Seconds, self.job_start_latency.clone());
        r.register("environment_creates", "Create calls by result", self.environment_creates.clone());
        let provision = self.environment_provision.clone();
        r.register_with_unit("environment_provision_duration", "Create call to claim", Unit::Seconds, provision);
        r.register("infra_failures", "Environments that did not do their job", self.infra_failures.clone());
        r.register("cancellations", "Jobs stopped, by reason", self.cancellations.clone());
        r.register("recovered_jobs", "What a start found, by what became of it", self.recovered_jobs.clone());
        r.register("orphans_collected", "Environments deleted that nobody needed", self.orphans_collected.clone());
        r.register_with_unit("reconcile_duration", "One pass", Unit::Seconds, self.reconcile_duration.clone());
        let last = self.reconcile_last_success.clone();
        r.register("reconcile_last_success_timestamp_seconds", "Last pass that saw everything", last);
        r.register("report_requests", "Calls forwarded to Gitea for jobs", self.report_requests.clone());
        r.register("log_rows", "Log rows forwarded", self.log_rows.clone());
        r.register("facade_denied", "Requests refused by the facade", self.facade_denied.clone());
        self.register_mirror(r);
    }

    fn register_mirror(&self, r: &mut Registry) {
        r.register("mirror_dropped", "Notes for the mirror that were not kept", self.mirror_dropped.clone());
        r.register("mirror_write_errors", "Failures of the mirror's file", self.mirror_write_errors.clone());
        r.register("mirror_rebuilds", "Mirrors begun anew in place of one", self.mirror_rebuilds.clone());
        let last = self.mirror_last_write.clone();
        r.register("mirror_last_write_timestamp_seconds", "Last write of the mirror", last);
        r.register("mirror_repairs", "Facts that the mirror did not show", self.mirror_repairs.clone());
        r.register("stranded", "Jobs found in no queue and no environment, by what became of them", self.stranded.clone());
        r.register("repeated_tasks", "Tasks that Gitea delivered again after their end", self.repeated_tasks.clone());
        r.register("drain_state", "0: new jobs are taken, 1: draining, 2: drained", self.drain_state.clone());
        r.register("http_denied", "Requests of operators refused, by reason", self.http_denied.clone());
        r.register("http_dropped", "Connections of operators dropped for want of places", self.http_dropped.clone());
    }

    /// All label combinations exist from the start, so that rates and alerts work on the first event.
    fn initialise(&self) {
        for result in ["task", "empty", "throttled", "error", "unregistered"] {
            drop(self.fetch_requests.get_or_create(&ResultLabel { result }));
        }
        for lane in Lane::ALL {
            let lane = lane.as_str();
            drop(self.assignments.get_or_create(&LaneLabel { lane }));
            for state in ["ready", "delayed", "leased"] {
                drop(self.queue_depth.get_or_create(&LaneState { lane, state }));
            }
        }
        for method in METHODS {
            for code in CODES {
                drop(self.report_requests.get_or_create(&MethodCode { method, code }));
            }
        }
        for reason in ["user", "gitea", "deadline"] {
            drop(self.cancellations.get_or_create(&ReasonLabel { reason }));
        }
        drop(self.recovered_jobs.get_or_create(&ResultLabel { result: "reattached" }));
        for backend in BackendKind::ALL.map(BackendKind::as_str) {
            drop(self.capacity_limit.get_or_create(&BackendLabel { backend }));
            drop(self.environment_silence.get_or_create(&BackendLabel { backend }));
            drop(self.job_start_latency.get_or_create(&BackendLabel { backend }));
            drop(self.environment_provision.get_or_create(&BackendLabel { backend }));
            for state in ["used", "free"] {
                drop(self.capacity_slots.get_or_create(&BackendState { backend, state }));
            }
            for state in ["offered", "running", "leaving"] {
                drop(self.jobs_inflight.get_or_create(&BackendState { backend, state }));
            }
            for outcome in ["created", "adopted", "failed"] {
                drop(self.environment_creates.get_or_create(&BackendOutcome { backend, outcome }));
            }
            for reason in ["stray", "duplicate", "superseded"] {
                drop(self.orphans_collected.get_or_create(&BackendReason { backend, reason }));
            }
            for outcome in ["success", "failure", "cancelled", "skipped"] {
                drop(self.jobs_completed.get_or_create(&BackendOutcome { backend, outcome }));
            }
            for reason in ["lost", "vanished", "silent", "deadline", "create", "no_start"] {
                drop(self.infra_failures.get_or_create(&BackendReason { backend, reason }));
            }
        }
        for reason in ["not_yet", "identity", "capability", "assignment", "revoked", "terminal", "connections", "task", "rate"] {
            drop(self.facade_denied.get_or_create(&ReasonLabel { reason }));
        }
        for reason in ["token", "rights", "host", "site", "body"] {
            drop(self.http_denied.get_or_create(&ReasonLabel { reason }));
        }
        for reason in ["slow", "full"] {
            drop(self.http_dropped.get_or_create(&ReasonLabel { reason }));
        }
        for reason in ["damaged", "instance", "vanished"] {
            drop(self.mirror_rebuilds.get_or_create(&ReasonLabel { reason }));
        }
        for result in ["republished", "failed", "cancelled", "over"] {
            drop(self.stranded.get_or_create(&ResultLabel { result }));
        }
    }

    /// OpenMetrics text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            // Writing to a String fails only if a metric refuses to encode itself; say so rather than show half of it.
            Err(e) => format!("# {e}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_the_documented_ones_and_few() {
        let metrics = Metrics::new();
        metrics.lost_fetches.inc();
        let text = metrics.text();
        for name in
            ["gitea_dynamic_runner_lost_fetch_total 1", "gitea_dynamic_runner_build_info", "fetch_duration_seconds_bucket"]
        {
            assert!(text.contains(name), "{name} in\n{text}");
        }
        let series = text.lines().filter(|l| !l.starts_with('#')).count();
        assert!(series < 300, "{series} series");
    }
}
