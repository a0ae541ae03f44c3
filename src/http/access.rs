//! Who may ask the operator's HTTP: under which names, from which pages, and with which token.
//!
//! Loopback is no proof of anything where jobs run on the same machine, so reading needs a token there. A browser sends a
//! password along whichever page made it ask, so what changes something is also asked where it comes from.

use axum::{
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::Engine as _;

use crate::secret::Secret;

/// Who may read, and who may drain.
#[derive(Clone)]
pub struct Access {
    pub read_token: Option<Secret>,
    /// May read, too.
    pub admin_token: Option<Secret>,
    /// Whether someone on loopback may read without a token.
    pub trust_loopback: bool,
    /// Names by which we may be called, beside loopback ones (no DNS rebinding).
    pub hosts: Vec<String>,
}

/// Whose token a request shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Admin,
    Reader,
    Nobody,
}

impl Access {
    fn shown(&self, request: &Request) -> Shown {
        let authorization = request.headers().get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
        let Some(token) = authorization.and_then(presented) else { return Shown::Nobody };
        let is = |known: &Option<Secret>| known.as_ref().is_some_and(|known| known.matches(token.expose()));
        // Both are compared, so that the time does not tell which was near.
        match (is(&self.admin_token), is(&self.read_token)) {
            (true, _) => Shown::Admin,
            (false, true) => Shown::Reader,
            (false, false) => Shown::Nobody,
        }
    }
}

/// A browser that was led here under another name shows that name.
pub(super) async fn right_host(State(access): State<Access>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if port.ends_with(']') { host } else { name });
    let known = matches!(name, "localhost" | "127.0.0.1" | "[::1]" | "") || access.hosts.iter().any(|h| h == name);
    if known {
        return next.run(request).await;
    }
    (StatusCode::MISDIRECTED_REQUEST, "unknown host name; add it to HTTP_HOSTS\n").into_response()
}

/// For what shows something.
pub(super) async fn may_read(State(access): State<Access>, request: Request, next: Next) -> Response {
    let open = access.read_token.is_none() && access.trust_loopback;
    if open || access.shown(&request) != Shown::Nobody {
        return next.run(request).await;
    }
    let way_out = "set READ_TOKEN_FILE to a file with a token, and show that token as password (any user name) or as bearer token; \
                   jobs run on this machine, so its loopback is open to them\n";
    unauthorized(way_out)
}

/// For what changes something.
#[expect(dead_code, reason = "its routes come next")]
pub(super) async fn may_drain(State(access): State<Access>, request: Request, next: Next) -> Response {
    match access.shown(&request) {
        Shown::Admin => next.run(request).await,
        _ if access.admin_token.is_none() => {
            let way_out =
                "drain is refused: set ADMIN_TOKEN_FILE to a file with a token of its own, restart, and show that token\n";
            (StatusCode::FORBIDDEN, way_out).into_response()
        }
        Shown::Reader => (StatusCode::FORBIDDEN, "this token may only read; show the one of ADMIN_TOKEN_FILE\n").into_response(),
        Shown::Nobody => unauthorized("show the token of ADMIN_TOKEN_FILE as bearer token, or as password (any user name)\n"),
    }
}

fn unauthorized(way_out: &'static str) -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Basic realm=\"gitea-dynamic-runner\"")], way_out).into_response()
}

/// The token of `Bearer …`, or the password of `Basic …`.
fn presented(authorization: &str) -> Option<Secret> {
    if let Some(token) = authorization.strip_prefix("Bearer ") {
        return Some(Secret::new(token.trim()));
    }
    let basic = base64::engine::general_purpose::STANDARD.decode(authorization.strip_prefix("Basic ")?.trim()).ok()?;
    let text = zeroize::Zeroizing::new(String::from_utf8(basic).ok()?);
    text.split_once(':').map(|(_, password)| Secret::new(password))
}
