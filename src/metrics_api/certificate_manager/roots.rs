//! The authorities by which replicas are verified. Pure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// How long an authority is trusted after we stopped using it: another replica may still serve with it.
const RETENTION: SignedDuration = SignedDuration::from_hours(1);
/// Limit of authorities in a bundle.
const MAX_COUNT: usize = 64;

/// Authorities, each with the time when we last used it, or first saw it published.
#[derive(Debug, Default)]
pub struct Roots(Vec<(CertificateDer<'static>, Timestamp)>);

impl Roots {
    /// Updates from the authorities that we use and those that are published.
    pub fn update(
        &mut self,
        ours: &[CertificateDer<'static>],
        published: &[CertificateDer<'static>],
        now: Timestamp,
    ) {
        for root in published {
            self.entry(root, now);
        }
        for root in ours {
            *self.entry(root, now) = now;
        }
        self.0
            .retain(|(root, seen)| is_retained(*seen, now) || published.contains(root));
    }

    fn entry(&mut self, root: &CertificateDer<'static>, now: Timestamp) -> &mut Timestamp {
        let known = self.0.iter().position(|(other, _)| other == root);
        let index = known.unwrap_or_else(|| {
            self.0.push((root.clone(), now));
            self.0.len() - 1
        });
        &mut self.0[index].1
    }

    /// The trusted authorities at `now`, in the same order on every replica.
    pub fn known(&self, now: Timestamp) -> Vec<CertificateDer<'static>> {
        let retained = self.0.iter().filter(|(_, seen)| is_retained(*seen, now));
        let mut known: Vec<_> = retained.map(|(root, _)| root.clone()).collect();
        known.sort_by(|one, other| one.as_ref().cmp(other.as_ref()));
        known
    }
}

fn is_retained(seen: Timestamp, now: Timestamp) -> bool {
    now.duration_since(seen) < RETENTION
}

/// The certificates in a PEM. Invalid ones are skipped.
pub fn read(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem)
        .filter_map(Result::ok)
        .take(MAX_COUNT)
        .collect()
}

/// Encodes as PEM (RFC 7468).
pub fn pem(roots: &[CertificateDer<'_>]) -> String {
    let mut pem = String::new();
    for root in roots {
        pem += "-----BEGIN CERTIFICATE-----\n";
        let mut rest = STANDARD.encode(root);
        while !rest.is_empty() {
            let next = rest.split_off(rest.len().min(64));
            pem += &rest;
            pem.push('\n');
            rest = next;
        }
        pem += "-----END CERTIFICATE-----\n";
    }
    pem
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(minute: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_mins(minute)
    }

    fn authority() -> CertificateDer<'static> {
        let pair = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap();
        pair.cert.der().clone()
    }

    fn sorted(mut all: Vec<CertificateDer<'static>>) -> Vec<CertificateDer<'static>> {
        all.sort_by(|one, other| one.as_ref().cmp(other.as_ref()));
        all
    }

    #[test]
    fn a_retired_authority_is_trusted_for_an_hour_only() {
        let (old, new) = (authority(), authority());
        let both = sorted(vec![old.clone(), new.clone()]);
        let mut roots = Roots::default();
        roots.update(std::slice::from_ref(&old), &[], at(0));
        for minute in [1, 30, 59] {
            roots.update(std::slice::from_ref(&new), &both, at(minute));
            assert_eq!(roots.known(at(minute)), both, "minute {minute}");
        }
        roots.update(std::slice::from_ref(&new), &both, at(60));
        assert_eq!(roots.known(at(60)), std::slice::from_ref(&new));
        // A leader may be slow to remove it: that does not make it new again.
        roots.update(std::slice::from_ref(&new), &both, at(61));
        assert_eq!(roots.known(at(61)), std::slice::from_ref(&new));
        roots.update(&[], std::slice::from_ref(&new), at(62));
        roots.update(&[], &both, at(63));
        assert_eq!(roots.known(at(63)), both, "it was removed in between");
    }

    #[test]
    fn a_new_replica_trusts_published_authorities_for_an_hour() {
        let (old, new) = (authority(), authority());
        let mut roots = Roots::default();
        roots.update(
            std::slice::from_ref(&new),
            std::slice::from_ref(&old),
            at(0),
        );
        assert_eq!(roots.known(at(59)).len(), 2);
        assert_eq!(roots.known(at(60)).len(), 0, "no update for an hour");
    }

    #[test]
    fn encoded_certificates_are_parsed_with_any_text_around_them() {
        let both = sorted(vec![authority(), authority()]);
        let written = pem(&both);
        assert!(written.lines().all(|line| line.len() <= 64), "{written}");
        assert_eq!(read(written.as_bytes()), both);
        let windows = format!("# ours\n{}", written.replace('\n', "\r\n"));
        assert_eq!(read(windows.as_bytes()), both);
        assert_eq!(read(b"-----BEGIN CERTIFICATE-----\n!\n"), []);
    }
}
