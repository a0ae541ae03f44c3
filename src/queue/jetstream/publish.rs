//! From the outbox into the stream: in order, each once, and without end until it is there.
//!
//! A row goes from the file when the server has said that it has it on its disk. No answer means *not known*: the row is sent again
//! under the same message id, and a copy that is there already is found by that id.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_nats::jetstream::{context::PublishErrorKind, message::PublishMessage};

use super::{JetStreamQueue, api, outbox::Waiting};
use crate::{
    backoff::Backoff,
    failpoint,
    ids::{Lane, TaskId},
    queue::{MAX_SEALED_BYTES, Published, QueueError},
};

/// Headers are part of what `max_payload` and `max_message_size` limit.
const HEADER_BYTES: usize = 1024;
/// A message that is in the way may have left when it is looked at: so often it is looked at again.
const LOOKS: u32 = 3;

/// What a publisher that waits for its row is told. `None` in the map: not decided yet.
type Answer = Result<Published, QueueError>;

pub(super) struct Pump {
    /// One at a time sends, so that order is kept.
    sending: tokio::sync::Mutex<Backoff>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<u64, Option<Answer>>,
    /// Why the last attempt failed, and when the next may be made.
    failure: Option<(String, Instant)>,
    /// Rows that the server will never take as it is now.
    too_large: HashMap<u64, usize>,
}

/// How one row ended.
enum Sent {
    Stored,
    /// Another message has the task's place.
    Taken(Lane),
    TooLarge(usize),
}

impl Default for Pump {
    fn default() -> Self {
        let backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));
        Self { sending: tokio::sync::Mutex::new(backoff), state: Mutex::default() }
    }
}

impl Pump {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn failure(&self) -> Option<String> {
        self.state().failure.as_ref().map(|(why, _)| why.clone())
    }

    /// How many rows the server will not take for their size, and the largest.
    pub(super) fn too_large(&self) -> Option<(usize, usize)> {
        let state = self.state();
        state.too_large.values().max().map(|largest| (state.too_large.len(), *largest))
    }

    /// Nobody sends while this is held.
    pub(super) async fn pause(&self) -> tokio::sync::MutexGuard<'_, Backoff> {
        self.sending.lock().await
    }

    /// The server may take now what it refused.
    pub(super) fn try_anew(&self) {
        let mut state = self.state();
        state.too_large.clear();
        if let Some((_, next)) = &mut state.failure {
            *next = Instant::now();
        }
    }
}

/// Takes a publisher off the list of those who wait, also when its call is dropped.
struct Waiter<'a>(&'a Pump, u64);

impl Waiter<'_> {
    fn answer(&self) -> Option<Answer> {
        self.0.state().waiting.get_mut(&self.1).and_then(Option::take)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.state().waiting.remove(&self.1);
    }
}

impl JetStreamQueue {
    /// On our disk first, then in NATS. Where NATS cannot be reached it stays on our disk, which is as good: it is `Stored`.
    pub(super) async fn store(&self, lane: Lane, task: TaskId, sealed: &[u8]) -> Result<Published, QueueError> {
        for limit in [MAX_SEALED_BYTES, self.limit()] {
            if sealed.len() > limit {
                return Err(QueueError::TooLarge { bytes: sealed.len(), limit });
            }
        }
        let _one_of_this_task = self.publishing.lock().await;
        if self.outbox.find(task).is_some() {
            return Ok(Published::Duplicate);
        }
        // Dying after this, the next start sends it.
        let number = self.outbox.put(lane, task, sealed.to_vec()).await?;
        self.pump.state().waiting.insert(number, None);
        let waiter = Waiter(&self.pump, number);
        drop(_one_of_this_task);
        self.drain().await;
        waiter.answer().unwrap_or(Ok(Published::Stored))
    }

    /// Sends what is in the outbox, as far as it goes.
    pub(super) async fn drain(&self) {
        if !self.is_open() || self.outbox.len() == 0 {
            return;
        }
        let mut backoff = self.pump.sending.lock().await;
        if self.pump.state().failure.as_ref().is_some_and(|(_, next)| *next > Instant::now()) {
            return;
        }
        let mut after = 0;
        while let Some((number, row)) = self.outbox.next_after(after) {
            after = number;
            if self.pump.state().too_large.contains_key(&number) {
                continue;
            }
            match self.send_until_decided(number, &row).await {
                Ok(()) => {
                    backoff.reset();
                    self.pump.state().failure = None;
                }
                Err(why) => {
                    if self.pump.failure().as_ref() != Some(&why) {
                        tracing::warn!(task = %row.task, error = why,
                            "failed to hand an assignment to NATS; it is on our disk and is sent again");
                    }
                    self.pump.state().failure = Some((why, Instant::now() + backoff.step()));
                    return;
                }
            }
        }
    }

