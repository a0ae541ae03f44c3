//! Gives an environment its identity: over a socket of our own authority, or (SPIRE) it comes from elsewhere.

use super::{IdentityError, authority::Authority};
use crate::environment::Observed;

/// Who issues the identities of environments.
#[derive(Clone)]
pub enum Binder {
    /// The embedded authority: one Workload API socket for each environment.
    Embedded(Authority),
}

impl Binder {
    /// Idempotent. The environment's executor gets its SVID from here on.
    pub async fn bind(&self, environment: &Observed) -> Result<(), IdentityError> {
        match (self, &environment.workload_socket) {
            (Binder::Embedded(authority), Some(socket)) => {
                authority.ensure_socket(socket, &environment.spiffe_id, environment.uid).await.map(|_| ())
            }
            (Binder::Embedded(_), None) => {
                let way_out =
                    "set SPIFFE_ENDPOINT_SOCKET to a SPIRE agent's; the embedded authority serves local environments only";
                Err(IdentityError::Config(format!("{} has no socket for an identity: {way_out}", environment.name)))
            }
        }
    }

    pub async fn unbind(&self, environment: &Observed) {
        match (self, &environment.workload_socket) {
            (Binder::Embedded(authority), Some(socket)) => authority.close_socket(socket).await,
            (Binder::Embedded(_), None) => {}
        }
    }
}
