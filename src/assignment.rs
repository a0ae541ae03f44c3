//! One job that Gitea gave us: what it is, and the sealed envelope in which it waits.
//!
//! The envelope is the only form in which an assignment rests anywhere. It is checked again whenever it is opened; the task's raw bytes are
//! kept as they came, so that fields we do not know survive. Whether a backend takes the job (container engine, forks) is the
//! backend's to say.

use sha2::{Digest as _, Sha256};

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{
    ids::{AssignmentId, Lane, TaskId},
    secret::SecretBytes,
    spiffe_name,
    task::{self, MAX_TASK_BYTES, TaskFacts, TaskFault, Trust},
};

pub mod seal;

/// What an assignment is judged by; the same at sealing and at opening.
#[derive(Debug, Clone)]
pub struct Rules {
    pub trust_domain: String,
    /// `vm` or `vm-dev` (`VM_RUNNER_LABEL`).
    pub vm_label: String,
}

#[derive(Debug, Clone)]
pub struct Assignment {
    pub id: AssignmentId,
    pub task: TaskId,
    pub lane: Lane,
    /// `owner/name` in original case; empty where it could not be read.
    pub repository: String,
    pub job_key: String,
    pub job_name: String,
    /// Empty for a refused one.
    pub spiffe_id: String,
    pub labels: Vec<String>,
    pub steps: u32,
    pub trust: Trust,
    /// See `TaskFacts::needs_docker`.
    pub needs_docker: Option<String>,
    pub run_id: String,
    /// SHA-256 of the task token: tells a task of a restored Gitea from the one we knew (rule R4). Of the raw task where no token
    /// can be read.
    pub token_hash: [u8; 32],
    /// Unix milliseconds of the FetchTask answer; Gitea's three hours start there.
    pub fetched_at_ms: u64,
    /// Why it cannot be served; set exactly when `lane` is `Refused`.
    pub refusal: Option<String>,
    /// The task as Gitea sent it; one that is too large (and so refused) is cut one byte above the limit.
    pub raw: SecretBytes,
}

impl Assignment {
    /// When Gitea handed the task out.
    pub fn fetched_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.fetched_at_ms)
    }
}

/// An envelope that cannot be taken at its word.
#[derive(Debug, thiserror::Error)]
pub enum OpenFault {
    /// Sealed with a key that we do not have (rotation): wait, alarm, do not throw away.
    #[error("sealed with the unknown key {0}: put that key back into SEAL_KEY_FILE")]
    UnknownKey(String),
    /// Written by a newer version: wait, alarm, do not throw away.
    #[error("envelope version {0} is newer than this binary knows: run the newer binary")]
    NewerVersion(u8),
    /// Damaged or tampered with: dead letter; the job is failed where its id can be read.
    #[error("envelope refused: {reason}")]
    Refused { reason: String, task: Option<TaskId> },
}

impl Assignment {
    /// Reads a fetched task. Never fails: what cannot be served becomes an assignment of the lane `Refused` that says why.
    /// `Err` only if not even the task's id can be read (nothing can be reported to Gitea then).
    pub fn of_task(mut raw: Vec<u8>, rules: &Rules, fetched_at_ms: u64) -> Result<Assignment, String> {
        // The byte too many keeps it refused whenever it is read again.
        raw.truncate(MAX_TASK_BYTES + 1);
        match task::read_task(&raw) {
            Ok(facts) => Ok(Self::of_facts(facts, raw, rules, fetched_at_ms)),
            Err(TaskFault { id: Some(id), steps, repository, run_id, reason }) => Ok(Self {
                id: id.assignment(),
                task: id,
                lane: Lane::Refused,
                repository,
                job_key: String::new(),
                job_name: String::new(),
                spiffe_id: String::new(),
                labels: Vec::new(),
                steps,
                trust: Trust::PullRequest,
                needs_docker: None,
                run_id,
                token_hash: Sha256::digest(&raw).into(),
                fetched_at_ms,
                refusal: Some(reason),
                raw: SecretBytes::new(raw),
            }),
            Err(TaskFault { id: None, reason, .. }) => Err(reason),
        }
    }

    fn of_facts(facts: TaskFacts, raw: Vec<u8>, rules: &Rules, fetched_at_ms: u64) -> Self {
        let (lane, refusal) = match lane_of(&facts, rules) {
            Ok(lane) => (lane, None),
            Err(reason) => (Lane::Refused, Some(reason)),
        };
        let spiffe_id = match refusal {
            None => spiffe_name::job_id(&rules.trust_domain, &facts.repository, &facts.job_key, facts.trust),
            Some(_) => String::new(),
        };
        Self {
            id: facts.id.assignment(),
            task: facts.id,
            lane,
            repository: facts.repository.to_string(),
            job_key: facts.job_key,
            job_name: facts.job_name,
            spiffe_id,
            labels: facts.labels,
            steps: facts.steps,
            trust: facts.trust,
            needs_docker: facts.needs_docker,
            run_id: facts.run_id,
            token_hash: Sha256::digest(facts.token.expose()).into(),
            fetched_at_ms,
            refusal,
            raw: SecretBytes::new(raw),
        }
    }
}

