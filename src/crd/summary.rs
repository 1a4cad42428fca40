//! What an agent's heartbeat says in one line, in the annotation `plimsoll.dev/summary` of its Lease:
//!
//! ```text
//! seq=4242 cpu=73.4 mem=61.2 cpumark=80.0 psi=1.2/0.0/3.4 rules=12 throttled=3 scheduling=NoSchedule breached=2:q/cpu,q/io
//! ```
//! Words in any order, separated by blanks; unknown ones are passed over, so that agents and readers of different
//! versions understand each other. What is not known is left out.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::node_watermark::scheduling;
use crate::engine::policy::{RuleId, TaintEffect};

/// The annotation's key.
pub const ANNOTATION: &str = "plimsoll.dev/summary";
/// It never has more bytes; what a longer one says beyond them is not read.
pub const MOST_BYTES: usize = 256;
/// A version with more bytes is left out.
const LONGEST_VERSION: usize = 24;

/// A node's health and load as its agent last told them. What is missing is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Grows by one with each renewal, over restarts of the agent too.
    pub sequence: Option<u64>,
    /// Version of the agent.
    pub version: Option<String>,
    /// Busy CPU of the CPUs online.
    pub cpu: Option<Percent>,
    /// Memory that is not available, of all memory.
    pub memory: Option<Percent>,
    /// The lowest high mark of the rules over CPU.
    pub cpu_mark: Option<Percent>,
    /// The lowest high mark of the rules over memory.
    pub memory_mark: Option<Percent>,
    /// Time in which some task was stalled for want of CPU, memory or I/O, over 10 s.
    pub pressure: [Option<Percent>; 3],
    /// Rules that the node keeps.
    pub rules: Option<u32>,
    /// How many of them are over their mark, Preview rules included.
    pub breached: Option<u32>,
    /// Those of them whose names found room.
    pub breached_rules: Vec<RuleId>,
    /// Pods that are throttled.
    pub throttled: Option<u32>,
    /// Whether new pods are kept away.
    pub scheduling: Option<Scheduling>,
}

/// Whether a node takes new pods, as far as plimsoll is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// It does.
    Enabled,
    /// A taint of ours keeps them away.
    Disabled(TaintEffect),
}

/// Percent with one decimal: 0.0 to 100.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u16);

impl Percent {
    /// What is above 100 counts as 100; `None` where it is negative or not a number.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is 0 to 1000 by then"
    )]
    pub fn of(percent: f64) -> Option<Self> {
        let known = percent.is_finite() && percent >= 0.0;
        known.then(|| Self((percent.min(100.0) * 10.0).round() as u16))
    }

    /// 0.0 to 100.0.
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

impl Scheduling {
    /// The word for it, as in the status of a `NodeWatermark`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enabled => scheduling::ENABLED,
            Self::Disabled(effect) => effect.name(),
        }
    }

    /// By that word.
    pub fn parse(word: &str) -> Option<Self> {
        let known = [
            Self::Enabled,
            Self::Disabled(TaintEffect::PreferNoSchedule),
            Self::Disabled(TaintEffect::NoSchedule),
        ];
        known.into_iter().find(|state| state.name() == word)
    }
}

impl Serialize for Scheduling {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Summary {
    /// Reads an annotation. What can't be read is passed over.
    pub fn parse(text: &str) -> Self {
        let mut summary = Self::default();
        for (key, value) in words(text) {
            summary.take(key, value);
        }
        summary
    }

    fn take(&mut self, key: &str, value: &str) {
        match key {
            "seq" => self.sequence = number(value),
            "v" => self.version = Some(value.to_owned()),
            "cpu" => self.cpu = percent(value),
            "mem" => self.memory = percent(value),
            "cpumark" => self.cpu_mark = percent(value),
            "memmark" => self.memory_mark = percent(value),
            "psi" => {
                let mut parts = value.split('/').map(percent);
                self.pressure = [(); 3].map(|()| parts.next().flatten());
            }
            "rules" => self.rules = number(value),
            "throttled" => self.throttled = number(value),
            "scheduling" => self.scheduling = Scheduling::parse(value),
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

/// The pairs in an annotation; of one that is too long, those that are whole within the limit.
fn words(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let end = if text.len() <= MOST_BYTES {
        text.len()
    } else {
        let mut head = text.as_bytes().iter().take(MOST_BYTES + 1);
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
        let mut line = Line(String::with_capacity(MOST_BYTES));
        line.put("seq", self.sequence);
        line.put("cpu", self.cpu);
        line.put("mem", self.memory);
        line.put("cpumark", self.cpu_mark);
        line.put("memmark", self.memory_mark);
        if self.pressure.iter().any(Option::is_some) {
            let [cpu, memory, io] = self.pressure.map(or_dash);
            line.put("psi", Some(format_args!("{cpu}/{memory}/{io}")));
        }
        line.put("rules", self.rules);
        line.put("throttled", self.throttled);
        line.put("scheduling", self.scheduling.map(Scheduling::name));
        let short = |version: &&String| version.len() <= LONGEST_VERSION && is_word(version);
        line.put("v", self.version.as_ref().filter(short));
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

/// A line that does not grow beyond its limit.
struct Line(String);

impl Line {
    fn put(&mut self, key: &str, value: Option<impl fmt::Display>) {
        let Some(value) = value else { return };
        let blank = if self.0.is_empty() { "" } else { " " };
        self.put_all(&format!("{blank}{key}={value}"));
    }

    /// As many as find room, in their order; one that could not be told from two is left out.
    fn put_names(&mut self, names: &[RuleId]) {
        let mut before = ":";
        for RuleId(name) in names {
            let whole = is_word(name) && !name.contains(',');
            if whole && self.put_all(&format!("{before}{name}")) {
                before = ",";
            }
        }
    }

    /// Puts it where there is room for all of it.
    fn put_all(&mut self, text: &str) -> bool {
        let room = self.0.len() + text.len() <= MOST_BYTES;
        if room {
            self.0.push_str(text);
        }
        room
    }
}

#[cfg(test)]
#[path = "summary_tests.rs"]
mod tests;
