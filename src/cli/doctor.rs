//! `doctor`: prints what `crate::doctor` finds, for people or as JSON, and says by its exit code whether something must be done.

use std::process::ExitCode;

use clap::Args;

use super::{exit, say};
use crate::{
    config::{self, Mode},
    doctor::{self, Item, State},
    printable::printable,
};

#[derive(Args)]
pub(super) struct Doctor {
    /// As for `serve`.
    #[arg(long)]
    standalone: bool,
    /// For programs: one JSON value.
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: &Doctor) -> ExitCode {
    if let Err(e) = crate::process::harden() {
        return super::told(&anyhow::Error::new(e).context("make the process non-dumpable"));
    }
    let mode = if args.standalone { Mode::Standalone } else { Mode::Full };
    let items = doctor::examine(config::process_environment(), mode).await;
    let to_do = items.iter().filter(|item| item.state == State::Todo).count();
    if args.json {
        say(&serde_json::json!({ "to_do": to_do, "items": items }).to_string());
    } else {
        say(&readable(&items, to_do));
    }
    if to_do == 0 { ExitCode::SUCCESS } else { ExitCode::from(exit::TO_DO) }
}

fn readable(items: &[Item], to_do: usize) -> String {
    let mut lines: Vec<String> = items.iter().map(line).collect();
    lines.push(match to_do {
        0 => "Nothing must be done.".to_owned(),
        n => format!("{n} thing(s) to do."),
    });
    lines.join("\n")
}

fn line(item: &Item) -> String {
    let mark = match item.state {
        State::Fine => "fine   ",
        State::Note => "note   ",
        State::Unknown => "unknown",
        State::Todo => "TO DO  ",
    };
    let said = format!("{mark} {}: {}", item.name, printable(&item.said));
    match &item.to_do {
        Some(way_out) => format!("{said}\n        → {}", printable(way_out)),
        None => said,
    }
}
