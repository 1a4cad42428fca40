//! Tracks how far clients are behind in reading their responses, so that the slowest can be disconnected when
//! responses take too much memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// A client that is behind for less time reads at full speed.
const MIN_BEHIND: Duration = Duration::from_millis(200);

/// Lag of the client of one connection.
#[derive(Debug, Default)]
pub struct ClientLag {
    /// Since when data waits to be sent.
    behind: Mutex<Option<Instant>>,
    too_slow: AtomicBool,
    cut: Notify,
}

impl ClientLag {
    fn behind(&self) -> MutexGuard<'_, Option<Instant>> {
        self.behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is unsent data.
    pub fn set_behind(&self, now: Instant) {
        self.behind().get_or_insert(now);
    }

    /// Everything was sent.
    pub fn set_caught_up(&self) {
        *self.behind() = None;
    }

    /// Since when data waits to be sent.
    pub fn behind_since(&self) -> Option<Instant> {
        *self.behind()
    }

    /// Marks the client as slower than the minimum rate.
    pub fn mark_too_slow(&self) {
        self.too_slow.store(true, Ordering::Relaxed);
    }

    /// Whether the client was slower than the minimum rate.
    pub fn was_too_slow(&self) -> bool {
        self.too_slow.load(Ordering::Relaxed)
    }

    /// Completes when the connection is to be closed to free memory.
    pub async fn cut(&self) {
        self.cut.notified().await;
    }
}

/// All connected clients.
#[derive(Debug, Default)]
pub struct ClientLags(Mutex<Vec<Weak<ClientLag>>>);

impl ClientLags {
    /// Adds a client.
    pub fn add(&self) -> Arc<ClientLag> {
        let lag = Arc::default();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&lag));
        lag
    }

    /// Disconnects the client that has been behind for longest. Returns whether there was one.
    pub fn cut_slowest(&self, now: Instant) -> bool {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let behind = all.iter().filter_map(|lag| {
            let lag = lag.upgrade()?;
            let since = lag.behind_since()?;
            (now.duration_since(since) >= MIN_BEHIND).then_some((since, lag))
        });
        let slowest = behind.min_by_key(|(since, _)| *since);
        slowest.map(|(_, lag)| lag.cut.notify_one()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn only_the_slowest_reader_is_cut() {
        let lags = ClientLags::default();
        let all = [(); 3].map(|()| lags.add());
        let started = Instant::now();
        let later = started + MIN_BEHIND;
        assert!(!lags.cut_slowest(later));
        all[0].set_behind(later);
        all[1].set_behind(started);
        all[2].set_behind(started);
        all[2].set_behind(later);
        all[2].set_caught_up();
        assert!(lags.cut_slowest(later));
        let is_cut = all.each_ref().map(|lag| lag.cut().now_or_never());
        assert_eq!(is_cut, [None, Some(()), None]);
        // The next one has only just fallen behind.
        all[1].set_caught_up();
        assert!(!lags.cut_slowest(later));
        assert!(lags.cut_slowest(later + MIN_BEHIND));
        assert!(all[0].cut().now_or_never().is_some());
        // Disconnected clients are forgotten.
        drop(all);
        assert!(!lags.cut_slowest(later + MIN_BEHIND));
        drop(lags.add());
        assert_eq!(lags.0.lock().unwrap().len(), 1);
    }
}
