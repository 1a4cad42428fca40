//! What the controller tells Prometheus, and its probes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::cluster::clock;
use crate::engine::time::BootTime;
use crate::serve::Source;

/// The loop turns at least every second: silent for so long it hangs.
const HANGS: Duration = Duration::from_secs(30);

/// Labels of a write.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteLabels {
    /// `NodeWatermark`, `status` or `Event`.
    pub object: &'static str,
    /// `ok` or `error`.
    pub result: &'static str,
}

/// Labels of a watch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchLabels {
    /// The kind.
    pub kind: &'static str,
}

/// All figures.
pub struct Metrics {
    registry: Registry,
    /// Writes to the API server.
    pub writes: Family<WriteLabels, Counter>,
    /// Failures of watches.
    pub watch_errors: Family<WatchLabels, Counter>,
    /// Events that were dropped, because too many were under way.
    pub events_dropped: Counter,
    /// Nodes.
    pub nodes: Gauge,
    /// Nodes whose `NodeWatermark` waits to be written.
    pub pending: Gauge,
    /// Nodes that get `PreferNoSchedule`, because too many are over their marks.
    pub softened: Gauge,
    /// 1 while this replica leads.
    pub leader: Gauge,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    beat: BootTime,
    /// What each watch waits for; absent once it was complete.
    waiting: BTreeMap<&'static str, String>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("plimsoll_controller"),
            writes: Family::default(),
            watch_errors: Family::default(),
            events_dropped: Counter::default(),
            nodes: Gauge::default(),
            pending: Gauge::default(),
            softened: Gauge::default(),
            leader: Gauge::default(),
            health: Mutex::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let Self {
            registry,
            writes,
            watch_errors,
            events_dropped,
            nodes,
            pending,
            softened,
            leader,
            health: _,
        } = self;
        registry.register("writes", "Writes to the API server", writes.clone());
        registry.register("watch_errors", "Failures of watches", watch_errors.clone());
        let dropped = "Events that were dropped, because too many were under way";
        registry.register("events_dropped", dropped, events_dropped.clone());
        registry.register("nodes", "Nodes", nodes.clone());
        let help = "Nodes whose NodeWatermark waits to be written";
        registry.register("pending_nodes", help, pending.clone());
        let help = "Nodes that get PreferNoSchedule, because too many are over their marks";
        registry.register("softened_nodes", help, softened.clone());
        registry.register("leader", "1 while this replica leads", leader.clone());
    }

    fn health<T>(&self, with: impl FnOnce(&mut Health) -> T) -> T {
        with(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The loop turned.
    pub fn beat(&self, now: BootTime) {
        self.health(|health| health.beat = now);
    }

    /// A watch waits: for its first full list, or because it failed before that.
    pub fn waits(&self, kind: &'static str, why: String) {
        self.health(|health| drop(health.waiting.insert(kind, why)));
    }

    /// A watch has seen all of its objects.
    pub fn complete(&self, kind: &'static str) {
        self.health(|health| drop(health.waiting.remove(kind)));
    }

    /// A write came to its end.
    pub fn wrote(&self, object: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "error" };
        let labels = WriteLabels { object, result };
        self.writes.get_or_create(&labels).inc();
    }
}

impl Source for Metrics {
    fn livez(&self) -> Result<(), String> {
        let silent = clock::now().since(self.health(|health| health.beat));
        if silent > HANGS {
            return Err(format!("nothing was done for {} s", silent.as_secs()));
        }
        Ok(())
    }

    /// A standby is as ready as the leader: it has seen all objects, and can lead at once.
    fn readyz(&self) -> Result<(), String> {
        let waiting: Vec<String> = self.health(|health| {
            let waiting = health.waiting.iter();
            waiting
                .map(|(kind, why)| format!("{kind}: {why}"))
                .collect()
        });
        if waiting.is_empty() {
            return Ok(());
        }
        Err(waiting.join("\n"))
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }
}
