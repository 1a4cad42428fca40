//! The windows of a node, from its samples.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::custom::{CustomWindows, SourceSeries};
use super::{CustomWindow, Statistic, TimeSeries};
use crate::engine::Demand;
use crate::engine::metric::{CustomMetric, Resource};
use crate::engine::plan::Unknown;
use crate::engine::sample::{CpuTimes, Sample};
use crate::engine::time::BootTime;
use crate::engine::values::memory;

/// CPU and memory over time, in percent of the node, and the sources of the windows in the node's settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodeWindows {
    last: Option<LastSample>,
    resources: Resources,
    pub(super) sources: Vec<SourceSeries>,
    #[serde(skip)]
    custom: CustomWindows,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Resources {
    cpu: TimeSeries,
    memory: TimeSeries,
}

/// The last sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct LastSample {
    at: BootTime,
    cpu: Option<CpuTimes>,
    /// Percent.
    memory: Option<f64>,
}

impl Resources {
    const fn of(&self, resource: Resource) -> &TimeSeries {
        match resource {
            Resource::Cpu => &self.cpu,
            Resource::Memory => &self.memory,
        }
    }
}

impl NodeWindows {
    /// Continues with windows saved by an earlier process of the same boot; `None` if they are invalid.
    #[must_use]
    pub fn resumed(mut self) -> Option<Self> {
        let Resources { cpu, memory } = &mut self.resources;
        let valid = cpu.resume() && memory.resume();
        self.sources.retain_mut(|source| source.series.resume());
        valid.then_some(self)
    }

    /// Sets the windows of the node's settings. Sources that they no longer have are dropped.
    pub fn set_custom(&mut self, windows: Arc<[CustomWindow]>) {
        self.custom = CustomWindows::new(windows, &mut self.sources);
    }

    /// The windows of the node's settings.
    pub const fn custom(&self) -> &Arc<[CustomWindow]> {
        self.custom.definitions()
    }

    /// Adds what samples must contain for the windows of the node's settings, probes aside.
    pub fn add_demand(&self, demand: &mut Demand) {
        self.custom.add_demand(demand);
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
        let last = self.last.replace(now);
        let busy = last.and_then(|last| self.resources.add(last, now));
        let before = last.map(|last| last.at);
        self.custom.add(&mut self.sources, before, sample);
        let resources = &self.resources;
        self.custom
            .renew(now.at, &self.sources, |resource| resources.of(resource));
        busy
    }

    /// The series of a resource.
    pub const fn of(&self, resource: Resource) -> &TimeSeries {
        self.resources.of(resource)
    }

    /// The value of a metric, in percent.
    ///
    /// # Errors
    /// [`Unknown::Sparse`] if less than half of the window has samples.
    pub fn value(&self, resource: Resource, statistic: Statistic) -> Result<f64, Unknown> {
        let window = self.of(resource).value(statistic);
        window.value.ok_or(Unknown::Sparse)
    }

    /// The current value of a window of the node's settings.
    ///
    /// # Errors
    /// [`Unknown::Missing`] if there is no window of that name, [`Unknown::Sparse`] if less than half of it has samples.
    pub fn custom_value(&self, metric: &CustomMetric) -> Result<f64, Unknown> {
        self.custom
            .value(metric, &self.sources, |resource| self.of(resource))
    }

    /// The last value of the source of such a window, and since when it has been measured; `None` if it is not known, or
    /// CPU or memory.
    pub(in crate::engine) fn custom_input(
        &self,
        metric: &CustomMetric,
    ) -> Option<(f64, Option<BootTime>)> {
        self.custom.input(metric, &self.sources)
    }

    /// The windows of the node's settings with their values, renewed after their periods. Below half coverage there is none.
    pub fn custom_values(&self) -> impl Iterator<Item = (&CustomWindow, Option<f64>)> {
        self.custom.values()
    }
}

impl Resources {
    fn add(&mut self, last: LastSample, now: LastSample) -> Option<f64> {
        let before = Some(last.at);
        let busy = cpu_percent(last, now);
        self.cpu.record(before, now.at, busy);
        let mean = last.memory.zip(now.memory);
        let mean = mean.map(|(before, now)| before.midpoint(now));
        self.memory.record(before, now.at, mean);
        busy
    }
}

fn cpu_percent(last: LastSample, now: LastSample) -> Option<f64> {
    let cpu = now.cpu?;
    let busy = cpu.busy_since(last.cpu?, now.at.since(last.at))?;
    Some(cpu.percent(busy).min(100.0))
}
