//! The CA of the embedded authority: kept in one file, rotated with overlap, signing SVIDs.
//!
//! The file holds the certificate and key that sign, then a successor with its key while one is prepared, then certificates that
//! are only trusted still. One file, replaced by rename: no crash can leave a key without its certificate. The order of a rotation
//! is publish, sign, retire, and each step is sent to all streams, so that nobody meets an SVID whose CA it has not been told.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PublicKeyData as _, SanType,
};
use rustls_pki_types::{
    PrivateKeyDer, PrivatePkcs8KeyDer,
    pem::{PemObject as _, SectionKind},
};
use spiffe::{SpiffeId, TrustDomain};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use super::Lifetimes;
use crate::{
    files::{self, Durable},
    secret::Secret,
};

const FILE: &str = "ca.pem";
/// Certificates start this much in the past: for a clock that is five minutes off either way, also when it jumps back at a restart.
const BACKDATE: Duration = Duration::from_secs(15 * 60);
/// A successor is known to all for at least this long before it signs, in parts of a CA's life.
const NOTICE: u32 = 50;

/// A key pair and its certificate.
struct Signer {
    issuer: rcgen::Issuer<'static, KeyPair>,
    certificate: Trusted,
}

/// A CA certificate without (or beside) its key.
#[derive(Clone)]
struct Trusted {
    der: Vec<u8>,
    from: SystemTime,
    until: SystemTime,
}

struct Kept {
    signing: Signer,
    next: Option<Signer>,
    old: Vec<Trusted>,
}

/// One SVID, as the Workload API sends it (DER; the key as PKCS #8).
pub(super) struct Leaf {
    pub(super) certificate: Bytes,
    pub(super) key: Bytes,
    pub(super) not_after: SystemTime,
}

/// Signs SVIDs with the present CA, and tells watchers when the CA or its bundle changes.
pub(super) struct Issuer {
    path: PathBuf,
    trust_domain: TrustDomain,
    lifetimes: Lifetimes,
    kept: RwLock<Kept>,
    changed: watch::Sender<()>,
}

