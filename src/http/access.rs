//! Who may ask the operator's HTTP: under which names, from which pages, and with which token.
//!
//! Loopback is no proof of anything where jobs run on the same machine, so reading needs a token there. A browser sends a
//! password along whichever page made it ask, so what changes something is also asked where it comes from, and nothing is granted
//! to other sites. Tokens are compared in constant time and never told; how often somebody was refused is counted by `denied`.

use std::net::{IpAddr, Ipv6Addr};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::Engine as _;

use crate::{metrics::ReasonLabel, secret::Secret};

/// Who may read, and who may drain.
#[derive(Clone)]
pub struct Access {
    pub read_token: Option<Secret>,
    /// May read, too.
    pub admin_token: Option<Secret>,
    /// Whether someone on loopback may read without a token.
    pub trust_loopback: bool,
    /// Names by which we may be called, beside `localhost` and addresses (no DNS rebinding).
    pub hosts: Vec<String>,
}

/// Whose token a request shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Admin,
    Reader,
    Nobody,
}

/// On an answer: why it is a refusal; the label of `http_denied_total`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Denied(pub(super) &'static str);

/// For pages that show everything themselves, and answers that nobody keeps.
const SECURITY: [(HeaderName, &str); 6] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; \
         base-uri 'none'; frame-ancestors 'none'",
    ),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::X_FRAME_OPTIONS, "DENY"),
];

impl Access {
    fn shown(&self, headers: &HeaderMap) -> Shown {
        let authorization = headers.get(header::AUTHORIZATION).and_then(|h| h.to_str().ok());
        let Some(token) = authorization.and_then(presented) else { return Shown::Nobody };
        let is = |known: &Option<Secret>| known.as_ref().is_some_and(|known| known.matches(token.expose()));
        // Both are compared, so that the time does not tell which was near.
        match (is(&self.admin_token), is(&self.read_token)) {
            (true, _) => Shown::Admin,
            (false, true) => Shown::Reader,
            (false, false) => Shown::Nobody,
        }
    }

    /// A browser that was led here under a stranger's name shows that name. An address cannot be led elsewhere.
    fn is_ours(&self, name: &str) -> bool {
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        address || name == "localhost" || self.hosts.iter().any(|host| name_of(host).is_some_and(|host| host == name))
    }
}

/// Under one of our names, from one of our pages (or from no page): else refused before anything is looked at.
pub(super) async fn at_home(State(access): State<Access>, request: Request, next: Next) -> Response {
    let host = match host(request.headers(), request.uri()) {
        Ok(host) => host,
        Err(fault) => return refusal(StatusCode::BAD_REQUEST, "host", fault),
    };
    if !name_of(&host).is_some_and(|name| access.is_ours(&name)) {
        return refusal(StatusCode::MISDIRECTED_REQUEST, "host", "unknown host name; add it to HTTP_HOSTS\n");
    }
    if ![Method::GET, Method::HEAD].contains(request.method()) && !from_our_page(request.headers(), &host) {
        return refusal(
            StatusCode::FORBIDDEN,
            "site",
            "a page of another site may not do this; behind a proxy, let it pass on the Host\n",
        );
    }
    next.run(request).await
}

/// For what shows something.
pub(super) async fn may_read(State(access): State<Access>, request: Request, next: Next) -> Response {
    let open = access.read_token.is_none() && access.trust_loopback;
    if open || access.shown(request.headers()) != Shown::Nobody {
        return next.run(request).await;
    }
    unauthorized(
        "set READ_TOKEN_FILE to a file with a token, and show that token as password (any user name) or as bearer token; \
         jobs run on this machine, so its loopback is open to them\n",
    )
}

