//! The little of a workflow payload that the demo's own parts read.
//!
//! The payload is a single job's YAML as Gitea writes it. What a job may run on and whose it is, `task` decides for the product; the
//! stand-in forge and the steps runner only need labels, steps and outputs.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde::Deserialize;

/// A workflow of exactly one job.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Workflow {
    #[serde(default)]
    pub(super) env: Option<BTreeMap<String, String>>,
    pub(super) jobs: BTreeMap<String, Job>,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct Job {
    #[serde(default, rename = "runs-on")]
    pub(super) runs_on: Option<Labels>,
    #[serde(default)]
    pub(super) env: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(super) outputs: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub(super) steps: Option<Vec<Option<Step>>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Labels {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Step {
    #[serde(default)]
    pub(super) id: Option<String>,
    #[serde(default)]
    pub(super) name: Option<String>,
    #[serde(default)]
    pub(super) run: Option<String>,
    #[serde(default)]
    pub(super) uses: Option<String>,
    #[serde(default, rename = "if")]
    pub(super) condition: Option<String>,
    #[serde(default)]
    pub(super) shell: Option<String>,
    #[serde(default)]
    pub(super) env: Option<BTreeMap<String, String>>,
}

impl Job {
    pub(super) fn labels(&self) -> Vec<String> {
        match &self.runs_on {
            None => Vec::new(),
            Some(Labels::One(label)) => vec![label.clone()],
            Some(Labels::Many(labels)) => labels.clone(),
        }
    }

    /// The steps that count: Gitea drops a null step, and numbers the others from 0.
    pub(super) fn steps(&self) -> Vec<Step> {
        self.steps.iter().flatten().flatten().cloned().collect()
    }
}

impl Step {
    /// What the pages show for it.
    pub(super) fn title(&self) -> String {
        match (&self.name, &self.run, &self.uses) {
            (Some(name), ..) => name.clone(),
            (None, Some(run), _) => format!("Run {}", run.trim().lines().next().unwrap_or_default()),
            (None, None, Some(uses)) => format!("Run {uses}"),
            (None, None, None) => "Run nothing".into(),
        }
    }
}

/// Reads a payload: the key of its only job, and the workflow around it.
pub(super) fn read(payload: &str) -> anyhow::Result<(String, Workflow)> {
    let workflow: Workflow = serde_saphyr::from_str(payload).context("read workflow payload")?;
    let mut keys = workflow.jobs.keys();
    match (keys.next().cloned(), keys.next()) {
        (Some(key), None) => Ok((key, workflow)),
        _ => anyhow::bail!("the payload has {} jobs, not one", workflow.jobs.len()),
    }
}