impl Issuer {
    pub(super) fn open(dir: &Path, trust_domain: &TrustDomain, lifetimes: Lifetimes) -> anyhow::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).with_context(|| format!("create {}", dir.display()))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).with_context(|| format!("close {}", dir.display()))?;
        let path = dir.join(FILE);
        let now = SystemTime::now();
        if path.exists() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).with_context(|| format!("close {}", path.display()))?;
        }
        let kept = kept_in(&path, trust_domain)?.filter(|kept| kept.signing.certificate.until > now);
        let fresh = kept.is_none();
        let kept = match kept {
            Some(kept) => kept,
            // First start, or the CA ended while nothing ran: then no SVID of it lives either, and no overlap is owed.
            None => Kept { signing: Signer::make(trust_domain, lifetimes.ca)?, next: None, old: Vec::new() },
        };
        let issuer = Self {
            path,
            trust_domain: trust_domain.clone(),
            lifetimes,
            kept: RwLock::new(kept),
            changed: watch::Sender::new(()),
        };
        if fresh {
            let text = to_pem(&[&issuer.read_kept().signing], &[]);
            issuer.write(&text)?;
        }
        issuer.rotation_pass(now)?;
        Ok(issuer)
    }

    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    pub(super) fn not_after(&self) -> SystemTime {
        self.read_kept().signing.certificate.until
    }

    /// All CA certificates that are trusted, one DER after another.
    pub(super) fn bundle(&self) -> Bytes {
        self.read_kept().trusted().flat_map(|c| c.der.iter().copied()).collect::<Vec<u8>>().into()
    }

    /// A new key and its SVID for `id`. It ends no later than the CA.
    pub(super) fn leaf(&self, id: &SpiffeId) -> anyhow::Result<Leaf> {
        let kept = self.read_kept();
        let now = SystemTime::now();
        let not_after = (now + self.lifetimes.leaf).min(kept.signing.certificate.until);
        ensure!(not_after > now, "the CA has ended; is the clock right?");
        let mut params = base(now, not_after, "SVID");
        params.subject_alt_names = vec![SanType::URI(id.to_string().try_into()?)];
        // `NoCa` would leave the extension out, and clients ask for it.
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &kept.signing.issuer)?;
        Ok(Leaf { certificate: certificate.der().to_vec().into(), key: key.serialize_der().into(), not_after })
    }

    /// Looks at the CA's age from time to time, for ever.
    pub(super) async fn rotation(self: std::sync::Arc<Self>) {
        let period = (self.lifetimes.ca / 48).clamp(Duration::from_millis(100), Duration::from_secs(3600));
        loop {
            tokio::time::sleep(period.mul_f64(rand::random_range(0.9..=1.0))).await;
            // A short write and fsync, a few times in a CA's life: not worth a thread.
            if let Err(error) = self.rotation_pass(SystemTime::now()) {
                tracing::error!(error = format!("{error:#}"), "rotate the CA of the embedded authority; tried again");
            }
        }
    }

    /// One step of publish, sign, retire, where its time has come. Only the rotation calls it, and `open` before that.
    ///
    /// The file is written before the step is taken and told: a crash or a full disk between the two leaves the running
    /// authority a step behind its file, which its restart or the next pass repairs; never an SVID whose CA is not on disk.
    fn rotation_pass(&self, now: SystemTime) -> anyhow::Result<()> {
        let kept = self.read_kept();
        let old = |kept: &Kept| kept.old.iter().filter(|old| old.until > now).cloned().collect::<Vec<_>>();
        let install: Box<dyn FnOnce(&mut Kept)> = match kept.step(now, self.lifetimes.ca) {
            Step::Nothing => return Ok(()),
            Step::Publish => {
                let next = Signer::make(&self.trust_domain, self.lifetimes.ca)?;
                self.write(&to_pem(&[&kept.signing, &next], &kept.old))?;
                Box::new(|kept| kept.next = Some(next))
            }
            Step::Sign(next) => {
                let mut old = old(&kept);
                old.push(kept.signing.certificate.clone());
                self.write(&to_pem(&[next], &old))?;
                Box::new(|kept| {
                    if let Some(next) = kept.next.take() {
                        kept.signing = next;
                    }
                    kept.old = old;
                })
            }
            Step::Retire => {
                let old = old(&kept);
                let signers: Vec<&Signer> = std::iter::once(&kept.signing).chain(&kept.next).collect();
                self.write(&to_pem(&signers, &old))?;
                Box::new(|kept| kept.old = old)
            }
        };
        tracing::info!(step = ?kept.step(now, self.lifetimes.ca), "rotate the CA of the embedded authority");
        drop(kept);
        install(&mut self.kept.write().unwrap_or_else(PoisonError::into_inner));
        self.changed.send_replace(());
        Ok(())
    }

    fn write(&self, text: &Secret) -> anyhow::Result<()> {
        files::write_private(&self.path, text.expose().as_bytes(), Durable::Disk)
            .with_context(|| format!("write the CA file {}", self.path.display()))
    }

    fn read_kept(&self) -> std::sync::RwLockReadGuard<'_, Kept> {
        self.kept.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Signer {
    fn make(trust_domain: &TrustDomain, life: Duration) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let now = SystemTime::now();
        // Each generation has a name of its own, so that verifiers never mix two of them up.
        let params = ca_params(trust_domain, now, now + life, &format!("CA {}", hex::encode(rand::random::<[u8; 8]>())))?;
        let der = params.self_signed(&key)?.der().to_vec();
        let certificate = Trusted::parse(der)?;
        Ok(Self { issuer: rcgen::Issuer::new(params, key), certificate })
    }

    /// From what the file holds; the key must be the certificate's.
    fn restore(certificate: Trusted, key: &[u8], trust_domain: &TrustDomain) -> anyhow::Result<Self> {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key));
        let key = KeyPair::try_from(&key).map_err(|e| anyhow!("unreadable key: {e}"))?;
        let (_, parsed) = X509Certificate::from_der(&certificate.der)?;
        ensure!(parsed.public_key().subject_public_key.data == key.der_bytes(), "the key is not the certificate's");
        let name = parsed.subject().iter_common_name().next().and_then(|cn| cn.as_str().ok()).context("no common name")?;
        let params = ca_params(trust_domain, certificate.from, certificate.until, name)?;
        Ok(Self { issuer: rcgen::Issuer::new(params, key), certificate })
    }
}

impl Trusted {
    fn parse(der: Vec<u8>) -> anyhow::Result<Self> {
        let (rest, parsed) = X509Certificate::from_der(&der)?;
        ensure!(rest.is_empty(), "something follows a certificate");
        let at = |seconds: i64| {
            let seconds = u64::try_from(seconds).context("a date before 1970")?;
            SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).context("a date too far away")
        };
        let (from, until) = (at(parsed.validity().not_before.timestamp())?, at(parsed.validity().not_after.timestamp())?);
        Ok(Self { der, from, until })
    }

    fn belongs_to(&self, trust_domain: &TrustDomain) -> anyhow::Result<()> {
        let (_, parsed) = X509Certificate::from_der(&self.der)?;
        ensure!(parsed.is_ca(), "it holds a certificate that is no CA's");
        let names = parsed.subject_alternative_name()?.context("it holds a CA without a trust domain")?;
        let wanted = trust_domain.id_string();
        match names.value.general_names.as_slice() {
            [GeneralName::URI(uri)] if *uri == wanted => Ok(()),
            other => bail!("it was made for {other:?}, and TRUST_DOMAIN says {wanted}"),
        }
    }
}

