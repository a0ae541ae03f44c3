//! Certificates that no honest authority issues, made with an authority's own key: each refusal of one is then of one property.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rcgen::{CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose, SanType};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, pem::PemObject as _};

/// Signs what it is told with an authority's key, and connects with it.
pub(crate) struct Forger {
    id: String,
    issuer: rcgen::Issuer<'static, KeyPair>,
}

impl Forger {
    /// With the key of the authority in `folder`; its honest work is an SVID of `id`.
    pub(crate) fn with_the_key_in(folder: &Path, id: &str) -> Self {
        let pem = std::fs::read(folder.join("ca.pem")).unwrap();
        let der = CertificateDer::from_pem_slice(&pem).unwrap();
        let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let name = certificate.subject();
        let organization = name.iter_organization().next().unwrap().as_str().unwrap();
        params.distinguished_name.push(DnType::OrganizationName, organization);
        params.distinguished_name.push(DnType::CommonName, name.iter_common_name().next().unwrap().as_str().unwrap());
        let key = PrivateKeyDer::from_pem_slice(&pem).unwrap();
        Self { id: id.to_owned(), issuer: rcgen::Issuer::new(params, KeyPair::try_from(&key).unwrap()) }
    }

    /// A client with an honest SVID, changed by `change`. It believes every server.
    pub(crate) fn client(&self, change: impl FnOnce(&mut CertificateParams)) -> Arc<rustls::ClientConfig> {
        let mut params = CertificateParams::default();
        params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
        params.not_after = (SystemTime::now() + Duration::from_secs(600)).into();
        params.subject_alt_names = vec![uri(&self.id)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let chain = vec![params.signed_by(&key, &self.issuer).unwrap().der().clone()];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Arc::new(trusting().with_client_auth_cert(chain, key).unwrap())
    }
}

pub(crate) fn uri(id: &str) -> SanType {
    SanType::URI(id.try_into().unwrap())
}

pub(crate) fn trusting() -> rustls::ConfigBuilder<rustls::ClientConfig, rustls::client::WantsClientCert> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
}

/// Believes every server, so that a refusal in these tests is always the server's.
#[derive(Debug)]
struct AnyServer(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
