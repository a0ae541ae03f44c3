//! `register`: makes this installation one runner at Gitea. Once, because a second call makes a second runner.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{
    config::{self, CREDENTIALS_FILE, Faults, Reader, StoredCredentials, tools},
    failpoint,
    files::{self, Durable},
    gitea::{RunnerRpc, connect::Proxies, register::register},
    secret::Secret,
};

#[derive(Args)]
pub(super) struct Register {
    /// A file with Gitea's registration token (Site Administration → Actions → Runners); without it, standard input.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The runner's name at Gitea; by default this machine's.
    #[arg(long)]
    name: Option<String>,
}

pub(super) async fn run(args: Register) -> ExitCode {
    match registered(args).await {
        Ok(said) => {
            super::say(&said);
            ExitCode::SUCCESS
        }
        Err(e) if e.is::<Faults>() => e.downcast::<Faults>().map_or(ExitCode::FAILURE, |faults| super::told_faults(&faults)),
        Err(e) => super::told(&e),
    }
}

async fn registered(args: Register) -> anyhow::Result<String> {
    crate::process::harden().context("make the process non-dumpable")?;
    let mut read = Reader::new(config::process_environment());
    let (url, ca_file, state) = (read.url("GITEA_URL"), read.file("GITEA_CA_FILE"), read.state_directory());
    let (path, runner_bin) = (read.or("PATH", ""), read.optional("RUNNER_BIN").map(PathBuf::from));
    let name = args.name.or_else(|| read.optional("HOSTNAME")).unwrap_or_else(host_name);
    let proxies = Proxies::read(&|name| read.optional(name));
    read.finish(())?;
    let file = state.join(CREDENTIALS_FILE);
    if file.exists() {
        bail!(
            "{} exists: this installation is registered already. To register anew, delete that runner at Gitea, then remove the file",
            file.display()
        );
    }
    // Reserved before Gitea is asked, so that what Gitea gives can be kept. We may die in between: then the reservation is
    // left behind, and the next call says what to look for.
    let reserved = file.with_extension("reserved");
    if reserved.exists() {
        bail!(
            "{} exists: an earlier `register` did not end. Look at Gitea's list of runners for one named {name} that was never \
             online, delete it there, then remove this file",
            reserved.display()
        );
    }
    let token = read_token(args.token_file.as_deref())?;
    let rpc = RunnerRpc::to_gitea_through(&proxies, &url, ca_file.as_deref(), None).context("make Gitea client")?;
    prepare(&state).context("prepare the state directory")?;
    files::write_private(&reserved, b"", Durable::Disk).with_context(|| format!("write {}", reserved.display()))?;
    let tools = tools::look(runner_bin.as_deref(), &path).await;
    let capabilities: &[String] = if tools.runner.is_some_and(|r| r.cleans_up()) { &["cancelling".to_owned()] } else { &[] };
    let labels = ["self-hosted".to_owned(), "pod".to_owned()];
    let version = format!("gitea-dynamic-runner v{}", env!("CARGO_PKG_VERSION"));
    let runner = match register(&rpc, &token, &name, &version, &labels, capabilities).await {
        Ok(runner) => runner,
        Err(e) => {
            // Gitea refused: nothing was made. On a lost answer there may be a runner nobody knows; the text says so.
            fs::remove_file(&reserved).context("remove the reservation")?;
            return Err(anyhow::Error::new(e).context(format!(
                "register at {url}: is the token of the right level (instance, organisation, repository) and still valid? If Gitea \
                 did not answer, look for a runner named {name} in its list"
            )));
        }
    };
    failpoint::reached("register.answered");
    let stored = StoredCredentials {
        url: url.clone(),
        id: runner.id,
        uuid: runner.uuid,
        token: runner.token.expose().to_owned(),
        name: runner.name,
    };
    files::write_private(&file, &serde_json::to_vec_pretty(&stored)?, Durable::Disk)
        .with_context(|| format!("write {}", file.display()))?;
    fs::remove_file(&reserved).context("remove the reservation")?;
    give_to_owner(&state, &[file.as_path()])?;
    Ok(format!("Registered at {url} as {name} (id {}). Kept in {}.", stored.id, file.display()))
}

fn read_token(file: Option<&Path>) -> anyhow::Result<Secret> {
    let token = Secret::new(match file {
        Some(path) => fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?,
        None => super::read_stdin()?,
    });
    if token.expose().trim().is_empty() {
        bail!("the registration token is empty: give it with --token-file, or on standard input");
    }
    Ok(token)
}

fn prepare(state: &Path) -> anyhow::Result<()> {
    let private = state.join("private");
    fs::create_dir_all(&private)?;
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700))?;
    give_to_owner(state, &[private.as_path()])
}

/// Whoever owns the state directory runs the service; root may be the one who registers.
pub(super) fn give_to_owner(state: &Path, files: &[&Path]) -> anyhow::Result<()> {
    let owner = fs::metadata(state)?;
    for file in files {
        let theirs = fs::metadata(file)?;
        if (theirs.uid(), theirs.gid()) != (owner.uid(), owner.gid()) {
            std::os::unix::fs::chown(file, Some(owner.uid()), Some(owner.gid()))
                .with_context(|| format!("give {} to the owner of {}", file.display(), state.display()))?;
        }
    }
    Ok(())
}

fn host_name() -> String {
    nix::unistd::gethostname().map_or_else(|_| "gitea-dynamic-runner".into(), |name| name.to_string_lossy().into_owned())
}
