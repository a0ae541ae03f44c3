//! The demo's own parts: a stand-in forge, and a runner for plain `run:` steps.
//!
//! Both speak the real protocol over loopback. The tests use the same two, so what the demo shows is what the tests prove.

pub mod forge;
pub mod steps;
mod story;
mod workflow;

pub use self::story::run;
