//! Who plays: the demo's pods, with the CPU weights that Kubernetes would give them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::report::PodFacts;
use crate::engine::pod::{Pod, PodUid, QosClass};
use crate::engine::units::MilliCpu;

/// One pod of the demo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    /// Its name, which is its cgroup's too.
    pub name: String,
    /// Quality-of-service class, as its request and limit make it.
    pub qos: QosClass,
    /// CPU requested.
    pub request: MilliCpu,
    /// CPU limit; `None`: none.
    pub limit: Option<MilliCpu>,
    /// Threads that want to run.
    pub threads: usize,
}

impl Role {
    /// It as the engine knows pods.
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
            kept: None,
            owned: false,
        }
    }

    /// It as the report tells of it.
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
pub struct Cast {
    /// CPUs online.
    pub cpus: u32,
    /// The important pod.
    pub important: Role,
    /// The batch pods.
    pub batch: Vec<Role>,
}

/// Percent of the machine's CPU that the load line is drawn at.
pub const LINE_PERCENT: u8 = 70;

impl Cast {
    /// The pods for a machine with `cpus` CPUs.
    ///
    /// The important worker has one thread and asks for one whole CPU, so that the quota that comes with its limit
    /// is not below what it can use (the report tells whether it ever held it back). The batch pods together ask for 20 % of the machine and have a thread for each CPU;
    /// one of them has a limit (above what it can get), so that both kinds of original are put back: a quota and
    /// none.
    pub fn for_cpus(cpus: u32) -> Self {
        let machine = MilliCpu(u64::from(cpus) * 1000);
        let batch = |name: &str, limit| Role {
            name: name.to_owned(),
            qos: QosClass::Burstable,
            request: machine.percent(10),
            limit,
            threads: cpus as usize,
        };
        Self {
            cpus,
            important: Role {
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
    pub fn roles(&self) -> impl Iterator<Item = &Role> {
        std::iter::once(&self.important).chain(&self.batch)
    }

    /// The whole machine.
    pub fn capacity(&self) -> MilliCpu {
        MilliCpu(u64::from(self.cpus) * 1000)
    }

    /// The load line of this machine.
    pub fn line(&self) -> MilliCpu {
        self.capacity().percent(LINE_PERCENT)
    }
}

/// `cpu.shares` for a CPU request, as the kubelet's `MilliCPUToShares` has it: 1024 a CPU, 2 at the least, 262144 at
/// the most.
pub fn shares(request: MilliCpu) -> u64 {
    (request.0.saturating_mul(1024) / 1000).clamp(2, 262_144)
}

/// `cpu.weight` for `cpu.shares`, as `ConvertCPUSharesToCgroupV2Value` of runc 1.0 to 1.3 has it: 2..=262144 on
/// 1..=10000, in a straight line.
pub fn weight(shares: u64) -> u64 {
    1 + shares.saturating_sub(2) * 9999 / 262_142
}

/// The kernel's default enforcement period, which the kubelet keeps.
pub const QUOTA_PERIOD: Duration = Duration::from_millis(100);

/// `cpu.cfs_quota_us` for a limit over [`QUOTA_PERIOD`].
pub fn quota_micros(limit: MilliCpu) -> u64 {
    limit.0.saturating_mul(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_that_kubernetes_gives() {
        assert_eq!(shares(MilliCpu(0)), 2);
        assert_eq!(shares(MilliCpu(200)), 204);
        assert_eq!(shares(MilliCpu(1000)), 1024);
        assert_eq!(shares(MilliCpu(1_000_000)), 262_144);
        assert_eq!(weight(2), 1);
        assert_eq!(weight(1024), 39);
        assert_eq!(weight(262_144), 10_000);
    }

    #[test]
    fn the_batch_pods_can_be_throttled_below_the_line_on_every_machine() {
        for cpus in 1..=256 {
            let cast = Cast::for_cpus(cpus);
            let floor: MilliCpu = cast.batch.iter().map(|role| role.request).sum();
            assert!(floor < cast.line(), "{cpus} CPUs");
            let threads: usize = cast.batch.iter().map(|role| role.threads).sum();
            assert!(threads >= cpus as usize, "{cpus} CPUs");
        }
    }

    #[test]
    fn the_important_worker_cannot_reach_its_own_limit() {
        let worker = Cast::for_cpus(2).important;
        assert!(worker.limit.unwrap() >= MilliCpu(1000 * worker.threads as u64));
        assert_eq!(worker.limit, Some(worker.request), "Guaranteed");
    }
}
