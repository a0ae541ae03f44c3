//! `nats-setup`: makes the stream, its consumers and the dead letters in NATS, as an administrator that the controller never is.
//!
//! Without `--yes` it only says what there is and what would be done.

use std::{path::Path, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{
    assignment::{Assignment, Rules, seal::SealKeys},
    config::{self, Faults, Reader, nats},
    files::{self, Durable},
    ids::TaskId,
    queue::jetstream::{
        ACCEPTED_FILE, Accepted, KNOWN_FILE,
        setup::{Missing, Plan, Setup},
    },
};

#[derive(Args)]
pub(super) struct NatsSetup {
    /// Do what the plan says; without it, it is only shown.
    #[arg(long)]
    yes: bool,
    /// Move a stream of the old layout (one subject for each backend) to one subject for each task. Stop whatever uses it first.
    #[arg(long)]
    migrate: bool,
    /// Let the controller of this state folder take the stream that is there for its own, though it knew another one.
    #[arg(long)]
    accept: bool,
    /// Make an empty stream in the place of one whose data are lost for good, and accept it.
    #[arg(long)]
    replace_lost: bool,
    /// For new streams in a cluster: how many servers keep each message (1, 3 or 5).
    #[arg(long, default_value_t = 1, value_name = "N")]
    replicas: u64,
}

pub(super) async fn run(args: NatsSetup) -> ExitCode {
    match set_up(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is::<Faults>() => e.downcast::<Faults>().map_or(ExitCode::FAILURE, |faults| super::told_faults(&faults)),
        Err(e) => super::told(&e),
    }
}

async fn set_up(args: NatsSetup) -> anyhow::Result<()> {
    crate::process::harden().context("make the process non-dumpable")?;
    let mut read = Reader::new(config::process_environment());
    let (settings, admin, state) = (nats::without_users(&mut read), nats::admin(&mut read), read.state_directory());
    let seal_key = read.file("SEAL_KEY_FILE").unwrap_or_else(|| state.join("private/seal.key"));
    let rules =
        Rules { trust_domain: read.or("TRUST_DOMAIN", "dynamic-runner.development"), vm_label: read.or("VM_RUNNER_LABEL", "vm") };
    read.finish(())?;
    let setup = Setup::connect(&settings, &admin, args.replicas).await?;
    if args.migrate {
        migrate(&setup, &args, &seal_key, &rules).await?;
    }
    let missing = if args.replace_lost { Missing::ReplaceLost } else { Missing::MakeNew };
    let plan = setup.plan(known(&state).as_ref(), missing).await?;
    super::say(plan.to_string().trim_end());
    carry_out(&setup, &plan, &args).await?;
    if args.accept || (args.replace_lost && args.yes) {
        accept(&setup.stream().await?, &state)?;
    }
    Ok(())
}

async fn carry_out(setup: &Setup, plan: &Plan, args: &NatsSetup) -> anyhow::Result<()> {
    if plan.refused() {
        bail!("nothing was changed: see above what cannot be made right in place, and docs/nats.md for the way out");
    }
    if plan.nothing_to_do() {
        super::say("Nothing to do.");
        return Ok(());
    }
    if !args.yes {
        super::say("Nothing was changed. Run it again with --yes to do this.");
        return Ok(());
    }
    setup.carry_out(plan).await?;
    super::say("Done.");
    Ok(())
}

async fn migrate(setup: &Setup, args: &NatsSetup, seal_key: &Path, rules: &Rules) -> anyhow::Result<()> {
    let Some(waiting) = setup.flat_messages().await? else {
        super::say("There is nothing of the old layout.");
        return Ok(());
    };
    if !args.yes {
        bail!(
            "{waiting} message(s) of the old layout would get subjects of their own. Stop whatever uses the stream, then add --yes"
        );
    }
    let keys = std::fs::read_to_string(seal_key).ok().and_then(|text| SealKeys::parse(&text).ok());
    let task_of = |sealed: &[u8]| -> Option<TaskId> {
        let opened = Assignment::open(sealed, keys.as_ref()?, rules);
        opened.ok().map(|assignment| assignment.task)
    };
    // Dead letters must have their stream first.
    setup.ensure_dead_letters().await?;
    let done = setup.migrate(&task_of).await?;
    super::say(&format!("{} message(s) moved, {} double(s) put to the dead letters.", done.moved, done.doubles));
    if !done.unreadable.is_empty() {
        bail!(
            "{}\nthese stay where they are, and the migration is not finished: give their key by SEAL_KEY_FILE ({} was tried) and run this \
             again, or delete them",
            done.unreadable.join("\n"),
            seal_key.display()
        );
    }
    Ok(())
}

fn known(state: &Path) -> Option<Accepted> {
    serde_json::from_slice(&std::fs::read(state.join("private").join(KNOWN_FILE)).ok()?).ok()
}

/// The running controller finds it at its next look, a few seconds later.
fn accept(stream: &Accepted, state: &Path) -> anyhow::Result<()> {
    let private = state.join("private");
    if !private.is_dir() {
        bail!("{} is not there: run this with the controller's STATE_DIRECTORY", private.display());
    }
    let file = private.join(ACCEPTED_FILE);
    files::write_private(&file, &serde_json::to_vec(stream)?, Durable::Disk)
        .with_context(|| format!("write {}", file.display()))?;
    super::register::give_to_owner(state, &[file.as_path()])?;
    super::say(&format!("The stream {} is accepted; the controller takes it within some seconds.", stream.stream));
    Ok(())
}
