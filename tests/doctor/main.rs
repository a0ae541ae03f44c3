//! `doctor` in worlds that are whole and worlds that are broken: each fault is named with its way out, and nothing is changed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/mod.rs"]
mod support;
#[path = "../rules/world.rs"]
mod world;

mod broken;
mod real_gitea;
