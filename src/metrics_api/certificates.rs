//! TLS configuration of a replica. Pure.

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

/// Why the TLS configuration is unusable.
#[derive(Debug, Error)]
pub enum TlsError {
    /// The TLS library rejects the certificate or key.
    #[error("failed to use the certificate")]
    Certificate(#[from] rustls::Error),
    /// The authorities can't be used to verify replicas.
    #[error("failed to use the certificate authorities")]
    Authorities(#[from] VerifierBuilderError),
    /// Our name is not a valid DNS name.
    #[error("failed to use our own name")]
    Name(#[from] InvalidDnsNameError),
}

/// A certificate with its key.
#[derive(Debug)]
pub struct Pair {
    /// The certificate, followed by its intermediates.
    pub chain: Vec<CertificateDer<'static>>,
    /// Private key.
    pub key: PrivateKeyDer<'static>,
}

/// TLS configuration for serving and for calling other replicas.
#[derive(Clone)]
pub struct Tls {
    /// For clients of the API. It accepts any client certificate, or none: identity is checked per request.
    pub server: Arc<ServerConfig>,
    /// For agents that report.
    pub reports: Arc<ServerConfig>,
    /// For connections to the leader.
    pub client: Arc<ClientConfig>,
    /// Verifies other replicas by their certificates.
    replicas: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl Tls {
    /// For this certificate, where replicas have the name `name` and are signed by `roots`.
    ///
    /// # Errors
    /// The TLS library rejects something.
    pub fn new(
        pair: &Pair,
        roots: &[CertificateDer<'static>],
        name: String,
    ) -> Result<Self, TlsError> {
        let provider = provider();
        let roots = store(roots);
        let any_client = Arc::new(AnyClientCertificate(Arc::clone(&provider)));
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(pair.chain.clone(), pair.key.clone_key())?;
        Ok(Self {
            server: Arc::new(server(pair, &provider, any_client, b"http/1.1")?),
            reports: Arc::new(server(pair, &provider, Arc::new(NoClientAuth), b"h2")?),
            client: Arc::new(client),
            replicas: WebPkiClientVerifier::builder_with_provider(roots, provider).build()?,
            name: ServerName::try_from(name)?,
        })
    }

    /// Whether these certificates belong to a replica of this release: signed by our authority, with our name.
    pub fn is_replica(&self, certificates: &[CertificateDer<'static>], now: Timestamp) -> bool {
        let is_ours = |certificate| {
            ParsedCertificate::try_from(certificate)
                .is_ok_and(|parsed| verify_server_name(&parsed, &self.name).is_ok())
        };
        certificates.first().is_some_and(is_ours)
            && is_signed(self.replicas.as_ref(), certificates, now)
    }
}

/// Whether these certificates, the client's first, are valid at `now` for the authorities of `verifier`.
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

/// Converts to the TLS library's type.
pub fn unix(time: Timestamp) -> UnixTime {
    let since = u64::try_from(time.as_second()).unwrap_or(0);
    UnixTime::since_unix_epoch(Duration::from_secs(since))
}

/// The crypto provider.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Root store of these certificates. Invalid ones are skipped.
pub fn store(roots: &[CertificateDer<'static>]) -> Arc<RootCertStore> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    Arc::new(store)
}

/// Server configuration with this client verifier and one ALPN protocol.
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
    // A resumed session would carry an identity whose certificate may have expired. Agents rarely reconnect to the
    // same replica anyway.
    server.send_tls13_tickets = 0;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(server)
}

/// Requests a client certificate, and accepts any whose key the client has. It is verified per request: a handshake
/// that fails while an authority rotates would break discovery.
#[derive(Debug)]
struct AnyClientCertificate(Arc<CryptoProvider>);

impl ClientCertVerifier for AnyClientCertificate {
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
