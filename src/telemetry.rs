//! Logs: JSON lines for machines, or text for a terminal, to standard error.
//!
//! Panics go the same way, so that none is lost in a service's log.

use tracing_subscriber::{EnvFilter, fmt};

/// `json` unless `LOG_FORMAT=text`; what is shown follows `RUST_LOG`, else `default`.
pub fn start(format: Option<&str>, default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let started = match format {
        Some("text") => fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).try_init(),
        _ => fmt()
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .try_init(),
    };
    if started.is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let at = panic.location().map(ToString::to_string).unwrap_or_default();
            // The message may hold what was being worked on, so only the place is shown.
            tracing::error!(at, "panicked: a fault of this program; please report it");
        }));
    }
}
