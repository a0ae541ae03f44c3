//! Taking one delivery, and settling it.
//!
//! A pull is asked for when the caller has a slot, and never before: one message, no heartbeat (the client loses wake-ups with one), a new
//! question as soon as there is a new connection. Every settlement is a question whose answer is waited for; all may be repeated.

use std::time::{Duration, Instant};

use async_nats::{Message, StatusCode, Subscriber, client::Request, jetstream};
use futures::{FutureExt as _, StreamExt as _};

use super::{JetStreamQueue, api, api::ApiError, known::Standing};
use crate::{
    failpoint,
    ids::{Lane, TaskId},
    queue::{Lease, LeaseToken, MAX_DELAY, QueueError, Settled},
};

/// One pull at the server; after it, it is asked again.
const PULL_EXPIRES: Duration = Duration::from_secs(30);
/// How much later than it should the server may say that there was nothing.
const PULL_GRACE: Duration = Duration::from_secs(2);
/// After an answer that is no assignment and no end of the wait.
const PULL_PAUSE: Duration = Duration::from_millis(250);
/// How long a settlement waits for a connection that is just being made again.
const UP_LIMIT: Duration = Duration::from_secs(3);
/// A settlement is asked for so often; more is the caller's.
const SETTLE_TRIES: u32 = 2;
/// A longer reason is cut.
const REASON_CHARS: usize = 2000;

/// How a pull ended.
enum Pulled {
    Message(Box<Message>),
    Nothing,
    /// Ask again: at once after a new connection, else after a pause.
    Again,
    Pause(String),
}

