//! Read errors and probe failures: reported once when they start, and once when they end.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Demand;
use crate::engine::policy::PolicySet;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::window::CustomWindow;
use crate::messages::event::{Event, NoticeKind};
use crate::node::cgroup::cached_file::ReadError;
use crate::node::collect::Prober;

/// How often the probes of windows are sent: a response counts for 30 s.
const WINDOWS_INTERVAL: Duration = Duration::from_secs(10);

/// The probes, and which of them fail.
#[derive(Debug)]
pub struct Probes {
    prober: Prober,
    windows_due: BootTime,
    failing: BTreeMap<Arc<str>, String>,
}

impl Probes {
    /// No probes yet but those of `windows`. Probes without a host are sent to `node`.
    pub fn new(node: IpAddr, windows: Arc<[CustomWindow]>) -> Self {
        Self {
            prober: Prober::new(node).with_windows(windows),
            windows_due: BootTime::default(),
            failing: BTreeMap::new(),
        }
    }

    /// Triggers the probes of the windows if they are due; true if there are any.
    pub fn poll_windows(&mut self, now: BootTime) -> bool {
        if now < self.windows_due {
            return false;
        }
        self.windows_due = now + WINDOWS_INTERVAL;
        self.prober.trigger_windows()
    }

    /// Sets the probes of the policies.
    pub fn set_policy(&mut self, policy: &PolicySet) {
        if let Err(error) = self.prober.set_policy(policy) {
            tracing::error!(%error, "failed to start the probes: their rules stay unknown");
        }
    }

    /// Puts the last responses into the sample.
    pub fn fill(&self, sample: &mut Sample) {
        self.prober.fill(sample);
    }

    /// Triggers the demanded probes.
    pub fn set_demand(&self, demand: &Demand) {
        self.prober.set_demand(demand);
    }

    /// Reports probes that started to fail or work again.
    pub fn report_changes(&mut self, now: BootTime, events: &mut Vec<Event>) {
        let mut failing = BTreeMap::new();
        for (url, failure) in self.prober.failures() {
            failing.insert(Arc::clone(url), failure.to_string());
        }
        for (url, failure) in &failing {
            if self.failing.get(url) != Some(failure) {
                events.push(probe(now, url, Some(failure.clone())));
            }
        }
        for url in self.failing.keys() {
            if !failing.contains_key(url) {
                events.push(probe(now, url, None));
            }
        }
        self.failing = failing;
    }
}

fn probe(now: BootTime, url: &Arc<str>, failure: Option<String>) -> Event {
    let url = url.to_string();
    Event::notice(now, NoticeKind::Probe { url, failure })
}

/// Files that cannot be read or parsed.
#[derive(Debug, Default)]
pub struct Faults(Vec<String>);

impl Faults {
    /// Logs errors that did not occur the last time.
    pub fn log_new(&mut self, faults: &[ReadError]) {
        if faults.is_empty() && self.0.is_empty() {
            return;
        }
        let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
        for fault in texts.iter().filter(|fault| !self.0.contains(fault)) {
            tracing::warn!("{fault}");
        }
        self.0 = texts;
    }
}
