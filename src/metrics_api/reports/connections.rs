//! Open connections. New ones are limited in number and time; agents whose reports were accepted stay.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::{AbortHandle, Id};
use tokio::time::{Instant, sleep_until};

/// New connections, oldest first.
pub struct NewConnections {
    connections: Mutex<VecDeque<(Instant, AbortHandle)>>,
    max: usize,
    /// Minimum time that a connection is kept: in a flood of connections a well-behaved agent still has that long.
    min_stay: Duration,
}

impl NewConnections {
    /// At most `max` connections, each kept for at least `min_stay`.
    pub fn new(max: usize, min_stay: Duration) -> Self {
        Self {
            connections: Mutex::default(),
            max,
            min_stay,
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, AbortHandle)>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is room, and closes the oldest connection if needed. Returns whether one was closed.
    pub async fn evict_oldest(&self) -> bool {
        let oldest = {
            let mut connections = self.lock();
            connections.retain(|(_, other)| !other.is_finished());
            if connections.len() < self.max {
                return false;
            }
            connections.front().map(|(since, _)| *since)
        };
        if let Some(since) = oldest {
            sleep_until(since + self.min_stay).await;
        }
        let mut connections = self.lock();
        let is_full = connections.len() >= self.max;
        if is_full && let Some((_, oldest)) = connections.pop_front() {
            oldest.abort();
        }
        is_full
    }

    /// Adds a connection. It is started under the lock, so that it can't be removed before it is added.
    pub fn enter(&self, connection: impl FnOnce() -> AbortHandle) {
        let mut connections = self.lock();
        connections.push_back((Instant::now(), connection()));
    }

    /// Removes a connection.
    pub fn leave(&self, id: Id) -> Option<AbortHandle> {
        let mut connections = self.lock();
        let index = connections.iter().position(|(_, other)| other.id() == id)?;
        connections.remove(index).map(|(_, connection)| connection)
    }

    /// Number of connections.
    pub fn len(&self) -> usize {
        self.lock().len()
    }
}

/// Connections of agents by node, oldest first.
pub struct AgentConnections {
    connections: Mutex<HashMap<Arc<str>, VecDeque<AbortHandle>>>,
    /// More than one, because an agent may not know yet that its old connection is lost.
    max_per_node: usize,
}

impl AgentConnections {
    /// At most `max_per_node` per node.
    pub fn new(max_per_node: usize) -> Self {
        Self {
            connections: Mutex::default(),
            max_per_node,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, VecDeque<AbortHandle>>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. If its node has too many, the oldest is closed. Returns whether one was closed.
    pub fn enter(&self, node: &Arc<str>, connection: AbortHandle) -> bool {
        let mut connections = self.lock();
        let of_node = connections.entry(Arc::clone(node)).or_default();
        of_node.push_back(connection);
        let is_full = of_node.len() > self.max_per_node;
        if is_full && let Some(oldest) = of_node.pop_front() {
            oldest.abort();
        }
        is_full
    }

    /// Removes a closed connection.
    pub fn leave(&self, node: &str, id: Id) {
        let mut connections = self.lock();
        if let Some(of_node) = connections.get_mut(node) {
            of_node.retain(|other| other.id() != id);
            if of_node.is_empty() {
                connections.remove(node);
            }
        }
    }

    /// Number of connections.
    pub fn len(&self) -> usize {
        self.lock().values().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    const TIMEOUT: Duration = Duration::from_hours(1);

    fn task() -> AbortHandle {
        tokio::spawn(pending::<()>()).abort_handle()
    }

    async fn wait_closed(task: &AbortHandle) {
        while !task.is_finished() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_oldest_new_connection_is_closed_at_the_limit() {
        let new = NewConnections::new(2, Duration::ZERO);
        let tasks = [task(), task(), task()];
        for (index, task) in tasks.iter().enumerate() {
            assert_eq!(new.evict_oldest().await, index == 2);
            new.enter(|| task.clone());
        }
        wait_closed(&tasks[0]).await;
        assert!(!tasks[1].is_finished() && !tasks[2].is_finished());
        assert_eq!(new.len(), 2);
    }

    #[tokio::test]
    async fn no_new_connection_is_closed_before_its_minimum_time() {
        let new = NewConnections::new(1, TIMEOUT);
        let first = task();
        new.enter(|| first.clone());
        let wait = tokio::time::timeout(Duration::from_millis(50), new.evict_oldest());
        assert!(wait.await.is_err());
        assert!(!first.is_finished());
        // A closed connection makes room.
        assert!(new.leave(first.id()).is_some());
        assert!(!new.evict_oldest().await);
    }

    #[tokio::test]
    async fn a_node_keeps_its_two_newest_connections() {
        let agents = AgentConnections::new(2);
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let tasks = [task(), task(), task()];
        assert!(!agents.enter(&a, tasks[0].clone()));
        assert!(!agents.enter(&b, task()));
        assert!(!agents.enter(&a, tasks[1].clone()));
        assert!(agents.enter(&a, tasks[2].clone()));
        wait_closed(&tasks[0]).await;
        assert!(!tasks[1].is_finished() && !tasks[2].is_finished());
        assert_eq!(agents.len(), 3);
        agents.leave("a", tasks[0].id());
        agents.leave("a", tasks[1].id());
        agents.leave("a", tasks[2].id());
        assert_eq!(agents.len(), 1, "nodes without connections are removed");
        assert!(!agents.lock().contains_key("a"));
    }
}
