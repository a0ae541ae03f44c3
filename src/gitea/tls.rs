//! TLS towards Gitea: the system's certificates and `GITEA_CA_FILE`, nothing else.
//!
//! Our own SPIFFE connections never use this (see `identity`).

use std::{path::Path, sync::Arc};

use rustls::{ClientConfig, RootCertStore, pki_types::CertificateDer};
use rustls_pki_types::pem::PemObject as _;

use super::ClientFault;

/// A client configuration that trusts the system's roots and those in `ca_file` (PEM).
pub fn towards_gitea(url: &str, ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, ClientFault> {
    let mut roots = RootCertStore::empty();
    // Reading some 140 certificates costs every environment a part of its start, so it is done only where they are asked for. A
    // machine without any can still speak plain http, so their absence is no fault here.
    if !url.starts_with("http://") {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    if let Some(file) = ca_file {
        let fault = |e: String| ClientFault(format!("GITEA_CA_FILE {}: {e}", file.display()));
        let certs = CertificateDer::pem_file_iter(file)
            .and_then(|certs| certs.collect::<Result<Vec<_>, _>>())
            .map_err(|e| fault(format!("read PEM certificates: {e}")))?;
        if certs.is_empty() {
            return Err(fault("holds no PEM certificate".into()));
        }
        for cert in certs {
            roots.add(cert).map_err(|e| fault(format!("take certificate: {e}")))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| ClientFault(e.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}