impl JetStreamQueue {
    /// The oldest of a lane, or `None` after `wait`, also where nothing may be leased now (`health` says why).
    pub(super) async fn pull(&self, lane: Lane, wait: Duration) -> Result<Option<Lease>, QueueError> {
        let end = Instant::now() + wait.min(super::MAX_WAIT);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if !self.open_within(left).await {
                return Ok(None);
            }
            let left = end.saturating_duration_since(Instant::now());
            let pulled =
                self.pull_once(lane, left.min(PULL_EXPIRES)).await.map_err(|e| e.while_doing("ask NATS for an assignment"))?;
            match pulled {
                Pulled::Message(message) => {
                    if let Some(lease) = self.take(lane, *message).await? {
                        return Ok(Some(lease));
                    }
                }
                Pulled::Again => {}
                Pulled::Pause(why) => {
                    tracing::debug!(%lane, why, "a pull was turned down");
                    self.recheck();
                    tokio::time::sleep(PULL_PAUSE).await;
                }
                Pulled::Nothing => {}
            }
            if Instant::now() >= end {
                return Ok(None);
            }
        }
    }

    async fn pull_once(&self, lane: Lane, wait: Duration) -> Result<Pulled, ApiError> {
        let link = &self.worker;
        let mut connections = link.watch();
        let mut refusals = link.watch_refusals();
        connections.mark_unchanged();
        refusals.mark_unchanged();
        let inbox = link.client.new_inbox();
        let other = |e: &dyn std::fmt::Display| ApiError::Other(e.to_string());
        let mut answers = link.client.subscribe(inbox.clone()).await.map_err(|e| other(&e))?;
        let question = if wait.is_zero() {
            serde_json::json!({ "batch": 1, "no_wait": true })
        } else {
            serde_json::json!({ "batch": 1, "expires": u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX) })
        };
        let request = Request::new().payload(question.to_string().into()).inbox(inbox);
        let asked = link.js.send_request(format!("CONSUMER.MSG.NEXT.{}.{lane}", self.names.stream), request).await;
        asked.map_err(|e| other(&e))?;
        let pulled = tokio::select! {
            answer = answers.next() => answer.map_or(Pulled::Again, judged),
            // The server has forgotten the pull with the connection.
            _ = connections.changed() => Pulled::Again,
            _ = refusals.changed() => Pulled::Pause("a subject is refused".into()),
            () = tokio::time::sleep(wait + PULL_GRACE) => Pulled::Nothing,
        };
        self.give_back_the_rest(answers).await;
        Ok(pulled)
    }

    /// A message that came while we turned away is not left to its deadline.
    async fn give_back_the_rest(&self, mut answers: Subscriber) {
        // Failing, the deadline gives it back.
        answers.unsubscribe().await.ok();
        while let Some(Some(late)) = answers.next().now_or_never() {
            if let Some(reply) = late.reply.filter(|_| late.status.is_none()) {
                api::settle(&self.worker, &reply, "-NAK".into()).await.ok();
            }
        }
    }

    /// Makes a lease of a message. `None`: it was none, and has gone to the dead letters.
    async fn take(&self, lane: Lane, message: Message) -> Result<Option<Lease>, QueueError> {
        let message = jetstream::Message { message, context: self.worker.js.clone() };
        let info = message.info().map_err(|e| QueueError::Unavailable(format!("read a delivery from NATS: {e}")))?;
        let delivery = u32::try_from(info.delivered).unwrap_or(1);
        let token = LeaseToken { seq: info.stream_sequence, fence: info.consumer_sequence };
        let reply = message.reply.as_ref().map(ToString::to_string).unwrap_or_default();
        let Some((_, task)) = self.names.parse(&message.subject) else {
            let reason = format!("the subject {} names no task", message.subject);
            tracing::error!(%lane, reason, "failed to take a message for an assignment; it goes to the dead letters");
            self.bury(lane, "unreadable", token.seq, &message.payload, &reason).await?;
            self.settle(&reply, format!("+TERM {reason}")).await?;
            return Ok(None);
        };
        let id = message.headers.as_ref().and_then(|headers| headers.get(async_nats::header::NATS_MESSAGE_ID));
        let message_id = id.map(|id| id.as_str().to_owned());
        let lease = Lease { lane, task, sealed: message.payload.to_vec(), delivery, token };
        self.known.leased(&lease, reply, message_id);
        failpoint::reached("delivery.taken");
        Ok(Some(lease))
    }

    pub(super) async fn settle(&self, reply: &str, word: String) -> Result<(), QueueError> {
        let mut last = ApiError::TimedOut;
        for _ in 0..SETTLE_TRIES {
            if !self.worker.up_within(UP_LIMIT).await {
                return Err(QueueError::Unavailable("NATS is away".into()));
            }
            match api::settle(&self.worker, reply, word.clone()).await {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last.while_doing("settle a delivery with NATS"))
    }

    /// Out of the stream for good, once the server has said so. Dying before it, or no answer: it comes again, and is found over (R4).
    pub(super) async fn ack(&self, lease: &Lease) -> Result<Settled, QueueError> {
        let reply = match self.known.standing(lease) {
            Standing::Ours(reply) => reply,
            Standing::Gone => return Ok(Settled::AlreadyGone),
            Standing::Lost => return Ok(Settled::LeaseLost),
        };
        self.settle(&reply, "+ACK".into()).await?;
        failpoint::reached("delivery.acked");
        self.left(lease.lane, lease.task).await;
        Ok(Settled::Done)
    }

    pub(super) async fn progress(&self, lease: &Lease) -> Result<(), QueueError> {
        let reply = self.held(lease)?;
        self.settle(&reply, "+WPI".into()).await?;
        self.known.extended(lease);
        Ok(())
    }

    pub(super) async fn nak(&self, lease: &Lease, delay: Duration) -> Result<(), QueueError> {
        let reply = self.held(lease)?;
        let delay = delay.min(MAX_DELAY);
        let word = if delay.is_zero() { "-NAK".into() } else { format!("-NAK {{\"delay\": {}}}", delay.as_nanos()) };
        self.settle(&reply, word).await?;
        self.known.released(lease, (!delay.is_zero()).then(|| Instant::now() + delay));
        Ok(())
    }

    /// Dead letter first, then out of the stream: dying in between writes it again, under the same message id.
    pub(super) async fn dead_letter(&self, lease: &Lease, reason: &str) -> Result<(), QueueError> {
        let reply = self.held(lease)?;
        self.bury(lease.lane, &lease.task.to_string(), lease.token.seq, &lease.sealed, reason).await?;
        failpoint::reached("delivery.buried");
        self.settle(&reply, format!("+TERM {}", one_line(reason))).await?;
        self.left(lease.lane, lease.task).await;
        Ok(())
    }

    async fn bury(&self, lane: Lane, task: &str, seq: u64, sealed: &[u8], reason: &str) -> Result<(), QueueError> {
        let message = jetstream::message::PublishMessage::build()
            .payload(sealed.to_vec().into())
            .message_id(format!("{}-{}-{seq}", self.names.stream, self.outbox.stream_created().unwrap_or_default()))
            .expected_stream(self.names.dead_stream())
            .header("Task-Id", task)
            .header("Backend", lane.as_str())
            .header("Reason", one_line(reason));
        let sent = async { self.worker.js.send_publish(self.names.dead(lane, task), message).await?.await };
        let failed = |e| QueueError::Unavailable(format!("write a dead letter to the stream {}: {e}", self.names.dead_stream()));
        sent.await.map(drop).map_err(failed)
    }

    fn held(&self, lease: &Lease) -> Result<String, QueueError> {
        match self.known.standing(lease) {
            Standing::Ours(reply) => Ok(reply),
            Standing::Gone | Standing::Lost => Err(QueueError::LeaseLost),
        }
    }

    /// It was settled, so nothing of it is kept here. A crash may have left the row of this very message though NATS had it; another
    /// row of its task is another job.
    async fn left(&self, lane: Lane, task: TaskId) {
        let Some(message_id) = self.known.gone(lane, task) else { return };
        if let Some((number, _)) = self.outbox.find(task).filter(|(_, row)| row.message_id == message_id)
            && let Err(error) = self.outbox.remove(number).await
        {
            tracing::warn!(%task, %error, "failed to remove a settled assignment from the outbox; it is found over when it comes again");
        }
    }
}

fn judged(message: Message) -> Pulled {
    match message.status {
        None | Some(StatusCode::OK) => Pulled::Message(Box::new(message)),
        Some(StatusCode::NOT_FOUND | StatusCode::TIMEOUT) => Pulled::Nothing,
        Some(status) => Pulled::Pause(format!("{status} {}", message.description.unwrap_or_default())),
    }
}

/// Fit for a header and for a protocol line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON_CHARS).collect()
}
