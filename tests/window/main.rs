//! The window: what the pages and the JSON answers show, and that they follow what happens.
//!
//! `pages` asks the router in this process, with a mirror of the test's making; `browser` drives Chromium over a real run of the
//! demo; `api` holds a running controller's answers against the document that describes them.

#[path = "../support/mod.rs"]
mod support;
#[path = "../rules/world.rs"]
mod world;

mod api;
mod browser;
mod pages;
