//! What a replica serves with, and knows others by. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    NoClientAuth, NoServerSessionStorage, ParsedCertificate, VerifierBuilderError,
    WebPkiClientVerifier,
};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
};
use thiserror::Error;

/// Why nothing can be served with a certificate.
#[derive(Debug, Error)]
pub enum TlsError {
    /// The TLS library refuses it.
    #[error("failed to use the certificate")]
    Certificate(#[from] rustls::Error),
    /// They can't be used to verify replicas.
    #[error("failed to use the certificate authorities")]
    Authorities(#[from] VerifierBuilderError),
    /// No certificate can bear our name.
    #[error("failed to use our own name")]
    Name(#[from] InvalidDnsNameError),
}

/// A certificate with its key.
#[derive(Debug)]
pub struct Pair {
    /// The certificate, then those between it and its authority.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its key.
    pub key: PrivateKeyDer<'static>,
}

/// What this replica serves and calls others with.
#[derive(Clone)]
pub struct Tls {
    /// For those who connect to us. It takes any certificate, or none: who they are is judged for each request.
    pub server: Arc<ServerConfig>,
    /// For agents that report.
    pub reports: Arc<ServerConfig>,
    /// For connecting to the leader.
    pub client: Arc<ClientConfig>,
    /// Knows replicas by their certificates, which bear this name.
    replicas: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl Tls {
    /// By this pair, where replicas bear `name` and are of the authorities `roots`.
    ///
    /// # Errors
    /// The TLS library refuses something of it.
    pub fn new(
        pair: &Pair,
        roots: &[CertificateDer<'static>],
        name: String,
    ) -> Result<Self, TlsError> {
        let provider = provider();
        let roots = store(roots);
        let anybody = Arc::new(Anybody(Arc::clone(&provider)));
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(pair.chain.clone(), pair.key.clone_key())?;
        Ok(Self {
            server: Arc::new(server(pair, &provider, anybody, b"http/1.1")?),
            reports: Arc::new(server(pair, &provider, Arc::new(NoClientAuth), b"h2")?),
            client: Arc::new(client),
            replicas: WebPkiClientVerifier::builder_with_provider(roots, provider).build()?,
            name: ServerName::try_from(name)?,
        })
    }

    /// Whether these certificates make a replica of this release: of our authority, which may sign for others too, and of
    /// our name.
    pub fn is_replica(&self, certificates: &[CertificateDer<'static>], now: Timestamp) -> bool {
        let is_ours = |certificate| {
            ParsedCertificate::try_from(certificate)
                .is_ok_and(|parsed| verify_server_name(&parsed, &self.name).is_ok())
        };
        certificates.first().is_some_and(is_ours)
            && is_signed(self.replicas.as_ref(), certificates, now)
    }
}

/// Whether these certificates, the client's first, are good at `now` by the authorities of `verifier`.
pub fn is_signed(
    verifier: &dyn ClientCertVerifier,
    certificates: &[CertificateDer<'static>],
    now: Timestamp,
) -> bool {
    let [client, between @ ..] = certificates else {
        return false;
    };
    verifier
        .verify_client_cert(client, between, unix(now))
        .is_ok()
}

/// The same time, as TLS has it.
pub fn unix(time: Timestamp) -> UnixTime {
    let since = u64::try_from(time.as_second()).unwrap_or(0);
    UnixTime::since_unix_epoch(Duration::from_secs(since))
}

/// The cryptography of all of it.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Authorities to verify by. One that can't be is as if it were not there.
pub fn store(roots: &[CertificateDer<'static>]) -> Arc<RootCertStore> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    Arc::new(store)
}

/// What is served with: certificates that clients show are judged by `clients`, and one protocol is spoken.
fn server(
    pair: &Pair,
    provider: &Arc<CryptoProvider>,
    clients: Arc<dyn ClientCertVerifier>,
    protocol: &[u8],
) -> Result<ServerConfig, rustls::Error> {
    let mut server = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients)
        .with_single_cert(pair.chain.clone(), pair.key.clone_key())?;
    server.alpn_protocols = vec![protocol.to_vec()];
    // Resumed sessions would carry the identity of a certificate that may have ended; and agents connect once, and when
    // they do so again it is to another replica most often.
    server.send_tls13_tickets = 0;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(server)
}

/// Asks for a certificate, and takes any whose key the client has. What it is worth is judged by each request: a
/// handshake that failed because an authority rotated would take discovery with it.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ClientCertVerifier for Anybody {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
