//! Assignments that the stream holds and its consumer gives to nobody any more, as after a limit on deliveries.
//!
//! Such a message is in no count of the consumer. It is known by what is left over: what the consumer has passed by, and neither we nor the
//! server have out. Found in two looks, it is published anew by way of the outbox, which takes the old one's place: dying anywhere in
//! between, the row is there.

use std::collections::BTreeSet;

use super::{JetStreamQueue, api, api::ApiError};
use crate::{
    ids::{Lane, TaskId},
    queue::QueueError,
};

/// Suspects of the last look, with their places: a message that moved is another one.
pub(super) type Suspects = BTreeSet<(Lane, TaskId, u64)>;

impl JetStreamQueue {
    /// How many were brought back.
    pub(super) async fn revive(&self) -> Result<u64, QueueError> {
        if !self.is_open() {
            return Ok(0);
        }
        let mut found = Suspects::new();
        for lane in Lane::ALL {
            found.extend(self.stuck_in(lane).await?);
        }
        let again: Vec<_> = found.intersection(&self.suspects()).copied().collect();
        *self.suspects() = found;
        let mut revived = 0;
        for (lane, task, seq) in again {
            revived += u64::from(self.publish_anew(lane, task, seq).await?);
        }
        Ok(revived)
    }

    async fn stuck_in(&self, lane: Lane) -> Result<Suspects, QueueError> {
        let failed = |e: ApiError| e.while_doing("look for stuck deliveries");
        let tasks = self.in_order(lane).await?;
        // After the list: what is published or taken in between makes the consumer's numbers larger, never smaller.
        let info = api::consumer_info(self.up()?, &self.names.stream, lane.as_str()).await.map_err(failed)?;
        let passed = info.delivered.stream_sequence;
        let placed = tasks.iter().filter_map(|task| Some((*task, self.known.place(lane, *task)?)));
        let left_over: Suspects = placed
            .filter(|(task, seq)| *seq <= passed && !self.known.is_out(lane, *task))
            .map(|(task, seq)| (lane, task, seq))
            .collect();
        let counted = info.num_pending.saturating_add(info.num_ack_pending as u64);
        // Everything is accounted for: what looks left over is on its way to being delivered again.
        Ok(if tasks.len() as u64 > counted { left_over } else { Suspects::new() })
    }

    async fn publish_anew(&self, lane: Lane, task: TaskId, seq: u64) -> Result<bool, QueueError> {
        let Some((_, message)) = self.find_message(task).await?.filter(|(of, message)| *of == lane && message.sequence == seq)
        else {
            return Ok(false);
        };
        if self.outbox.find(task).is_some() {
            return Ok(false);
        }
        tracing::error!(%task, %lane, "failed to get an assignment delivered: its consumer had given it up (a limit on deliveries?). \
            It is put into the queue anew; look at the consumer with `gitea-dynamic-runner nats-setup`");
        self.outbox.put(lane, task, message.payload.to_vec()).await?;
        self.drain().await;
        Ok(true)
    }
}
