//! What cannot be read or asked: told once, and once more when it is over.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::event::{Event, News};
use crate::engine::Demand;
use crate::engine::policy::PolicySet;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::node::cgroup::gauge::ReadError;
use crate::node::collect::Prober;

/// The probes, and which of them fail.
#[derive(Debug)]
pub struct Probes {
    prober: Prober,
    failing: BTreeMap<Arc<str>, String>,
}

impl Probes {
    /// None yet; those that name no host are asked at `node`.
    pub const fn new(node: IpAddr) -> Self {
        Self {
            prober: Prober::new(node),
            failing: BTreeMap::new(),
        }
    }

    /// Takes the probes of the policies.
    pub fn set_policy(&mut self, policy: &PolicySet) {
        if let Err(error) = self.prober.set_policy(policy) {
            tracing::error!(%error, "failed to start asking probes: their rules stay unknown");
        }
    }

    /// Puts the last answers into the sample.
    pub fn fill(&self, sample: &mut Sample) {
        self.prober.fill(sample);
    }

    /// Has those asked that are wanted.
    pub fn ask(&self, demand: &Demand) {
        self.prober.ask(demand);
    }

    /// Tells which began to fail, or answer again.
    pub fn tell(&mut self, now: BootTime, events: &mut Vec<Event>) {
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
    Event::notice(now, News::Probe { url, failure })
}

/// Files that cannot be read or understood.
#[derive(Debug, Default)]
pub struct Faults(Vec<String>);

impl Faults {
    /// Logs those that were not there the last time.
    pub fn tell(&mut self, faults: &[ReadError]) {
        if faults.is_empty() && self.0.is_empty() {
            return;
        }
        let words: Vec<String> = faults.iter().map(ToString::to_string).collect();
        for fault in words.iter().filter(|fault| !self.0.contains(fault)) {
            tracing::warn!("{fault}");
        }
        self.0 = words;
    }
}
