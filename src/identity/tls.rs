//! TLS over the present SVID: what we show, and whom we accept.
//!
//! Every handshake takes one whole `Material` (key, bundle), so an update between two steps cannot split it. The chain is checked
//! by webpki against the bundle of our own trust domain alone; what SPIFFE asks of a leaf beyond that is checked here.
//! No resumption on either side: a resumed handshake would skip the verifier.

use std::{
    fmt, io,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustls::{
    CertificateError, ClientConfig, ConfigBuilder, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    ServerConfig, SignatureScheme, WantsVerifier,
    client::{
        ResolvesClientCert, Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{
        ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};
use spiffe::{SpiffeId, TrustDomain, x509_source::X509SourceState};
use tokio_util::sync::DropGuard;

use crate::spiffe_name;

/// One coherent observation of the Workload API, ready for handshakes.
pub(super) struct Material {
    key: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
    pub(super) not_after: SystemTime,
}

impl Material {
    /// Fails with a readable reason where the key does not fit the certificate, or the bundle of `trust_domain` is missing.
    pub(super) fn build(
        state: &X509SourceState,
        provider: &Arc<CryptoProvider>,
        trust_domain: &TrustDomain,
    ) -> anyhow::Result<Self> {
        let (svid, context) = (state.svid()?, state.context()?);
        let chain: Vec<_> = svid.cert_chain().iter().map(|c| CertificateDer::from(c.as_bytes().to_vec())).collect();
        let not_after =
            chain.first().and_then(|leaf| not_after(leaf)).ok_or_else(|| anyhow::anyhow!("unreadable certificate"))?;
        let key = PrivateKeyDer::Pkcs8(svid.private_key().as_bytes().to_vec().into());
        let key = CertifiedKey::from_der(chain, key, provider)?;
        let bundle = context.bundle_set().get(trust_domain).ok_or_else(|| anyhow::anyhow!("no bundle of {trust_domain}"))?;
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(bundle.authorities().iter().map(|c| CertificateDer::from(c.as_bytes().to_vec())));
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
        Ok(Self { key: Arc::new(key), roots, clients, not_after })
    }
}

/// The material in use; it is replaced, never changed.
pub(super) struct Current {
    material: RwLock<Arc<Material>>,
    provider: Arc<CryptoProvider>,
    trust_domain: TrustDomain,
    /// Ends the task that refreshes us.
    _refresh: DropGuard,
}

impl Current {
    pub(super) fn new(first: Material, provider: Arc<CryptoProvider>, trust_domain: TrustDomain, refresh: DropGuard) -> Self {
        Self { material: RwLock::new(Arc::new(first)), provider, trust_domain, _refresh: refresh }
    }

    pub(super) fn not_after(&self) -> SystemTime {
        self.any().not_after
    }

    /// Takes over what the Workload API gives now. On an error the old material stays, until its own end.
    pub(super) fn replace(&self, state: &X509SourceState) -> anyhow::Result<()> {
        let new = Arc::new(Material::build(state, &self.provider, &self.trust_domain)?);
        *self.material.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    fn any(&self) -> Arc<Material> {
        self.material.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `None` once our own certificate has ended: then nobody is shown anything, and nobody is accepted.
    fn usable(&self) -> Option<Arc<Material>> {
        Some(self.any()).filter(|m| m.not_after > SystemTime::now())
    }
}

/// Whose certificate is accepted.
enum Peers {
    /// Jobs of our trust domain.
    Jobs,
    /// Exactly this SPIFFE ID.
    Exactly(String),
}

struct SpiffeTls {
    current: Arc<Current>,
    peers: Peers,
}

pub(super) fn server(builder: ConfigBuilder<ServerConfig, WantsVerifier>, current: Arc<Current>) -> ServerConfig {
    let tls = Arc::new(SpiffeTls { current, peers: Peers::Jobs });
    let mut config = builder.with_client_cert_verifier(tls.clone()).with_cert_resolver(tls);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config
}

pub(super) fn client(builder: ConfigBuilder<ClientConfig, WantsVerifier>, current: Arc<Current>, peer: &str) -> ClientConfig {
    let tls = Arc::new(SpiffeTls { current, peers: Peers::Exactly(peer.to_owned()) });
    let mut config = builder.dangerous().with_custom_certificate_verifier(tls.clone()).with_client_cert_resolver(tls);
    config.resumption = Resumption::disabled();
    config
}

/// The one SPIFFE ID of a certificate, and when it ends. The chain has been verified by the handshake.
pub(super) fn peer(leaf: &CertificateDer<'_>) -> Option<(String, SystemTime)> {
    let id = spiffe::cert::spiffe_id_from_der(leaf).ok()?;
    Some((id.to_string(), not_after(leaf)?))
}

fn not_after(leaf: &[u8]) -> Option<SystemTime> {
    let (_, certificate) = x509_parser::parse_x509_certificate(leaf).ok()?;
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn refused(reason: impl fmt::Display) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(io::Error::other(reason.to_string())))))
}

impl SpiffeTls {
    fn usable(&self) -> Result<Arc<Material>, Error> {
        self.current.usable().ok_or_else(|| Error::General("our own SVID has expired".into()))
    }

    /// What the X.509-SVID specification asks of a leaf beyond its chain, and whether it is one of `peers`.
    fn leaf_ok(&self, der: &CertificateDer<'_>) -> Result<(), Error> {
        let id = spiffe::cert::spiffe_id_from_der(der).map_err(refused)?;
        leaf_usage(der)?;
        if id.path().is_empty() || id.trust_domain() != &self.current.trust_domain {
            return Err(refused(format_args!("{id} is not a workload of {}", self.current.trust_domain)));
        }
        if !self.admits(&id) {
            return Err(refused(format_args!("{id} is not the peer that is expected here")));
        }
        Ok(())
    }

    fn admits(&self, id: &SpiffeId) -> bool {
        match &self.peers {
            Peers::Jobs => spiffe_name::is_job(&id.to_string(), self.current.trust_domain.as_str()),
            Peers::Exactly(wanted) => id.to_string() == *wanted,
        }
    }
}

fn leaf_usage(der: &CertificateDer<'_>) -> Result<(), Error> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).map_err(refused)?;
    let basic = certificate.basic_constraints().map_err(refused)?.ok_or_else(|| refused("it has no basic constraints"))?;
    let usage = certificate.key_usage().map_err(refused)?.ok_or_else(|| refused("it has no key usage"))?;
    if basic.value.ca || usage.value.key_cert_sign() || usage.value.crl_sign() || !usage.value.digital_signature() {
        return Err(refused("it is not a workload's certificate"));
    }
    Ok(())
}

impl fmt::Debug for SpiffeTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpiffeTls").finish_non_exhaustive()
    }
}

impl ResolvesServerCert for SpiffeTls {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.usable()?.key.clone())
    }
}

impl ResolvesClientCert for SpiffeTls {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.current.usable()?.key.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for SpiffeTls {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.usable()?.clients.verify_client_cert(leaf, chain, now)?;
        self.leaf_ok(leaf)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, leaf, signature, &self.current.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.current.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for SpiffeTls {
    /// The name in the URL is not looked at: SPIFFE trusts the ID alone.
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(leaf)?,
            &self.usable()?.roots,
            chain,
            now,
            self.current.provider.signature_verification_algorithms.all,
        )?;
        self.leaf_ok(leaf)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls12_signature(self, message, leaf, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls13_signature(self, message, leaf, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ClientCertVerifier::supported_verify_schemes(self)
    }
}
