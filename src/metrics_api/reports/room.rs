//! Open connections. New ones are limited in number and time; agents whose reports were accepted stay.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::{AbortHandle, Id};
use tokio::time::{Instant, sleep_until};

/// New connections, oldest first.
pub struct Newcomers {
    inside: Mutex<VecDeque<(Instant, AbortHandle)>>,
    most: usize,
    /// Minimum time that a connection is kept: in a flood of connections a well-behaved agent still has that long.
    least: Duration,
}

impl Newcomers {
    /// At most `most` connections, each kept for at least `least`.
    pub fn new(most: usize, least: Duration) -> Self {
        Self {
            inside: Mutex::default(),
            most,
            least,
        }
    }

    fn inside(&self) -> MutexGuard<'_, VecDeque<(Instant, AbortHandle)>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is room, and closes the oldest connection if needed. Returns whether one was closed.
    pub async fn make_room(&self) -> bool {
        let oldest = {
            let mut inside = self.inside();
            inside.retain(|(_, other)| !other.is_finished());
            if inside.len() < self.most {
                return false;
            }
            inside.front().map(|(since, _)| *since)
        };
        if let Some(since) = oldest {
            sleep_until(since + self.least).await;
        }
        let mut inside = self.inside();
        let is_full = inside.len() >= self.most;
        if is_full && let Some((_, oldest)) = inside.pop_front() {
            oldest.abort();
        }
        is_full
    }

    /// Adds a connection. It is started under the lock, so that it can't be removed before it is added.
    pub fn enter(&self, one: impl FnOnce() -> AbortHandle) {
        let mut inside = self.inside();
        inside.push_back((Instant::now(), one()));
    }

    /// Removes a connection.
    pub fn leave(&self, id: Id) -> Option<AbortHandle> {
        let mut inside = self.inside();
        let place = inside.iter().position(|(_, other)| other.id() == id)?;
        inside.remove(place).map(|(_, one)| one)
    }

    /// Number of connections.
    pub fn len(&self) -> usize {
        self.inside().len()
    }
}

/// Connections of agents by node, oldest first.
pub struct Agents {
    inside: Mutex<HashMap<Arc<str>, VecDeque<AbortHandle>>>,
    /// More than one, because an agent may not know yet that its old connection is lost.
    most_of_one: usize,
}

impl Agents {
    /// At most `most_of_one` per node.
    pub fn new(most_of_one: usize) -> Self {
        Self {
            inside: Mutex::default(),
            most_of_one,
        }
    }

    fn inside(&self) -> MutexGuard<'_, HashMap<Arc<str>, VecDeque<AbortHandle>>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. If its node has too many, the oldest is closed. Returns whether one was closed.
    pub fn enter(&self, node: &Arc<str>, one: AbortHandle) -> bool {
        let mut inside = self.inside();
        let of_node = inside.entry(Arc::clone(node)).or_default();
        of_node.push_back(one);
        let is_full = of_node.len() > self.most_of_one;
        if is_full && let Some(oldest) = of_node.pop_front() {
            oldest.abort();
        }
        is_full
    }

    /// Removes a closed connection.
    pub fn leave(&self, node: &str, id: Id) {
        let mut inside = self.inside();
        if let Some(of_node) = inside.get_mut(node) {
            of_node.retain(|other| other.id() != id);
            if of_node.is_empty() {
                inside.remove(node);
            }
        }
    }

    /// Number of connections.
    pub fn len(&self) -> usize {
        self.inside().values().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    const LONG: Duration = Duration::from_hours(1);

    fn guest() -> AbortHandle {
        tokio::spawn(pending::<()>()).abort_handle()
    }

    async fn is_sent_away(guest: &AbortHandle) {
        while !guest.is_finished() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_oldest_new_connection_is_closed_at_the_limit() {
        let room = Newcomers::new(2, Duration::ZERO);
        let guests = [guest(), guest(), guest()];
        for (index, guest) in guests.iter().enumerate() {
            assert_eq!(room.make_room().await, index == 2);
            room.enter(|| guest.clone());
        }
        is_sent_away(&guests[0]).await;
        assert!(!guests[1].is_finished() && !guests[2].is_finished());
        assert_eq!(room.len(), 2);
    }

    #[tokio::test]
    async fn no_new_connection_is_closed_before_its_minimum_time() {
        let room = Newcomers::new(1, LONG);
        let first = guest();
        room.enter(|| first.clone());
        let wait = tokio::time::timeout(Duration::from_millis(50), room.make_room());
        assert!(wait.await.is_err());
        assert!(!first.is_finished());
        // A closed connection makes room.
        assert!(room.leave(first.id()).is_some());
        assert!(!room.make_room().await);
    }

    #[tokio::test]
    async fn a_node_keeps_its_two_newest_connections() {
        let agents = Agents::new(2);
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let guests = [guest(), guest(), guest()];
        assert!(!agents.enter(&a, guests[0].clone()));
        assert!(!agents.enter(&b, guest()));
        assert!(!agents.enter(&a, guests[1].clone()));
        assert!(agents.enter(&a, guests[2].clone()));
        is_sent_away(&guests[0]).await;
        assert!(!guests[1].is_finished() && !guests[2].is_finished());
        assert_eq!(agents.len(), 3);
        agents.leave("a", guests[0].id());
        agents.leave("a", guests[1].id());
        agents.leave("a", guests[2].id());
        assert_eq!(agents.len(), 1, "nodes without connections are removed");
        assert!(!agents.inside().contains_key("a"));
    }
}
