//! Stories of the whole controller against the stand-in forge: one for each rule R1 to R12, and for crashes at its bad moments.
//!
//! The controller is the built binary as a process of its own, its inner runner the demo's steps runner; the forge is in this
//! process, so that it can fail, lose answers and go back to a backup on order. Each story ends, when its world is dropped, by
//! proving that nothing is left running.

#[path = "../support/mod.rs"]
mod support;

mod attacks;
mod drain;
mod environments;
mod fetching;
mod instances;
mod outages;
mod passes;
mod queued;
mod reasons;
mod registration;
mod reports;
mod restarts;
mod series;
mod twice;
mod upgrades;
mod world;
