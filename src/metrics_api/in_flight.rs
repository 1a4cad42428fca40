//! Limits the lists and watches in progress per user, so that one user can't take all connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Limit per user.
pub const MAX_PER_USER: usize = 100;

/// Counts per user.
#[derive(Debug)]
pub struct RequestsInFlight {
    users: Mutex<HashMap<String, usize>>,
    max: usize,
}

/// A slot; released on drop.
#[derive(Debug)]
pub struct InFlightSlot {
    all: Arc<RequestsInFlight>,
    user: String,
}

impl RequestsInFlight {
    /// With this limit per user.
    pub fn new(max: usize) -> Self {
        Self {
            users: Mutex::default(),
            max,
        }
    }

    fn users(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for this user. `None`: the limit is reached.
    pub fn begin(self: &Arc<Self>, user: &str) -> Option<InFlightSlot> {
        let mut users = self.users();
        let count = users.get(user).copied().unwrap_or(0);
        (count < self.max).then(|| {
            users.insert(user.to_owned(), count + 1);
            InFlightSlot {
                all: Arc::clone(self),
                user: user.to_owned(),
            }
        })
    }
}

impl Drop for InFlightSlot {
    fn drop(&mut self) {
        let mut users = self.all.users();
        if let Some(count) = users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_applies_per_user() {
        let all = Arc::new(RequestsInFlight::new(2));
        let first = all.begin("ann").unwrap();
        let second = all.begin("ann").unwrap();
        assert!(all.begin("ann").is_none());
        let other = all.begin("bob").unwrap();
        drop(first);
        let third = all.begin("ann").unwrap();
        drop((second, third, other));
        assert!(all.users().is_empty(), "users without slots are removed");
    }
}