/// For what changes something.
pub(super) async fn may_drain(State(access): State<Access>, request: Request, next: Next) -> Response {
    match access.shown(request.headers()) {
        Shown::Admin => next.run(request).await,
        _ if access.admin_token.is_none() => refusal(
            StatusCode::FORBIDDEN,
            "rights",
            "draining is refused: set ADMIN_TOKEN_FILE to a file with a token of its own, restart, and show that token\n",
        ),
        Shown::Reader => refusal(StatusCode::FORBIDDEN, "rights", "this token may only read: show the one of ADMIN_TOKEN_FILE\n"),
        Shown::Nobody => unauthorized("show the token of ADMIN_TOKEN_FILE as bearer token, or as password (any user name)\n"),
    }
}

/// The last of all layers: counts refusals, and tells browsers what nobody else may do with an answer.
pub(super) async fn told(State(metrics): State<crate::metrics::Metrics>, mut response: Response) -> Response {
    // Once, however often it passes here.
    if let Some(Denied(reason)) = response.extensions_mut().remove() {
        metrics.http_denied.get_or_create(&ReasonLabel { reason }).inc();
    }
    for (name, value) in SECURITY {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

pub(super) fn refusal(status: StatusCode, reason: &'static str, way_out: &'static str) -> Response {
    let mut response = (status, way_out).into_response();
    response.extensions_mut().insert(Denied(reason));
    response
}

fn unauthorized(way_out: &'static str) -> Response {
    let mut response = refusal(StatusCode::UNAUTHORIZED, "token", way_out);
    let realm = HeaderValue::from_static("Basic realm=\"gitea-dynamic-runner\", charset=\"UTF-8\"");
    response.headers_mut().insert(header::WWW_AUTHENTICATE, realm);
    response
}

/// The one authority that a request names, in lower case. Two that differ are one for whoever stands before us and one for us.
fn host(headers: &HeaderMap, uri: &Uri) -> Result<String, &'static str> {
    let mut named = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (named.next(), named.next()) else { return Err("name one Host\n") };
    let host = host.to_str().map_err(|_| "the Host is not a name\n")?.to_ascii_lowercase();
    match uri.authority() {
        Some(authority) if authority.as_str().to_ascii_lowercase() != host => Err("the Host is not that of the address\n"),
        _ => Ok(host),
    }
}

/// The name in `name`, `name:port`, `[v6]` or `[v6]:port`: in lower case and without the dot of the root. `None`: it is none.
fn name_of(authority: &str) -> Option<String> {
    let lower = authority.to_ascii_lowercase();
    let (name, port) = match lower.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            (format!("[{}]", address.parse::<Ipv6Addr>().ok()?), port)
        }
        None => {
            let (name, port) = lower.split_at(lower.find(':').unwrap_or(lower.len()));
            (name.strip_suffix('.').unwrap_or(name).to_owned(), port)
        }
    };
    let port_fits = match port.strip_prefix(':') {
        Some(digits) => digits.bytes().all(|b| b.is_ascii_digit()) && digits.parse::<u16>().is_ok(),
        None => port.is_empty(),
    };
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'[' | b']' | b':');
    (port_fits && !name.is_empty() && name.bytes().all(fine)).then_some(name)
}

/// What a browser says of the page that asks, if it is one: programs say nothing. `Origin: null` is somebody's, too.
fn from_our_page(headers: &HeaderMap, host: &str) -> bool {
    let all = |name: &str, fine: &dyn Fn(&str) -> bool| headers.get_all(name).iter().all(|v| v.to_str().is_ok_and(fine));
    let ours = |origin: &str| {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
    };
    all("sec-fetch-site", &|site| matches!(site, "same-origin" | "none")) && all("origin", &ours)
}

