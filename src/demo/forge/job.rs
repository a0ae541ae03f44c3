//! Jobs as a user gives them to the stand-in forge, and the tasks that it makes of them.
//!
//! A task has what a real one has: payload YAML of one job, the 36 keys of the `github` context, tokens of its own, secrets, variables,
//! needs (captured tasks of a Gitea 1.27.3 are the model). What happens to a job afterwards is `state`'s.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use buffa::MessageField;
use serde_json::{Value, json};

use crate::{demo::workflow, ids::TaskId, proto::runner as rpc, secret::Secret};

/// A job's number at the forge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub i64);

/// A run's number at the forge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub i64);

/// Whether a job whose needs did not all succeed is still handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunWhen {
    /// The forge skips it.
    NeedsSucceeded,
    /// `if: always()`.
    Always,
}

/// One job to push. Everything but key and labels may stay empty.
#[derive(Debug, Clone)]
pub struct JobSpec {
    pub key: String,
    pub labels: Vec<String>,
    pub steps: Vec<StepSpec>,
    /// Keys of jobs of the same push.
    pub needs: Vec<String>,
    pub run_when: RunWhen,
    /// Output name to expression, for example `${{ steps.a.outputs.x }}`.
    pub outputs: BTreeMap<String, String>,
    pub env: BTreeMap<String, String>,
    pub secrets: BTreeMap<String, String>,
    pub vars: BTreeMap<String, String>,
    /// Replaces keys of the task's context (`repository`, `event`, …), or adds some.
    pub context: BTreeMap<String, Value>,
    /// Taken as it is for the task's payload; made from the fields above if absent.
    pub payload: Option<String>,
}

/// One step of a job.
#[derive(Debug, Clone, Default)]
pub struct StepSpec {
    pub id: Option<String>,
    pub name: Option<String>,
    pub run: Option<String>,
    pub uses: Option<String>,
    pub condition: Option<String>,
}

/// Whether a rendered workflow keeps `needs:`. Gitea erases them in a task's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    Kept,
    Erased,
}

impl JobSpec {
    pub fn new(key: &str, labels: &[&str]) -> Self {
        Self {
            key: key.to_owned(),
            labels: labels.iter().map(|&label| label.to_owned()).collect(),
            steps: Vec::new(),
            needs: Vec::new(),
            run_when: RunWhen::NeedsSucceeded,
            outputs: BTreeMap::new(),
            env: BTreeMap::new(),
            secrets: BTreeMap::new(),
            vars: BTreeMap::new(),
            context: BTreeMap::new(),
            payload: None,
        }
    }

    /// A job from the text of a workflow file with one job. The text becomes the payload unchanged.
    pub fn from_workflow(text: &str) -> anyhow::Result<Self> {
        let (key, read) = workflow::read(text)?;
        let job = &read.jobs[&key];
        let mut spec = Self::new(&key, &[]);
        spec.labels = job.labels();
        spec.steps = job.steps().into_iter().map(StepSpec::from).collect();
        spec.payload = Some(text.to_owned());
        Ok(spec)
    }

    /// One more `run:` step.
    #[must_use]
    pub fn run(self, script: &str) -> Self {
        self.step(StepSpec { run: Some(script.to_owned()), ..StepSpec::default() })
    }

    #[must_use]
    pub fn step(mut self, step: StepSpec) -> Self {
        self.steps.push(step);
        self
    }

    #[must_use]
    pub fn needs(mut self, key: &str) -> Self {
        self.needs.push(key.to_owned());
        self
    }

    #[must_use]
    pub fn secret(mut self, name: &str, value: &str) -> Self {
        self.secrets.insert(name.to_owned(), value.to_owned());
        self
    }

    #[must_use]
    pub fn var(mut self, name: &str, value: &str) -> Self {
        self.vars.insert(name.to_owned(), value.to_owned());
        self
    }

    #[must_use]
    pub fn context(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.context.insert(key.to_owned(), value.into());
        self
    }

    pub(crate) fn repository(&self) -> &str {
        self.context.get("repository").and_then(Value::as_str).unwrap_or("boss/demo")
    }
}

impl From<workflow::Step> for StepSpec {
    fn from(step: workflow::Step) -> Self {
        Self { name: Some(step.title()), id: step.id, run: step.run, uses: step.uses, condition: step.condition }
    }
}

impl StepSpec {
    pub(crate) fn title(&self) -> String {
        let step = workflow::Step {
            name: self.name.clone(),
            run: self.run.clone(),
            uses: self.uses.clone(),
            ..workflow::Step::default()
        };
        step.title()
    }
}

/// The workflow file of some jobs.
pub fn workflow_text(jobs: &[JobSpec], needs: Needs) -> String {
    let mut text = String::from("name: demo\n\"on\": push\njobs:\n");
    for job in jobs {
        render_job(&mut text, job, needs);
    }
    text
}

