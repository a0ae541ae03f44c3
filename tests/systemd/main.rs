//! The package, under a real systemd: it boots in a container, beside a real Gitea on this machine, and runs jobs of the official runner.
//!
//! Each story has a machine of its own ([`machine`]) and ends it by its process id. `tests/run.sh systemd` installs what they need; they need root.

#[path = "../support/mod.rs"]
mod support;

mod image;
mod machine;
mod package;
mod service;
