//! The summary of a node in the heartbeat of its agent: the annotation `plimsoll.dev/summary` of its Lease.
//!
//! ```text
//! seq=4242 cpu=73.4 mem=61.2 load=91.8 cpumark=80.0 psi=1.2/0.0/3.4 rules=12 throttled=3 scheduling=NoSchedule breached=2:q/cpu,q/io
//! ```
//! Pairs in any order, separated by spaces. Unknown ones are ignored, so that agents and readers of different versions are
//! compatible. Unknown values are left out.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::node_watermark::scheduling;
use crate::engine::policy::{RuleId, TaintEffect};

/// The key of the annotation.
pub const ANNOTATION: &str = "plimsoll.dev/summary";
/// The maximum size; the rest of a longer one is not read.
pub const MAX_BYTES: usize = 256;
/// A longer version is left out.
const MAX_VERSION: usize = 24;

/// The health and load of a node as last reported by its agent. `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Increases by one with each renewal, also across restarts of the agent.
    pub sequence: Option<u64>,
    /// The version of the agent.
    pub version: Option<String>,
    /// Busy CPU, in percent of the online CPUs.
    pub cpu: Option<Percent>,
    /// How near the node is to where its rules act, in percent; above 100 it is 100.
    pub load: Option<Percent>,
    /// Memory that is not available, in percent of all memory.
    pub memory: Option<Percent>,
    /// The lowest threshold of the rules on CPU, without those outside their hours.
    #[serde(rename = "cpuMark")]
    pub cpu_threshold: Option<Percent>,
    /// The lowest threshold of the rules on memory, without those outside their hours.
    #[serde(rename = "memoryMark")]
    pub memory_threshold: Option<Percent>,
    /// The pressure (`some`, `avg10`) of CPU, memory and I/O.
    pub pressure: [Option<Percent>; 3],
    /// The number of rules of the node.
    pub rules: Option<u32>,
    /// The number of breached rules, including Preview rules.
    pub breached: Option<u32>,
    /// The ids of breached rules, as many as fit.
    pub breached_rules: Vec<RuleId>,
    /// The number of throttled pods.
    pub throttled: Option<u32>,
    /// Whether plimsoll disables scheduling.
    pub scheduling: Option<ReportedScheduling>,
}

/// Whether plimsoll disables scheduling on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportedScheduling {
    /// It does not.
    Enabled,
    /// It does, with a taint of this effect.
    Disabled(TaintEffect),
}

/// A percentage with one decimal, from 0.0 to 100.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u16);

impl Percent {
    /// Values above 100 become 100; `None` if it is negative or not finite.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is from 0 to 1000"
    )]
    pub fn of(percent: f64) -> Option<Self> {
        let known = percent.is_finite() && percent >= 0.0;
        known.then(|| Self((percent.min(100.0) * 10.0).round() as u16))
    }

    /// The value, from 0.0 to 100.0.
    pub fn value(self) -> f64 {
        f64::from(self.0) / 10.0
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 10, self.0 % 10)
    }
}

impl Serialize for Percent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.value())
    }
}

impl ReportedScheduling {
    /// The name, as in the status of a `NodeWatermark`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enabled => scheduling::ENABLED,
            Self::Disabled(effect) => effect.name(),
        }
    }

    /// From that name.
    pub fn parse(name: &str) -> Option<Self> {
        let known = [
            Self::Enabled,
            Self::Disabled(TaintEffect::PreferNoSchedule),
            Self::Disabled(TaintEffect::NoSchedule),
        ];
        known.into_iter().find(|state| state.name() == name)
    }
}

impl Serialize for ReportedScheduling {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Summary {
    /// Reads an annotation. Invalid values are ignored.
    pub fn parse(text: &str) -> Self {
        let mut summary = Self::default();
        for (key, value) in pairs(text) {
            summary.set(key, value);
        }
        summary
    }

    fn set(&mut self, key: &str, value: &str) {
        match key {
            "seq" => self.sequence = number(value),
            "v" => self.version = Some(value.to_owned()),
            "cpu" => self.cpu = percent(value),
            "load" => self.load = percent(value),
            "mem" => self.memory = percent(value),
            "cpumark" => self.cpu_threshold = percent(value),
            "memmark" => self.memory_threshold = percent(value),
            "psi" => {
                let mut parts = value.split('/').map(percent);
                self.pressure = [(); 3].map(|()| parts.next().flatten());
            }
            "rules" => self.rules = number(value),
            "throttled" => self.throttled = number(value),
            "scheduling" => self.scheduling = ReportedScheduling::parse(value),
            "breached" => {
                let (count, names) = value.split_once(':').unwrap_or((value, ""));
                self.breached = number(count);
                let names = names.split(',').filter(|name| !name.is_empty());
                self.breached_rules = names.map(RuleId::from).collect();
            }
            _ => {}
        }
    }
}

/// The pairs in an annotation. If it is too long, only those that are entirely within the limit.
fn pairs(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let end = if text.len() <= MAX_BYTES {
        text.len()
    } else {
        let mut head = text.as_bytes().iter().take(MAX_BYTES + 1);
        head.rposition(|byte| *byte == b' ').unwrap_or(0)
    };
    let text = text.get(..end).unwrap_or_default();
    text.split_ascii_whitespace()
        .filter_map(|word| word.split_once('='))
}

fn number<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn percent(text: &str) -> Option<Percent> {
    number(text).and_then(Percent::of)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = Line(String::with_capacity(MAX_BYTES));
        line.put("seq", self.sequence);
        line.put("cpu", self.cpu);
        line.put("mem", self.memory);
        line.put("load", self.load);
        line.put("cpumark", self.cpu_threshold);
        line.put("memmark", self.memory_threshold);
        if self.pressure.iter().any(Option::is_some) {
            let [cpu, memory, io] = self.pressure.map(or_dash);
            line.put("psi", Some(format_args!("{cpu}/{memory}/{io}")));
        }
        line.put("rules", self.rules);
        line.put("throttled", self.throttled);
        line.put("scheduling", self.scheduling.map(ReportedScheduling::name));
        let fits = |version: &&String| version.len() <= MAX_VERSION && is_word(version);
        line.put("v", self.version.as_ref().filter(fits));
        line.put("breached", self.breached);
        if self.breached.is_some() {
            line.put_names(&self.breached_rules);
        }
        f.write_str(&line.0)
    }
}

fn or_dash(percent: Option<Percent>) -> String {
    percent.map_or_else(|| "-".to_owned(), |percent| percent.to_string())
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(|letter: char| letter.is_whitespace())
}

/// A line of at most [`MAX_BYTES`].
struct Line(String);

impl Line {
    fn put(&mut self, key: &str, value: Option<impl fmt::Display>) {
        let Some(value) = value else { return };
        let separator = if self.0.is_empty() { "" } else { " " };
        self.try_put(&format!("{separator}{key}={value}"));
    }

    /// Adds as many names as fit, in order. A name with a separator in it is left out.
    fn put_names(&mut self, names: &[RuleId]) {
        let mut separator = ":";
        for RuleId(name) in names {
            let is_valid = is_word(name) && !name.contains(',');
            if is_valid && self.try_put(&format!("{separator}{name}")) {
                separator = ",";
            }
        }
    }

    /// Adds the text if all of it fits.
    fn try_put(&mut self, text: &str) -> bool {
        let fits = self.0.len() + text.len() <= MAX_BYTES;
        if fits {
            self.0.push_str(text);
        }
        fits
    }
}

#[cfg(test)]
#[path = "summary_tests.rs"]
mod tests;
