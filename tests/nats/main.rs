//! What only the queue in JetStream must survive, against a real nats-server (`tests/run.sh nats`): its crashes and absences, its refusals, and
//! the controller above it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "the world is shared with other stories")]

mod bench;
mod checks;
mod controller;
mod crashes;
mod doctor;
mod limits;
mod outbox;
mod rights;
mod setup;
#[path = "../support/mod.rs"]
mod support;
#[path = "../rules/world.rs"]
mod world;
