//! From the old layout, in which all assignments of a backend shared one subject, to one subject for each task.
//!
//! In place and in order, while nobody publishes or consumes. Each message is published under its own subject, then the old one is deleted:
//! dying in between leaves both, and the next run finds the new one there. The limit of one message a subject comes last, because it
//! would delete a backlog that still shares one. A run that was cut off is simply run again.

use async_nats::jetstream::{
    context::PublishErrorKind,
    message::{PublishMessage, StreamMessage},
};
use serde_json::{Value, json};

use super::{
    api::{self, code},
    judge::{self, Change},
    setup::{Setup, SetupError, failed},
};
use crate::{
    failpoint,
    ids::{Lane, TaskId},
};

/// What a migration did, or would do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Migrated {
    /// Messages that got a subject of their own.
    pub moved: u64,
    /// Second messages of one task: they went to the dead letters.
    pub doubles: u64,
    /// What names no task, one line each; it stays where it is.
    pub unreadable: Vec<String>,
}

/// Finds the task of a sealed assignment; its header may not say it.
pub type TaskOf<'a> = &'a (dyn Fn(&[u8]) -> Option<TaskId> + Sync);

impl Setup {
    /// How many messages wait in the old layout; `None`: the stream has nothing of it.
    pub async fn flat_messages(&self) -> Result<Option<u64>, SetupError> {
        let info = format!("STREAM.INFO.{}", self.names.stream);
        let Some(config) = self.config_of(&info, code::STREAM_NOT_FOUND).await? else {
            return Err(SetupError(format!(
                "the stream {} is not there: `nats-setup` without --migrate makes it",
                self.names.stream
            )));
        };
        let waiting = self.count_flat().await?;
        Ok((waiting > 0 || judge::is_flat(&config, &self.names)).then_some(waiting))
    }

    pub(super) async fn count_flat(&self) -> Result<u64, SetupError> {
        let mut waiting = 0;
        for lane in Lane::ALL {
            let subject = self.names.flat(lane);
            let counted = api::subjects(&self.link, &self.names.stream, &subject).await;
            waiting += counted.map_err(failed("count the messages of the old layout"))?.values().sum::<u64>();
        }
        Ok(waiting)
    }

    /// All of it, or as far as it goes: what is unreadable is told, and then the last step is not taken.
    pub async fn migrate(&self, task_of: TaskOf<'_>) -> Result<Migrated, SetupError> {
        self.take_new_subjects().await?;
        let mut done = Migrated::default();
        for lane in Lane::ALL {
            let mut next = 1;
            while let Some(message) = self.next_flat(lane, next).await? {
                next = message.sequence + 1;
                self.move_one(lane, &message, task_of, &mut done).await?;
            }
        }
        Ok(done)
    }

    async fn next_flat(&self, lane: Lane, from: u64) -> Result<Option<StreamMessage>, SetupError> {
        let found = api::first_message(&self.link, &self.names.stream, &self.names.flat(lane), from).await;
        found.map_err(failed("read the old layout"))
    }

    /// The stream takes both layouts; everything else of it that may be changed becomes as it must be, but for the limit a subject.
    async fn take_new_subjects(&self) -> Result<(), SetupError> {
        let stream = &self.names.stream;
        let config = self.config_of(&format!("STREAM.INFO.{stream}"), code::STREAM_NOT_FOUND).await?;
        let mut config = config.ok_or_else(|| SetupError(format!("the stream {stream} is not there")))?;
        let findings = judge::judge(&config, &judge::stream_rules(&self.names));
        if let Some(fixed) = findings.iter().find(|finding| finding.rule.change == Change::Never) {
            return Err(SetupError(format!(
                "the stream {stream} cannot be migrated in place: {}, and the server does not let that be changed",
                fixed.text()
            )));
        }
        for finding in &findings {
            match finding.rule.key {
                "max_msgs_per_subject" | "discard_new_per_subject" => {}
                "subjects" => config["subjects"] = self.subjects_beside(&finding.found),
                key => config[key] = finding.rule.wanted.clone(),
            }
        }
        let updated: Result<Value, _> = api::ask(&self.link, format!("STREAM.UPDATE.{stream}"), &config).await;
        updated.map(drop).map_err(failed("let the stream take the new subjects"))
    }

    /// One pattern takes both layouts, and the server wants none that overlap; others stay.
    fn subjects_beside(&self, found: &Value) -> Value {
        let prefix = format!("{}.", self.names.base);
        let others = found.as_array().into_iter().flatten().filter_map(Value::as_str).filter(|one| !one.starts_with(&prefix));
        let all = self.names.all();
        json!(others.chain([all.as_str()]).collect::<Vec<_>>())
    }

    async fn move_one(
        &self,
        lane: Lane,
        message: &StreamMessage,
        task_of: TaskOf<'_>,
        done: &mut Migrated,
    ) -> Result<(), SetupError> {
        let Some(task) = task_in_headers(message).or_else(|| task_of(&message.payload)) else {
            done.unreadable.push(format!("message {} on {} names no task", message.sequence, message.subject));
            return Ok(());
        };
        let subject = self.names.subject(lane, task);
        // Of the old message, so that a repeated run is told that it did this before. Its own id would be taken for a repetition of the old one.
        let moved = PublishMessage::build()
            .payload(message.payload.clone())
            .message_id(format!("migrated-{}-{}", self.names.stream, message.sequence))
            .expected_stream(&self.names.stream)
            .expected_last_subject_sequence(0)
            .header("Task-Id", task.to_string())
            .header("Backend", lane.as_str())
            .header("Schema", "1");
        let sent = async { self.link.js.send_publish(subject.clone(), moved).await?.await };
        match sent.await {
            Ok(_) => done.moved += 1,
            Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => {
                // The task has a place: by a run before this one, or it was published twice.
                let there = api::first_message(&self.link, &self.names.stream, &subject, 1).await;
                let there = there.map_err(failed("look at what was moved"))?;
                if there.is_some_and(|there| there.payload == message.payload) {
                    done.moved += 1;
                } else {
                    self.bury_double(lane, task, message).await?;
                    done.doubles += 1;
                }
            }
            Err(error) => return Err(SetupError(format!("move task {task} to {subject}: {error}"))),
        }
        failpoint::reached("migrate.moved");
        // Dying here, both are there, and the next run comes by the line above.
        let question = json!({ "seq": message.sequence });
        let deleted: Result<Value, _> = api::ask(&self.link, format!("STREAM.MSG.DELETE.{}", self.names.stream), &question).await;
        deleted.map(drop).map_err(failed("delete what was moved"))
    }

    async fn bury_double(&self, lane: Lane, task: TaskId, message: &StreamMessage) -> Result<(), SetupError> {
        let letter = PublishMessage::build()
            .payload(message.payload.clone())
            .message_id(format!("double-{}-{}", self.names.stream, message.sequence))
            .expected_stream(self.names.dead_stream())
            .header("Task-Id", task.to_string())
            .header("Backend", lane.as_str())
            .header("Reason", "a second assignment of this task was in the old layout");
        let sent = async { self.link.js.send_publish(self.names.dead(lane, &task.to_string()), letter).await?.await };
        sent.await.map(drop).map_err(|e| SetupError(format!("write a dead letter for task {task}: {e}")))
    }
}

fn task_in_headers(message: &StreamMessage) -> Option<TaskId> {
    let header = |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
    let named = header("Task-Id").and_then(|task| task.parse().ok());
    named.or_else(|| {
        let id = header("Nats-Msg-Id")?;
        id.strip_prefix("gitea-task-").unwrap_or(&id).parse().ok()
    })
}
