//! The mirror: what it remembers of jobs, and that no job depends on it.
//!
//! `file` holds its file against damage, crashes and full disks; the stories are of the whole controller against the stand-in
//! forge, with the mirror deleted, cut or swapped at bad moments.

#[path = "../support/mod.rs"]
mod support;
#[path = "../rules/world.rs"]
mod world;

mod deleted;
mod file;
mod migrations;
mod passes;
mod shown;
mod stranded;
