//! The sealed envelope: version, key id, nonce, then zstd within XChaCha20-Poly1305.
//!
//! Keeps every secret of a waiting job out of files and of the queue's server. Who may read the key file is not decided here.
//!
//! ```text
//! byte 0       version, 1
//! bytes 1..5   key id: the first four bytes of the key's SHA-256
//! bytes 5..29  nonce, random
//! bytes 29..   XChaCha20-Poly1305 (bytes 0..29 are authenticated with it) of zstd of postcard of `Stored`
//! ```

use std::io::Read as _;

use chacha20poly1305::{
    Key, XChaCha20Poly1305, XNonce,
    aead::{Aead as _, KeyInit as _, Payload},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::{Assignment, OpenFault, Rules};
use crate::{
    ids::{Lane, TaskId},
    secret::SecretBytes,
    task::MAX_TASK_BYTES,
};

const VERSION: u8 = 1;
const KEY_ID: std::ops::Range<usize> = 1..5;
const NONCE: std::ops::Range<usize> = 5..29;
const HEADER_BYTES: usize = 29;
const KEY_BYTES: usize = 32;
/// More keys than any rotation needs.
const MAX_KEYS: usize = 16;
/// What an envelope may hold: a task at its limit, and the few facts beside it.
const MAX_STORED_BYTES: usize = MAX_TASK_BYTES + (1 << 20);
/// zstd's own default. Higher ones cost more time than the queue's disk is worth.
const ZSTD_LEVEL: i32 = 3;

/// The keys of `SEAL_KEY_FILE`: the first seals, all open (rotation).
#[derive(Debug, Clone)]
pub struct SealKeys {
    /// Never empty.
    keys: Vec<([u8; 4], SecretBytes)>,
}

impl SealKeys {
    /// One key a line: 64 hex digits; empty lines and lines that start with `#` are skipped. The key's id is the first four bytes of
    /// its SHA-256. The message names every faulty line, and shows none of it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut keys: Vec<([u8; 4], SecretBytes)> = Vec::new();
        let mut faults = Vec::new();
        for (at, line) in text.lines().enumerate().map(|(at, line)| (at + 1, line.trim())) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut key = Zeroizing::new([0; KEY_BYTES]);
            if hex::decode_to_slice(line, key.as_mut_slice()).is_err() {
                faults.push(format!("line {at} is not 64 hex digits"));
                continue;
            }
            let id = key_id(key.as_slice());
            if keys.iter().any(|(other, _)| *other == id) {
                faults.push(format!("line {at} has the key {} again", hex::encode(id)));
            }
            keys.push((id, SecretBytes::new(key.to_vec())));
        }
        if keys.is_empty() && faults.is_empty() {
            faults.push("it holds no key".into());
        }
        if keys.len() > MAX_KEYS {
            faults.push(format!("it holds {} keys, more than {MAX_KEYS}", keys.len()));
        }
        if faults.is_empty() {
            return Ok(Self { keys });
        }
        Err(format!("seal key file is refused: {}; make a key with `openssl rand -hex 32`", faults.join("; ")))
    }

    /// The id of the key that seals, as it stands in `OpenFault::UnknownKey`.
    pub fn sealing_id(&self) -> String {
        self.keys.first().map(|(id, _)| hex::encode(id)).unwrap_or_default()
    }

    fn find(&self, id: &[u8]) -> Option<XChaCha20Poly1305> {
        let (_, key) = self.keys.iter().find(|(known, _)| known == id)?;
        Some(XChaCha20Poly1305::new(Key::from_slice(key.expose())))
    }
}

fn key_id(key: &[u8]) -> [u8; 4] {
    let hash = Sha256::digest(key);
    [hash[0], hash[1], hash[2], hash[3]]
}

/// What an envelope of version 1 holds. postcard knows no field names: a later writer may only add fields behind the last one, and
/// a reader leaves what it does not know unread. A change that an old reader would misunderstand needs the next version.
///
/// The rest of an assignment is read again from the task itself.
#[derive(Serialize, Deserialize)]
struct Stored<'a> {
    task: i64,
    lane: u8,
    spiffe_id: &'a str,
    token_hash: [u8; 32],
    fetched_at_ms: u64,
    refusal: Option<&'a str>,
    #[serde(serialize_with = "at_once")]
    raw: &'a [u8],
}

