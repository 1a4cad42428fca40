//! Pods of a scene, with the CPU weights that Kubernetes would give them.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::engine::pod::{Pod, PodUid, QosClass, Resources};
use crate::engine::units::MilliCpu;

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenePod {
    /// Its name, and that of its cgroup.
    pub name: String,
    /// Quality-of-service class, as its request and limit imply.
    pub qos: QosClass,
    /// CPU requested.
    pub request: MilliCpu,
    /// CPU limit.
    pub limit: Option<MilliCpu>,
    /// Threads: of the important pod those that serve, of a batch pod those that are always busy.
    pub threads: usize,
    /// Labels, as the policies select them.
    pub labels: BTreeMap<String, String>,
}

impl ScenePod {
    /// As a pod of the engine.
    pub fn pod(&self) -> Pod {
        let uid = format!("default/{}", self.name);
        Pod {
            uid: PodUid::from(uid.as_str()),
            namespace: "default".to_owned(),
            name: self.name.clone(),
            labels: self.labels.clone(),
            priority: 0,
            qos: self.qos,
            started: 0,
            running: true,
            terminating: false,
            resources_reported: false,
            resizing: false,
            elastic: false,
            cpu_request: self.request,
            resources: Resources {
                cpu_limit: self.limit,
                ..Resources::default()
            },
            exec_probes: false,
            container_requests: BTreeMap::new(),
            grace: Duration::from_secs(30),
            protected: false,
            reserved: None,
            eviction_exemption: None,
            owned: false,
            owner: None,
        }
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
}
