//! From samples to what is shown of the node and its pods; the same for a live run and for a recording.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::view::{NodeView, PodView};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};
use crate::ordered;

/// Use is shown as the mean over this time: shorter, and it jumps with the 100 ms periods of the quotas.
const WINDOW: Duration = Duration::from_secs(1);

/// What the last samples say.
#[derive(Clone, Debug)]
pub struct Scene {
    capacity: MilliCpu,
    line: MilliCpu,
    looks: VecDeque<Look>,
    originals: BTreeMap<PodUid, Quota>,
    quotas: BTreeMap<PodUid, Quota>,
}

/// The CPU counters of one sample.
#[derive(Clone, Debug)]
struct Look {
    at: BootTime,
    node: Option<u64>,
    pods: BTreeMap<PodUid, (BootTime, u64)>,
}

impl Scene {
    /// Nothing seen yet, on a node of this size with this load line.
    pub const fn new(capacity: MilliCpu, line: MilliCpu) -> Self {
        Self {
            capacity,
            line,
            looks: VecDeque::new(),
            originals: BTreeMap::new(),
            quotas: BTreeMap::new(),
        }
    }

    /// Takes a sample. The first quota seen of a pod counts as its original: nothing is in force at the begin.
    pub fn see(&mut self, sample: &Sample) {
        for pod in &sample.pods {
            if let Some(quota) = pod.levers.first().and_then(|lever| lever.quota) {
                self.originals.entry(pod.uid.clone()).or_insert(quota);
                self.quotas.insert(pod.uid.clone(), quota);
            }
        }
        self.looks.push_back(look(sample));
        while self.looks.get(1).is_some_and(|next| self.is_old(next.at)) {
            self.looks.pop_front();
        }
    }

    /// The originals are back, and no sample has shown it yet.
    pub fn all_restored(&mut self) {
        self.quotas.clone_from(&self.originals);
    }

    /// At least [`WINDOW`] before the last look.
    fn is_old(&self, at: BootTime) -> bool {
        self.looks
            .back()
            .is_some_and(|last| last.at.since(at) >= WINDOW)
    }

    /// The node.
    pub fn node(&self) -> NodeView {
        NodeView {
            usage: self.node_usage(),
            capacity: self.capacity,
            line: self.line,
        }
    }

    /// A pod; `weight` is not in samples.
    pub fn pod(&self, pod: &Pod, weight: Option<String>) -> PodView {
        PodView {
            name: pod.name.clone(),
            class: pod.qos.to_string(),
            weight,
            usage: self.pod_usage(&pod.uid),
            original: self.originals.get(&pod.uid).copied(),
            quota: self.quotas.get(&pod.uid).copied(),
        }
    }

    fn node_usage(&self) -> Option<MilliCpu> {
        let (first, last) = self.ends()?;
        rate((first.at, first.node?), (last.at, last.node?))
    }

    fn pod_usage(&self, uid: &PodUid) -> Option<MilliCpu> {
        let seen = |look: &Look| look.pods.get(uid).copied();
        let first = self.looks.iter().find_map(seen)?;
        let last = self.looks.back().and_then(seen)?;
        rate(first, last)
    }

    fn ends(&self) -> Option<(&Look, &Look)> {
        Some((self.looks.front()?, self.looks.back()?))
    }
}

fn look(sample: &Sample) -> Look {
    let pods = sample.pods.iter().filter_map(|pod| {
        let nanos = pod.cpu_nanos?;
        Some((pod.uid.clone(), (pod.at, nanos)))
    });
    Look {
        at: sample.at,
        node: sample.node.cpu.map(|cpu| cpu.busy),
        pods: ordered::map(pods),
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
    use crate::engine::sample::{CpuTimes, LeverSample, PodSample};

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
            levers: vec![LeverSample {
                cgroup: "".into(),
                cpu_nanos: None,
                quota: Some(quota),
            }],
            ..PodSample::new("a".into(), at)
        });
        sample
    }

    #[test]
    fn use_is_the_mean_over_the_last_second() {
        let mut scene = Scene::new(MilliCpu(2000), MilliCpu(1400));
        assert_eq!(scene.node().usage, None, "nothing seen");
        for step in 0..=20 {
            // Idle for two seconds, then both CPUs busy for three.
            let busy = 2 * (step * 250_u64).saturating_sub(2000);
            scene.see(&sample(10_000 + step * 250, busy, Quota::Unlimited));
        }
        assert_eq!(scene.node().usage, Some(MilliCpu(2000)));
        assert_eq!(scene.pod_usage(&"a".into()), Some(MilliCpu(1000)));
        assert_eq!(scene.pod_usage(&"b".into()), None);
    }

    #[test]
    fn the_original_stays_what_was_seen_first() {
        let mut scene = Scene::new(MilliCpu(2000), MilliCpu(1400));
        scene.see(&sample(0, 0, Quota::Unlimited));
        scene.see(&sample(250, 0, Quota::Limit(MilliCpu(300))));
        assert_eq!(scene.originals[&"a".into()], Quota::Unlimited);
        assert_eq!(scene.quotas[&"a".into()], Quota::Limit(MilliCpu(300)));
    }
}
