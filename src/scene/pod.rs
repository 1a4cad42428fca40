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

/// The kernel's and the kubelet's default quota period.
pub const QUOTA_PERIOD: Duration = Duration::from_millis(100);

/// `cpu.cfs_quota_us` for a limit over [`QUOTA_PERIOD`].
pub fn quota_micros(limit: MilliCpu) -> u64 {
    limit.0.saturating_mul(100)
}
