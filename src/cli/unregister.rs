//! `unregister`: the end of an installation. What still waits here fails with its reason, and the runner to delete in Gitea is named.
//!
//! Only while no controller runs and no environment is left: `drain --wait` and a stop come before it. Gitea has no call by which a
//! runner deletes itself, so that is left to a person. Without `--yes` it only says what it would do. We may die between Gitea's answer and
//! the removal from the queue: then the next run reports the same end again, which changes nothing.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::{Context as _, bail};
use clap::Args;

use super::{Serve, say};
use crate::{
    assignment::{Assignment, Rules, seal::SealKeys},
    claims::Verdict,
    config::{CREDENTIALS_FILE, Config, Faults, Mode, QueueConfig, StoredCredentials, process_environment},
    gitea::{
        RunnerRpc,
        report::{self, Settlement},
    },
    ids::{Lane, TaskId},
    queue::{
        AssignmentQueue, QueueHealth,
        embedded::EmbeddedQueue,
        jetstream::{JetStreamOptions, JetStreamQueue},
    },
    secret::Secret,
};

/// For the log of each job that ends this way.
const REASON: &str =
    "The runner that had taken this job was removed before the job began, so it did not run. Please run it again.";

#[derive(Args)]
pub(super) struct Unregister {
    #[command(flatten)]
    serve: Serve,
    /// Do it; without it, it is only shown.
    #[arg(long)]
    yes: bool,
}

pub(super) async fn run(args: &Unregister) -> ExitCode {
    match unregister(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is::<Faults>() => e.downcast::<Faults>().map_or(ExitCode::FAILURE, |faults| super::told_faults(&faults)),
        Err(e) => super::told(&e),
    }
}

async fn unregister(args: &Unregister) -> anyhow::Result<()> {
    crate::process::harden().context("make the process non-dumpable")?;
    let mode = if args.serve.standalone { Mode::Standalone } else { Mode::Full };
    let config = Config::read(process_environment(), mode)?;
    let private = config.state_directory.join("private");
    let left = environments(&private)?;
    if left > 0 {
        bail!("{left} environment(s) are left here: start the controller, `drain --wait`, stop it, then run this again");
    }
    let queue = open(&config.queue, &private).await.context("open queue")?;
    let waiting = waiting(queue.as_ref()).await?;
    say(&format!("{} job(s) wait here and would fail: each can be run again in Gitea.", waiting.len()));
    if args.yes {
        fail(&config, &private, queue.as_ref(), &waiting).await?;
        say("None waits here any more.");
    } else if !waiting.is_empty() {
        say("Nothing was changed. Run it again with --yes to fail them.");
    }
    say(&runner_to_delete(&config));
    Ok(())
}

/// By the records of the local backend.
fn environments(private: &Path) -> anyhow::Result<usize> {
    let folder = private.join("environments");
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(e).with_context(|| format!("list {}", folder.display())),
    };
    Ok(entries.flatten().filter(|entry| entry.path().extension().is_some_and(|extension| extension == "json")).count())
}

/// With its lock, so no controller runs, and none starts meanwhile.
async fn open(config: &QueueConfig, private: &Path) -> anyhow::Result<Arc<dyn AssignmentQueue>> {
    Ok(match config {
        QueueConfig::Embedded => Arc::new(EmbeddedQueue::open(&private.join("queue.redb"))?),
        QueueConfig::JetStream(settings) => {
            let options = JetStreamOptions::default();
            let queue = JetStreamQueue::open(&private.join("outbox.redb"), settings.as_ref().clone(), options).await?;
            queue.tend().await;
            if let QueueHealth::Unfit(why) = queue.health().await {
                bail!("{why}");
            }
            Arc::new(queue)
        }
    })
}

async fn waiting(queue: &dyn AssignmentQueue) -> anyhow::Result<Vec<(Lane, TaskId)>> {
    let mut found = Vec::new();
    for lane in Lane::ALL {
        let queued = queue.list(lane).await.with_context(|| format!("list {lane}"))?;
        found.extend(queued.into_iter().map(|queued| (lane, queued.task)));
    }
    Ok(found)
}

/// Each leaves the queue only after Gitea has its end (rule R9).
async fn fail(config: &Config, private: &Path, queue: &dyn AssignmentQueue, waiting: &[(Lane, TaskId)]) -> anyhow::Result<()> {
    let gitea = &config.gitea;
    let credentials = Some((gitea.uuid.as_str(), &gitea.token));
    let rpc = RunnerRpc::to_gitea_through(&config.proxies(), &gitea.url, gitea.ca_file.as_deref(), credentials)?;
    let key = config.keys.seal.clone().unwrap_or_else(|| private.join("seal.key"));
    let keys = std::fs::read_to_string(&key).ok().map(Secret::new).and_then(|text| SealKeys::parse(text.expose()).ok());
    let rules = Rules { trust_domain: config.identity.trust_domain.clone(), vm_label: config.vm_label.clone() };
    for (lane, task) in waiting {
        let sealed = queue.get(*task).await.context("read an assignment")?.map(|queued| queued.sealed).unwrap_or_default();
        // One that cannot be opened any more is failed all the same; only its steps are not known then.
        let opened = keys.as_ref().and_then(|keys| Assignment::open(&sealed, keys, &rules).ok());
        let settlement = Settlement {
            verdict: Verdict::Failure,
            reasons: vec![REASON.into()],
            steps: opened.as_ref().map_or(0, |assignment| assignment.steps),
            known_steps: Vec::new(),
            started_at: opened.map_or_else(std::time::SystemTime::now, |assignment| assignment.fetched_at()),
        };
        report::settle(&rpc, *task, &settlement)
            .await
            .with_context(|| format!("report the end of task {task} to Gitea; run this again"))?;
        queue.cancel(*lane, *task).await.with_context(|| format!("take task {task} out of the queue; run this again"))?;
    }
    Ok(())
}

fn runner_to_delete(config: &Config) -> String {
    let stored = std::fs::read(config.state_directory.join(CREDENTIALS_FILE)).map(zeroize::Zeroizing::new).ok();
    let stored = stored.and_then(|text| serde_json::from_slice::<StoredCredentials>(&text).ok());
    let url = &config.gitea.url;
    let which = match stored.filter(|stored| stored.uuid == config.gitea.uuid) {
        Some(StoredCredentials { id, name, .. }) => format!("the runner {name} (id {id})"),
        None => format!("the runner with the UUID {}", config.gitea.uuid),
    };
    format!(
        "Now delete {which} at {url}, on the page Actions → Runners of the site administration, or of the organisation or repository it belongs \
         to ({url}/-/admin/actions/runners). Then remove {}.",
        config.state_directory.display()
    )
}