fn render_job(text: &mut String, job: &JobSpec, needs: Needs) {
    let mut line = |indent: usize, content: String| {
        text.push_str(&" ".repeat(indent));
        text.push_str(&content);
        text.push('\n');
    };
    line(2, format!("{}:", quoted(&job.key)));
    line(4, format!("name: {}", quoted(&job.key)));
    line(4, format!("runs-on: {}", list(&job.labels)));
    if needs == Needs::Kept && !job.needs.is_empty() {
        line(4, format!("needs: {}", list(&job.needs)));
    }
    if job.run_when == RunWhen::Always {
        line(4, "if: always()".into());
    }
    for (title, map) in [("outputs", &job.outputs), ("env", &job.env)] {
        if !map.is_empty() {
            line(4, format!("{title}:"));
            map.iter().for_each(|(name, value)| line(6, format!("{}: {}", quoted(name), quoted(value))));
        }
    }
    if !job.steps.is_empty() {
        line(4, "steps:".into());
    }
    for step in &job.steps {
        let fields = [("id", &step.id), ("name", &step.name), ("if", &step.condition), ("uses", &step.uses), ("run", &step.run)];
        let set = fields.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        for (at, (name, value)) in set.enumerate() {
            line(6, format!("{} {name}: {}", if at == 0 { "-" } else { " " }, quoted(value)));
        }
    }
}

/// A JSON string is a YAML double-quoted scalar.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn list(items: &[String]) -> String {
    Value::from(items).to_string()
}

/// Where a task belongs, beyond its spec.
pub(crate) struct Place<'a> {
    pub(crate) task: TaskId,
    pub(crate) job: JobId,
    pub(crate) run: RunId,
    /// Without a slash at its end.
    pub(crate) root_url: &'a str,
    pub(crate) token: &'a Secret,
    /// When the job was pushed, in seconds since 1970.
    pub(crate) pushed: u64,
}

/// The task as it goes over the wire, with a new token in its context.
pub(crate) fn task(spec: &JobSpec, place: &Place<'_>, needs: BTreeMap<String, rpc::TaskNeed>) -> rpc::Task {
    let payload = spec.payload.clone().unwrap_or_else(|| workflow_text(std::slice::from_ref(spec), Needs::Erased));
    let mut secrets = spec.secrets.clone();
    for name in ["GITHUB_TOKEN", "GITEA_TOKEN"] {
        secrets.insert(name.into(), place.token.expose().to_owned());
    }
    rpc::Task {
        id: place.task.0,
        workflow_payload: Some(payload.into_bytes()),
        context: MessageField::from(serde_json::from_value::<buffa_types::google::protobuf::Struct>(context(spec, place)).ok()),
        secrets: secrets.into_iter().collect(),
        needs: needs.into_iter().collect(),
        vars: spec.vars.clone().into_iter().collect(),
        ..Default::default()
    }
}

/// The 36 keys that every captured task has.
fn context(spec: &JobSpec, place: &Place<'_>) -> Value {
    let (root, repository) = (place.root_url, spec.repository());
    let (owner, name) = repository.split_once('/').unwrap_or((repository, ""));
    let sha = hex::encode(&<sha2::Sha256 as sha2::Digest>::digest(place.run.0.to_be_bytes())[..20]);
    let page = format!("{root}/{repository}");
    let user = json!({"id": 1, "login": owner, "username": owner, "full_name": "", "email": "boss@example.invalid"});
    let event = json!({
        "ref": "refs/heads/main", "before": "0".repeat(40), "after": sha, "total_commits": 1,
        "head_commit": {"id": sha, "message": "change\n", "url": format!("{page}/commit/{sha}")},
        "repository": {"id": 1, "name": name, "full_name": repository, "owner": user, "private": false, "fork": false,
            "html_url": page, "clone_url": format!("{page}.git"), "default_branch": "main"},
        "pusher": user, "sender": user,
    });
    let mut context = json!({
        "actor": owner, "api_url": format!("{root}/api/v1"), "base_ref": "", "event": event, "event_name": "push",
        "gitea_default_actions_url": root, "gitea_runtime_token": runtime_token(place), "head_ref": "",
        "job": spec.key, "ref": "refs/heads/main", "ref_name": "main", "ref_protected": false, "ref_type": "branch",
        "repository": repository, "repositoryUrl": page, "repository_owner": owner, "run_attempt": "1",
        "run_id": place.run.0.to_string(), "run_number": place.run.0.to_string(), "secret_source": "Actions",
        "server_url": format!("{root}/"), "sha": sha, "token": place.token.expose(), "triggering_actor": owner,
        "workflow": "demo.yaml",
    });
    let empty =
        "action action_path action_ref action_repository action_status env event_path graphql_url path retention_days workspace";
    for key in empty.split(' ') {
        context[key] = "".into();
    }
    for (key, value) in &spec.context {
        context[key] = value.clone();
    }
    context
}

/// Shaped like Gitea's (a JWT with the ids in clear), signed by nobody.
fn runtime_token(place: &Place<'_>) -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let (run, job) = (place.run.0, place.job.0);
    let claims = json!({"nbf": place.pushed, "exp": place.pushed + 4 * 3600, "scp": format!("Actions.Results:{run}:{job}"),
        "TaskID": place.task.0, "RunID": run, "JobID": job, "ac": "[]"});
    let signature = URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
    format!("{}.{}.{signature}", part(json!({"alg": "HS256", "typ": "JWT"})), part(claims))
}
