//! CPU usage of the node and its pods, from samples.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::view::{DemoNode, PodView};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};

/// Usage is the mean over this time: a shorter one jumps with the 100 ms quota periods.
const WINDOW: Duration = Duration::from_secs(1);

/// Usage and quotas from the latest samples.
#[derive(Clone, Debug)]
pub struct UsageTracker {
    capacity: MilliCpu,
    threshold: MilliCpu,
    readings: VecDeque<Reading>,
    originals: BTreeMap<PodUid, Quota>,
    quotas: BTreeMap<PodUid, Quota>,
}

/// The CPU counters of one sample.
#[derive(Clone, Debug)]
struct Reading {
    at: BootTime,
    node: Option<u64>,
    pods: BTreeMap<PodUid, (BootTime, u64)>,
}

impl UsageTracker {
    /// For a node of this size with this threshold.
    pub const fn new(capacity: MilliCpu, threshold: MilliCpu) -> Self {
        Self {
            capacity,
            threshold,
            readings: VecDeque::new(),
            originals: BTreeMap::new(),
            quotas: BTreeMap::new(),
        }
    }

    /// Adds a sample. A pod's first quota is its original: nothing is in force at the start.
    pub fn add_sample(&mut self, sample: &Sample) {
        for pod in &sample.pods {
            if let Some(quota) = pod
                .target_cgroups
                .first()
                .and_then(|target_cgroup| target_cgroup.quota)
            {
                self.originals.entry(pod.uid.clone()).or_insert(quota);
                self.quotas.insert(pod.uid.clone(), quota);
            }
        }
        self.readings.push_back(reading(sample));
        while self
            .readings
            .get(1)
            .is_some_and(|next| self.is_old(next.at))
        {
            self.readings.pop_front();
        }
    }

    /// The originals are restored, before a sample shows it.
    pub fn all_restored(&mut self) {
        self.quotas.clone_from(&self.originals);
    }

    /// At least [`WINDOW`] before the last reading.
    fn is_old(&self, at: BootTime) -> bool {
        self.readings
            .back()
            .is_some_and(|last| last.at.since(at) >= WINDOW)
    }

    /// The node.
    pub fn node(&self) -> DemoNode {
        DemoNode {
            usage: self.node_usage(),
            capacity: self.capacity,
            threshold: self.threshold,
        }
    }

    /// A pod; samples have neither its `weight` nor whether it is `idle` class.
    pub fn pod(&self, pod: &Pod, weight: Option<String>, idle: bool) -> PodView {
        PodView {
            name: pod.name.clone(),
            class: pod.qos.to_string(),
            weight,
            usage: self.pod_usage(&pod.uid),
            original: self.originals.get(&pod.uid).copied(),
            quota: self.quotas.get(&pod.uid).copied(),
            idle,
        }
    }

    fn node_usage(&self) -> Option<MilliCpu> {
        let (first, last) = self.ends()?;
        rate((first.at, first.node?), (last.at, last.node?))
    }

    fn pod_usage(&self, uid: &PodUid) -> Option<MilliCpu> {
        let of_pod = |reading: &Reading| reading.pods.get(uid).copied();
        let first = self.readings.iter().find_map(of_pod)?;
        let last = self.readings.back().and_then(of_pod)?;
        rate(first, last)
    }

    fn ends(&self) -> Option<(&Reading, &Reading)> {
        Some((self.readings.front()?, self.readings.back()?))
    }
}

fn reading(sample: &Sample) -> Reading {
    let pods = sample.pods.iter().filter_map(|pod| {
        let nanos = pod.cpu_nanos?;
        Some((pod.uid.clone(), (pod.at, nanos)))
    });
    Reading {
        at: sample.at,
        node: sample.node.cpu.map(|cpu| cpu.busy),
        pods: pods.collect::<BTreeMap<_, _>>(),
    }
}

fn rate(first: (BootTime, u64), last: (BootTime, u64)) -> Option<MilliCpu> {
    let elapsed = last.0.since(first.0).as_nanos();
    MilliCpu::from_usage(
        last.1.checked_sub(first.1)?,
        u64::try_from(elapsed).unwrap_or(u64::MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::sample::{CpuTimes, PodSample, TargetCgroupSample};

    fn sample(millis: u64, busy_millis: u64, quota: Quota) -> Sample {
        let at = BootTime::from_nanos(millis * 1_000_000);
        let mut sample = Sample {
            at,
            ..Sample::default()
        };
        sample.node.cpu = Some(CpuTimes {
            busy: busy_millis * 1_000_000,
            idle: 0,
            online: 2,
        });
        sample.pods.push(PodSample {
            cpu_nanos: Some(busy_millis * 500_000),
            target_cgroups: vec![TargetCgroupSample {
                cgroup: "".into(),
                cpu_nanos: None,
                quota: Some(quota),
            }],
            ..PodSample::new("a".into(), at)
        });
        sample
    }

    #[test]
    fn usage_is_the_mean_over_the_last_second() {
        let mut usage = UsageTracker::new(MilliCpu(2000), MilliCpu(1400));
        assert_eq!(usage.node().usage, None, "no sample yet");
        for step in 0..=20 {
            // Idle for two seconds, then both CPUs busy for three.
            let busy = 2 * (step * 250_u64).saturating_sub(2000);
            usage.add_sample(&sample(10_000 + step * 250, busy, Quota::Unlimited));
        }
        assert_eq!(usage.node().usage, Some(MilliCpu(2000)));
        assert_eq!(usage.pod_usage(&"a".into()), Some(MilliCpu(1000)));
        assert_eq!(usage.pod_usage(&"b".into()), None);
    }

    #[test]
    fn the_original_is_the_first_quota() {
        let mut usage = UsageTracker::new(MilliCpu(2000), MilliCpu(1400));
        usage.add_sample(&sample(0, 0, Quota::Unlimited));
        usage.add_sample(&sample(250, 0, Quota::Limit(MilliCpu(300))));
        assert_eq!(usage.originals[&"a".into()], Quota::Unlimited);
        assert_eq!(usage.quotas[&"a".into()], Quota::Limit(MilliCpu(300)));
    }
}
