//! Values of the whole node: its own gauges, its devices and interfaces, and the series of probes.

use std::sync::Arc;
use std::time::Duration;

use super::{
    Baseline, Fold, KIB, NANOS_PER_SECOND, SeriesLabels, Value, busy, check_plausible, difference,
    find_near, finite, increase, interval, memory, non_negative, percent, selects,
};
use crate::engine::metric::{DiskRate, InterfaceRate, Metric, PressureKind};
use crate::engine::plan::Unknown;
use crate::engine::policy::Probe;
use crate::engine::sample::{CpuTimes, DiskSample, InterfaceSample, ProbeSample, Sample};
use crate::engine::selector::{Labels, Selector};
use crate::engine::time::BootTime;

/// Which series of which metric.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Query<'a> {
    pub(in crate::engine) metric: &'a Metric,
    /// `None` selects all series.
    pub(in crate::engine) series: Option<&'a Selector>,
    pub(in crate::engine) probe: Option<&'a Probe>,
    /// An older sample has no value.
    pub(in crate::engine) sample_ttl: Duration,
}

/// A sample and the one before it.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Interval<'a> {
    pub(in crate::engine) now: BootTime,
    pub(in crate::engine) sample: &'a Sample,
    pub(in crate::engine) baseline: &'a Baseline,
    /// The usual time between the two; after three times that, there is no baseline.
    pub(in crate::engine) period: Duration,
}

/// The largest of the selected series, or why none of them has a value; and since when it has been measured.
pub(in crate::engine) fn largest(
    query: Query<'_>,
    interval: Interval<'_>,
) -> (Value, Option<BootTime>) {
    let node = NodeValues { query, interval };
    let mut fold = Fold::default();
    node.add_to(&mut fold);
    let since = match query.metric {
        Metric::Probe(_) => node.probe_sample().map(|probe| probe.at),
        _ => interval.baseline.at,
    };
    (fold.largest(), since)
}

/// Reads values from an interval.
#[derive(Clone, Copy)]
pub(super) struct NodeValues<'a> {
    pub(super) query: Query<'a>,
    pub(super) interval: Interval<'a>,
}

impl<'a> NodeValues<'a> {
    pub(super) fn stale(&self, at: BootTime) -> bool {
        self.interval.now.since(at) > self.query.sample_ttl
    }

    pub(super) fn selects<L: Labels + ?Sized>(&self, labels: &L) -> bool {
        selects(self.query.series, labels)
    }

    /// Adds the selected series; none for a metric that is not of the whole node.
    pub(super) fn add_to(&self, fold: &mut Fold) {
        match self.query.metric {
            Metric::Probe(name) => self.probe(name, fold),
            _ if self.stale(self.interval.sample.at) => fold.add(Err(Unknown::Stale)),
            Metric::Disk(rate) => self.disks(*rate, fold),
            Metric::Interface(rate) => self.interfaces(*rate, fold),
            _ if self.selects::<[(&str, &str)]>(&[]) => fold.add(self.value()),
            _ => {}
        }
    }

    /// Metrics with one value per node.
    fn value(&self) -> Value {
        let node = &self.interval.sample.node;
        match self.query.metric {
            Metric::CpuUsage => self.cpu().map(|(millicores, _)| millicores),
            Metric::CpuUtilization => self.cpu().map(|(millicores, cpu)| cpu.percent(millicores)),
            Metric::MemoryUsage => memory(node).map(|(used, _)| used),
            Metric::MemoryUtilization => memory(node).map(|(used, total)| used / total * 100.0),
            Metric::Load(index) => node
                .load
                .and_then(|load| load.get(*index).copied())
                .map_or(Err(Unknown::Missing), non_negative),
            Metric::Pressure { kind, full, window } => {
                let lines = node.pressure[*kind as usize];
                let line = lines.and_then(|p| if *full { p.full } else { Some(p.some) });
                line.and_then(|averages| averages.get(*window).copied())
                    .map_or(Err(Unknown::Missing), percent)
            }
            _ => Err(Unknown::Missing),
        }
    }

    /// Busy millicores over the interval, and the current CPU times.
    pub(super) fn cpu(&self) -> Result<(f64, CpuTimes), Unknown> {
        let now = self.interval.sample.node.cpu.ok_or(Unknown::Missing)?;
        let interval = self.since_baseline()?;
        let before = self.interval.baseline.cpu.ok_or(Unknown::Rebased)?;
        Ok((busy(before, now, interval)?, now))
    }

