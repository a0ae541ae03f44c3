//! The server's own page about itself: the only place that says whether it writes to the disk before it acknowledges.
//!
//! Plain HTTP, as nats-server serves it on loopback or inside a cluster; nothing secret is asked or told.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde::Deserialize;

const LIMIT: Duration = Duration::from_secs(3);
const MAX_BYTES: usize = 1 << 20;

#[derive(Deserialize)]
struct Varz {
    #[serde(default)]
    jetstream: JetStream,
}

#[derive(Default, Deserialize)]
struct JetStream {
    #[serde(default)]
    config: Config,
}

#[derive(Default, Deserialize)]
struct Config {
    #[serde(default)]
    sync_always: bool,
}

/// Whether `sync_interval` is `always`. `Err`: why it cannot be told.
pub(super) async fn syncs_always(monitor_url: &str) -> Result<bool, String> {
    let uri: http::Uri = format!("{}/varz", monitor_url.trim_end_matches('/')).parse().map_err(|e| format!("{e}"))?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let ask = async {
        let answer = client.get(uri).await.map_err(|e| e.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("it answers {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await.map_err(|e| e.to_string())?;
        let varz: Varz = serde_json::from_slice(&body.to_bytes()).map_err(|e| e.to_string())?;
        Ok(varz.jetstream.config.sync_always)
    };
    tokio::time::timeout(LIMIT, ask).await.unwrap_or_else(|_| Err("no answer in time".into()))
}
