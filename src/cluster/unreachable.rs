//! Why an API server could not be reached, for a person.

use std::error::Error as StdError;
use std::io;
use std::iter;

use hyper_util::client::legacy;
use rustls::CertificateError::{
    BadEncoding, Expired, ExpiredContext, NotValidForName, NotValidForNameContext, NotValidYet,
    NotValidYetContext, Other, UnknownIssuer,
};
use rustls::{AlertDescription, CertificateError};
use thiserror::Error;

use super::client::describe;

/// The API server could not be reached, or the connection broke.
#[derive(Debug, Error)]
#[error("no answer from {address}: {}", reason(source))]
pub(super) struct Unreachable {
    address: String,
    source: legacy::Error,
}

impl Unreachable {
    pub(super) fn new(address: &str, source: legacy::Error) -> Self {
        Self {
            address: address.to_owned(),
            source,
        }
    }
}

/// The cause, without the first words, which name a part of the client.
fn reason(error: &legacy::Error) -> String {
    let Some(cause) = error.source() else {
        return error.to_string();
    };
    let mut causes = iter::successors(Some(cause), |&error| error.source());
    let by_tls = causes.find_map(|error| tls_error(error).and_then(explain));
    by_tls.unwrap_or_else(|| describe(cause))
}

/// TLS errors are inside of I/O errors, which are no source of theirs.
fn tls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    let inner = error.downcast_ref().and_then(io::Error::get_ref);
    match inner {
        Some(inner) => tls_error(inner),
        None => error.downcast_ref(),
    }
}

/// A TLS error that has a likely cause.
fn explain(error: &rustls::Error) -> Option<String> {
    Some(match error {
        rustls::Error::InvalidMessage(_) => {
            "this port does not use TLS; if it is the right one, write http:// in the kubeconfig"
                .to_owned()
        }
        rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => {
            "it requires a client certificate; name one in the kubeconfig".to_owned()
        }
        rustls::Error::InvalidCertificate(error) => {
            format!("its certificate {}", of_certificate(error)?)
        }
        _ => return None,
    })
}

fn of_certificate(error: &CertificateError) -> Option<String> {
    let text = match error {
        UnknownIssuer => {
            "is signed by an unknown authority; correct certificate-authority-data in the kubeconfig"
        }
        Expired | ExpiredContext { .. } => "has expired; renew it",
        NotValidYet | NotValidYetContext { .. } => "is not valid yet; compare the clocks",
        BadEncoding => "can't be decoded",
        NotValidForName => "is for another name; write that name as server in the kubeconfig",
        NotValidForNameContext { presented, .. } => {
            let names = presented.join(", ");
            return Some(format!(
                "is for other names ({names}); write one of them as server, or as tls-server-name, in the kubeconfig"
            ));
        }
        Other(other) if is_of_an_authority(other) => {
            "is one of an authority, which can't identify a server; give the API server one that it has signed"
        }
        _ => return None,
    };
    Some(text.to_owned())
}

fn is_of_an_authority(error: &rustls::OtherError) -> bool {
    let error = error.0.downcast_ref();
    matches!(error, Some(webpki::Error::CaUsedAsEndEntity))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::ServerName;
    use rustls::{InvalidMessage, OtherError};

    use super::*;

    #[test]
    fn tls_errors_are_explained() {
        let plain = rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType);
        let wrapped = io::Error::other(io::Error::other(plain));
        assert_eq!(
            tls_error(&wrapped)
                .and_then(explain)
                .expect("an explanation"),
            "this port does not use TLS; if it is the right one, write http:// in the kubeconfig"
        );
        let authority = OtherError(Arc::new(webpki::Error::CaUsedAsEndEntity));
        let name = NotValidForNameContext {
            expected: ServerName::try_from("a.example").expect("a name"),
            presented: vec!["DnsName(\"kubernetes\")".to_owned()],
        };
        for (error, expected) in [
            (Other(authority), "its certificate is one of an authority"),
            (
                UnknownIssuer,
                "its certificate is signed by an unknown authority",
            ),
            (Expired, "its certificate has expired"),
            (
                name,
                "its certificate is for other names (DnsName(\"kubernetes\"))",
            ),
        ] {
            let text = explain(&rustls::Error::InvalidCertificate(error));
            let text = text.expect("an explanation");
            assert!(text.starts_with(expected), "{text}");
        }
        assert_eq!(explain(&rustls::Error::DecryptError), None);
    }
}
