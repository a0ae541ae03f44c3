//! One task, run: its steps in order, their outputs, and the result that the official runner would report.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use buffa_types::google::protobuf::Struct;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    expand::{Scope, read_assignments},
    report::Reporter,
    shell::{self, Ended, Script},
};
use crate::{
    demo::workflow::{self, Job, Step, Workflow},
    gitea::RunnerRpc,
    proto::runner::{Task, TaskResult},
};

/// A step's GITHUB_OUTPUT and GITHUB_ENV are read up to here.
const MAX_COMMAND_FILE: u64 = 16 << 20;

/// What all steps of a job share.
struct Running<'a> {
    address: &'a str,
    scope: Scope,
    env: BTreeMap<String, String>,
    /// Where steps run.
    folder: PathBuf,
    /// For scripts and command files.
    temp: PathBuf,
    stop: &'a watch::Receiver<bool>,
}

/// Runs a task and reports its end. `envs` are the configuration's, for every step. Everything that goes wrong with it ends up in its log.
pub(super) async fn run(
    task: Task,
    rpc: RunnerRpc,
    address: &str,
    envs: &BTreeMap<String, String>,
    stop: &watch::Receiver<bool>,
) {
    let context = serde_json::to_value::<&Struct>(&task.context).unwrap_or_default();
    let payload = String::from_utf8_lossy(task.workflow_payload.as_deref().unwrap_or_default()).into_owned();
    let read = workflow::read(&payload);
    let steps = read.as_ref().map(|(key, workflow)| workflow.jobs[key].steps()).unwrap_or_default();
    let tokens = ["token", "gitea_runtime_token"].into_iter().filter_map(|key| context[key].as_str().map(str::to_owned));
    let secrets = task.secrets.values().cloned().chain(tokens);
    let mut reporter = Reporter::new(rpc, task.id, steps.len(), secrets);
    reporter.say(&format!("task {} of job {}, run by the demo's steps runner", task.id, context["job"]));
    let result = match read {
        Ok((key, workflow)) => {
            let scope = scope(&task, context);
            match prepare(address, scope, &workflow, &workflow.jobs[&key], stop) {
                Ok(mut running) => {
                    running.env.extend(envs.clone());
                    running.all(&steps, &workflow.jobs[&key], &mut reporter).await
                }
                Err(error) => refuse(&mut reporter, &steps, &error),
            }
        }
        Err(error) => refuse(&mut reporter, &steps, &error),
    };
    reporter.close(result).await;
}

/// A job that cannot begin: its steps are CANCELLED, as the official runner has it.
fn refuse(reporter: &mut Reporter, steps: &[Step], error: &anyhow::Error) -> TaskResult {
    reporter.say(&format!("the job cannot run: {error:#}"));
    (0..steps.len()).for_each(|at| reporter.step_ends(at, TaskResult::RESULT_CANCELLED));
    TaskResult::RESULT_FAILURE
}

fn scope(task: &Task, github: Value) -> Scope {
    let result = |result: &buffa::EnumValue<TaskResult>| match result.as_known() {
        Some(TaskResult::RESULT_SUCCESS) => "success",
        Some(TaskResult::RESULT_CANCELLED) => "cancelled",
        Some(TaskResult::RESULT_SKIPPED) => "skipped",
        _ => "failure",
    };
    let map = |map: &dyn Fn() -> Vec<(String, Value)>| Value::Object(map().into_iter().collect());
    let texts = |name: &String, value: &String| (name.clone(), Value::from(value.as_str()));
    let needs =
        || task.needs.iter().map(|(key, need)| (key.clone(), json!({"outputs": need.outputs, "result": result(&need.result)})));
    Scope(json!({
        "secrets": map(&|| task.secrets.iter().map(|(name, value)| texts(name, value)).collect()),
        "vars": map(&|| task.vars.iter().map(|(name, value)| texts(name, value)).collect()),
        "needs": map(&|| needs().collect()),
        "github": github,
        "env": {},
        "steps": {},
    }))
}

fn prepare<'a>(
    address: &'a str,
    scope: Scope,
    workflow: &Workflow,
    job: &Job,
    stop: &'a watch::Receiver<bool>,
) -> anyhow::Result<Running<'a>> {
    let here = std::env::current_dir().context("find the working directory")?;
    let (folder, temp) = (here.join("workspace"), here.join("temp"));
    for folder in [&folder, &temp] {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let mut running = Running { address, scope, env: BTreeMap::new(), folder, temp, stop };
    running.env = running.github_env();
    for env in [&workflow.env, &job.env].into_iter().flatten() {
        running.add_env(env)?;
    }
    Ok(running)
}

