//! What the executor needs of its task, and the task as the runner shall get it.
//!
//! In self mode Gitea names itself as the place of `uses: owner/action`; the environment may have no route there, but it has
//! the bridge. The task's other bytes stay as they came.

use buffa::Message as _;
use buffa_types::google::protobuf::{Struct, Value};

use super::proxy::Origin;
use crate::{proto::runner::Task, secret::SecretBytes, task::read_task};

const ACTIONS_URL: &str = "gitea_default_actions_url";
/// Taken when the task cannot be read: the runner then fails the job itself, with a log.
const ANY_LABELS: [&str; 3] = ["self-hosted", "pod", "vm"];

pub(super) struct RunnerTask {
    pub(super) id: i64,
    /// Labels of the job, each of which the runner must know as `host`.
    pub(super) labels: Vec<String>,
    /// The ROOT_URL that Gitea announces.
    pub(super) announced: Option<Origin>,
    /// In self mode the place of actions is Gitea itself.
    self_mode: bool,
    raw: SecretBytes,
}

impl RunnerTask {
    /// `None` if `raw` is no Task with an id. `gitea` is `GITEA_URL`.
    pub(super) fn new(raw: SecretBytes, gitea: &str) -> Option<Self> {
        let task = Task::decode_from_slice(raw.expose()).ok().filter(|task| task.id > 0)?;
        let context = |key: &str| task.context.as_option().and_then(|c| c.fields.get(key)?.as_str().and_then(Origin::new));
        let announced = context("server_url");
        let actions = context(ACTIONS_URL);
        let self_mode = actions.is_some_and(|actions| {
            [announced.as_ref(), Origin::new(gitea).as_ref()].into_iter().flatten().any(|gitea| gitea.same(&actions))
        });
        let labels = match read_task(raw.expose()) {
            Ok(facts) if !facts.labels.is_empty() => facts.labels,
            _ => ANY_LABELS.map(str::to_owned).to_vec(),
        };
        Some(Self { id: task.id, labels, announced, self_mode, raw })
    }

    /// The bytes for the runner, which reaches Gitea at `bridge`.
    pub(super) fn for_runner(&self, bridge: &str) -> SecretBytes {
        if !self.self_mode {
            return self.raw.clone();
        }
        // Protobuf merges a message field that comes twice, and of a map's entries with one key the last one counts.
        let fields = [(ACTIONS_URL.to_owned(), Value::from(bridge.to_owned()))];
        let context = Struct { fields: fields.into_iter().collect(), ..Default::default() };
        let more = Task { context: context.into(), ..Default::default() }.encode_to_vec();
        SecretBytes::new([self.raw.expose(), &more].concat())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    const BRIDGE: &str = "http://127.0.0.1:4711";

    fn task(server: &str, actions: &str) -> Vec<u8> {
        let fields = [("server_url", server), (ACTIONS_URL, actions), ("token", "canary")];
        let fields = fields.into_iter().map(|(key, value)| (key.to_owned(), Value::from(value.to_owned()))).collect();
        let context = Struct { fields, ..Default::default() };
        let mut raw = Task { id: 7, context: context.into(), ..Default::default() }.encode_to_vec();
        // Field 99, which no version knows.
        raw.extend([0x9a, 0x06, 2, b'h', b'i']);
        raw
    }

    fn through(server: &str, actions: &str) -> (Vec<u8>, Vec<u8>) {
        let raw = task(server, actions);
        let task = RunnerTask::new(SecretBytes::new(raw.clone()), "http://gitea.internal:3000/").unwrap();
        (raw, task.for_runner(BRIDGE).expose().to_vec())
    }

    #[test]
    fn in_self_mode_actions_come_through_the_bridge_and_every_other_byte_stays() {
        for (server, actions) in [
            ("https://git.example.test/sub/", "https://git.example.test/sub"),
            ("https://git.example.test/", "https://GIT.example.test:443"),
            ("https://git.example.test/", "http://gitea.internal:3000"),
        ] {
            let (raw, given) = through(server, actions);
            assert!(given.starts_with(&raw));
            let (before, after) = (Task::decode_from_slice(&raw).unwrap(), Task::decode_from_slice(&given).unwrap());
            let (before, after) = (before.context.into_option().unwrap(), after.context.into_option().unwrap());
            assert_eq!(after.fields[ACTIONS_URL].as_str(), Some(BRIDGE));
            assert_eq!(after.fields.len(), before.fields.len());
            for key in ["server_url", "token"] {
                assert_eq!(after.fields[key], before.fields[key]);
            }
        }
    }

    #[test]
    fn another_place_of_actions_is_left_alone() {
        for actions in ["https://github.com", "https://git.example.test/sub", "https://git.example.test:8443", ""] {
            let (raw, given) = through("https://git.example.test/", actions);
            assert_eq!(raw, given, "{actions}");
        }
        assert!(RunnerTask::new(SecretBytes::new(b"no task".to_vec()), "http://x/").is_none());
    }
}
