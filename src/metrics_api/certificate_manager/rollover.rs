//! The switch from one certificate to the next. Pure.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;

use super::super::certificates::Pair;
use super::Certificate;

/// How long a new certificate waits before it is served. By then the other replicas have its files, API servers its
/// authorities, and agents as well, whose kubelets are the last to update.
const MAX_DELAY: SignedDuration = SignedDuration::from_mins(5);
/// The wait is at most this fraction of the remaining lifetime of the current certificate.
const DELAY_FRACTION: i32 = 10;

/// A valid certificate.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The certificate.
    pub pair: Arc<Pair>,
    /// The authorities that came with it.
    pub roots: Vec<CertificateDer<'static>>,
    /// When it expires.
    pub expires: Timestamp,
}

/// The certificate in use, and the next one with the time from which it is used.
#[derive(Debug, Default)]
pub struct Rollover {
    served: Option<Candidate>,
    next: Option<(Candidate, Timestamp)>,
}

impl Rollover {
    /// Adds a certificate at `now`. Returns from when it is served, unless that is immediately.
    pub fn offer(&mut self, found: Candidate, now: Timestamp) -> Option<Timestamp> {
        let before = self.served.as_ref();
        let Some(served) = before.filter(|served| served.pair.chain != found.pair.chain) else {
            self.served = Some(found);
            self.next = None;
            return None;
        };
        let from = now.checked_add(delay(served.expires, now)).unwrap_or(now);
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
    pub fn current(&self) -> Option<Certificate> {
        let served = self.served.as_ref()?;
        let next = self.next.as_ref().map(|(next, _)| next);
        let both = || std::iter::once(served).chain(next);
        Some(Certificate {
            pair: Arc::clone(&served.pair),
            roots: both().flat_map(|found| found.roots.clone()).collect(),
            expires: served.expires,
        })
    }
}

/// How long a certificate that arrives at `now` waits, if the current one expires at `expires`.
fn delay(expires: Timestamp, now: Timestamp) -> SignedDuration {
    let part = expires.duration_since(now) / DELAY_FRACTION;
    part.clamp(SignedDuration::ZERO, MAX_DELAY)
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::PrivatePkcs8KeyDer;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Numbers stand for certificates, keys and authorities.
    fn found(number: u8, expires: i64) -> Candidate {
        Candidate {
            pair: Arc::new(Pair {
                chain: vec![vec![number].into()],
                key: PrivatePkcs8KeyDer::from(vec![number]).into(),
            }),
            roots: vec![vec![number].into()],
            expires: at(expires),
        }
    }

    fn served(rollover: &Rollover) -> u8 {
        rollover.current().unwrap().pair.chain[0][0]
    }

    #[test]
    fn the_first_is_served_immediately_and_the_next_after_a_delay() {
        let mut rollover = Rollover::default();
        assert!(rollover.current().is_none());
        assert_eq!(rollover.offer(found(1, 1_000_000), at(0)), None);
        assert_eq!(served(&rollover), 1);
        assert_eq!(rollover.offer(found(2, 2_000_000), at(10)), Some(at(310)));
        for second in [10, 100, 309] {
            rollover.advance(at(second));
            let current = rollover.current().unwrap();
            assert_eq!(current.pair.chain[0][0], 1, "at {second} s");
            assert_eq!(current.roots.len(), 2, "both authorities are published");
        }
        assert!(rollover.is_due(at(310)));
        rollover.advance(at(310));
        assert_eq!(served(&rollover), 2);
        assert_eq!(rollover.current().unwrap().roots.len(), 1);
        assert!(!rollover.is_due(at(311)));
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
            let mut rollover = Rollover::default();
            rollover.offer(found(1, 100 + left), at(0));
            let from = rollover.offer(found(2, 9000), at(100));
            assert_eq!(from, Some(at(100 + waits)), "{left} s left");
        }
    }

    #[test]
    fn a_withdrawn_certificate_is_never_served() {
        let mut rollover = Rollover::default();
        rollover.offer(found(1, 1_000_000), at(0));
        rollover.offer(found(2, 1_000_000), at(10));
        let back = Candidate {
            roots: vec![vec![9].into()],
            ..found(1, 1_000_000)
        };
        assert_eq!(rollover.offer(back, at(20)), None);
        rollover.advance(at(10_000));
        assert_eq!(served(&rollover), 1);
        assert_eq!(rollover.current().unwrap().roots[0][0], 9);
        // The last of several pending certificates wins.
        rollover.offer(found(3, 1_000_000), at(10_000));
        rollover.offer(found(4, 1_000_000), at(10_200));
        rollover.advance(at(10_300));
        assert_eq!(served(&rollover), 1);
        rollover.advance(at(10_500));
        assert_eq!(served(&rollover), 4);
    }
}