/// The token of `Bearer …`, or the password of `Basic …`.
fn presented(authorization: &str) -> Option<Secret> {
    let (scheme, shown) = authorization.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(Secret::new(shown.trim()));
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let basic = zeroize::Zeroizing::new(base64::engine::general_purpose::STANDARD.decode(shown.trim()).ok()?);
    std::str::from_utf8(&basic).ok()?.split_once(':').map(|(_, password)| Secret::new(password))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_name_is_told_from_its_port_and_from_what_only_looks_like_one() {
        for (authority, expected) in [
            ("localhost", Some("localhost")),
            ("LocalHost:9180", Some("localhost")),
            ("localhost.:9180", Some("localhost")),
            ("127.0.0.1:9180", Some("127.0.0.1")),
            ("[::1]:9180", Some("[::1]")),
            ("[0:0::1]", Some("[::1]")),
            ("ci.example.test", Some("ci.example.test")),
            ("", None),
            (":9180", None),
            (".", None),
            ("localhost:", None),
            ("localhost:+80", None),
            ("localhost:99999", None),
            ("localhost:80:80", None),
            ("localhost:9180@evil.test", None),
            ("user@localhost", None),
            ("evil.test/localhost", None),
            ("localhost#evil.test", None),
            ("local host", None),
            ("[::1", None),
            ("[::1]evil.test", None),
            ("[evil.test]", None),
            ("::1", None),
            ("localhóst", None),
        ] {
            assert_eq!(name_of(authority).as_deref(), expected, "{authority:?}");
        }
    }

    #[test]
    fn only_our_own_names_and_addresses_are_ours() {
        let hosts = vec!["ci.example.test".into(), "Other.Example.test:8443".into()];
        let access = Access { read_token: None, admin_token: None, trust_loopback: false, hosts };
        for (name, ours) in [
            ("localhost", true),
            ("127.0.0.1", true),
            ("10.1.2.3", true),
            ("[::1]", true),
            ("ci.example.test", true),
            ("other.example.test", true),
            ("evil.test", false),
            ("localhost.evil.test", false),
            ("evil-localhost", false),
            ("127.0.0.1.evil.test", false),
            ("2130706433", false),
            ("0x7f.1", false),
            ("xci.example.test", false),
        ] {
            assert_eq!(access.is_ours(name), ours, "{name}");
        }
    }

    #[test]
    fn pages_of_other_sites_and_of_nobody_are_told_from_our_own_and_from_programs() {
        for (pairs, ours) in [
            (vec![], true),
            (vec![("origin", "http://127.0.0.1:9180")], true),
            (vec![("origin", "https://127.0.0.1:9180"), ("sec-fetch-site", "same-origin")], true),
            (vec![("sec-fetch-site", "none")], true),
            (vec![("origin", "http://127.0.0.1:9181")], false),
            (vec![("origin", "http://127.0.0.1")], false),
            (vec![("origin", "null")], false),
            (vec![("origin", "")], false),
            (vec![("origin", "http://evil.test")], false),
            (vec![("origin", "http://127.0.0.1:9180.evil.test")], false),
            (vec![("origin", "http://127.0.0.1:9180"), ("origin", "http://evil.test")], false),
            (vec![("origin", "http://127.0.0.1:9180"), ("sec-fetch-site", "cross-site")], false),
            (vec![("sec-fetch-site", "same-site")], false),
        ] {
            let mut headers = HeaderMap::new();
            for (name, value) in &pairs {
                headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_static(value));
            }
            assert_eq!(from_our_page(&headers, "127.0.0.1:9180"), ours, "{pairs:?}");
        }
    }

    #[test]
    fn a_token_is_taken_from_either_scheme_in_any_spelling() {
        let encoded = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        for (header, expected) in [
            ("Bearer t0ken".to_owned(), Some("t0ken")),
            ("bearer  t0ken ".to_owned(), Some("t0ken")),
            (format!("Basic {}", encoded("me:t0ken")), Some("t0ken")),
            (format!("BASIC {}", encoded(":a:b")), Some("a:b")),
            (format!("Basic {}", encoded("no colon")), None),
            ("Basic ???".to_owned(), None),
            ("Digest t0ken".to_owned(), None),
            ("t0ken".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(presented(&header).as_ref().map(Secret::expose), expected, "{header}");
        }
    }
}
