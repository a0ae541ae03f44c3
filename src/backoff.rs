//! Waiting longer after each failure, with jitter, so that many who failed together do not come back together.

use std::time::Duration;

/// Doubles from `first` to `most`; each wait is shortened by up to a third.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    pub fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, next: first }
    }

    /// The next wait; each call counts as a failure.
    pub fn step(&mut self) -> Duration {
        let wait = self.next;
        self.next = (self.next * 2).min(self.most);
        wait.mul_f64(1.0 - rand::random::<f64>() / 3.0)
    }

    pub async fn wait(&mut self) {
        tokio::time::sleep(self.step()).await;
    }

    /// It went well: start small again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_most_and_start_anew_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(4));
        for most in [1, 2, 4, 4, 4] {
            let wait = backoff.step();
            assert!(wait <= Duration::from_secs(most) && wait >= Duration::from_secs(most).mul_f64(0.66), "{wait:?} {most}");
        }
        backoff.reset();
        assert!(backoff.step() <= Duration::from_secs(1));
    }
}
