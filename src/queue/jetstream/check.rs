//! Whether the server and its stream may be entrusted with jobs: looked at when a connection is made, and again from time to time.
//!
//! A refusal closes the gate: nothing is fetched or leased until a later look finds it mended. Warnings are told once. Before the gate opens,
//! the deliveries that the process before this one held are given back, so that nobody waits for their deadlines.

use std::{
    collections::HashSet,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use async_nats::jetstream::stream;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Gate, JetStreamQueue,
    api::{self, ApiError, code},
    judge::{self, Finding},
    monitor,
};
use crate::{failpoint, files, ids::Lane};

/// Between looks at a server that was refused.
const CLOSED_PERIOD: Duration = Duration::from_secs(3);
/// Between looks at one that is fine.
const OPEN_PERIOD: Duration = Duration::from_secs(60);
/// After something went wrong.
const RECHECK_PERIOD: Duration = Duration::from_secs(1);
/// A connection that is being made gets so long before it counts as missing.
const UP_LIMIT: Duration = Duration::from_secs(2);
/// A server that takes less may not take a large task.
const MIN_PAYLOAD: usize = 8 << 20;

/// Where `nats-setup --accept` leaves its word, beside the outbox.
pub const ACCEPTED_FILE: &str = "nats-accepted.json";

/// Where the controller says to `nats-setup` which stream it knows; the outbox, which has it too, is locked while it runs.
pub const KNOWN_FILE: &str = "nats-known.json";

/// A stream: one that is known, or that a person has accepted in the place of that.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Accepted {
    pub stream: String,
    /// Nanoseconds since 1970.
    pub created: u64,
}

/// What is remembered between looks.
#[derive(Default)]
pub(super) struct Memory {
    last: Option<Instant>,
    connections: (u64, u64),
    /// The refusal that was told.
    told: Option<String>,
    warned: HashSet<String>,
    /// The deliveries of the process before this one were given back.
    given_back: bool,
}

pub(crate) fn created_ns(info: &stream::Info) -> u64 {
    u64::try_from(info.created.unix_timestamp_nanos()).unwrap_or(0)
}

impl JetStreamQueue {
    /// How often the two connections were made.
    pub(super) fn connections(&self) -> (u64, u64) {
        (*self.producer.watch().borrow(), *self.worker.watch().borrow())
    }

    /// Looks, if it is time to.
    pub(super) async fn look(&self) {
        let memory = self.checks.lock().await;
        self.look_with(memory).await;
    }

    /// Looks, unless somebody does already.
    pub(super) async fn try_look(&self) {
        if let Ok(memory) = self.checks.try_lock() {
            self.look_with(memory).await;
        }
    }

    async fn look_with(&self, mut memory: tokio::sync::MutexGuard<'_, Memory>) {
        let since = memory.last.map_or(Duration::MAX, |last| last.elapsed());
        let up = self.worker.is_up() && self.producer.is_up();
        let period = if self.recheck.load(Ordering::Relaxed) {
            RECHECK_PERIOD
        } else if self.is_open() && up {
            OPEN_PERIOD
        } else {
            CLOSED_PERIOD
        };
        let new_connection = up && memory.connections != self.connections();
        if since < period && !new_connection {
            return;
        }
        self.recheck.store(false, Ordering::Relaxed);
        let examined = self.examine(&mut memory).await;
        memory.last = Some(Instant::now());
        match examined {
            Ok(()) => {
                if memory.told.take().is_some() {
                    tracing::info!(stream = self.names.stream, "NATS can be entrusted with jobs again");
                }
                self.pump.try_anew();
                self.gate.send_replace(Gate::Open(memory.connections));
                // What waits here goes before what comes.
                self.drain().await;
            }
            Err(why) => {
                if memory.told.as_ref() != Some(&why) {
                    tracing::error!(error = why, "nothing is fetched or leased until this is mended; running jobs are served");
                    memory.told = Some(why.clone());
                }
                self.gate.send_replace(Gate::Closed(why));
            }
        }
    }

