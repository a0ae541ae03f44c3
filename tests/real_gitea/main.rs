//! Stories of whole jobs: a real Gitea, the unmodified official runner, and the built controller between them.
//!
//! Each story has servers of its own and ends, when its controller is dropped, by proving that nothing is left running.
//! `tests/run.sh gitea` installs what they need.

#[path = "../support/mod.rs"]
mod support;

mod endings;
mod jobs;
mod places;
mod restarts;
mod window;
