//! One connection to NATS: whether it is there, and if not, why, in words that help.
//!
//! The client reconnects for ever by itself. What it does not tell is kept here from its events: a refused subject never answers,
//! it only shows as an event. Both users have inboxes of their own, so that neither hears the other.

use std::{
    error::Error as _,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, ServerError, connection::State, jetstream};
use tokio::sync::watch;

use super::names::{Settings, User};

/// One attempt to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// One question to the server.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// A refused subject counts for so long after it was last refused: the server may have been told better, and does not say so.
const REFUSAL_COUNTS: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Producer,
    Worker,
    Admin,
}

impl Role {
    fn inbox(self) -> &'static str {
        match self {
            Role::Producer => "_INBOX_producer",
            Role::Worker => "_INBOX_worker",
            Role::Admin => "_INBOX_admin",
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Role::Producer => "NATS_PRODUCER",
            Role::Worker => "NATS_WORKER",
            Role::Admin => "NATS_ADMIN",
        }
    }
}

#[derive(Default)]
struct Heard {
    refusal: Option<(String, Instant)>,
}

pub(super) struct Link {
    pub(super) client: Client,
    pub(super) js: jetstream::Context,
    settings: Settings,
    user: User,
    role: Role,
    /// Counts connections made; changes wake who waits for an answer that the old one owed.
    connected: watch::Receiver<u64>,
    /// Counts subjects refused; a question about one is never answered.
    refused: watch::Receiver<u64>,
    heard: Arc<Mutex<Heard>>,
}

fn options(settings: &Settings, user: &User, role: Role) -> ConnectOptions {
    let mut options = ConnectOptions::with_user_and_password(user.name.clone(), user.password.expose().to_owned())
        .name("gitea-dynamic-runner")
        .custom_inbox_prefix(role.inbox())
        .require_tls(settings.tls())
        .connection_timeout(CONNECT_LIMIT)
        .request_timeout(Some(REQUEST_LIMIT))
        .ping_interval(Duration::from_secs(10));
    if let Some(file) = &settings.ca_file {
        options = options.add_root_certificates(file.clone());
    }
    options
}

impl Link {
    /// Comes back at once; the connection is made when the server can be reached. Fails only where the settings make no sense.
    pub(super) async fn open(settings: &Settings, user: &User, role: Role) -> Result<Self, String> {
        let (connected, is_connected) = watch::channel(0);
        let (refused, is_refused) = watch::channel(0);
        let heard = Arc::new(Mutex::new(Heard::default()));
        let hear = Arc::clone(&heard);
        let options = options(settings, user, role).retry_on_initial_connect().event_callback(move |event| {
            match event {
                Event::Connected => connected.send_modify(|times| *times += 1),
                Event::ServerError(ServerError::Other(text)) if text.to_lowercase().contains("permissions violation") => {
                    hear.lock().unwrap_or_else(PoisonError::into_inner).refusal = Some((text, Instant::now()));
                    refused.send_modify(|times| *times += 1);
                }
                _ => {}
            }
            std::future::ready(())
        });
        let urls: Vec<&str> = settings.url.split(',').map(str::trim).collect();
        let client = options.connect(urls).await.map_err(|e| format!("NATS_URL={}: {}", settings.url, words(&e)))?;
        let js = jetstream::context::ContextBuilder::new().timeout(REQUEST_LIMIT).build(client.clone());
        Ok(Self {
            client,
            js,
            settings: settings.clone(),
            user: user.clone(),
            role,
            connected: is_connected,
            refused: is_refused,
            heard,
        })
    }

    /// The event comes a moment after the client says so, and only with it this connection can be told from another.
    pub(super) fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected && *self.connected.borrow() > 0
    }

    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.connected.clone()
    }

    pub(super) fn watch_refusals(&self) -> watch::Receiver<u64> {
        self.refused.clone()
    }

    /// Waits for the connection, but not longer than `limit`.
    pub(super) async fn up_within(&self, limit: Duration) -> bool {
        let mut watch = self.watch();
        let end = tokio::time::Instant::now() + limit;
        while !self.is_up() {
            // State and event do not come together, so it is looked at again soon.
            let soon = end.min(tokio::time::Instant::now() + Duration::from_millis(50));
            if tokio::time::timeout_at(soon, watch.changed()).await.is_err() && tokio::time::Instant::now() >= end {
                return self.is_up();
            }
        }
        true
    }

    /// A subject that the server lately refused to this user.
    pub(super) fn refusal(&self) -> Option<String> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let (text, at) = heard.refusal.as_ref()?;
        (at.elapsed() < REFUSAL_COUNTS).then(|| {
            format!(
                "NATS refuses a subject to the user {} ({}_USER): {text}. Give it the rights of docs/nats.md",
                self.user.name,
                self.role.variable()
            )
        })
    }

    /// Why there is no connection, found out by one more attempt, since the client does not tell.
    pub(super) async fn why_down(&self) -> String {
        let urls: Vec<&str> = self.settings.url.split(',').map(str::trim).collect();
        match options(&self.settings, &self.user, self.role).connect(urls).await {
            Ok(_) => "the connection to NATS is being made".into(),
            Err(error) => self.told(&error),
        }
    }

    fn told(&self, error: &async_nats::ConnectError) -> String {
        let (url, said) = (&self.settings.url, words(error));
        let variable = self.role.variable();
        match error.kind() {
            ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => format!(
                "NATS at {url} does not let the user {} in: correct {variable}_USER and {variable}_PASSWORD, or the server's users",
                self.user.name
            ),
            _ if said.contains("InvalidContentType") => format!(
                "NATS at {url} does not speak TLS, which NATS_CA_FILE or a tls:// address asks for: nothing is sent in the clear. \
                 Give the server a certificate, or unset NATS_CA_FILE and write nats://"
            ),
            _ if said.contains("UnknownIssuer") => format!(
                "the certificate of NATS at {url} is from an authority that is not trusted here: set NATS_CA_FILE to that authority's \
                 certificate ({said})"
            ),
            _ if said.contains("NotValidForName") => {
                format!("the certificate of NATS at {url} is for another name: address it as the certificate does ({said})")
            }
            _ if said.contains("CertificateRequired") => {
                format!("NATS at {url} asks for a certificate of ours (`verify`), and this program has none: use passwords there")
            }
            _ => {
                format!("NATS at {url} cannot be reached ({said}): start it, or correct NATS_URL; it is tried again without end")
            }
        }
    }
}

/// An error with what caused it; each cause once.
fn words(error: &async_nats::ConnectError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