    /// `Err`: why no job may be entrusted, and what to do.
    async fn examine(&self, memory: &mut Memory) -> Result<(), String> {
        for link in [&self.worker, &self.producer] {
            if !link.up_within(UP_LIMIT).await {
                return Err(link.why_down().await);
            }
        }
        // What is found is true of these; one that is lost meanwhile makes another look.
        memory.connections = self.connections();
        let stream = &self.names.stream;
        let raw: Value = self.ask_info(format!("STREAM.INFO.{stream}")).await.map_err(|e| self.no_stream(e))?;
        let info: stream::Info =
            serde_json::from_value(raw.clone()).map_err(|e| format!("read the state of stream {stream}: {e}"))?;
        let config = raw.get("config").cloned().unwrap_or_default();
        let findings = judge::judge(&config, &judge::stream_rules(&self.names));
        let mut warnings = warnings(stream, &findings);
        if judge::is_flat(&config, &self.names) {
            return Err(format!(
                "the stream {stream} has the old layout, in which all assignments of a backend share one subject: move them with \
                 `gitea-dynamic-runner nats-setup --migrate` (docs/nats.md)"
            ));
        }
        refuse(&format!("the stream {stream}"), &findings)?;
        for lane in Lane::ALL {
            let asked = self.ask_info::<Value>(format!("CONSUMER.INFO.{stream}.{lane}")).await;
            let consumer = asked.map_err(|e| self.no_consumer(lane, e))?;
            let config = consumer.get("config").cloned().unwrap_or_default();
            let findings = judge::judge(&config, &judge::consumer_rules(&self.names, lane));
            refuse(&format!("the consumer {lane} of stream {stream}"), &findings)?;
            warnings.extend(self::warnings(&format!("{stream}/{lane}"), &findings));
        }
        let dead = self.names.dead_stream();
        let raw: Value = self.ask_info(format!("STREAM.INFO.{dead}")).await.map_err(|e| self.no_dead_letters(e))?;
        refuse(&format!("the stream {dead}"), &judge::judge(raw.get("config").unwrap_or(&raw), &judge::dead_rules(&self.names)))?;
        self.known_stream(&info).await?;
        warnings.extend(self.server_warnings(&info).await);
        for warning in warnings {
            if memory.warned.insert(warning.clone()) {
                tracing::warn!("{warning}");
            }
        }
        self.take_limits(&info);
        self.give_back(memory).await
    }

    async fn ask_info<T: serde::de::DeserializeOwned>(&self, subject: String) -> Result<T, ApiError> {
        api::ask(&self.worker, subject, &serde_json::json!({})).await
    }

    fn take_limits(&self, info: &stream::Info) {
        let stream = usize::try_from(info.config.max_message_size).ok().filter(|bytes| *bytes > 0).unwrap_or(usize::MAX);
        self.max_message.store(stream.min(self.producer.client.max_payload()), Ordering::Relaxed);
    }

    fn no_stream(&self, error: ApiError) -> String {
        let stream = &self.names.stream;
        match error {
            ApiError::Refused(code::STREAM_NOT_FOUND, _) if self.outbox.stream_created().is_some() => format!(
                "the stream {stream} is gone from NATS at {}, and with it the jobs that waited in it. Give the server back its data (a wrong \
                 key of its encryption looks the same), or, if they are lost for good, make an empty one with \
                 `gitea-dynamic-runner nats-setup --yes --replace-lost`",
                self.settings.url
            ),
            ApiError::Refused(code::STREAM_NOT_FOUND, _) => format!(
                "the stream {stream} is not in NATS at {}: make it with `gitea-dynamic-runner nats-setup`",
                self.settings.url
            ),
            ApiError::Refused(code::NOT_ENABLED | code::NO_ACCOUNT, said) => format!(
                "NATS at {} has no JetStream for this account ({said}): enable it there (docs/nats.md)",
                self.settings.url
            ),
            other => self.unanswered(&format!("look at the stream {stream}"), other),
        }
    }

    fn no_consumer(&self, lane: Lane, error: ApiError) -> String {
        let stream = &self.names.stream;
        match error {
            ApiError::Refused(code::CONSUMER_NOT_FOUND, _) => {
                format!("the stream {stream} has no consumer {lane}: make it with `gitea-dynamic-runner nats-setup`")
            }
            other => self.unanswered(&format!("look at the consumer {lane} of stream {stream}"), other),
        }
    }

    fn no_dead_letters(&self, error: ApiError) -> String {
        let dead = self.names.dead_stream();
        match error {
            ApiError::Refused(code::STREAM_NOT_FOUND, _) => {
                format!("the stream {dead} for dead letters is not there: make it with `gitea-dynamic-runner nats-setup`")
            }
            other => self.unanswered(&format!("look at the stream {dead}"), other),
        }
    }

    /// A subject that is not permitted is not answered either, and then the server has said so beside.
    fn unanswered(&self, what: &str, error: ApiError) -> String {
        match (error, self.worker.refusal()) {
            (ApiError::TimedOut, Some(refusal)) => refusal,
            (error, _) => format!("{what}: {error}"),
        }
    }

    /// The stream must be the one that we know. The first one ever seen is remembered.
    async fn known_stream(&self, info: &stream::Info) -> Result<(), String> {
        let (created, stream) = (created_ns(info), &self.names.stream);
        match self.outbox.stream_created() {
            Some(known) if known == created => return Ok(()),
            Some(known) if !self.is_accepted(created) => {
                let ago = |ns: u64| info.created - Duration::from_nanos(created.saturating_sub(ns));
                return Err(format!(
                    "the stream {stream} is not the one that this controller knows: it was made at {}, the known one at {}. Jobs that waited \
                     in that one are not in it. Give the server back its data, or accept this stream with \
                     `gitea-dynamic-runner nats-setup --accept`",
                    info.created,
                    ago(known)
                ));
            }
            // Nothing that is known of places and deliveries is true of another stream.
            Some(_) => self.known.clear(),
            None => {}
        }
        // What is in it was given to somebody before us; probes for lost fetches start above it (rule R3).
        let subjects = api::subjects(&self.worker, stream, &self.names.all()).await;
        let subjects = subjects.map_err(|e| self.unanswered(&format!("list the stream {stream}"), e))?;
        let ids = subjects.keys().filter_map(|subject| u64::try_from(self.names.parse(subject)?.1.0).ok());
        let highest = ids.max().unwrap_or(0);
        self.outbox.remember_stream(created, highest).await.map_err(|e| format!("remember the stream {stream}: {e}"))?;
        let text = serde_json::json!({ "stream": stream, "created": created }).to_string();
        files::write_private(&self.folder.join(KNOWN_FILE), text.as_bytes(), files::Durable::Disk)
            .map_err(|e| format!("write {KNOWN_FILE}: {e}"))?;
        failpoint::reached("stream.remembered");
        files::remove(&self.folder.join(ACCEPTED_FILE)).map_err(|e| format!("remove {ACCEPTED_FILE}: {e}"))?;
        tracing::info!(stream, "the stream in NATS is remembered");
        Ok(())
    }

