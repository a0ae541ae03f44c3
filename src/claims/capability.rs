//! The capability of an environment: HMAC over assignment and nonce, so that nothing has to be stored to check one.

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

use crate::{
    ids::{AssignmentId, Nonce},
    secret::{Secret, SecretBytes},
};

/// The key of `RUNNER_CAPABILITY_KEY_FILE`. Changing it cuts off the environments that run.
#[derive(Debug, Clone)]
pub struct CapabilityKey(SecretBytes);

impl CapabilityKey {
    /// 64 hex digits.
    pub fn parse(text: &str) -> Result<Self, String> {
        match hex::decode(text.trim()) {
            Ok(key) if key.len() == 32 => Ok(Self(SecretBytes::new(key))),
            _ => Err("a capability key is 64 hex digits; make one with: openssl rand -hex 32".into()),
        }
    }

    pub fn random() -> Self {
        Self(SecretBytes::new(rand::random::<[u8; 32]>().to_vec()))
    }

    /// What the environment shows with every request: 64 hex digits.
    pub fn capability(&self, assignment: AssignmentId, nonce: &Nonce) -> Secret {
        Secret::new(hex::encode(self.mac(assignment, nonce).finalize().into_bytes()))
    }

    /// In constant time.
    pub fn verify(&self, assignment: AssignmentId, nonce: &Nonce, shown: &str) -> bool {
        hex::decode(shown).is_ok_and(|shown| self.mac(assignment, nonce).verify_slice(&shown).is_ok())
    }

    fn mac(&self, assignment: AssignmentId, nonce: &Nonce) -> Hmac<Sha256> {
        #[expect(clippy::expect_used, reason = "HMAC takes a key of any length")]
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose()).expect("HMAC takes any key");
        mac.update(format!("{assignment}\0{nonce}").as_bytes());
        mac
    }
}
