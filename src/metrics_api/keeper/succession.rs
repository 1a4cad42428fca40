//! Which of two certificates is served, where one follows the other. Pure.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;

use super::super::certificates::Pair;
use super::Held;

/// So long is a new certificate known before it is served: other replicas have its files by then, API servers its
/// authorities, and agents, by whose kubelets these come last, as well.
const PATIENCE: SignedDuration = SignedDuration::from_mins(5);
/// Less where the one before it does not last: this part of what is left of it.
const PART: i32 = 10;

/// A certificate that was found good.
#[derive(Clone, Debug)]
pub struct Found {
    /// The certificate.
    pub pair: Arc<Pair>,
    /// The authorities that came with it.
    pub roots: Vec<CertificateDer<'static>>,
    /// When it is good no more.
    pub ends: Timestamp,
}

/// The certificate that is served, and the one that follows it, with the time from which on it is served.
#[derive(Debug, Default)]
pub struct Succession {
    served: Option<Found>,
    next: Option<(Found, Timestamp)>,
}

impl Succession {
    /// One comes at `now`. The answer is when it is served, where that is not at once.
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

    /// Whether the next one is to be served by `now`.
    pub fn is_due(&self, now: Timestamp) -> bool {
        self.next.as_ref().is_some_and(|(_, from)| *from <= now)
    }

    /// Serves the next one where that is due.
    pub fn advance(&mut self, now: Timestamp) {
        if self.is_due(now) {
            self.served = self.next.take().map(|(next, _)| next);
        }
    }

    /// What is served, and what others have to know for it and for what follows; `None`: nothing came yet.
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

/// How long one that comes at `now` waits for one that lasts until `ends`.
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

    /// Of certificates, keys and authorities their numbers have to do.
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
    fn the_first_is_served_at_once_and_the_next_when_everybody_can_know_it() {
        let mut succession = Succession::default();
        assert!(succession.held().is_none());
        assert_eq!(succession.offer(found(1, 1_000_000), at(0)), None);
        assert_eq!(served(&succession), 1);
        assert_eq!(succession.offer(found(2, 2_000_000), at(10)), Some(at(310)));
        for second in [10, 100, 309] {
            succession.advance(at(second));
            let held = succession.held().unwrap();
            assert_eq!(held.pair.chain[0][0], 1, "at {second} s");
            assert_eq!(held.roots.len(), 2, "both authorities are told");
        }
        assert!(succession.is_due(at(310)));
        succession.advance(at(310));
        assert_eq!(served(&succession), 2);
        assert_eq!(succession.held().unwrap().roots.len(), 1);
        assert!(!succession.is_due(at(311)));
    }

    #[test]
    fn one_that_ends_soon_is_replaced_the_sooner_and_one_that_ended_at_once() {
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
            assert_eq!(from, Some(at(100 + waits)), "{left} s are left");
        }
    }

    #[test]
    fn a_certificate_that_was_taken_back_is_never_served() {
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
        // Of two that come one after the other the last is served.
        succession.offer(found(3, 1_000_000), at(10_000));
        succession.offer(found(4, 1_000_000), at(10_200));
        succession.advance(at(10_300));
        assert_eq!(served(&succession), 1);
        succession.advance(at(10_500));
        assert_eq!(served(&succession), 4);
    }
}