    /// `Ok`: the row is dealt with, or set aside. `Err`: try again later.
    async fn send_until_decided(&self, number: u64, row: &Waiting) -> Result<(), String> {
        let waits = self.pump.state().waiting.contains_key(&number);
        let sealed = self.outbox.payload(number).await.map_err(|e| e.to_string())?;
        for _ in 0..LOOKS {
            let answer = match self.send(row, &sealed).await? {
                Sent::Stored => Ok(Published::Stored),
                // A publisher who waits learns it and decides. Else it was promised: the old one is of a Gitea from before a restore, or
                // a delivery that got stuck, and goes.
                Sent::Taken(_) if waits => Ok(Published::Duplicate),
                Sent::Taken(lane) => {
                    tracing::warn!(task = %row.task, %lane, "another assignment of this task is in NATS; the newer takes its place");
                    self.purge(lane, row.task).await.map_err(|e| e.to_string())?;
                    continue;
                }
                Sent::TooLarge(bytes) if waits => Err(QueueError::TooLarge { bytes, limit: self.limit() }),
                Sent::TooLarge(bytes) => {
                    tracing::error!(task = %row.task, bytes, "failed to hand an assignment to NATS: it is too large for the stream; \
                        raise max_message_size and max_payload (docs/nats.md). It stays on our disk");
                    self.pump.state().too_large.insert(number, bytes);
                    return Ok(());
                }
            };
            failpoint::reached("outbox.sent");
            // Dying before the row is removed, it is found in the stream by its message id and removed then.
            if let Err(error) = self.outbox.remove(number).await {
                tracing::warn!(task = %row.task, %error, "failed to remove what NATS has from the outbox; will try again");
            }
            if let Some(waiting) = self.pump.state().waiting.get_mut(&number) {
                *waiting = Some(answer);
            }
            return Ok(());
        }
        Err(format!("the place of task {} in NATS does not become free", row.task))
    }

    async fn send(&self, row: &Waiting, sealed: &[u8]) -> Result<Sent, String> {
        if let Some(sent) = self.in_stream(row).await? {
            return Ok(sent);
        }
        let message = PublishMessage::build()
            .payload(sealed.to_vec().into())
            .message_id(&row.message_id)
            .expected_stream(&self.names.stream)
            .header("Task-Id", row.task.to_string())
            .header("Backend", row.lane.as_str())
            .header("Schema", "1");
        let sent = async { self.producer.js.send_publish(self.names.subject(row.lane, row.task), message).await?.await };
        let error = match sent.await {
            Ok(ack) => {
                self.known.placed(row.lane, row.task, ack.sequence);
                return Ok(Sent::Stored);
            }
            Err(error) => error,
        };
        let refused = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<async_nats::jetstream::Error>());
        let (code, text) = refused.map_or((0, String::new()), |e| (e.error_code().0, e.to_string()));
        match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => Ok(Sent::TooLarge(sealed.len())),
            _ if code == api::code::MESSAGE_TOO_LARGE => Ok(Sent::TooLarge(sealed.len())),
            _ if code == api::code::STORE_FAILED && text.contains("per subject") => {
                self.in_stream(row).await?.ok_or_else(|| "its place is taken, and free when looked at".into())
            }
            _ if code == api::code::STORE_FAILED => {
                Err(format!("the stream {} is full ({text}): raise its max_bytes (docs/nats.md)", self.names.stream))
            }
            PublishErrorKind::TimedOut => {
                Err("NATS does not acknowledge what is published: its disk is full (make room, and restart it), it hangs, or the user of \
                                               NATS_PRODUCER_USER may not publish there. It is sent again without end"
                    .into())
            }
            PublishErrorKind::StreamNotFound => {
                self.recheck();
                Err(format!("no stream takes {}: the stream {} is missing or has no leader", self.names.all(), self.names.stream))
            }
            _ if code != 0 => Err(format!("NATS refuses what is published: {text}")),
            _ => Err(format!("publish to NATS: {error}")),
        }
    }

    /// Whether the row, or another message of its task, is in the stream.
    async fn in_stream(&self, row: &Waiting) -> Result<Option<Sent>, String> {
        let found = self.find_message(row.task).await.map_err(|e| e.to_string())?;
        Ok(found.map(|(lane, message)| {
            let id = message.headers.get(async_nats::header::NATS_MESSAGE_ID).map(|id| id.as_str().to_owned());
            if id.as_deref() == Some(row.message_id.as_str()) {
                self.known.placed(lane, row.task, message.sequence);
                Sent::Stored
            } else {
                Sent::Taken(lane)
            }
        }))
    }

    /// The largest sealed assignment that the server and the stream take, as the last look at them showed.
    fn limit(&self) -> usize {
        self.max_message.load(std::sync::atomic::Ordering::Relaxed).saturating_sub(HEADER_BYTES)
    }
}
