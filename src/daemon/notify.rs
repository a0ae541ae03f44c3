//! What systemd is told of a running controller (sd_notify(3)): ready when `/readyz` is, one line on how it is, and that it still turns.
//!
//! It only tells. Why the process is not ready is for `health`, whether its tasks turn for `supervise`, and what follows from silence for
//! systemd. Without `NOTIFY_SOCKET` nothing of it happens.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::MissedTickBehavior;

use crate::{health::Health, supervise::Pulses};

/// Readiness is looked at this often.
const PERIOD: Duration = Duration::from_millis(500);
/// While it is not ready, its start may take this much longer, each time it is said. So a start that waits for Gitea is waited for, however
/// long that takes, and one that hangs is ended.
const START_EXTENSION: Duration = Duration::from_secs(60);
/// A line of `systemctl status`.
const STATUS_LENGTH: usize = 200;

/// Tells until it is dropped; dropping says that the process is about to end.
pub(super) struct Told(Option<tokio::task::JoinHandle<()>>);

impl Drop for Told {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
            say(&[NotifyState::Stopping, NotifyState::Status("stopping: nothing new is begun; running environments go on")]);
        }
    }
}

/// A task of the runtime, so that its silence also says that the runtime does not turn.
pub(super) fn tell(health: Health, pulses: Pulses) -> Told {
    let listens = std::env::var_os("NOTIFY_SOCKET").is_some();
    Told(listens.then(|| tokio::spawn(telling(health, pulses))))
}

async fn telling(health: Health, pulses: Pulses) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut was_ready, mut status_told, mut stall_told) = (false, String::new(), Vec::new());
    loop {
        ticks.tick().await;
        let stalled = pulses.stalled();
        if stalled != stall_told && !stalled.is_empty() {
            tracing::error!(tasks = ?stalled, "tasks hang: systemd is not told any more that all is well, and will restart this process");
        }
        let (reasons, turns) = (health.reasons(), stalled.is_empty());
        stall_told = stalled;
        let status = status(&reasons);
        let mut states = Vec::new();
        if status != status_told {
            states.push(NotifyState::Status(&status));
        }
        if reasons.is_empty() && !was_ready {
            was_ready = true;
            states.push(NotifyState::Ready);
        }
        if turns {
            // The watchdog counts from `READY=1` on, the start's limit until then.
            states.push(NotifyState::Watchdog);
            if !was_ready {
                states.push(NotifyState::ExtendTimeoutUsec(u32::try_from(START_EXTENSION.as_micros()).unwrap_or(u32::MAX)));
            }
        }
        say(&states);
        status_told = status;
    }
}

fn say(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "failed to speak to systemd");
    }
}

/// One line, without anything that would end it.
fn status(reasons: &[String]) -> String {
    let text = if reasons.is_empty() { "ready".to_owned() } else { format!("not ready: {}", reasons.join("; ")) };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(STATUS_LENGTH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_cannot_say_more_than_its_line() {
        let said = status(&["gitea: no\nWATCHDOG=1".to_owned(), "x".repeat(500)]);
        assert!(
            said.starts_with("not ready: gitea: no WATCHDOG=1; x")
                && said.chars().count() == STATUS_LENGTH
                && !said.contains('\n')
        );
        assert_eq!(status(&[]), "ready");
    }
}
