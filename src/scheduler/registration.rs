//! Whether Gitea still knows us. One "unregistered runner" may be a database fail-over; three over a minute are the truth.

use std::time::Duration;

use tokio::time::Instant;

const CONFIRMATIONS: u32 = 3;
const CONFIRM_OVER: Duration = Duration::from_secs(60);
const CONFIRM_EVERY: Duration = Duration::from_secs(20);
/// While parked. The runner may have been restored at Gitea.
const PARKED_EVERY: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Registration {
    doubts: u32,
    since: Option<Instant>,
    lost: bool,
}

impl Registration {
    pub(super) fn confirmed(&mut self) {
        if self.lost {
            tracing::info!("Gitea knows this runner again; fetching goes on");
        }
        *self = Self::default();
    }

    /// Gitea denied knowing us; answers when to ask again.
    pub(super) fn doubted(&mut self, now: Instant) -> Duration {
        let since = *self.since.get_or_insert(now);
        self.doubts += 1;
        if !self.lost && self.doubts >= CONFIRMATIONS && now.duration_since(since) >= CONFIRM_OVER {
            self.lost = true;
            tracing::error!(
                "Gitea does not know this runner: it was deleted there, or its token is wrong. Running jobs go on, nothing new is \
                 fetched. Register anew: stop the service, remove credentials.json from the state directory, run \
                 `gitea-dynamic-runner register`, and start it"
            );
        }
        if self.lost { PARKED_EVERY } else { CONFIRM_EVERY }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_runner_is_lost_only_after_three_denials_over_a_minute() {
        let (mut registration, start) = (Registration::default(), Instant::now());
        for second in [0, 1, 2, 3, 59] {
            registration.doubted(start + Duration::from_secs(second));
            assert!(!registration.is_lost(), "{second}");
        }
        registration.doubted(start + Duration::from_secs(60));
        assert!(registration.is_lost());
        registration.confirmed();
        assert!(!registration.is_lost());
        registration.doubted(start);
        registration.doubted(start + Duration::from_secs(70));
        assert!(!registration.is_lost());
    }
}
