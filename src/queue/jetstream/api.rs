//! Questions to JetStream, and what its refusals are.
//!
//! What an answer means for a job is not decided here. Silence is its own kind: then it is not known whether the question was heard.

use std::collections::HashMap;

use async_nats::{
    StatusCode,
    jetstream::{
        consumer,
        context::RequestErrorKind,
        message::StreamMessage,
        response::Response,
        stream::{self, DirectGetErrorKind},
    },
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::link::Link;
use crate::queue::QueueError;

/// JetStream's own numbers.
pub(super) mod code {
    pub(in crate::queue::jetstream) const CONSUMER_NOT_FOUND: u64 = 10014;
    pub(in crate::queue::jetstream) const NO_ACCOUNT: u64 = 10039;
    pub(in crate::queue::jetstream) const MESSAGE_TOO_LARGE: u64 = 10054;
    pub(in crate::queue::jetstream) const STREAM_NOT_FOUND: u64 = 10059;
    pub(in crate::queue::jetstream) const NOT_ENABLED: u64 = 10076;
    /// "maximum messages exceeded", "maximum bytes exceeded" and "maximum messages per subject exceeded" all have it.
    pub(in crate::queue::jetstream) const STORE_FAILED: u64 = 10077;
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ApiError {
    #[error("{1}")]
    Refused(u64, String),
    #[error("nobody answers to it: JetStream is off, the stream or consumer is missing, or has no leader just now")]
    NoResponders,
    #[error("no answer in time: the server hangs, its disk is full, or the user may not ask this")]
    TimedOut,
    #[error("{0}")]
    Other(String),
}

impl ApiError {
    pub(super) fn while_doing(self, what: &str) -> QueueError {
        QueueError::Unavailable(format!("{what}: {self}"))
    }
}

/// One question with a JSON answer; `subject` without `$JS.API.`.
pub(super) async fn ask<T: DeserializeOwned>(link: &Link, subject: String, payload: &impl Serialize) -> Result<T, ApiError> {
    match link.js.request(subject, payload).await {
        Ok(Response::Ok(answer)) => Ok(answer),
        Ok(Response::Err { error }) => Err(ApiError::Refused(error.error_code().0, error.to_string())),
        Err(error) => Err(match error.kind() {
            RequestErrorKind::TimedOut => ApiError::TimedOut,
            RequestErrorKind::NoResponders => ApiError::NoResponders,
            _ => ApiError::Other(error.to_string()),
        }),
    }
}

pub(super) async fn stream_info(link: &Link, stream: &str) -> Result<stream::Info, ApiError> {
    ask(link, format!("STREAM.INFO.{stream}"), &serde_json::json!({})).await
}

pub(super) async fn consumer_info(link: &Link, stream: &str, consumer: &str) -> Result<consumer::Info, ApiError> {
    ask(link, format!("CONSUMER.INFO.{stream}.{consumer}"), &serde_json::json!({})).await
}

#[derive(Deserialize)]
struct SubjectsPage {
    state: SubjectsState,
    #[serde(default)]
    total: usize,
}

#[derive(Deserialize)]
struct SubjectsState {
    #[serde(default)]
    subjects: HashMap<String, u64>,
}

/// The subjects that match `filter`, and how many messages each has. One question for every 100,000.
pub(super) async fn subjects(link: &Link, stream: &str, filter: &str) -> Result<HashMap<String, u64>, ApiError> {
    let mut found = HashMap::new();
    loop {
        let question = serde_json::json!({ "subjects_filter": filter, "offset": found.len() });
        let page: SubjectsPage = ask(link, format!("STREAM.INFO.{stream}"), &question).await?;
        let before = found.len();
        found.extend(page.state.subjects);
        if found.len() >= page.total || found.len() == before {
            return Ok(found);
        }
    }
}

/// The first message on a subject (which may have wildcards) at or after `sequence`.
pub(super) async fn first_message(
    link: &Link,
    stream: &str,
    filter: &str,
    sequence: u64,
) -> Result<Option<StreamMessage>, ApiError> {
    let stream = link.js.get_stream_no_info(stream).await.map_err(|e| ApiError::Other(e.to_string()))?;
    match stream.direct_get_builder().next_by_subject(filter).sequence(sequence).send().await {
        Ok(message) => Ok(Some(message)),
        Err(error) => match error.kind() {
            DirectGetErrorKind::NotFound => Ok(None),
            DirectGetErrorKind::TimedOut => Err(ApiError::TimedOut),
            DirectGetErrorKind::ErrorResponse(StatusCode::NO_RESPONDERS, _) => Err(ApiError::NoResponders),
            _ => Err(ApiError::Other(error.to_string())),
        },
    }
}

#[derive(Deserialize)]
struct Purged {
    purged: u64,
}

/// Removes what is on one subject; how many that were.
pub(super) async fn purge(link: &Link, stream: &str, subject: &str) -> Result<u64, ApiError> {
    let purged: Purged = ask(link, format!("STREAM.PURGE.{stream}"), &serde_json::json!({ "filter": subject })).await?;
    Ok(purged.purged)
}

/// Tells the server about a delivery, and hears that it was heard. `double_ack` takes "nobody is there" for an answer; this does not.
pub(super) async fn settle(link: &Link, reply: &str, word: String) -> Result<(), ApiError> {
    match link.client.request(reply.to_owned(), word.into()).await {
        Ok(_) => Ok(()),
        Err(error) => Err(match error.kind() {
            async_nats::RequestErrorKind::TimedOut => ApiError::TimedOut,
            async_nats::RequestErrorKind::NoResponders => ApiError::NoResponders,
            _ => ApiError::Other(error.to_string()),
        }),
    }
}
