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
    raw: &'a [u8],
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
        match (lane, stored.refusal, &found.refusal) {
            // A refusal stands, with the reason that was given when it was made; another version may word it differently.
            (Lane::Refused, Some(reason), _) => {
                found.refusal = Some(reason.to_owned());
                found.lane = Lane::Refused;
                found.spiffe_id = String::new();
            }
            (Lane::Refused, None, _) => return Err(refused("it is refused without a reason".into())),
            (_, Some(_), _) => return Err(refused(format!("it is refused, and in the lane {lane}"))),
            (_, None, Some(reason)) => return Err(refused(format!("it can no longer be served: {reason}"))),
            (_, None, None) if found.lane != lane => {
                return Err(refused(format!("it is in the lane {lane}, and `runs-on` names {}", found.lane)));
            }
            (_, None, None) if found.spiffe_id != stored.spiffe_id => {
                return Err(refused(format!("its identity is {}, and its context gives {}", stored.spiffe_id, found.spiffe_id)));
            }
            (_, None, None) => {}
        }
        Ok(found)
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
