//! The settings for JetStream: those of the controller, and the administrator's for `nats-setup`.
//!
//! Two users with least rights; the administrator is a third, whom the controller never has.

use super::Reader;
use crate::{
    queue::jetstream::{Names, Settings, User},
    secret::Secret,
};

/// Faults are collected by the reader.
pub(crate) fn settings(read: &mut Reader) -> Settings {
    let (producer, worker) =
        (user(read, "NATS_PRODUCER_USER", "NATS_PRODUCER_PASSWORD"), user(read, "NATS_WORKER_USER", "NATS_WORKER_PASSWORD"));
    if !producer.name.is_empty() && producer.name == worker.name {
        read.fault(format!(
            "NATS_PRODUCER_USER and NATS_WORKER_USER are both {}: use two users with least rights, as in docs/nats.md",
            worker.name
        ));
    }
    Settings { producer, worker, ..without_users(read) }
}

/// As [`settings`], for somebody who is neither.
pub(crate) fn without_users(read: &mut Reader) -> Settings {
    let nobody = || User { name: String::new(), password: Secret::new("") };
    Settings {
        url: url(read),
        ca_file: read.file("NATS_CA_FILE"),
        producer: nobody(),
        worker: nobody(),
        names: names(read),
        monitor_url: monitor(read),
    }
}

/// The administrator, for `nats-setup`.
pub(crate) fn admin(read: &mut Reader) -> User {
    user(read, "NATS_ADMIN_USER", "NATS_ADMIN_PASSWORD")
}

/// The password may be in the file that `…_FILE` names.
fn user(read: &mut Reader, name: &str, password: &str) -> User {
    let user = read.optional(name);
    if user.is_none() {
        read.fault(format!("{name} is not set: the user of docs/nats.md"));
    }
    let both = read.optional(password).is_some() && read.optional(&format!("{password}_FILE")).is_some();
    let secret = read.secret(password);
    if secret.is_none() && !both {
        read.fault(format!("{password} is not set: set it, or {password}_FILE"));
    }
    User { name: user.unwrap_or_default(), password: secret.unwrap_or_else(|| Secret::new("")) }
}

fn url(read: &mut Reader) -> String {
    let Some(text) = read.optional("NATS_URL") else {
        read.fault(
            "NATS_URL is not set: the address of the NATS server, as nats://127.0.0.1:4222 or tls://nats.example.org:4222",
        );
        return String::new();
    };
    let fine = text.split(',').map(str::trim).all(|one| {
        let host = one.strip_prefix("nats://").or_else(|| one.strip_prefix("tls://"));
        host.is_some_and(|host| !host.is_empty() && !host.contains('/') && !host.contains('@'))
    });
    if !fine {
        // It may hold a password, so it is not repeated where it does.
        let shown = if text.contains('@') { "(with a user in it)" } else { text.as_str() };
        read.fault(format!(
            "NATS_URL={shown}: nats:// or tls:// addresses, separated by commas, without user and path; users have settings of their own"
        ));
    }
    text
}

fn names(read: &mut Reader) -> Names {
    let Names { stream, base } = Names::default();
    let names = Names { stream: read.or("NATS_STREAM", &stream), base: read.or("NATS_SUBJECT_BASE", &base) };
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    if !plain(&names.stream) {
        read.fault(format!("NATS_STREAM={}: letters, digits, dashes and underscores", names.stream));
    }
    if !names.base.split('.').all(plain) {
        read.fault(format!(
            "NATS_SUBJECT_BASE={}: words of letters, digits, dashes and underscores, with dots between",
            names.base
        ));
    }
    names
}

fn monitor(read: &mut Reader) -> Option<String> {
    let text = read.optional("NATS_MONITOR_URL")?;
    let uri = text.parse::<http::Uri>().ok();
    if !uri.is_some_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some()) {
        read.fault(format!("NATS_MONITOR_URL={text}: the server's monitoring address, as http://127.0.0.1:8222"));
    }
    Some(text)
}