    fn is_accepted(&self, created: u64) -> bool {
        let text = std::fs::read(self.folder.join(ACCEPTED_FILE)).unwrap_or_default();
        let accepted: Option<Accepted> = serde_json::from_slice(&text).ok();
        accepted == Some(Accepted { stream: self.names.stream.clone(), created })
    }

    async fn server_warnings(&self, info: &stream::Info) -> Vec<String> {
        let mut warnings = Vec::new();
        let payload = self.producer.client.max_payload();
        if payload < MIN_PAYLOAD {
            warnings.push(format!(
                "NATS takes messages of {payload} bytes at most; a large task may not fit: set max_payload: 8MB in the server's configuration"
            ));
        }
        let servers = info.cluster.as_ref().map_or(1, |cluster| cluster.replicas.len() + 1);
        let clustered = info.cluster.as_ref().is_some_and(|cluster| cluster.name.as_ref().is_some_and(|name| !name.is_empty()));
        if clustered && info.config.num_replicas < 3 {
            warnings.push(format!(
                "the stream {} is kept by {servers} server(s) of a cluster: if that is lost, so are its jobs. Set num_replicas to 3",
                self.names.stream
            ));
        }
        match &self.settings.monitor_url {
            None => warnings.push(
                "NATS_MONITOR_URL is not set, so it could not be checked that NATS writes to its disk before it acknowledges \
                 (sync_interval: always); without that a power cut loses jobs"
                    .into(),
            ),
            Some(url) => match monitor::syncs_always(url).await {
                Ok(true) => {}
                Ok(false) => warnings.push(
                    "NATS acknowledges before it has written to its disk: a power cut loses jobs. Set `sync_interval: always` in the \
                     jetstream block of its configuration, and restart it"
                        .into(),
                ),
                Err(why) => warnings.push(format!("NATS_MONITOR_URL={url}: read /varz: {why}; whether sync_interval is `always` is not known")),
            },
        }
        warnings
    }

    /// What the process before this one held comes back at once, instead of at its deadline; what it had put off comes early, which
    /// harms nothing. Only before anything is leased here: a delivery is told by its message, so this would take it from its holder.
    ///
    /// The server reads only consumer, message and delivery from a reply subject, and any delivery that is out is good enough, so the
    /// dead process need not have left its own.
    async fn give_back(&self, memory: &mut Memory) -> Result<(), String> {
        if memory.given_back {
            return Ok(());
        }
        let stream = &self.names.stream;
        for lane in Lane::ALL {
            let failed = |e: ApiError| format!("look for the deliveries of the last run: {e}");
            let delivered = api::consumer_info(&self.worker, stream, lane.as_str()).await.map_err(failed)?;
            if delivered.num_ack_pending == 0 {
                continue;
            }
            let (passed, last) = (delivered.delivered.stream_sequence, delivered.delivered.consumer_sequence);
            let tasks = self.in_order(lane).await.map_err(|e| e.to_string())?;
            for seq in tasks.into_iter().filter_map(|task| self.known.place(lane, task)).filter(|seq| *seq <= passed) {
                let reply = format!("$JS.ACK.{stream}.{lane}.1.{seq}.{last}.0.0");
                if let Err(error) = api::settle(&self.worker, &reply, "-NAK".into()).await {
                    tracing::debug!(%lane, seq, %error, "failed to give a delivery of the last run back; its deadline does");
                }
            }
        }
        memory.given_back = true;
        Ok(())
    }
}

fn refuse(what: &str, findings: &[Finding]) -> Result<(), String> {
    let refused: Vec<_> = findings.iter().filter(|finding| finding.is_refusal()).map(Finding::text).collect();
    if refused.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{what} is not as it must be: {}. `gitea-dynamic-runner nats-setup` shows what to do about it",
        refused.join("; ")
    ))
}

fn warnings(what: &str, findings: &[Finding]) -> Vec<String> {
    let small = findings.iter().filter(|finding| !finding.is_refusal());
    small.map(|finding| format!("{what}: {}: `gitea-dynamic-runner nats-setup --yes` raises it", finding.text())).collect()
}
