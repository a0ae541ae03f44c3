//! The tasks without which the process is not whole: named, watched, and the first to end ends the process with its name.
//!
//! Nothing is restarted in here: edges retry their neighbours, and systemd or Kubernetes restarts processes. Whether the tasks still
//! turn is seen here too ([`Pulses`]); what follows from it is for who asks.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{task::JoinSet, time::Instant};

/// A task that does not come back from one step for this long blocks its thread: a dead lock, or a disk that does not answer.
const STEP_LIMIT: Duration = Duration::from_secs(30);

#[derive(Default)]
pub struct Essential {
    tasks: JoinSet<&'static str>,
    names: Vec<(tokio::task::Id, &'static str)>,
    pulses: Pulses,
}

/// How often a task moves by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turns {
    /// When something happens; that may be never.
    WhenCalled,
    /// At least once in this time, whatever happens.
    Within(Duration),
}

/// When each essential task last moved. Every clone sees the same tasks.
#[derive(Clone)]
pub struct Pulses {
    since: Instant,
    tasks: Arc<Mutex<Vec<Arc<Pulse>>>>,
}

/// Of one task.
struct Pulse {
    name: &'static str,
    turns: Turns,
    /// Milliseconds from `Pulses::since` to the begin or end of its last step.
    at_ms: AtomicU64,
    in_step: AtomicBool,
}

impl Default for Pulses {
    fn default() -> Self {
        Self { since: Instant::now(), tasks: Arc::default() }
    }
}

impl Pulses {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The task, seen at each step that it makes.
    fn seen<F: Future<Output = ()>>(&self, name: &'static str, turns: Turns, task: F) -> impl Future<Output = ()> + use<F> {
        let pulse = Arc::new(Pulse { name, turns, at_ms: self.now_ms().into(), in_step: false.into() });
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&pulse));
        let pulses = self.clone();
        async move {
            let mut task = pin!(task);
            let step = |in_step| {
                pulse.at_ms.store(pulses.now_ms(), Ordering::Relaxed);
                pulse.in_step.store(in_step, Ordering::Relaxed);
            };
            std::future::poll_fn(|context| {
                step(true);
                let polled = task.as_mut().poll(context);
                step(false);
                polled
            })
            .await;
        }
    }

    /// The tasks that hang: in one step for too long, or without one for longer than they ever rest.
    pub fn stalled(&self) -> Vec<&'static str> {
        let now = self.now_ms();
        let hangs = |pulse: &Pulse| {
            let rested = Duration::from_millis(now.saturating_sub(pulse.at_ms.load(Ordering::Relaxed)));
            match pulse.turns {
                _ if pulse.in_step.load(Ordering::Relaxed) => rested > STEP_LIMIT,
                Turns::WhenCalled => false,
                Turns::Within(limit) => rested > limit,
            }
        };
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.iter().filter(|pulse| hangs(pulse)).map(|pulse| pulse.name).collect()
    }
}

/// An essential task ended before it should.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("essential task {name} ended: {how}")]
pub struct EndedEarly {
    pub name: &'static str,
    pub how: String,
}

impl Essential {
    /// Its tasks are seen among those of `pulses`.
    pub fn seen_in(pulses: Pulses) -> Self {
        Self { pulses, ..Self::default() }
    }

    pub fn spawn(&mut self, name: &'static str, turns: Turns, task: impl Future<Output = ()> + Send + 'static) {
        let task = self.pulses.seen(name, turns, task);
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
        essential.spawn("stays", Turns::WhenCalled, std::future::pending());
        essential.spawn("panics", Turns::WhenCalled, async { panic!("as it should") });
        assert_eq!(essential.ended().await, EndedEarly { name: "panics", how: "it panicked".into() });
        essential.spawn("returns", Turns::WhenCalled, async {});
        assert_eq!(essential.ended().await.name, "returns");
        assert_eq!(essential.drain(Duration::from_millis(20)).await, ["stays"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_rests_too_long_is_named_and_one_that_waits_to_be_called_is_not() {
        let pulses = Pulses::default();
        let mut essential = Essential::seen_in(pulses.clone());
        let period = Duration::from_secs(5);
        essential.spawn("turns", Turns::Within(period * 2), async move {
            loop {
                tokio::time::sleep(period).await;
            }
        });
        essential.spawn("hangs", Turns::Within(period * 2), std::future::pending());
        essential.spawn("waits", Turns::WhenCalled, std::future::pending());
        tokio::time::sleep(period).await;
        assert!(pulses.stalled().is_empty());
        tokio::time::sleep(period * 2).await;
        assert_eq!(pulses.stalled(), ["hangs"]);
    }

    #[test]
    fn a_task_that_does_not_come_back_from_a_step_is_named() {
        let pulses = Pulses { since: Instant::now() - STEP_LIMIT * 3, tasks: Arc::default() };
        let stuck = Pulse { name: "stuck", turns: Turns::WhenCalled, at_ms: 0.into(), in_step: true.into() };
        pulses.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(stuck.into());
        assert_eq!(pulses.stalled(), ["stuck"]);
    }
}