impl Kept {
    fn trusted(&self) -> impl Iterator<Item = &Trusted> {
        let next = self.next.iter().map(|n| &n.certificate);
        std::iter::once(&self.signing.certificate).chain(next).chain(&self.old)
    }

    fn step(&self, now: SystemTime, life: Duration) -> Step<'_> {
        let left = self.signing.certificate.until.duration_since(now).unwrap_or_default();
        match &self.next {
            None if left < life / 3 => return Step::Publish,
            Some(next) if left < life / 6 => {
                let known = now.duration_since(next.certificate.from + BACKDATE).unwrap_or_default();
                if left.is_zero() || known >= life / NOTICE {
                    return Step::Sign(next);
                }
            }
            _ => {}
        }
        if self.old.iter().any(|old| old.until <= now) { Step::Retire } else { Step::Nothing }
    }
}

/// What a rotation does next.
enum Step<'a> {
    Nothing,
    Publish,
    Sign(&'a Signer),
    Retire,
}

impl std::fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nothing => "nothing",
            Self::Publish => "publish the next CA",
            Self::Sign(_) => "sign with the next CA",
            Self::Retire => "retire an ended CA",
        })
    }
}

/// The one that signs first, then its successor if there is one.
fn to_pem(signers: &[&Signer], old: &[Trusted]) -> Secret {
    let mut text = String::new();
    for signer in signers {
        text.push_str(&pem(&signer.certificate.der));
        text.push_str(&signer.issuer.key().serialize_pem());
    }
    text.extend(old.iter().map(|old| pem(&old.der)));
    Secret::new(text)
}

fn pem(der: &[u8]) -> String {
    let body = BASE64_STANDARD.encode(der);
    let lines: Vec<&str> = body.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// Reads what `to_pem` wrote. A key belongs to the certificate before it.
fn parse(text: &str, trust_domain: &TrustDomain) -> anyhow::Result<Kept> {
    let mut signers = Vec::new();
    let mut certificates: Vec<Trusted> = Vec::new();
    for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text.as_bytes()) {
        match section.map_err(|e| anyhow!("{e}"))? {
            (SectionKind::Certificate, der) => {
                let certificate = Trusted::parse(der)?;
                certificate.belongs_to(trust_domain)?;
                certificates.push(certificate);
            }
            (SectionKind::PrivateKey, key) => {
                let certificate = certificates.pop().context("it holds a key before its certificate")?;
                signers.push(Signer::restore(certificate, &key, trust_domain)?);
            }
            (kind, _) => bail!("it holds a section of another kind ({kind:?})"),
        }
    }
    let mut signers = signers.into_iter();
    let signing = signers.next().context("it holds no key with its certificate")?;
    let next = signers.next();
    ensure!(signers.next().is_none(), "it holds more than two keys");
    Ok(Kept { signing, next, old: certificates })
}

fn base(now: SystemTime, not_after: SystemTime, common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.not_before = (now - BACKDATE).into();
    params.not_after = not_after.into();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "gitea-dynamic-runner");
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

fn ca_params(td: &TrustDomain, now: SystemTime, not_after: SystemTime, name: &str) -> anyhow::Result<CertificateParams> {
    let mut params = base(now, not_after, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.subject_alt_names = vec![SanType::URI(td.id_string().try_into()?)];
    Ok(params)
}

fn kept_in(path: &Path, trust_domain: &TrustDomain) -> anyhow::Result<Option<Kept>> {
    let Some(text) = read(path)? else { return Ok(None) };
    let kept = parse(text.expose(), trust_domain).with_context(|| {
        format!(
            "the CA file {} is damaged or foreign; put it back from a backup, or move it away to get a new CA (environments that run now lose their identity then)",
            path.display()
        )
    });
    kept.map(Some)
}

/// Until when the CA that is kept in `dir` signs. Only looks.
pub(super) fn look(dir: &Path, trust_domain: &TrustDomain) -> anyhow::Result<Option<SystemTime>> {
    Ok(kept_in(&dir.join(FILE), trust_domain)?.map(|kept| kept.signing.certificate.until))
}

fn read(path: &Path) -> anyhow::Result<Option<Secret>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(Secret::new(text))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("read the CA file {}; make it readable for this user", path.display())),
    }
}
