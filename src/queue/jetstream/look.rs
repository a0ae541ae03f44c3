//! What is found when NATS is looked at, and what to do about it: for the controller's own look, and for `doctor`.
//!
//! Changes nothing there. What a finding means for the gate, and which stream is remembered, is `check`'s.

use std::time::Duration;

use async_nats::{HeaderMap, jetstream::stream};
use serde_json::Value;

use super::{
    api::{self, ApiError, code},
    check::{Accepted, created_ns},
    judge::{self, Finding},
    link::{Link, Role},
    monitor,
    names::Settings,
};
use crate::ids::{Lane, TaskId};

/// A connection that is being made gets so long before it counts as missing.
const UP_LIMIT: Duration = Duration::from_secs(2);
/// A server that takes less may not take a large task.
const MIN_PAYLOAD: usize = 8 << 20;

/// Whether a stream was known before this look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    Seen,
    Never,
}

pub(super) struct Look<'a> {
    pub(super) settings: &'a Settings,
    pub(super) producer: &'a Link,
    pub(super) worker: &'a Link,
    pub(super) before: Before,
}

/// A stream that may be entrusted with jobs.
pub(super) struct Looked {
    pub(super) info: stream::Info,
    pub(super) warnings: Vec<String>,
}

impl Look<'_> {
    /// `Err`: which user has no connection, and why.
    pub(super) async fn connected(&self) -> Result<(), String> {
        for link in [self.worker, self.producer] {
            if !link.up_within(UP_LIMIT).await {
                return Err(link.why_down().await);
            }
        }
        Ok(())
    }

    /// Stream, consumers and dead letters. `Err`: why no job may be entrusted to them.
    pub(super) async fn stream(&self) -> Result<Looked, String> {
        let names = &self.settings.names;
        let stream = &names.stream;
        let raw: Value = self.ask_info(format!("STREAM.INFO.{stream}")).await.map_err(|e| self.no_stream(e))?;
        let info: stream::Info =
            serde_json::from_value(raw.clone()).map_err(|e| format!("read the state of stream {stream}: {e}"))?;
        let config = raw.get("config").cloned().unwrap_or_default();
        let findings = judge::judge(&config, &judge::stream_rules(names));
        let mut warnings = warnings(stream, &findings);
        if judge::is_flat(&config, names) {
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
            let findings = judge::judge(&config, &judge::consumer_rules(names, lane));
            refuse(&format!("the consumer {lane} of stream {stream}"), &findings)?;
            warnings.extend(self::warnings(&format!("{stream}/{lane}"), &findings));
        }
        let dead = names.dead_stream();
        let raw: Value = self.ask_info(format!("STREAM.INFO.{dead}")).await.map_err(|e| self.no_dead_letters(e))?;
        refuse(&format!("the stream {dead}"), &judge::judge(raw.get("config").unwrap_or(&raw), &judge::dead_rules(names)))?;
        Ok(Looked { info, warnings })
    }

    async fn ask_info<T: serde::de::DeserializeOwned>(&self, subject: String) -> Result<T, ApiError> {
        api::ask(self.worker, subject, &serde_json::json!({})).await
    }

    fn no_stream(&self, error: ApiError) -> String {
        let stream = &self.settings.names.stream;
        match error {
            ApiError::Refused(code::STREAM_NOT_FOUND, _) if self.before == Before::Seen => format!(
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
        let stream = &self.settings.names.stream;
        match error {
            ApiError::Refused(code::CONSUMER_NOT_FOUND, _) => {
                format!("the stream {stream} has no consumer {lane}: make it with `gitea-dynamic-runner nats-setup`")
            }
            other => self.unanswered(&format!("look at the consumer {lane} of stream {stream}"), other),
        }
    }

    fn no_dead_letters(&self, error: ApiError) -> String {
        let dead = self.settings.names.dead_stream();
        match error {
            ApiError::Refused(code::STREAM_NOT_FOUND, _) => {
                format!("the stream {dead} for dead letters is not there: make it with `gitea-dynamic-runner nats-setup`")
            }
            other => self.unanswered(&format!("look at the stream {dead}"), other),
        }
    }

    /// A subject that is not permitted is not answered either, and then the server has said so beside.
    pub(super) fn unanswered(&self, what: &str, error: ApiError) -> String {
        match (error, self.worker.refusal()) {
            (ApiError::TimedOut, Some(refusal)) => refusal,
            (error, _) => format!("{what}: {error}"),
        }
    }

    pub(super) fn server_warnings(&self, info: &stream::Info) -> Vec<String> {
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
                self.settings.names.stream
            ));
        }
        warnings
    }

    /// Whether it is not, or not known to be, written to the disk before it is acknowledged.
    pub(super) async fn sync_warning(&self) -> Option<String> {
        match self.synced().await {
            Synced::Always => None,
            Synced::Late(why) | Synced::Unknown(why) => Some(why),
        }
    }

    async fn synced(&self) -> Synced {
        let Some(url) = &self.settings.monitor_url else {
            return Synced::Unknown(
                "NATS_MONITOR_URL is not set, so it could not be checked that NATS writes to its disk before it acknowledges \
                 (sync_interval: always); without that a power cut loses jobs"
                    .into(),
            );
        };
        match monitor::syncs_always(url).await {
            Ok(true) => Synced::Always,
            Ok(false) => Synced::Late(
                "NATS acknowledges before it has written to its disk: a power cut loses jobs. Set `sync_interval: always` in the \
                 jetstream block of its configuration, and restart it"
                    .into(),
            ),
            Err(why) => Synced::Unknown(format!(
                "NATS_MONITOR_URL={url}: read /varz: {why}; whether sync_interval is `always` is not known"
            )),
        }
    }

    /// Puts nothing anywhere: the message names a stream that is not there, so the server refuses it, but only to who may publish.
    async fn may_publish(&self) -> Result<(), String> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Stream", "none-a-question-only");
        let subject = self.settings.names.subject(Lane::Pod, TaskId(0));
        let answer = self.producer.client.request_with_headers(subject, headers, "".into()).await;
        match (answer, self.producer.refusal()) {
            (_, Some(refusal)) => Err(refusal),
            (Ok(_), None) => Ok(()),
            (Err(error), None) => Err(format!("ask whether assignments may be published: {error}")),
        }
    }
}

