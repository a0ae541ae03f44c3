//! gitea-dynamic-runner: one runner registration, and behind it a one-shot environment for each Gitea Actions job.
//!
//! In reading order; who may use whom is in `docs/ARCHITECTURE.md` and checked by `tests/tidy.rs`.

// Facts: no IO.
pub mod assignment;
pub mod backoff;
pub mod board;
pub mod claims;
pub mod drain;
pub mod environment;
pub mod failpoint;
pub mod files;
pub mod ids;
pub mod names;
pub mod plan;
pub mod printable;
pub mod process;
pub mod proto;
pub mod secret;
pub mod spiffe_name;
pub mod task;

// Edges: one neighbour each.
pub mod backend;
pub mod gitea;
pub mod identity;
pub mod leader;
pub mod metrics;
pub mod mirror;
pub mod queue;

// Roles: what the controller does.
pub mod backlog;
pub mod facade;
pub mod http;
pub mod reconcile;
pub mod scheduler;
pub mod slots;
pub mod waiting;
pub mod worker;

// In the environment.
pub mod executor;

// Wiring.
pub mod cli;
pub mod config;
pub mod daemon;
pub mod doctor;
pub mod health;
pub mod supervise;
pub mod telemetry;

// A stand-in forge and a small runner, for the demo and the tests.
pub mod demo;
