//! The agent's token and the CA certificates of the controller: mounted files that the kubelet replaces.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::header::HeaderValue;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;

use crate::cluster::mounted::{Stamp, stamp};

/// File of the bound `ServiceAccount` token.
const TOKEN: &str = "token";
/// File of the CA certificates, in PEM.
const AUTHORITIES: &str = "ca.crt";

/// Why there are no credentials.
#[derive(Debug, Error)]
pub enum CredentialsError {
    /// A file is missing or cannot be read.
    #[error("failed to read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// It contains no token.
    #[error("failed to read {}: it contains no token", .0.display())]
    Token(PathBuf),
    /// It contains no usable certificate.
    #[error("failed to read {}: it contains no CA certificate", .0.display())]
    Authorities(PathBuf),
    /// TLS cannot be set up.
    #[error("failed to set up TLS")]
    Tls(#[from] rustls::Error),
}

impl CredentialsError {
    /// The file does not exist: direct reports are not configured.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Read(_, error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// The agent's credentials and trust roots.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// The `Authorization` header.
    pub authorization: HeaderValue,
    /// For connections; a new one after a change of the CA certificates.
    pub tls: Arc<ClientConfig>,
}

/// Reads the files, and again when they change.
#[derive(Debug)]
pub struct CredentialFiles {
    token: MountedFile<HeaderValue>,
    authorities: MountedFile<Arc<ClientConfig>>,
}

impl CredentialFiles {
    /// The files in `directory`.
    pub fn new(directory: &Path) -> Self {
        Self {
            token: MountedFile::new(directory.join(TOKEN)),
            authorities: MountedFile::new(directory.join(AUTHORITIES)),
        }
    }

    /// The current credentials. Reads a file only if it was replaced; checking that takes microseconds.
    ///
    /// # Errors
    /// If a file is missing or not valid.
    pub fn current(&mut self) -> Result<Credentials, CredentialsError> {
        Ok(Credentials {
            authorization: self.token.current(authorization)?,
            tls: self.authorities.current(tls)?,
        })
    }
}

/// A parsed file, with its content and stamp. The kubelet replaces all files of a volume together by a symbolic link, so
/// a new token changes the stamp of the unchanged CA file, too.
#[derive(Debug)]
struct MountedFile<T> {
    path: PathBuf,
    last: Option<(Stamp, Vec<u8>, T)>,
}

impl<T: Clone> MountedFile<T> {
    const fn new(path: PathBuf) -> Self {
        Self { path, last: None }
    }

    fn current(
        &mut self,
        read: fn(&Path, &[u8]) -> Result<T, CredentialsError>,
    ) -> Result<T, CredentialsError> {
        let failed = |source| CredentialsError::Read(self.path.clone(), source);
        let stamp = stamp(&self.path).map_err(failed)?;
        if let Some((known, _, value)) = &self.last
            && *known == stamp
        {
            return Ok(value.clone());
        }
        let text = fs::read(&self.path).map_err(failed)?;
        let last = self.last.take().filter(|(_, known, _)| *known == text);
        let value = match last {
            Some((_, _, value)) => value,
            None => read(&self.path, &text)?,
        };
        self.last = Some((stamp, text, value.clone()));
        Ok(value)
    }
}

fn authorization(path: &Path, text: &[u8]) -> Result<HeaderValue, CredentialsError> {
    let none = || CredentialsError::Token(path.to_owned());
    let token = text.trim_ascii();
    if token.is_empty() {
        return Err(none());
    }
    let value = [b"Bearer ", token].concat();
    let mut value = HeaderValue::from_bytes(&value).map_err(|_| none())?;
    value.set_sensitive(true);
    Ok(value)
}

fn tls(path: &Path, text: &[u8]) -> Result<Arc<ClientConfig>, CredentialsError> {
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_slice_iter(text).filter_map(Result::ok);
    roots.add_parsable_certificates(certificates);
    if roots.is_empty() {
        return Err(CredentialsError::Authorities(path.to_owned()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn authority() -> String {
        let pair = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap();
        pair.cert.pem()
    }

    /// Updates the files as the kubelet does: a directory for each version and a replaced link.
    fn publish(directory: &Path, version: u32, token: &str, authorities: &str) {
        let data = directory.join(format!("..{version}"));
        fs::create_dir(&data).unwrap();
        fs::write(data.join(TOKEN), token).unwrap();
        fs::write(data.join(AUTHORITIES), authorities).unwrap();
        let (next, link) = (directory.join("..data_tmp"), directory.join("..data"));
        symlink(&data, &next).unwrap();
        fs::rename(next, link).unwrap();
        for name in [TOKEN, AUTHORITIES] {
            let visible = directory.join(name);
            if !visible.exists() {
                symlink(Path::new("..data").join(name), visible).unwrap();
            }
        }
    }

    #[test]
    fn files_are_read_again_after_the_kubelet_replaced_them() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = CredentialFiles::new(directory.path());
        let missing = files.current().unwrap_err();
        assert!(missing.is_missing(), "{missing}");
        let first = authority();
        publish(directory.path(), 1, "one\n", &first);
        let one = files.current().unwrap();
        assert_eq!(one.authorization, "Bearer one");
        assert!(one.authorization.is_sensitive());
        let again = files.current().unwrap();
        assert!(Arc::ptr_eq(&one.tls, &again.tls), "nothing has changed");
        publish(directory.path(), 2, "two", &first);
        let two = files.current().unwrap();
        assert_eq!(two.authorization, "Bearer two");
        assert!(
            Arc::ptr_eq(&one.tls, &two.tls),
            "they are the same authorities"
        );
        publish(
            directory.path(),
            3,
            "two",
            &format!("{first}{}", authority()),
        );
        let rotated = files.current().unwrap();
        assert!(!Arc::ptr_eq(&one.tls, &rotated.tls));
    }

    #[test]
    fn an_invalid_token_or_certificate_is_reported_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = CredentialFiles::new(directory.path());
        publish(directory.path(), 1, " \n", &authority());
        let error = files.current().unwrap_err();
        assert!(!error.is_missing());
        assert!(
            error.to_string().ends_with("/token: it contains no token"),
            "{error}"
        );
        publish(directory.path(), 2, "a\u{7f}b", &authority());
        files.current().unwrap_err();
        publish(directory.path(), 3, "token", "no PEM");
        let error = files.current().unwrap_err().to_string();
        assert!(
            error.contains("/ca.crt: it contains no CA certificate"),
            "{error}"
        );
    }
}
