//! A nats-server, set up, and the queue in it, without a controller.

use std::{path::PathBuf, time::Duration};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{
        AssignmentQueue as _, Lease, Published, QueueError, QueueHealth,
        jetstream::{JetStreamOptions, JetStreamQueue, Settings},
    },
};

use crate::support::{eventually, nats::Nats};

pub(crate) const SOON: Duration = Duration::from_secs(20);
pub(crate) const AT_ONCE: Duration = Duration::ZERO;

pub(crate) struct Bench {
    pub(crate) queue: Option<JetStreamQueue>,
    pub(crate) nats: Nats,
    folder: tempfile::TempDir,
}

/// A queue whose folder has always room, open for business or not.
pub(crate) async fn open(path: &std::path::Path, settings: Settings) -> Result<JetStreamQueue, QueueError> {
    JetStreamQueue::open(path, settings, JetStreamOptions { min_free_bytes: 0 }).await
}

pub(crate) fn sealed(task: i64) -> Vec<u8> {
    format!("sealed {task} ").repeat(40).into_bytes()
}

impl Bench {
    pub(crate) async fn new() -> Self {
        let nats = Nats::start().await;
        nats.set_up().await;
        let bench = Self::over(nats).await;
        bench.is_fine().await;
        bench
    }

    /// With a server as it is.
    pub(crate) async fn over(nats: Nats) -> Self {
        let mut bench = Self { queue: None, nats, folder: tempfile::tempdir().unwrap() };
        bench.open().await;
        bench
    }

    pub(crate) fn outbox(&self) -> PathBuf {
        self.folder.path().join("outbox.redb")
    }

    pub(crate) fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    pub(crate) async fn open(&mut self) {
        self.queue = Some(open(&self.outbox(), self.nats.settings()).await.unwrap());
    }

    /// As after a crash: nothing is said to the server.
    pub(crate) fn close(&mut self) {
        self.queue = None;
    }

    pub(crate) fn queue(&self) -> &JetStreamQueue {
        self.queue.as_ref().unwrap()
    }

    pub(crate) async fn is_fine(&self) {
        let fine = async || {
            self.queue().tend().await;
            (self.queue().health().await == QueueHealth::Fine).then_some(())
        };
        eventually("the queue is fit", SOON, fine).await;
    }

    /// Why it is unfit, once that contains `text`.
    pub(crate) async fn is_unfit(&self, text: &str) -> String {
        let mut last = String::new();
        let unfit = async || {
            self.queue().tend().await;
            match self.queue().health().await {
                QueueHealth::Unfit(why) if why.contains(text) => Some(why),
                QueueHealth::Unfit(why) => {
                    last = why;
                    None
                }
                QueueHealth::Fine => None,
            }
        };
        let why = tokio::time::timeout(SOON * 2, eventually(text, SOON, unfit));
        why.await.unwrap()
    }

    pub(crate) async fn publish(&self, task: i64) -> Published {
        self.queue().publish(Lane::Pod, TaskId(task), &sealed(task)).await.unwrap()
    }

    pub(crate) async fn lease(&self) -> Lease {
        self.queue().lease(Lane::Pod, SOON).await.unwrap().expect("an assignment")
    }

    pub(crate) async fn tasks(&self) -> Vec<i64> {
        self.queue().list(Lane::Pod).await.unwrap().into_iter().map(|facts| facts.task.0).collect()
    }

    /// All that is there, taken and completed, in the order in which it came.
    pub(crate) async fn empty(&self) -> Vec<i64> {
        let mut came = Vec::new();
        while let Some(lease) = self.queue().lease(Lane::Pod, AT_ONCE).await.unwrap() {
            assert_eq!(lease.sealed, sealed(lease.task.0));
            came.push(lease.task.0);
            self.queue().complete(lease).await.unwrap();
        }
        came
    }

    /// What the outbox still holds.
    pub(crate) async fn waiting(&self) -> u64 {
        self.queue().tend().await.outbox
    }

    pub(crate) async fn drained(&self) {
        eventually("the outbox is empty", SOON, async || (self.waiting().await == 0).then_some(())).await;
    }
}
