//! x
pub mod facade;
pub mod delivery;
pub mod spool;
pub mod stop;
pub mod bridge;
mod task;
mod path;
mod proxy;

use std::time::Duration;
/// Waits between tries: twice as long each time, up to a limit, with jitter.
pub struct Backoff {
    first: Duration,
    limit: Duration,
    next: Duration,
}

impl Backoff {
    pub fn new(first: Duration, limit: Duration) -> Self {
        Self { first, limit, next: first }
    }

    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// Sleeps between half and the whole of the present wait.
    pub async fn sleep(&mut self) {
        tokio::time::sleep(self.next.mul_f64(rand::random_range(0.5..=1.0))).await;
        self.next = (self.next * 2).min(self.limit);
    }
}
