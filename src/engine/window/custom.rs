//! Windows over any metric, as the node's settings define them.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{MAX_INTERVAL, TimeSeries, Window};
use crate::engine::Demand;
use crate::engine::metric::{CustomMetric, Metric, Resource};
use crate::engine::plan::Unknown;
use crate::engine::policy::Probe;
use crate::engine::sample::Sample;
use crate::engine::selector::Selector;
use crate::engine::time::BootTime;
use crate::engine::values::{Baseline, GAP_PERIODS, Interval, Query, largest};

/// The maximum number of windows of a node.
pub const MAX_WINDOWS: usize = 16;

/// A window of the node's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct CustomWindow {
    /// Its name, source and statistic, as a metric for rules.
    pub metric: Arc<CustomMetric>,
    /// Selects series of the source by label; `None` selects all. The largest one counts.
    pub series: Option<Selector>,
    /// Where the source is read, if it is a series of a probe.
    pub probe: Option<Probe>,
    /// How often its value is renewed in reports and metrics. Rules always use the current value.
    pub period: Duration,
}

impl CustomWindow {
    /// Why there is no window over a metric; `None` if there may be one.
    pub const fn refusal(source: &Metric) -> Option<&'static str> {
        match source {
            Metric::CpuUsage
            | Metric::CpuUtilization
            | Metric::MemoryUsage
            | Metric::MemoryUtilization
            | Metric::Load(_)
            | Metric::Pressure { .. }
            | Metric::Disk(_)
            | Metric::Interface(_)
            | Metric::Probe(_) => None,
            Metric::Window(..) | Metric::Custom(_) => Some("is a window itself"),
            Metric::RunQueueTime | Metric::ThrottledRatio | Metric::PodStall(_) => {
                Some("is a metric of pods, and a window is over a metric of the node")
            }
            Metric::Protected(_) => Some("depends on the action of a rule"),
            Metric::ElasticCpuRequested => Some("is not measured yet"),
        }
    }

    fn query(&self) -> Query<'_> {
        Query {
            metric: &self.metric.source,
            series: self.series.as_ref(),
            probe: self.probe.as_ref(),
            sample_ttl: MAX_INTERVAL,
        }
    }

    /// What identifies the series of its source in saved windows.
    fn key(&self) -> String {
        let source = &self.metric.source;
        let url = self.probe.as_ref().map_or("", |probe| &probe.url);
        let requirements = self.series.iter().flat_map(|it| &it.requirements);
        let selected: Vec<String> = requirements.map(|it| format!("{it:?}")).collect();
        format!("{source} {url} {}", selected.join(" "))
    }
}

/// A source that is neither the CPU nor the memory of the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SourceSeries {
    key: String,
    pub(super) series: TimeSeries,
    /// The index of a window over it.
    #[serde(skip)]
    window: usize,
    /// The last value, and since when it has been measured.
    #[serde(skip)]
    last: (Option<f64>, Option<BootTime>),
}

/// Where the series of a window is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Node(Resource),
    /// The index of a source.
    Source(usize),
}

/// The value of a window, renewed after its period.
#[derive(Clone, Debug)]
struct Gauge {
    place: Place,
    due: BootTime,
    value: Option<f64>,
}

/// The windows of the node's settings.
#[derive(Clone, Debug, Default)]
pub(super) struct CustomWindows {
    definitions: Arc<[CustomWindow]>,
    /// One for each definition.
    gauges: Vec<Gauge>,
    /// The last sample.
    baseline: Baseline,
}

impl CustomWindows {
    /// The windows with these definitions. Of the series in `sources`, those of their sources stay.
    pub(super) fn new(definitions: Arc<[CustomWindow]>, sources: &mut Vec<SourceSeries>) -> Self {
        let mut saved = std::mem::take(sources);
        let mut place = |window: usize, definition: &CustomWindow| {
            if let Some(resource) = definition.metric.source.resource() {
                return Place::Node(resource);
            }
            let key = definition.key();
            if let Some(known) = sources.iter().position(|source| source.key == key) {
                return Place::Source(known);
            }
            let series = match saved.iter().position(|source| source.key == key) {
                Some(index) => saved.swap_remove(index).series,
                None => TimeSeries::default(),
            };
            sources.push(SourceSeries {
                key,
                series,
                window,
                last: (None, None),
            });
            Place::Source(sources.len() - 1)
        };
        let places = definitions.iter().enumerate();
        let places = places.map(|(window, definition)| place(window, definition));
        let gauges = places.map(|place| Gauge {
            place,
            due: BootTime::default(),
            value: None,
        });
        Self {
            gauges: gauges.collect(),
            definitions,
            baseline: Baseline::default(),
        }
    }

