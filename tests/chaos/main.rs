//! The whole controller under faults: crashed at every failpoint, killed at random with its neighbours, and each fault of the matrix in
//! `docs/faults.md`.
//!
//! Each story ends with its ledger (job, result, how often its first step began), and by proving that nothing is left running.

#[path = "../support/mod.rs"]
mod support;
#[path = "../rules/world.rs"]
mod world;

mod failpoints;
mod faults;
mod jetstream;
mod ledger;
mod real;
mod run;
mod upgrade;
