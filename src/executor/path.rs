//! Which of the bridge's doors a request goes to, judged by its target alone.
//!
//! A path that some server on the way could read as `/api/actions` must not slip past the bridge to Gitea: there the job's
//! runner token means nothing, but the bridge would lend its network place. So what is not exactly an RPC path and becomes one
//! by decoding, by merging slashes or by dropping dots is refused, and everything else is passed on exactly as it came.

use http::{Method, Uri};

/// The RPC paths, exactly.
const RPC: [&str; 6] = [
    PING,
    "/api/actions/runner.v1.RunnerService/Register",
    "/api/actions/runner.v1.RunnerService/Declare",
    "/api/actions/runner.v1.RunnerService/FetchTask",
    "/api/actions/runner.v1.RunnerService/UpdateTask",
    "/api/actions/runner.v1.RunnerService/UpdateLog",
];
const PING: &str = "/api/actions/ping.v1.PingService/Ping";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// The one RPC without a token.
    Ping,
    Rpc,
    /// On to Gitea, as it came.
    Gitea,
    /// 404.
    Hidden,
    /// 405.
    NoTunnel,
    /// 400, with a reason.
    Refused(&'static str),
}

pub(super) fn door(method: &Method, target: &Uri) -> Door {
    if method == Method::CONNECT {
        return Door::NoTunnel;
    }
    if target.scheme().is_some() || target.authority().is_some() {
        return Door::Refused("absolute-form targets are not served here");
    }
    let path = target.path();
    if !path.starts_with('/') {
        return Door::Refused("the target is no path");
    }
    if path == PING {
        return Door::Ping;
    }
    if RPC.contains(&path) {
        return Door::Rpc;
    }
    // Twice, because a proxy in front of Gitea may decode once more.
    let once = decode(path.as_bytes());
    let twice = decode(&once);
    let readings = [path.as_bytes(), &once, &twice];
    if readings.iter().any(|reading| segments(reading).any(|segment| segment == b"..")) {
        return Door::Refused("`..` in the path");
    }
    if readings.iter().any(|reading| is_actions(reading)) { Door::Hidden } else { Door::Gitea }
}

fn is_actions(path: &[u8]) -> bool {
    let mut real = segments(path).filter(|segment| !segment.is_empty() && *segment != b".");
    let mut is = |name: &[u8]| real.next().is_some_and(|segment| segment.eq_ignore_ascii_case(name));
    is(b"api") && is(b"actions")
}

/// A backslash is a slash for some servers.
fn segments(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| matches!(byte, b'/' | b'\\'))
}

fn decode(text: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let hex = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16)).and_then(|d| u8::try_from(d).ok());
        match (first, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push(high << 4 | low);
                rest = &after[2..];
            }
            _ => {
                decoded.push(first);
                rest = after;
            }
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn at(target: &str) -> Door {
        door(&Method::POST, &target.parse().unwrap())
    }

    #[test]
    fn only_exact_paths_are_rpcs_and_lookalikes_reach_nothing() {
        assert_eq!(at("/api/actions/ping.v1.PingService/Ping"), Door::Ping);
        assert_eq!(at("/api/actions/runner.v1.RunnerService/FetchTask?x=1"), Door::Rpc);
        for hidden in [
            "/api/actions",
            "/api/actions/",
            "/api/actions?x",
            "/api/actions/runner.v1.RunnerService/Other",
            "/api/actions/runner.v1.RunnerService/FetchTask/",
            "//api/actions/runner.v1.RunnerService/FetchTask",
            "/api//actions/runner.v1.RunnerService/FetchTask",
            "/api/./actions/runner.v1.RunnerService/FetchTask",
            "/./api/actions/x",
            "/api/%61ctions/runner.v1.RunnerService/FetchTask",
            "/%61pi/actions/x",
            "/api%2factions/x",
            "/api%2Factions%2Fx",
            "/api/%2561ctions/x",
            "/api/%2e/actions/x",
            "/api%5cactions/x",
            "/API/Actions/x",
        ] {
            assert_eq!(at(hidden), Door::Hidden, "{hidden}");
        }
        for refused in [
            "/api/actions/../actions/runner.v1.RunnerService/FetchTask",
            "/x/../api/actions/x",
            "/x/%2e%2e/api/actions/x",
            "/x/.%2E/y",
            "/api/actions%2f..",
            "/x%2f..%2fy",
            "/x/%252e%252e/y",
            "http://127.0.0.1/api/v1/version",
            "http://169.254.169.254/latest",
        ] {
            assert!(matches!(at(refused), Door::Refused(_)), "{refused}");
        }
        assert_eq!(door(&Method::CONNECT, &"gitea.test:443".parse().unwrap()), Door::NoTunnel);
        assert!(matches!(door(&Method::OPTIONS, &"*".parse().unwrap()), Door::Refused(_)));
    }

    #[test]
    fn everything_else_goes_to_gitea() {
        for passed in [
            "/",
            "/api/actions_pipeline/_apis/pipelines/workflows/1/artifacts",
            "/api/v1/repos/o/r/actions/runs",
            "/o/r/info/refs?service=git-upload-pack",
            "/o/r/src/branch/a%2Fb/c%20d..txt",
            "/o/api/actions/x",
            "/twirp/github.actions.results.api.v1.ArtifactService/CreateArtifact",
            "/x/%zz/100%",
        ] {
            assert_eq!(at(passed), Door::Gitea, "{passed}");
        }
    }
}
