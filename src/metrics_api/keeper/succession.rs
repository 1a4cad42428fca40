//! The switch from one certificate to the next. Pure.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;

use super::super::certificates::Pair;
use super::Held;

/// How long a new certificate waits before it is served. By then the other replicas have its files, API servers its
/// authorities, and agents as well, whose kubelets are the last to update.
const PATIENCE: SignedDuration = SignedDuration::from_mins(5);
/// The wait is at most this fraction of the remaining lifetime of the current certificate.
const PART: i32 = 10;

/// A valid certificate.
#[derive(Clone, Debug)]
pub struct Found {
    /// The certificate.
    pub pair: Arc<Pair>,
    /// The authorities that came with it.
    pub roots: Vec<CertificateDer<'static>>,
    /// When it expires.
    pub ends: Timestamp,
}

/// The certificate in use, and the next one with the time from which it is used.
#[derive(Debug, Default)]
pub struct Succession {
    served: Option<Found>,
    next: Option<(Found, Timestamp)>,
}

impl Succession {
    /// Adds a certificate at `now`. Returns from when it is served, unless that is immediately.
    pub fn offer(&mut self, found: Found, now: Timestamp) -> Option<Timestamp> {
        let before = self.served.as_ref();
        let Some(served) = before.filter(|served| served.pair.chain != found.pair.chain) else {
            self.served = Some(found);
            self.next = None;
            return None;
        };
        let from = now.checked_add(patience(served.ends, now)).unwrap_or(now);
        self.next = Some((found, from));
        Some(from)
    }

    /// Whether the next certificate is due at `now`.
    pub fn is_due(&self, now: Timestamp) -> bool {
        self.next.as_ref().is_some_and(|(_, from)| *from <= now)
    }

    /// Switches to the next certificate if it is due.
    pub fn advance(&mut self, now: Timestamp) {
        if self.is_due(now) {
            self.served = self.next.take().map(|(next, _)| next);
        }
    }

    /// The certificate in use, with the authorities of this and the next one. `None`: there is none yet.
    pub fn held(&self) -> Option<Held> {
        let served = self.served.as_ref()?;
        let next = self.next.as_ref().map(|(next, _)| next);
        let both = || std::iter::once(served).chain(next);
        Some(Held {
            pair: Arc::clone(&served.pair),
            roots: both().flat_map(|found| found.roots.clone()).collect(),
            ends: served.ends,
        })
    }
}

/// How long a certificate that arrives at `now` waits, if the current one expires at `ends`.
fn patience(ends: Timestamp, now: Timestamp) -> SignedDuration {
    let part = ends.duration_since(now) / PART;
    part.clamp(SignedDuration::ZERO, PATIENCE)
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::PrivatePkcs8KeyDer;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Numbers stand for certificates, keys and authorities.
    fn found(number: u8, ends: i64) -> Found {
        Found {
            pair: Arc::new(Pair {
                chain: vec![vec![number].into()],
                key: PrivatePkcs8KeyDer::from(vec![number]).into(),
            }),
            roots: vec![vec![number].into()],
            ends: at(ends),
        }
    }

    fn served(succession: &Succession) -> u8 {
        succession.held().unwrap().pair.chain[0][0]
    }

    #[test]
    fn the_first_is_served_immediately_and_the_next_after_a_delay() {
        let mut succession = Succession::default();
        assert!(succession.held().is_none());
        assert_eq!(succession.offer(found(1, 1_000_000), at(0)), None);
        assert_eq!(served(&succession), 1);
        assert_eq!(succession.offer(found(2, 2_000_000), at(10)), Some(at(310)));
        for second in [10, 100, 309] {
            succession.advance(at(second));
            let held = succession.held().unwrap();
            assert_eq!(held.pair.chain[0][0], 1, "at {second} s");
            assert_eq!(held.roots.len(), 2, "both authorities are published");
        }
        assert!(succession.is_due(at(310)));
        succession.advance(at(310));
        assert_eq!(served(&succession), 2);
        assert_eq!(succession.held().unwrap().roots.len(), 1);
        assert!(!succession.is_due(at(311)));
    }

    #[test]
    fn the_delay_shrinks_with_the_remaining_lifetime() {
        for (left, waits) in [
            (3600, 300),
            (3000, 300),
            (600, 60),
            (10, 1),
            (0, 0),
            (-5, 0),
        ] {
            let mut succession = Succession::default();
            succession.offer(found(1, 100 + left), at(0));
            let from = succession.offer(found(2, 9000), at(100));
            assert_eq!(from, Some(at(100 + waits)), "{left} s left");
        }
    }

    #[test]
    fn a_withdrawn_certificate_is_never_served() {
        let mut succession = Succession::default();
        succession.offer(found(1, 1_000_000), at(0));
        succession.offer(found(2, 1_000_000), at(10));
        let back = Found {
            roots: vec![vec![9].into()],
            ..found(1, 1_000_000)
        };
        assert_eq!(succession.offer(back, at(20)), None);
        succession.advance(at(10_000));
        assert_eq!(served(&succession), 1);
        assert_eq!(succession.held().unwrap().roots[0][0], 9);
        // The last of several pending certificates wins.
        succession.offer(found(3, 1_000_000), at(10_000));
        succession.offer(found(4, 1_000_000), at(10_200));
        succession.advance(at(10_300));
        assert_eq!(served(&succession), 1);
        succession.advance(at(10_500));
        assert_eq!(served(&succession), 4);
    }
}
