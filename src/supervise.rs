//! The tasks without which the process is not whole: named, watched, and the first to end ends the process with its name.
//!
//! Nothing is restarted in here: edges retry their neighbours, and systemd or Kubernetes restarts processes.

use std::time::Duration;

use tokio::{task::JoinSet, time::Instant};

#[derive(Default)]
pub struct Essential {
    tasks: JoinSet<&'static str>,
    names: Vec<(tokio::task::Id, &'static str)>,
}

/// An essential task ended before it should.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("essential task {name} ended: {how}")]
pub struct EndedEarly {
    pub name: &'static str,
    pub how: String,
}

impl Essential {
    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let handle = self.tasks.spawn(async move {
            task.await;
            name
        });
        self.names.push((handle.id(), name));
    }

    /// Resolves when any of them ends; for ever pending if there are none.
    pub async fn ended(&mut self) -> EndedEarly {
        match self.tasks.join_next_with_id().await {
            Some(Ok((id, name))) => {
                self.names.retain(|(known, _)| *known != id);
                EndedEarly { name, how: "it returned".into() }
            }
            Some(Err(e)) => {
                let name = self.names.iter().find(|(id, _)| *id == e.id()).map_or("unknown", |(_, name)| name);
                self.names.retain(|(id, _)| *id != e.id());
                EndedEarly { name, how: if e.is_panic() { "it panicked".into() } else { "it was aborted".into() } }
            }
            None => std::future::pending().await,
        }
    }

    /// Waits until all have ended, at most `limit`; the rest is aborted and named.
    pub async fn drain(mut self, limit: Duration) -> Vec<&'static str> {
        let deadline = Instant::now() + limit;
        while !self.tasks.is_empty() {
            match tokio::time::timeout_at(deadline, self.ended()).await {
                Ok(ended) if ended.how == "it panicked" => tracing::error!(task = ended.name, "a task panicked while ending"),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        self.tasks.abort_all();
        self.names.into_iter().map(|(_, name)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_task_that_ends_is_named() {
        let mut essential = Essential::default();
        essential.spawn("stays", std::future::pending());
        essential.spawn("panics", async { panic!("as it should") });
        assert_eq!(essential.ended().await, EndedEarly { name: "panics", how: "it panicked".into() });
        essential.spawn("returns", async {});
        assert_eq!(essential.ended().await.name, "returns");
        assert_eq!(essential.drain(Duration::from_millis(20)).await, ["stays"]);
    }
}
