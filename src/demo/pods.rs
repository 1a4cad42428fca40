//! The demo's pods.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::engine::pod::QosClass;
use crate::engine::units::MilliCpu;
use crate::scene::load::Service;
use crate::scene::pod::ScenePod;

/// The pods for a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoPods {
    /// CPUs that the demo may use.
    pub cpus: u32,
    /// The important pod.
    pub important: ScenePod,
    /// What it does.
    pub service: Service,
    /// The batch pods.
    pub batch: Vec<ScenePod>,
}

/// A rule's threshold on CPU usage, in percent of the CPUs that the demo may use.
pub const THRESHOLD_PERCENT: u8 = 70;
/// What each pod requests, in percent of these CPUs.
const REQUEST_PERCENT: u8 = 15;
/// CPU time of a request of the important pod.
const WORK: Duration = Duration::from_millis(8);
/// Requests of the important pod per second and CPU: at [`WORK`] each they need 60 % of the CPUs.
const RATE_PER_CPU: u32 = 75;
/// Short, so that the queue of the overload is served within a second or two once there are CPUs for it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

impl DemoPods {
    /// The pods for `cpus` CPUs.
    ///
    /// All three request the same, so they have equal CPU weights, and the batch pods are always busy: of 2 CPUs the important
    /// one gets 0.67. It needs 1.2, as a service does that handles more than it requested. One batch pod has a limit (above
    /// what it can get), so that both a quota and `max` are compared at the end.
    pub fn for_cpus(cpus: u32) -> Self {
        let cpus = cpus.max(1);
        let machine = MilliCpu(u64::from(cpus) * 1000);
        let threads = 2 * cpus as usize;
        let pod = |name: &str, workload: &str, limit| ScenePod {
            name: name.to_owned(),
            qos: QosClass::Burstable,
            request: machine.percent(REQUEST_PERCENT),
            limit,
            threads,
            labels: BTreeMap::from([("workload".to_owned(), workload.to_owned())]),
        };
        Self {
            cpus,
            important: pod("important", "service", None),
            service: Service {
                threads,
                rate: RATE_PER_CPU * cpus,
                work: WORK,
                request_timeout: REQUEST_TIMEOUT,
                first_of_chain: false,
            },
            batch: vec![
                pod("batch-a", "batch", None),
                pod("batch-b", "batch", Some(machine.percent(90))),
            ],
        }
    }

    /// All pods, the important one first.
    pub fn all(&self) -> impl Iterator<Item = &ScenePod> {
        std::iter::once(&self.important).chain(&self.batch)
    }

    /// All CPUs that the demo may use.
    pub fn capacity(&self) -> MilliCpu {
        MilliCpu(u64::from(self.cpus) * 1000)
    }

    /// CPU that the important pod needs.
    pub fn needed(&self) -> MilliCpu {
        let micros = u64::from(self.service.rate)
            * u64::try_from(self.service.work.as_micros()).unwrap_or(0);
        MilliCpu(micros / 1000)
    }

    /// The threshold on CPU usage.
    pub fn threshold(&self) -> MilliCpu {
        self.capacity().percent(THRESHOLD_PERCENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::weight_share::shares;

    #[test]
    fn the_important_pod_needs_more_than_its_share_and_fits_without_the_others() {
        for cpus in [1, 2, 3, 4, 16, 64, 256] {
            let demo_pods = DemoPods::for_cpus(cpus);
            let weights: u64 = demo_pods.all().map(|pod| shares(pod.request)).sum();
            let share = demo_pods.capacity().0 * shares(demo_pods.important.request) / weights;
            let needed = demo_pods.needed().0;
            assert!(needed > share * 3 / 2, "{cpus} CPUs: {needed} of {share}");
            assert!(needed < demo_pods.threshold().0, "{cpus} CPUs");
            for batch in &demo_pods.batch {
                assert!(batch.threads >= cpus as usize, "{cpus} CPUs");
                let limit = batch.limit.map_or(u64::MAX, |limit| limit.0);
                assert!(limit > demo_pods.capacity().0 / 2, "{cpus} CPUs");
            }
        }
    }

    #[test]
    fn the_load_grows_with_the_cpus() {
        let two = DemoPods::for_cpus(2);
        assert_eq!(two.important.request, MilliCpu(300));
        assert_eq!(two.needed(), MilliCpu(1200));
        assert_eq!((two.service.threads, two.service.rate), (4, 150));
        let sixteen = DemoPods::for_cpus(16);
        assert_eq!(sixteen.important.request, MilliCpu(2400));
        assert_eq!(sixteen.needed(), MilliCpu(9600));
        assert_eq!((sixteen.service.threads, sixteen.service.rate), (32, 1200));
        assert_eq!(sixteen.batch[0].threads, 32);
        assert_eq!(sixteen.threshold(), MilliCpu(11_200));
    }
}