fn lane_of(facts: &TaskFacts, rules: &Rules) -> Result<Lane, String> {
    if let Some(uses) = &facts.uses {
        return Err(format!(
            "This job calls the reusable workflow `{uses}`. Gitea expands such calls itself from version 1.27 on; this one hands them to \
             the runner, which gets no steps to run. Update Gitea, or write the steps into the job."
        ));
    }
    Ok(task::backend_of(&facts.labels, &rules.vm_label)?.lane())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use buffa::Message as _;

    use super::*;
    use crate::proto::{self, runner};

    fn rules() -> Rules {
        Rules { trust_domain: "ci.example".into(), vm_label: "vm-dev".into() }
    }

    fn real(name: &str) -> Assignment {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/gitea-tasks/{name}.bin"));
        let raw = proto::task_of_answer(&std::fs::read(path).unwrap()).unwrap().unwrap();
        let made = Assignment::of_task(raw.clone(), &rules(), 5).unwrap();
        assert_eq!((made.raw.expose(), made.fetched_at_ms, made.id), (raw.as_slice(), 5, made.task.assignment()));
        made
    }

    #[test]
    fn a_job_gets_the_lane_that_it_names_and_an_identity_of_its_own() {
        let made = real("two-labels");
        assert_eq!((made.lane, made.refusal, made.steps), (Lane::Pod, None, 1));
        assert_eq!(made.spiffe_id, "spiffe://ci.example/ci/boss/two-labels/hello");
        assert_eq!((made.repository.as_str(), made.run_id.as_str()), ("boss/two-labels", "1"));
        let made = real("rich-job");
        assert_eq!((made.lane, made.steps, made.trust), (Lane::Vm, 4, Trust::Own));
        let made = real("secrets-vars-org-private");
        assert_eq!(made.spiffe_id, "spiffe://ci.example/ci/acme.corp/repo-name_5f1.x/secret");
        assert_eq!(made.repository, "Acme.Corp/Repo-Name_1.x");
        assert_ne!(real("rerun-attempt-1").token_hash, real("rerun-attempt-2").token_hash);
    }

    #[test]
    fn what_only_a_backend_can_refuse_is_not_refused_here() {
        let docker = real("container-services");
        assert_eq!((docker.lane, docker.needs_docker.as_deref()), (Lane::Pod, Some("`container:`")));
        let context = serde_json::json!({"repository": "acme/app", "event_name": "pull_request", "ref": "refs/pull/2/head",
            "event": {"pull_request": {"head": {"repo": null}, "base": {"repo": {"id": 7}}}}});
        let fork = made_of("jobs: {check: {runs-on: [self-hosted, pod]}}", &context);
        assert_eq!((fork.lane, fork.trust), (Lane::Pod, Trust::PullRequest));
        assert_eq!(fork.spiffe_id, "spiffe://ci.example/ci-pr/acme/app/check");
    }

    fn made_of(payload: &str, context: &serde_json::Value) -> Assignment {
        let task = runner::Task {
            id: 71,
            workflow_payload: Some(payload.as_bytes().to_vec()),
            context: buffa::MessageField::some(serde_json::from_value(context.clone()).unwrap()),
            ..Default::default()
        };
        Assignment::of_task(task.encode_to_vec(), &rules(), 5).unwrap()
    }

    #[test]
    fn what_cannot_be_served_is_kept_with_a_reason_that_says_what_to_write() {
        for (name, repository, says) in [
            ("one-label", "boss/one-label", "without `self-hosted`"),
            ("runs-on-missing", "boss/runs-on-missing", "no `runs-on`"),
            ("runs-on-empty-list", "boss/runs-on-empty-list", "`runs-on: [self-hosted, vm-dev]`"),
            ("runs-on-fromjson", "boss/runs-on-fromjson", "fromJSON"),
            ("needs-runs-on-build", "boss/needs-runs-on", "without `needs`"),
            ("gitea-1.26.0/reusable-1-call", "boss/reusable", "`./.gitea/workflows/reusable-callee.yaml`"),
        ] {
            let made = real(name);
            let reason = made.refusal.unwrap();
            assert!(reason.contains(says), "{name}: {reason}");
            assert_eq!((made.lane, made.spiffe_id.as_str(), made.repository.as_str()), (Lane::Refused, "", repository));
        }
        let context = serde_json::json!({"repository": "acme/app", "run_id": "9"});
        for (payload, says) in [
            ("jobs: {}", "no job"),
            ("jobs: {a: {}, b: {}}", "2 jobs"),
            ("jobs: [", "cannot be read"),
            ("jobs: {a: {uses: ./x.yaml, runs-on: [self-hosted, pod]}}", "1.27"),
            ("jobs: {a: {runs-on: [self-hosted, vm]}}", "nor `vm-dev`"),
        ] {
            let made = made_of(payload, &context);
            let reason = made.refusal.unwrap();
            assert!(reason.contains(says), "{payload}: {reason}");
            assert_eq!(
                (made.lane, made.task, made.repository.as_str(), made.run_id.as_str()),
                (Lane::Refused, TaskId(71), "acme/app", "9")
            );
        }
    }

    #[test]
    fn a_broken_task_is_kept_as_long_as_its_id_can_be_read() {
        let made = Assignment::of_task(vec![8, 71, 0x12, 0xff], &rules(), 5).unwrap();
        assert_eq!((made.lane, made.task, made.repository.as_str()), (Lane::Refused, TaskId(71), ""));
        assert!(made.refusal.unwrap().contains("cannot be decoded"));
        for raw in [vec![], vec![8, 0], b"not a task".to_vec()] {
            assert!(!Assignment::of_task(raw, &rules(), 5).unwrap_err().is_empty());
        }
    }
}
