//! A text or bytes that must never be shown: it does not print, and is wiped when dropped.
//!
//! Whoever needs the value says so with `expose`; a search for that word finds every use.

use std::fmt;

use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

/// A secret text: a token, a password, a capability.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

/// Secret bytes: a key, a task with its tokens.
#[derive(Clone)]
pub struct SecretBytes(Zeroizing<Vec<u8>>);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// 256 random bits as 64 hex digits.
    pub fn random() -> Self {
        Self::new(hex::encode(rand::random::<[u8; 32]>()))
    }

    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Compares in constant time (but for the length).
    pub fn matches(&self, other: &str) -> bool {
        self.0.as_bytes().ct_eq(other.as_bytes()).into()
    }
}

impl SecretBytes {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_does_not_print_and_compares() {
        let secret = Secret::new("canary");
        assert_eq!(format!("{secret:?} {:?}", SecretBytes::new(b"canary".to_vec())), "[secret] [secret]");
        assert!(secret.matches("canary"));
        assert!(!secret.matches("canar"));
        assert_eq!(Secret::random().expose().len(), 64);
    }
}
