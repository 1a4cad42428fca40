//! How many lists and watches of one user are under way: one user does not take the connections of all others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// So many of one user at a time.
pub const MAX_OF_A_USER: usize = 100;

/// Those of all users.
#[derive(Debug)]
pub struct UnderWay {
    users: Mutex<HashMap<String, usize>>,
    max: usize,
}

/// One of them, for as long as it is held.
#[derive(Debug)]
pub struct Turn {
    all: Arc<UnderWay>,
    user: String,
}

impl UnderWay {
    /// At most so many of each user.
    pub fn new(max: usize) -> Self {
        Self {
            users: Mutex::default(),
            max,
        }
    }

    fn users(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more of this user; `None`: there are too many.
    pub fn begin(self: &Arc<Self>, user: &str) -> Option<Turn> {
        let mut users = self.users();
        let count = users.get(user).copied().unwrap_or(0);
        (count < self.max).then(|| {
            users.insert(user.to_owned(), count + 1);
            Turn {
                all: Arc::clone(self),
                user: user.to_owned(),
            }
        })
    }
}

impl Drop for Turn {
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
    fn a_user_has_so_many_at_a_time_whatever_others_have() {
        let all = Arc::new(UnderWay::new(2));
        let first = all.begin("ann").unwrap();
        let second = all.begin("ann").unwrap();
        assert!(all.begin("ann").is_none());
        let other = all.begin("bob").unwrap();
        drop(first);
        let third = all.begin("ann").unwrap();
        drop((second, third, other));
        assert!(all.users().is_empty(), "nothing is kept of who has left");
    }
}