impl Running<'_> {
    /// What the official runner gives every step of these; the server is whoever handed out the task.
    fn github_env(&self) -> BTreeMap<String, String> {
        let github = &self.scope.0["github"];
        let keys = "actor base_ref event_name head_ref job ref ref_name ref_type repository repository_owner run_attempt run_id run_number sha workflow";
        let given = keys
            .split(' ')
            .map(|key| (format!("GITHUB_{}", key.to_uppercase()), github[key].as_str().unwrap_or_default().to_owned()));
        let own = [
            ("CI", "true".to_owned()),
            ("GITHUB_ACTIONS", "true".to_owned()),
            ("GITEA_ACTIONS", "true".to_owned()),
            ("GITHUB_SERVER_URL", self.address.to_owned()),
            ("GITHUB_API_URL", format!("{}/api/v1", self.address)),
            ("GITHUB_WORKSPACE", self.folder.display().to_string()),
            ("RUNNER_TEMP", self.temp.display().to_string()),
        ];
        given.chain(own.map(|(name, value)| (name.to_owned(), value))).collect()
    }

    fn add_env(&mut self, env: &BTreeMap<String, String>) -> anyhow::Result<()> {
        for (name, value) in env {
            let value = self.scope.expand(value).with_context(|| format!("read env {name}"))?;
            self.scope.0["env"][name] = value.as_str().into();
            self.env.insert(name.clone(), value);
        }
        Ok(())
    }

    async fn all(&mut self, steps: &[Step], job: &Job, reporter: &mut Reporter) -> TaskResult {
        let (mut failed, mut stopped) = (false, false);
        for (at, step) in steps.iter().enumerate() {
            if stopped {
                reporter.step_ends(at, TaskResult::RESULT_CANCELLED);
                continue;
            }
            let result = match self.one(at, step, failed, reporter).await {
                Ok(result) => result,
                Err(error) => {
                    reporter.say(&format!("{error:#}"));
                    TaskResult::RESULT_FAILURE
                }
            };
            failed |= result == TaskResult::RESULT_FAILURE;
            stopped = reporter.cancelled || *self.stop.borrow();
            reporter.step_ends(at, result);
            if !stopped {
                reporter.flush().await;
            }
        }
        if stopped {
            reporter.say("stopped");
            // The official runner 1.0.8 reports SUCCESS here, so whoever believes a stopped runner is found out with this one too.
            return TaskResult::RESULT_SUCCESS;
        }
        for (name, expression) in job.outputs.iter().flatten() {
            match self.scope.expand(expression) {
                Ok(value) if reporter.hides(&value) => reporter.say(&format!("output {name} is left out: it holds a secret")),
                Ok(value) => drop(reporter.outputs.insert(name.clone(), value)),
                Err(error) => reporter.say(&format!("output {name} is left out: {error:#}")),
            }
        }
        if failed { TaskResult::RESULT_FAILURE } else { TaskResult::RESULT_SUCCESS }
    }

    async fn one(&mut self, at: usize, step: &Step, failed: bool, reporter: &mut Reporter) -> anyhow::Result<TaskResult> {
        if !Scope::runs(step.condition.as_deref(), failed)? {
            return Ok(TaskResult::RESULT_SKIPPED);
        }
        reporter.step_begins(at);
        reporter.say(&step.title());
        reporter.flush().await;
        let Some(run) = &step.run else {
            let what = step.uses.as_deref().map_or("a step without run".into(), |action| format!("uses: {action}"));
            bail!("this runner of the demo runs only run: steps, not {what}; give RUNNER_BIN the official runner for the rest");
        };
        let text = self.scope.expand(run)?;
        let mut env = self.env.clone();
        for (name, value) in step.env.iter().flatten() {
            env.insert(name.clone(), self.scope.expand(value).with_context(|| format!("read env {name}"))?);
        }
        let file = |kind: &str| self.temp.join(format!("{kind}-{at}"));
        let (output, more_env, script) = (file("output"), file("env"), file("script"));
        for (name, path) in [("GITHUB_OUTPUT", &output), ("GITHUB_ENV", &more_env)] {
            std::fs::write(path, "").with_context(|| format!("make {}", path.display()))?;
            env.insert(name.into(), path.display().to_string());
        }
        let shell = step.shell.as_deref();
        let script = Script { text: &text, shell, env: &env, folder: &self.folder, file: &script };
        let ended = shell::run(script, reporter, self.stop).await?;
        self.take_files(step, &output, &more_env)?;
        Ok(if ended == Ended::Succeeded { TaskResult::RESULT_SUCCESS } else { TaskResult::RESULT_FAILURE })
    }

    fn take_files(&mut self, step: &Step, output: &Path, env: &Path) -> anyhow::Result<()> {
        let outputs = read_file(output).context("read GITHUB_OUTPUT")?;
        if let Some(id) = &step.id {
            self.scope.0["steps"][id] = json!({"outputs": outputs});
        }
        for (name, value) in read_file(env).context("read GITHUB_ENV")? {
            self.scope.0["env"][&name] = value.as_str().into();
            self.env.insert(name, value);
        }
        Ok(())
    }
}

fn read_file(path: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let size = std::fs::metadata(path).with_context(|| format!("look at {}", path.display()))?.len();
    if size > MAX_COMMAND_FILE {
        bail!("{size} bytes are more than 16 MiB");
    }
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    read_assignments(&String::from_utf8_lossy(&bytes))
}