    pub(super) const fn definitions(&self) -> &Arc<[CustomWindow]> {
        &self.definitions
    }

    /// What samples must contain.
    pub(super) fn add_demand(&self, demand: &mut Demand) {
        for definition in self.definitions.iter() {
            match definition.metric.source {
                Metric::Load(_) => (demand.load, demand.tasks) = (true, true),
                Metric::Pressure { kind, .. } => demand.pressure[kind as usize] = true,
                Metric::Disk(_) => demand.disks = true,
                Metric::Interface(_) => demand.interfaces = true,
                _ => {}
            }
        }
    }

    /// Adds a sample to the sources; the previous one was taken at `before`.
    pub(super) fn add(
        &mut self,
        sources: &mut [SourceSeries],
        before: Option<BootTime>,
        sample: &Sample,
    ) {
        if sources.is_empty() || before == Some(sample.at) {
            return;
        }
        for source in sources {
            let Some(definition) = self.definitions.get(source.window) else {
                continue;
            };
            let interval = Interval {
                now: sample.at,
                sample,
                baseline: &self.baseline,
                period: MAX_INTERVAL / GAP_PERIODS,
            };
            let (value, since) = largest(definition.query(), interval);
            let value = value.ok();
            let (last, _) = std::mem::replace(&mut source.last, (value, since));
            let mean = match definition.metric.source {
                Metric::Disk(_) | Metric::Interface(_) => value,
                _ => last.zip(value).map(|(last, value)| last.midpoint(value)),
            };
            source.series.record(before, sample.at, mean);
        }
        self.baseline.store(sample);
    }

    /// Renews the values that are due or not known.
    pub(super) fn renew<'a>(
        &mut self,
        now: BootTime,
        sources: &'a [SourceSeries],
        node: impl Fn(Resource) -> &'a TimeSeries,
    ) {
        for (gauge, definition) in self.gauges.iter_mut().zip(self.definitions.iter()) {
            if gauge.value.is_some() && now < gauge.due {
                continue;
            }
            let series = gauge.place.series(sources, &node);
            let window = series.map(|series| series.value(definition.metric.statistic));
            gauge.value = window.and_then(|window| window.value);
            gauge.due = now + definition.period;
        }
    }

    /// The windows with their values as last renewed.
    pub(super) fn values(&self) -> impl Iterator<Item = (&CustomWindow, Option<f64>)> {
        let gauges = self.definitions.iter().zip(&self.gauges);
        gauges.map(|(definition, gauge)| (definition, gauge.value))
    }

    /// The current value of a window.
    ///
    /// # Errors
    /// [`Unknown::Missing`] if this node has no window of that name, [`Unknown::Sparse`] below half coverage.
    pub(super) fn value<'a>(
        &self,
        metric: &CustomMetric,
        sources: &'a [SourceSeries],
        node: impl Fn(Resource) -> &'a TimeSeries,
    ) -> Result<f64, Unknown> {
        let (definition, gauge) = self.find(metric).ok_or(Unknown::Missing)?;
        let series = gauge.place.series(sources, node);
        let series = series.ok_or(Unknown::Missing)?;
        let Window { value, .. } = series.value(definition.metric.statistic);
        value.ok_or(Unknown::Sparse)
    }

    /// The last value of the source of a window, and since when it has been measured; `None` for CPU and memory.
    pub(super) fn input(
        &self,
        metric: &CustomMetric,
        sources: &[SourceSeries],
    ) -> Option<(f64, Option<BootTime>)> {
        let (_, gauge) = self.find(metric)?;
        let Place::Source(index) = gauge.place else {
            return None;
        };
        let (value, since) = sources.get(index)?.last;
        Some((value?, since))
    }

    fn find(&self, metric: &CustomMetric) -> Option<(&CustomWindow, &Gauge)> {
        let mut windows = self.definitions.iter().zip(&self.gauges);
        windows.find(|(definition, _)| definition.metric.name == metric.name)
    }
}

impl Place {
    fn series<'a>(
        self,
        sources: &'a [SourceSeries],
        node: impl Fn(Resource) -> &'a TimeSeries,
    ) -> Option<&'a TimeSeries> {
        match self {
            Self::Node(resource) => Some(node(resource)),
            Self::Source(index) => sources.get(index).map(|source| &source.series),
        }
    }
}

#[cfg(test)]
#[path = "custom_tests.rs"]
mod tests;