enum Synced {
    Always,
    Late(String),
    Unknown(String),
}

/// What `doctor` is told of NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Fine,
    /// Works, but should be better.
    Weak(String),
    Unknown(String),
    /// No job would be fetched.
    Bad(String),
}

/// `known` is the stream of an earlier run, `accepted` one that a person has accepted since.
pub async fn examine(settings: &Settings, known: Option<&Accepted>, accepted: Option<&Accepted>) -> Vec<(&'static str, Found)> {
    const ITEMS: [&str; 4] = ["nats.connection", "nats.publish", "nats.stream", "nats.sync"];
    let opened = tokio::try_join!(
        Link::open(settings, &settings.producer, Role::Producer),
        Link::open(settings, &settings.worker, Role::Worker)
    );
    let (producer, worker) = match opened {
        Ok(opened) => opened,
        Err(why) => return vec![(ITEMS[0], Found::Bad(why))],
    };
    let before = if known.is_some() { Before::Seen } else { Before::Never };
    let look = Look { settings, producer: &producer, worker: &worker, before };
    let (connected, synced) = tokio::join!(look.connected(), look.synced());
    let synced = match synced {
        Synced::Always => Found::Fine,
        Synced::Late(why) => Found::Bad(why),
        Synced::Unknown(why) => Found::Unknown(why),
    };
    if let Err(why) = connected {
        let unknown = || Found::Unknown("there is no connection to NATS to ask by: mend nats.connection first".into());
        return vec![(ITEMS[0], Found::Bad(why)), (ITEMS[1], unknown()), (ITEMS[2], unknown()), (ITEMS[3], synced)];
    }
    let (may, stream) = tokio::join!(look.may_publish(), look.stream());
    let may = may.map_or_else(Found::Bad, |()| Found::Fine);
    let stream = match stream {
        Err(why) => Found::Bad(why),
        Ok(looked) => judged(&look, looked, known, accepted),
    };
    vec![(ITEMS[0], Found::Fine), (ITEMS[1], may), (ITEMS[2], stream), (ITEMS[3], synced)]
}

fn judged(look: &Look<'_>, looked: Looked, known: Option<&Accepted>, accepted: Option<&Accepted>) -> Found {
    let Looked { info, mut warnings } = looked;
    let found = Accepted { stream: look.settings.names.stream.clone(), created: created_ns(&info) };
    if known.is_some_and(|known| *known != found) && accepted != Some(&found) {
        return Found::Bad(format!(
            "the stream {} is not the one that the controller of this state folder knows: give the server back its data, or accept this \
             stream with `gitea-dynamic-runner nats-setup --accept`",
            found.stream
        ));
    }
    warnings.extend(look.server_warnings(&info));
    if warnings.is_empty() { Found::Fine } else { Found::Weak(warnings.join("; ")) }
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
