//! The SPIFFE ID of a job: `spiffe://TD/ci/<owner>/<repo>/<job key>`, collision-free (`/ci-pr/` for pull requests of forks).
//!
//! Names only. Whether somebody with such an ID may do anything is decided by the capability (rule R6), never by parsing the path.
//! Policies are written against these names, so the mapping must never change.

use sha2::{Digest as _, Sha256};

use crate::task::{Repository, Trust};

/// Longest trust domain for which every ID stays within SPIRE's 255 bytes.
pub const MAX_TRUST_DOMAIN: usize = 48;

/// `spiffe://` 9, trust domain 48, `/ci-pr/` 7, two segments of 64, one of 56, two slashes: 250 bytes.
const MAX_SEGMENT: usize = 64;
const MAX_JOB_SEGMENT: usize = 56;

/// `spiffe://TD/ci/…` of a job.
///
/// Owner and repository in lower case, because Gitea takes `Acme/App` and `acme/app` for the same; job keys differ by case. The trust
/// domain is taken as it is (lower case, at most [`MAX_TRUST_DOMAIN`] bytes).
pub fn job_id(trust_domain: &str, repository: &Repository, job_key: &str, trust: Trust) -> String {
    let root = match trust {
        Trust::Own => "ci",
        Trust::PullRequest => "ci-pr",
    };
    let owner = segment(&repository.owner.to_ascii_lowercase(), MAX_SEGMENT);
    let name = segment(&repository.name.to_ascii_lowercase(), MAX_SEGMENT);
    let job = segment(job_key, MAX_JOB_SEGMENT);
    format!("spiffe://{trust_domain}/{root}/{owner}/{name}/{job}")
}

/// Whether a SPIFFE ID is one of a job in this trust domain.
pub fn is_job(id: &str, trust_domain: &str) -> bool {
    let path = id.strip_prefix("spiffe://").and_then(|rest| rest.strip_prefix(trust_domain));
    let path = path.and_then(|path| path.strip_prefix("/ci/").or_else(|| path.strip_prefix("/ci-pr/")));
    let Some(path) = path else {
        return false;
    };
    let segments: Vec<&str> = path.split('/').collect();
    segments.len() == 3
        && segments.iter().zip([MAX_SEGMENT, MAX_SEGMENT, MAX_JOB_SEGMENT]).all(|(part, max)| is_segment(part, max))
}

/// What `segment` can give, as far as its letters and length tell.
fn is_segment(part: &str, max: usize) -> bool {
    let lawful = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.' | b'_');
    !part.is_empty() && part.len() <= max && !part.starts_with('.') && part.bytes().all(lawful)
}