/// As one piece; serde would take a slice byte by byte. The same on the wire.
fn at_once<S: serde::Serializer>(bytes: &[u8], into: S) -> Result<S::Ok, S::Error> {
    into.serialize_bytes(bytes)
}

impl Assignment {
    #[expect(clippy::unwrap_used, reason = "writing into memory fails only where allocation does")]
    pub fn seal(&self, keys: &SealKeys) -> Vec<u8> {
        let stored = Stored {
            task: self.task.0,
            lane: self.lane.code(),
            spiffe_id: &self.spiffe_id,
            token_hash: self.token_hash,
            fetched_at_ms: self.fetched_at_ms,
            refusal: self.refusal.as_deref(),
            raw: self.raw.expose(),
        };
        let plain = Zeroizing::new(postcard::to_stdvec(&stored).unwrap());
        seal_bytes(&plain, keys)
    }

    /// Opens an envelope and checks it against the task inside: id, lane against `runs-on`, identity against context.
    ///
    /// The caller compares the assignment's task with the one under which the queue kept it.
    pub fn open(sealed: &[u8], keys: &SealKeys, rules: &Rules) -> Result<Assignment, OpenFault> {
        let plain = open_bytes(sealed, keys)?;
        let (stored, _later): (Stored<'_>, _) =
            postcard::take_from_bytes(&plain).map_err(|fault| refused(None, format!("content cannot be read: {fault}")))?;
        let task = (stored.task > 0).then_some(TaskId(stored.task));
        let refused = |reason: String| refused(task, reason);
        let Some(lane) = Lane::from_code(stored.lane) else {
            return Err(refused(format!("lane {} is none", stored.lane)));
        };
        let mut found = Assignment::of_task(stored.raw.to_vec(), rules, stored.fetched_at_ms)
            .map_err(|reason| refused(format!("the task inside cannot be read: {reason}")))?;
        if Some(found.task) != task {
            return Err(refused(format!("it says task {}, and the task inside is {}", stored.task, found.task)));
        }
        if found.token_hash != stored.token_hash {
            return Err(refused("it was made of a task with another token".into()));
        }
        check(&mut found, lane, &stored).map_err(refused)?;
        Ok(found)
    }
}

/// Compares what was stored with what the task inside gives now.
fn check(found: &mut Assignment, lane: Lane, stored: &Stored<'_>) -> Result<(), String> {
    match (lane, stored.refusal, &found.refusal) {
        // A refusal stands, with the reason that was given when it was made; another version may word it differently.
        (Lane::Refused, Some(reason), _) => {
            found.refusal = Some(reason.to_owned());
            found.lane = Lane::Refused;
            found.spiffe_id = String::new();
            Ok(())
        }
        (Lane::Refused, None, _) => Err("it is refused without a reason".into()),
        (_, Some(_), _) => Err(format!("it is refused, and in the lane {lane}")),
        (_, None, Some(reason)) => Err(format!("it can no longer be served: {reason}")),
        (_, None, None) if found.lane != lane => Err(format!("it is in the lane {lane}, and `runs-on` names {}", found.lane)),
        (_, None, None) if found.spiffe_id != stored.spiffe_id => {
            Err(format!("its identity is {}, and its context gives {}", stored.spiffe_id, found.spiffe_id))
        }
        (_, None, None) => Ok(()),
    }
}

fn refused(task: Option<TaskId>, reason: String) -> OpenFault {
    OpenFault::Refused { reason, task }
}

#[expect(clippy::unwrap_used, reason = "zstd into memory and a cipher below 256 GiB do not fail, and keys are never empty")]
fn seal_bytes(plain: &[u8], keys: &SealKeys) -> Vec<u8> {
    let packed = Zeroizing::new(zstd::bulk::compress(plain, ZSTD_LEVEL).unwrap());
    let (id, _) = keys.keys.first().unwrap();
    let mut sealed = vec![VERSION];
    sealed.extend_from_slice(id);
    sealed.extend_from_slice(&rand::random::<[u8; 24]>());
    let payload = Payload { msg: &packed, aad: &sealed };
    let body = keys.find(id).unwrap().encrypt(XNonce::from_slice(&sealed[NONCE]), payload).unwrap();
    sealed.extend_from_slice(&body);
    sealed
}

fn open_bytes(sealed: &[u8], keys: &SealKeys) -> Result<Zeroizing<Vec<u8>>, OpenFault> {
    match sealed.first() {
        Some(&VERSION) => {}
        Some(&newer) if newer > VERSION => return Err(OpenFault::NewerVersion(newer)),
        _ => return Err(refused(None, "it has no version".into())),
    }
    let Some((header, body)) = sealed.split_at_checked(HEADER_BYTES) else {
        return Err(refused(None, "it is cut off".into()));
    };
    let Some(cipher) = keys.find(&header[KEY_ID]) else {
        return Err(OpenFault::UnknownKey(hex::encode(&header[KEY_ID])));
    };
    let packed = cipher
        .decrypt(XNonce::from_slice(&header[NONCE]), Payload { msg: body, aad: header })
        .map_err(|_| refused(None, "it is damaged, or was not sealed with this key".into()))?;
    let packed = Zeroizing::new(packed);
    let mut plain = Zeroizing::new(Vec::new());
    let stream =
        zstd::stream::read::Decoder::new(packed.as_slice()).map_err(|fault| refused(None, format!("unpack: {fault}")))?;
    // One byte above the bound tells a task that is too large from one at the bound.
    stream
        .take(MAX_STORED_BYTES as u64 + 1)
        .read_to_end(&mut plain)
        .map_err(|fault| refused(None, format!("unpack: {fault}")))?;
    if plain.len() > MAX_STORED_BYTES {
        return Err(refused(None, format!("it holds more than {} MiB", MAX_STORED_BYTES >> 20)));
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;
    use crate::proto;

    const KEY: &str = "1111111111111111111111111111111111111111111111111111111111111111";
    const OTHER: &str = "2222222222222222222222222222222222222222222222222222222222222222";

    fn rules() -> Rules {
        Rules { trust_domain: "ci.example".into(), vm_label: "vm".into() }
    }

    fn keys() -> SealKeys {
        SealKeys::parse(KEY).unwrap()
    }

    fn raw(answer: &[u8]) -> Vec<u8> {
        proto::task_of_answer(answer).unwrap().unwrap()
    }

    fn plain_task() -> Vec<u8> {
        raw(include_bytes!("../../tests/fixtures/gitea-tasks/two-labels.bin"))
    }

    fn assignment() -> Assignment {
        Assignment::of_task(plain_task(), &rules(), 1_790_000_000_000).unwrap()
    }

    fn stored<'a>(of: &'a Assignment) -> Stored<'a> {
        Stored {
            task: of.task.0,
            lane: of.lane.code(),
            spiffe_id: &of.spiffe_id,
            token_hash: of.token_hash,
            fetched_at_ms: of.fetched_at_ms,
            refusal: of.refusal.as_deref(),
            raw: of.raw.expose(),
        }
    }

