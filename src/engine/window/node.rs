//! The windows of a node, from its samples.

use serde::{Deserialize, Serialize};

use super::{Series, Statistic};
use crate::engine::metric::Resource;
use crate::engine::plan::Unknown;
use crate::engine::sample::{CpuTimes, Sample};
use crate::engine::time::BootTime;
use crate::engine::values::memory;

/// CPU and memory over time, in percent of the node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodeWindows {
    last: Option<LastSample>,
    cpu: Series,
    memory: Series,
}

/// The last sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct LastSample {
    at: BootTime,
    cpu: Option<CpuTimes>,
    /// Percent.
    memory: Option<f64>,
}

impl NodeWindows {
    /// Continues with windows saved by an earlier process of the same boot; `None` if they are invalid.
    #[must_use]
    pub fn resumed(mut self) -> Option<Self> {
        (self.cpu.resume() && self.memory.resume()).then_some(self)
    }

    /// Adds a sample of the node. CPU is computed from the busy time counter, so nothing between samples is missed; memory
    /// is interpolated linearly.
    ///
    /// Returns the percentage of busy CPUs since the previous sample, if both are known.
    pub fn add(&mut self, sample: &Sample) -> Option<f64> {
        let now = LastSample {
            at: sample.at,
            cpu: sample.node.cpu,
            memory: memory(&sample.node)
                .ok()
                .map(|(used, total)| used / total * 100.0),
        };
        let last = self.last.replace(now)?;
        let busy = cpu_percent(last, now);
        record(&mut self.cpu, last, now, busy);
        let mean = last.memory.zip(now.memory);
        let mean = mean.map(|(before, now)| before.midpoint(now));
        record(&mut self.memory, last, now, mean);
        busy
    }

    /// The series of a resource.
    pub const fn of(&self, resource: Resource) -> &Series {
        match resource {
            Resource::Cpu => &self.cpu,
            Resource::Memory => &self.memory,
        }
    }

    /// The value of a metric, in percent.
    ///
    /// # Errors
    /// [`Unknown::Sparse`] if less than half of the window has samples.
    pub fn value(&self, resource: Resource, statistic: Statistic) -> Result<f64, Unknown> {
        let window = self.of(resource).value(statistic);
        window.value.ok_or(Unknown::Sparse)
    }
}

fn record(series: &mut Series, last: LastSample, now: LastSample, mean: Option<f64>) {
    match mean {
        Some(mean) if last.at <= now.at => series.add(last.at, now.at, mean),
        _ => series.advance(now.at),
    }
}

fn cpu_percent(last: LastSample, now: LastSample) -> Option<f64> {
    let cpu = now.cpu?;
    let busy = cpu.busy_since(last.cpu?, now.at.since(last.at))?;
    Some(cpu.percent(busy).min(100.0))
}