/// One path segment, a different one for each text.
///
/// `[a-z0-9-]` stand for themselves, and `.` but for the first byte; any other byte becomes `_` and two hex digits, the empty text
/// `_`. What gets longer than `max` ends in `_-` and half its SHA-256; `_-` comes from nothing else, so no short text can look
/// like a long one.
fn segment(raw: &str, max: usize) -> String {
    if raw.is_empty() {
        return "_".into();
    }
    let mut out = String::with_capacity(raw.len().min(max) + 3);
    let mut bytes = raw.bytes().enumerate();
    // One byte more than fits is enough to know that it does not fit.
    while let Some((at, byte)) = bytes.next().filter(|_| out.len() <= max) {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' => out.push(char::from(byte)),
            b'.' if at > 0 => out.push('.'),
            _ => {
                out.push('_');
                out.push_str(&hex::encode([byte]));
            }
        }
    }
    if out.len() <= max {
        return out;
    }
    let hash = hex::encode(&Sha256::digest(raw.as_bytes())[..16]);
    out.truncate(max - 2 - hash.len());
    // Never inside an escape.
    if let Some(at) = out.rfind('_').filter(|at| out.len() - at < 3) {
        out.truncate(at);
    }
    format!("{out}_-{hash}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn id(owner: &str, name: &str, job: &str, trust: Trust) -> String {
        job_id("ci.example", &Repository { owner: owner.into(), name: name.into() }, job, trust)
    }

    #[test]
    fn names_are_spelled_as_policies_expect_them() {
        for (raw, wanted) in [
            ("a.b", "a.b"),
            ("a-b", "a-b"),
            ("a_b", "a_5fb"),
            (".github", "_2egithub"),
            ("..", "_2e."),
            ("", "_"),
            ("build (linux, 3.12)", "build_20_28linux_2c_203.12_29"),
            ("Ünï", "_c3_9cn_c3_af"),
            ("a/b", "a_2fb"),
            ("123", "123"),
        ] {
            assert_eq!(segment(raw, MAX_SEGMENT), wanted, "{raw}");
        }
        assert_eq!(
            id("Acme.Corp", "Repo-Name_1.x", "Build", Trust::Own),
            "spiffe://ci.example/ci/acme.corp/repo-name_5f1.x/_42uild"
        );
        assert_eq!(id("a", "b", "c", Trust::PullRequest), "spiffe://ci.example/ci-pr/a/b/c");
        assert_eq!(id("A", "B", "c", Trust::Own), id("a", "b", "c", Trust::Own));
        assert_ne!(id("a", "b", "C", Trust::Own), id("a", "b", "c", Trust::Own));
    }

    #[test]
    fn a_long_name_is_cut_before_an_escape_and_told_apart_by_its_hash() {
        let long = "x".repeat(29) + "ü" + &"y".repeat(80);
        let cut = segment(&long, MAX_SEGMENT);
        assert_eq!(&cut[..31], format!("{}_-", "x".repeat(29)));
        assert_eq!(cut.len(), 29 + 2 + 32);
        assert_ne!(cut, segment(&(long.clone() + "y"), MAX_SEGMENT));
        // Exactly as long as allowed is not cut.
        assert_eq!(segment(&"x".repeat(64), MAX_SEGMENT), "x".repeat(64));
        assert_eq!(segment(&"x".repeat(65), MAX_SEGMENT).len(), 64);
    }

    #[test]
    fn only_ids_of_jobs_are_jobs() {
        assert!(is_job("spiffe://td/ci/a/b/c", "td"));
        assert!(is_job("spiffe://td/ci-pr/a/b/_2e", "td"));
        for id in [
            "",
            "spiffe://td",
            "spiffe://td/ci",
            "spiffe://td/ci/a/b",
            "spiffe://td/ci/a/b/c/d",
            "spiffe://td/ci/a//c",
            "spiffe://td/ci/a/../c",
            "spiffe://td/ci/a/b/C",
            "spiffe://td/ci/a/b/c/",
            "spiffe://td/facade/a/b/c",
            "spiffe://tdx/ci/a/b/c",
            "spiffe://other/ci/a/b/c",
            "https://td/ci/a/b/c",
        ] {
            assert!(!is_job(id, "td"), "{id}");
        }
    }

    /// Texts that are likely to meet: few letters, the mapping's own signs, lengths around the bounds.
    fn raw_name() -> impl Strategy<Value = String> {
        prop_oneof!["[a-c_.\\-/A é]{0,6}", "[a_]{50,70}", "\\PC{0,40}", "_-[0-9a-f]{0,3}", any::<String>()]
    }

    fn trust() -> impl Strategy<Value = Trust> {
        prop_oneof![Just(Trust::Own), Just(Trust::PullRequest)]
    }

    proptest! {
        #[test]
        fn two_names_never_share_a_segment(a in raw_name(), b in raw_name(), max in prop_oneof![Just(MAX_SEGMENT), Just(MAX_JOB_SEGMENT)]) {
            prop_assert_eq!(a == b, segment(&a, max) == segment(&b, max));
        }

        #[test]
        fn a_long_name_and_what_it_became_never_share_a_segment(a in "[a-b_é]{57,80}") {
            let became = segment(&a, MAX_JOB_SEGMENT);
            prop_assert_ne!(segment(&became, MAX_JOB_SEGMENT), became);
        }

        #[test]
        fn every_id_is_a_valid_spiffe_id_of_a_job_within_spires_bound(
            owner in raw_name(), name in raw_name(), job in raw_name(), trust in trust(), domain in "[a-z][a-z0-9.-]{0,46}[a-z]"
        ) {
            let id = job_id(&domain, &Repository { owner, name }, &job, trust);
            prop_assert!(id.len() <= 255, "{}", id.len());
            let parsed = spiffe::SpiffeId::new(&id).unwrap();
            prop_assert_eq!(parsed.to_string(), id.clone());
            prop_assert!(is_job(&id, &domain));
        }

        #[test]
        fn jobs_of_different_trust_or_place_never_share_an_id(
            a in (raw_name(), raw_name(), raw_name(), trust()), b in (raw_name(), raw_name(), raw_name(), trust())
        ) {
            let low = |(owner, name, job, trust): &(String, String, String, Trust)| {
                (owner.to_ascii_lowercase(), name.to_ascii_lowercase(), job.clone(), *trust)
            };
            let ids = (id(&a.0, &a.1, &a.2, a.3), id(&b.0, &b.1, &b.2, b.3));
            prop_assert_eq!(low(&a) == low(&b), ids.0 == ids.1);
        }
    }
}