    fn open(stored: &Stored<'_>) -> Result<Assignment, OpenFault> {
        Assignment::open(&seal_bytes(&postcard::to_stdvec(stored).unwrap(), &keys()), &keys(), &rules())
    }

    /// All but the raw task's `Debug`, which shows nothing.
    fn same(a: &Assignment, b: &Assignment) {
        assert_eq!(format!("{a:?}"), format!("{b:?}"));
        assert_eq!(a.raw.expose(), b.raw.expose());
    }

    fn reason_of(fault: OpenFault) -> String {
        match fault {
            OpenFault::Refused { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_sealed_opens_again_and_shows_no_secret() {
        let sealed = assignment().seal(&keys());
        same(&Assignment::open(&sealed, &keys(), &rules()).unwrap(), &assignment());
        for hidden in [&b"jobs"[..], b"boss", b"spiffe"] {
            assert!(!sealed.windows(hidden.len()).any(|window| window == hidden));
        }
        assert_ne!(sealed, assignment().seal(&keys()), "a nonce was used twice");
        let mut unknown_field = plain_task();
        unknown_field.extend([0x9a, 0x06, 2, b'h', b'i']);
        let kept = Assignment::of_task(unknown_field.clone(), &rules(), 1).unwrap();
        assert_eq!(Assignment::open(&kept.seal(&keys()), &keys(), &rules()).unwrap().raw.expose(), unknown_field);
    }

    #[test]
    fn no_changed_byte_and_no_cut_is_taken() {
        let sealed = assignment().seal(&keys());
        for at in 0..sealed.len() {
            for flip in [1, 0x80] {
                let mut bad = sealed.clone();
                bad[at] ^= flip;
                match (at, Assignment::open(&bad, &keys(), &rules()).unwrap_err()) {
                    (0, OpenFault::NewerVersion(version)) => assert!(version > VERSION),
                    (1..5, OpenFault::UnknownKey(id)) => assert_ne!(id, keys().sealing_id()),
                    (1..5, fault) => panic!("{fault:?}"),
                    (_, OpenFault::Refused { task: None, .. }) => {}
                    (at, fault) => panic!("{at}: {fault:?}"),
                }
            }
        }
        for cut in 0..sealed.len() {
            assert!(matches!(Assignment::open(&sealed[..cut], &keys(), &rules()), Err(OpenFault::Refused { .. })), "{cut}");
        }
        let longer = [sealed.as_slice(), b"x"].concat();
        assert!(matches!(Assignment::open(&longer, &keys(), &rules()), Err(OpenFault::Refused { .. })));
        // The head of one on the body of another.
        let mut swapped = assignment().seal(&keys());
        swapped[..HEADER_BYTES].copy_from_slice(&sealed[..HEADER_BYTES]);
        assert!(matches!(Assignment::open(&swapped, &keys(), &rules()), Err(OpenFault::Refused { .. })));
    }

    #[test]
    fn a_version_or_a_key_that_is_not_known_is_no_damage() {
        let mut sealed = assignment().seal(&keys());
        let fault = Assignment::open(&sealed, &SealKeys::parse(OTHER).unwrap(), &rules()).unwrap_err();
        assert!(matches!(&fault, OpenFault::UnknownKey(id) if *id == keys().sealing_id()), "{fault}");
        sealed[0] = 2;
        assert!(matches!(Assignment::open(&sealed, &keys(), &rules()), Err(OpenFault::NewerVersion(2))));
        assert!(matches!(Assignment::open(&[7], &keys(), &rules()), Err(OpenFault::NewerVersion(7))));
        assert!(matches!(Assignment::open(&[], &keys(), &rules()), Err(OpenFault::Refused { .. })));
    }

    #[test]
    fn the_first_key_seals_and_every_key_opens() {
        let rotated = SealKeys::parse(&format!("# new\n{OTHER}\n\n# old\n  {KEY}  \n")).unwrap();
        let old = assignment().seal(&keys());
        let new = assignment().seal(&rotated);
        same(&Assignment::open(&old, &rotated, &rules()).unwrap(), &Assignment::open(&new, &rotated, &rules()).unwrap());
        assert!(
            matches!(Assignment::open(&new, &keys(), &rules()), Err(OpenFault::UnknownKey(id)) if id == rotated.sealing_id())
        );
        assert!(!format!("{rotated:?}").contains("2222"));
    }

    #[test]
    fn a_faulty_key_file_is_told_all_its_faults_and_none_of_its_keys() {
        let text = format!("{KEY}\nabc\n{}\n{KEY}\n{}\n", "zz".repeat(32), "33".repeat(33));
        let reason = SealKeys::parse(&text).unwrap_err();
        for says in ["line 2 is not 64 hex digits", "line 3 is", "line 4 has the key", "line 5 is", "openssl rand -hex 32"] {
            assert!(reason.contains(says), "{reason}");
        }
        for hidden in ["abc", "1111", "zz", "3333"] {
            assert!(!reason.contains(hidden), "{reason}");
        }
        assert!(SealKeys::parse("\n# none\n").unwrap_err().contains("no key"));
        let many: String = (0..17u8).map(|at| format!("{}\n", hex::encode([at; 32]))).collect();
        assert!(SealKeys::parse(&many).unwrap_err().contains("17 keys"));
    }

    #[test]
    fn an_envelope_that_disagrees_with_its_task_is_refused() {
        let honest = assignment();
        same(&open(&stored(&honest)).unwrap(), &honest);
        let refused =
            Assignment::of_task(raw(include_bytes!("../../tests/fixtures/gitea-tasks/one-label.bin")), &rules(), 1).unwrap();
        let says = |change: &dyn Fn(&mut Stored<'_>), of: &Assignment| {
            let mut lie = stored(of);
            change(&mut lie);
            reason_of(open(&lie).unwrap_err())
        };
        assert!(says(&|s| s.task = 72, &honest).contains("task 72"));
        assert!(says(&|s| s.task = 0, &honest).contains("task 0"));
        assert!(says(&|s| s.lane = Lane::Vm.code(), &honest).contains("lane vm"));
        assert!(says(&|s| s.lane = 9, &honest).contains("lane 9"));
        assert!(says(&|s| s.lane = Lane::Refused.code(), &honest).contains("without a reason"));
        assert!(says(&|s| s.refusal = Some("x"), &honest).contains("in the lane pod"));
        assert!(says(&|s| s.spiffe_id = "spiffe://ci.example/ci/acme/other/hello", &honest).contains("identity"));
        assert!(says(&|s| s.token_hash[0] ^= 1, &honest).contains("token"));
        assert!(says(&|s| s.raw = b"", &honest).contains("cannot be read"));
        let swapped = Stored { raw: refused.raw.expose(), ..stored(&honest) };
        assert!(reason_of(open(&swapped).unwrap_err()).contains("task inside is 2"));
        let promoted = says(
            &|s| {
                s.lane = Lane::Pod.code();
                s.refusal = None;
            },
            &refused,
        );
        assert!(promoted.contains("no longer be served"), "{promoted}");
        // The controller's own settings changed while it waited.
        let sealed = honest.seal(&keys());
        let moved = Rules { trust_domain: "other.example".into(), ..rules() };
        assert!(reason_of(Assignment::open(&sealed, &keys(), &moved).unwrap_err()).contains("other.example"));
    }

    #[test]
    fn what_is_packed_too_large_is_refused_without_being_unpacked_whole() {
        let bomb = seal_bytes(&vec![0; MAX_STORED_BYTES + 1], &keys());
        assert!(bomb.len() < 1 << 20);
        assert!(reason_of(Assignment::open(&bomb, &keys(), &rules()).unwrap_err()).contains("more than 33 MiB"));
    }

    #[test]
    fn a_task_that_is_too_large_is_refused_kept_and_opened() {
        let mut huge = plain_task();
        huge.resize(MAX_TASK_BYTES + 1000, 0);
        let refused = Assignment::of_task(huge, &rules(), 5).unwrap();
        assert_eq!((refused.lane, refused.task, refused.raw.expose().len()), (Lane::Refused, TaskId(1), MAX_TASK_BYTES + 1));
        same(&Assignment::open(&refused.seal(&keys()), &keys(), &rules()).unwrap(), &refused);
    }

    #[test]
    fn envelopes_of_the_past_and_of_a_later_writer_open() {
        let kept = Assignment::open(include_bytes!("../../tests/fixtures/envelopes/version-1.bin"), &keys(), &rules()).unwrap();
        same(&kept, &assignment());
        let later = include_bytes!("../../tests/fixtures/envelopes/version-1-later-writer.bin");
        assert_eq!(&open_bytes(later, &keys()).unwrap()[..][open_bytes(later, &keys()).unwrap().len() - 5..], b"\x04more");
        same(&Assignment::open(later, &keys(), &rules()).unwrap(), &assignment());
        let refused =
            Assignment::open(include_bytes!("../../tests/fixtures/envelopes/version-1-refused.bin"), &keys(), &rules()).unwrap();
        assert_eq!((refused.lane, refused.refusal.as_deref()), (Lane::Refused, Some("A reason as it was worded then.")));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_in_an_envelope_are_opened_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400), cut in any::<prop::sample::Index>()) {
            drop(Assignment::open(&bytes, &keys(), &rules()));
            prop_assert!(Assignment::open(&seal_bytes(&bytes, &keys()), &keys(), &rules()).is_err());
            let honest = assignment();
            let mut plain = postcard::to_stdvec(&stored(&honest)).unwrap();
            let at = cut.index(plain.len());
            plain.splice(at..(at + bytes.len().min(8)).min(plain.len()), bytes.iter().copied().take(8));
            if let Ok(found) = Assignment::open(&seal_bytes(&plain, &keys()), &keys(), &rules()) {
                prop_assert_eq!(found.refusal.is_some(), found.lane == Lane::Refused);
            }
        }

        #[test]
        fn any_task_that_gives_an_assignment_opens_again(bytes in prop::collection::vec(any::<u8>(), 0..200), id in 1..i64::MAX) {
            let mut raw = vec![8];
            buffa::encoding::encode_varint(id.cast_unsigned(), &mut raw);
            raw.extend(bytes);
            if let Ok(made) = Assignment::of_task(raw, &rules(), 1) {
                prop_assert_eq!(made.refusal.is_some(), made.lane == Lane::Refused);
                same(&Assignment::open(&made.seal(&keys()), &keys(), &rules()).unwrap(), &made);
            }
        }
    }
}