    /// Percent of the interval in which tasks were stalled.
    pub(super) fn stalled(&self, kind: PressureKind, full: bool) -> Option<f64> {
        let index = usize::from(full);
        let now = self.interval.sample.node.pressure[kind as usize]?.totals[index];
        let before = self.interval.baseline.stalled[kind as usize][index];
        let interval = self.since_baseline().ok()?;
        let stalled = difference(before, now).ok()?;
        Some(stalled / interval * 100.0)
    }

    fn disks(&self, rate: DiskRate, fold: &mut Fold) {
        for (index, disk) in self.interval.sample.node.disks.iter().enumerate() {
            if self.selects(&[("device", &*disk.device)][..]) {
                let before = find_near(&self.interval.baseline.disks, index, |b| {
                    b.device == disk.device
                });
                fold.add(self.disk(rate, before, disk));
            }
        }
    }

    fn disk(&self, rate: DiskRate, before: Option<&DiskSample>, disk: &DiskSample) -> Value {
        let interval = self.since_baseline()?;
        let before = before.ok_or(Unknown::Rebased)?;
        let seconds = interval / NANOS_PER_SECOND;
        let per_second = |from: u64, to: u64| increase(from, to).map(|n| n / seconds);
        match rate {
            DiskRate::ReadKib => per_second(before.read_bytes, disk.read_bytes).map(|n| n / KIB),
            DiskRate::WriteKib => per_second(before.write_bytes, disk.write_bytes).map(|n| n / KIB),
            DiskRate::Reads => per_second(before.reads, disk.reads),
            DiskRate::Writes => per_second(before.writes, disk.writes),
            DiskRate::Utilization => {
                let busy = increase(before.io_ms, disk.io_ms)? * 1e6;
                check_plausible(busy, interval, 1.0)?;
                Ok(busy / interval * 100.0)
            }
        }
    }

    fn interfaces(&self, rate: InterfaceRate, fold: &mut Fold) {
        for (index, link) in self.interval.sample.node.interfaces.iter().enumerate() {
            if self.selects(&[("interface", &*link.interface)][..]) {
                let same = |b: &InterfaceSample| b.interface == link.interface;
                let before = find_near(&self.interval.baseline.interfaces, index, same);
                fold.add(self.interface(rate, before, link));
            }
        }
    }

    fn interface(
        &self,
        rate: InterfaceRate,
        before: Option<&InterfaceSample>,
        link: &InterfaceSample,
    ) -> Value {
        let interval = self.since_baseline()?;
        let before = before.ok_or(Unknown::Rebased)?;
        let count = |of: fn(&InterfaceSample) -> u64| {
            increase(of(before), of(link)).map(|n| n / (interval / NANOS_PER_SECOND))
        };
        match rate {
            InterfaceRate::ReceiveKib => count(|l| l.receive_bytes).map(|n| n / KIB),
            InterfaceRate::SendKib => count(|l| l.send_bytes).map(|n| n / KIB),
            InterfaceRate::ReceivePackets => count(|l| l.receive_packets),
            InterfaceRate::SendPackets => count(|l| l.send_packets),
            InterfaceRate::ReceiveDrops => count(|l| l.receive_drops),
            InterfaceRate::SendDrops => count(|l| l.send_drops),
        }
    }

    fn probe(&self, name: &Arc<str>, fold: &mut Fold) {
        let Some(answer) = self.probe_sample() else {
            return;
        };
        for series in answer.series.iter().filter(|series| series.name == *name) {
            if self.selects(&SeriesLabels(&series.labels)) {
                fold.add(if self.is_probe_stale(answer.at) {
                    Err(Unknown::Stale)
                } else {
                    finite(series.value)
                });
            }
        }
    }

    /// Answers are valid at least until the next evaluation, since they are as old as that when they are evaluated.
    fn is_probe_stale(&self, at: BootTime) -> bool {
        let timeout = self.query.probe.map_or(Duration::ZERO, |it| it.timeout);
        let min_ttl = self.interval.period + timeout;
        self.interval.now.since(at) > self.query.sample_ttl.max(min_ttl)
    }

    pub(super) fn probe_sample(&self) -> Option<&'a ProbeSample> {
        let probe = self.query.probe?;
        let answers = self.interval.sample.probes.iter();
        answers
            .filter(|answer| answer.url == probe.url)
            .max_by_key(|answer| answer.at)
    }

    /// Nanoseconds from the baseline to the sample.
    fn since_baseline(&self) -> Value {
        let Interval {
            sample,
            baseline,
            period,
            ..
        } = self.interval;
        interval(baseline.at, sample.at, period).map(|nanos| nanos as f64)
    }
}
