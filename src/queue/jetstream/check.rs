//! Whether the server and its stream may be entrusted with jobs: looked at when a connection is made, and again from time to time.
//!
//! A refusal closes the gate: nothing is fetched or leased until a later look finds it mended. Warnings are told once. Before the gate opens,
//! the deliveries that the process before this one held are given back, so that nobody waits for their deadlines.

use std::{
    collections::HashSet,
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use async_nats::jetstream::stream;
use serde::{Deserialize, Serialize};

use super::{
    Gate, JetStreamQueue,
    api::{self, ApiError},
    look::{Before, Look, Looked},
};
use crate::{failpoint, files, ids::Lane, queue::StoreUse};

/// Between looks at a server that was refused.
const CLOSED_PERIOD: Duration = Duration::from_secs(3);
/// Between looks at one that is fine.
const OPEN_PERIOD: Duration = Duration::from_secs(60);
/// After something went wrong.
const RECHECK_PERIOD: Duration = Duration::from_secs(1);

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
        let look = self.looking();
        look.connected().await?;
        // What is found is true of these; one that is lost meanwhile makes another look.
        memory.connections = self.connections();
        let Looked { info, mut warnings } = look.stream().await?;
        self.known_stream(&info).await?;
        warnings.extend(look.server_warnings(&info));
        warnings.extend(look.sync_warning().await);
        for warning in warnings {
            if memory.warned.insert(warning.clone()) {
                tracing::warn!("{warning}");
            }
        }
        self.take_limits(&info);
        self.give_back(memory).await
    }

    fn looking(&self) -> Look<'_> {
        let known = if self.outbox.stream_created().is_some() { Before::Seen } else { Before::Never };
        Look { settings: &self.settings, producer: &self.producer, worker: &self.worker, before: known }
    }

    fn take_limits(&self, info: &stream::Info) {
        let limit = u64::try_from(info.config.max_bytes).ok().filter(|bytes| *bytes > 0);
        *self.store_use.lock().unwrap_or_else(PoisonError::into_inner) =
            limit.map(|limit| StoreUse { used: info.state.bytes, limit });
        let stream = usize::try_from(info.config.max_message_size).ok().filter(|bytes| *bytes > 0).unwrap_or(usize::MAX);
        self.max_message.store(stream.min(self.producer.client.max_payload()), Ordering::Relaxed);
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
        let subjects = subjects.map_err(|e| self.looking().unanswered(&format!("list the stream {stream}"), e))?;
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
