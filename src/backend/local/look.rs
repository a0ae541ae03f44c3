//! What the records say about an environment, held against the process table.

use std::{
    io,
    time::{Duration, SystemTime},
};

use super::{
    CREATE_LIMIT,
    state::{self, KeeperRecord, Layout, Record, Status},
};
use crate::{
    backend::{Observed, Phase},
    ids::EnvironmentName,
    names::{executor_exit, metadata},
    process::{self, Send},
};

/// `None` if there is no such environment; an error if it cannot be told.
pub(super) fn observe(layout: &Layout, prefix: &str, name: &EnvironmentName) -> io::Result<Option<Observed>> {
    let Some(record) = layout.read_record(name)? else { return Ok(None) };
    let phase = phase(layout, name, &record)?;
    let label = |key: &str| record.labels.get(&format!("{prefix}/{key}")).map(String::as_str);
    let annotation = |key: &str| record.annotations.get(&format!("{prefix}/{key}")).cloned().unwrap_or_default();
    let wrong = |what: &str| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "the environment's record {} has no valid {prefix}/{what}: was METADATA_PREFIX changed?",
                layout.record(name).display()
            ),
        )
    };
    Ok(Some(Observed {
        name: name.clone(),
        assignment: label(metadata::ASSIGNMENT_ID)
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| wrong(metadata::ASSIGNMENT_ID))?,
        nonce: label(metadata::ENVIRONMENT).and_then(|text| text.parse().ok()).ok_or_else(|| wrong(metadata::ENVIRONMENT))?,
        backend: label(metadata::BACKEND).and_then(|text| text.parse().ok()).ok_or_else(|| wrong(metadata::BACKEND))?,
        claimed: label(metadata::CLAIMED) == Some("true"),
        terminal: label(metadata::TERMINAL) == Some("true"),
        phase,
        repository: annotation(metadata::REPOSITORY),
        job_key: annotation(metadata::JOB_KEY),
        spiffe_id: annotation(metadata::SPIFFE_ID),
        steps: annotation(metadata::STEPS).parse().map_err(|_| wrong(metadata::STEPS))?,
        created_at: state::from_unix_ms(record.created_ms),
        deadline_at: state::from_unix_ms(record.deadline_ms),
        uid: record.uid,
        workload_socket: Some(layout.socket(name)),
    }))
}

/// SIGTERM to the keeper, which hands it on; `false` if there is no such environment.
pub(super) fn ask_stop(layout: &Layout, name: &EnvironmentName) -> io::Result<bool> {
    if layout.read_record(name)?.is_none() {
        return Ok(false);
    }
    if let Some(keeper) = state::read_json::<KeeperRecord>(&layout.keeper(name))? {
        keeper.keeper.send(Send::Terminate)?;
    }
    Ok(true)
}

pub(super) fn phase(layout: &Layout, name: &EnvironmentName, record: &Record) -> io::Result<Phase> {
    let ended =
        || state::read_json::<Status>(&layout.status(name)).map(|status| status.map(|status| end_of(layout, name, status)));
    if record.boot != process::boot_id()? {
        // No process outlived the restart. What was not flushed before a power cut may be missing or empty.
        return Ok(ended().unwrap_or_default().unwrap_or_else(|| Phase::Ended("lost: the machine was restarted".into())));
    }
    if let Some(ended) = ended()? {
        return Ok(ended);
    }
    let Some(keeper) = state::read_json::<KeeperRecord>(&layout.keeper(name))? else {
        let age = SystemTime::now().duration_since(state::from_unix_ms(record.created_ms)).unwrap_or(Duration::ZERO);
        return Ok(if age > CREATE_LIMIT { Phase::Ended("never started".into()) } else { Phase::Pending });
    };
    match (keeper.keeper.is_alive()?, keeper.started) {
        (true, true) => Ok(Phase::Running),
        (true, false) => Ok(Phase::Pending),
        // It may have written its last word since the first look.
        (false, _) => {
            Ok(ended()?.unwrap_or_else(|| Phase::Ended("lost: its keeper was killed, and the environment with it".into())))
        }
    }
}

/// What the executor's last word means.
fn end_of(layout: &Layout, name: &EnvironmentName, status: Status) -> Phase {
    if status.text != format!("exit code {}", executor_exit::UNFIT) {
        return Phase::Ended(status.text);
    }
    Phase::Unfit(format!("it can run no job here: is RUNNER_BIN the official runner? {} says more", layout.log(name).display()))
}
