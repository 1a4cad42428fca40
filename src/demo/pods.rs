//! The demo's pods, with the CPU weights that Kubernetes would give them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::report::PodFacts;
use crate::engine::pod::{Pod, PodUid, QosClass};
use crate::engine::units::MilliCpu;

/// One pod of the demo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoPod {
    /// Its name, and that of its cgroup.
    pub name: String,
    /// Quality-of-service class, as its request and limit imply.
    pub qos: QosClass,
    /// CPU requested.
    pub request: MilliCpu,
    /// CPU limit.
    pub limit: Option<MilliCpu>,
    /// Busy threads.
    pub threads: usize,
}

impl DemoPod {
    /// As a pod of the engine.
    pub fn pod(&self) -> Pod {
        let uid = format!("demo/{}", self.name);
        Pod {
            uid: PodUid::from(uid.as_str()),
            namespace: "demo".to_owned(),
            name: self.name.clone(),
            labels: BTreeMap::new(),
            priority: 0,
            qos: self.qos,
            started: 0,
            running: true,
            terminating: false,
            elastic: false,
            cpu_request: self.request,
            container_requests: BTreeMap::new(),
            grace: Duration::from_secs(30),
            protected: false,
            reserved: None,
            eviction_exemption: None,
            owned: false,
        }
    }

    /// Its row in the report.
    pub fn facts(&self, weight: String, lowest_quota: Option<String>) -> PodFacts {
        PodFacts {
            name: self.name.clone(),
            class: self.qos.to_string(),
            request_millicores: self.request.0,
            limit_millicores: self.limit.map(|limit| limit.0),
            weight,
            threads: self.threads,
            lowest_quota,
        }
    }
}

/// The pods for a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoPods {
    /// CPUs online.
    pub cpus: u32,
    /// The important pod.
    pub important: DemoPod,
    /// The batch pods.
    pub batch: Vec<DemoPod>,
}

/// The rule's threshold in percent of the machine's CPU.
pub const THRESHOLD_PERCENT: u8 = 70;

impl DemoPods {
    /// The pods for a machine with `cpus` CPUs.
    ///
    /// The important worker has one thread and requests one CPU, so that its own limit does not throttle it. The batch
    /// pods together request 20 % of the machine and each have a thread for every CPU. One has a limit (above what it
    /// can get), so that both a quota and `max` are restored.
    pub fn for_cpus(cpus: u32) -> Self {
        let machine = MilliCpu(u64::from(cpus) * 1000);
        let batch = |name: &str, limit| DemoPod {
            name: name.to_owned(),
            qos: QosClass::Burstable,
            request: machine.percent(10),
            limit,
            threads: cpus as usize,
        };
        Self {
            cpus,
            important: DemoPod {
                name: "important".to_owned(),
                qos: QosClass::Guaranteed,
                request: MilliCpu(1000),
                limit: Some(MilliCpu(1000)),
                threads: 1,
            },
            batch: vec![
                batch("batch-a", None),
                batch("batch-b", Some(machine.percent(90))),
            ],
        }
    }

    /// All pods, the important one first.
    pub fn all(&self) -> impl Iterator<Item = &DemoPod> {
        std::iter::once(&self.important).chain(&self.batch)
    }

    /// The whole machine.
    pub fn capacity(&self) -> MilliCpu {
        MilliCpu(u64::from(self.cpus) * 1000)
    }

    /// The rule's threshold for this machine.
    pub fn threshold(&self) -> MilliCpu {
        self.capacity().percent(THRESHOLD_PERCENT)
    }
}

/// `cpu.shares` for a CPU request, as the kubelet's `MilliCPUToShares` computes it: 1024 a CPU, in 2..=262144.
pub fn shares(request: MilliCpu) -> u64 {
    (request.0.saturating_mul(1024) / 1000).clamp(2, 262_144)
}

/// `cpu.weight` for `cpu.shares`, as `ConvertCPUSharesToCgroupV2Value` of runc 1.0 to 1.3 computes it: linear from
/// 2..=262144 to 1..=10000.
pub fn weight(shares: u64) -> u64 {
    1 + shares.saturating_sub(2) * 9999 / 262_142
}

/// The kernel's and the kubelet's default quota period.
pub const QUOTA_PERIOD: Duration = Duration::from_millis(100);

/// `cpu.cfs_quota_us` for a limit over [`QUOTA_PERIOD`].
pub fn quota_micros(limit: MilliCpu) -> u64 {
    limit.0.saturating_mul(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_kubernetes() {
        assert_eq!(shares(MilliCpu(0)), 2);
        assert_eq!(shares(MilliCpu(200)), 204);
        assert_eq!(shares(MilliCpu(1000)), 1024);
        assert_eq!(shares(MilliCpu(1_000_000)), 262_144);
        assert_eq!(weight(2), 1);
        assert_eq!(weight(1024), 39);
        assert_eq!(weight(262_144), 10_000);
    }

    #[test]
    fn batch_pods_can_be_throttled_below_the_threshold_on_any_machine() {
        for cpus in 1..=256 {
            let demo_pods = DemoPods::for_cpus(cpus);
            let floor: MilliCpu = demo_pods
                .batch
                .iter()
                .map(|demo_pod| demo_pod.request)
                .sum();
            assert!(floor < demo_pods.threshold(), "{cpus} CPUs");
            let threads: usize = demo_pods
                .batch
                .iter()
                .map(|demo_pod| demo_pod.threads)
                .sum();
            assert!(threads >= cpus as usize, "{cpus} CPUs");
        }
    }

    #[test]
    fn the_important_worker_cannot_exceed_its_own_limit() {
        let worker = DemoPods::for_cpus(2).important;
        assert!(worker.limit.unwrap() >= MilliCpu(1000 * worker.threads as u64));
        assert_eq!(worker.limit, Some(worker.request), "Guaranteed");
    }
}
