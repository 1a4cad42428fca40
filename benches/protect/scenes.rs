//! The scenes. Their figures grow with the CPUs.

use std::sync::Arc;
use std::time::Duration;

use plimsoll::demo::pods::DemoPods;
use plimsoll::demo::policy::WAITING;
use plimsoll::engine::pod::QosClass;
use plimsoll::engine::units::MilliCpu;
use plimsoll::scene::cgroups::SceneCgroups;
use plimsoll::scene::load::Service;
use plimsoll::scene::pod::ScenePod;

use crate::round::Ground;
use crate::ways::Way;

/// Important pods and batch pods on one machine.
#[derive(Clone)]
pub struct Scene {
    pub name: &'static str,
    /// In each round, in this order.
    pub ways: Vec<Way>,
    /// At most so many rounds.
    pub max_rounds: usize,
    /// Pods weigh what they would on cgroup v2, on v1 too.
    pub weights_of_v2: bool,
    /// For the report.
    pub about: String,
    /// One server, or a chain of services.
    pub important: Vec<ScenePod>,
    pub service: Service,
    pub batch: Vec<(ScenePod, Batch)>,
    /// The policy of Plimsoll's ways on cgroup v2.
    pub by_waiting: ByWaiting,
    /// The bar: the p99 against that alone.
    pub max_ratio: f64,
    /// The ways that must meet the bars; without any, the best of Plimsoll's.
    pub must_hold: Vec<Way>,
    /// Length of a round.
    pub length: Duration,
}

/// An example of a policy on what protected pods wait.
#[derive(Clone, Copy)]
pub struct ByWaiting {
    pub example: &'static str,
    /// Instead of its threshold and `restoreValue`, in percent of the time: it must be above what the important pod waits alone.
    pub threshold: Option<(u8, u8)>,
}

const PRESSURE: ByWaiting = ByWaiting {
    example: include_str!("../../examples/ensurance/pressure.yaml"),
    threshold: None,
};

const SERVICES: ByWaiting = ByWaiting {
    example: include_str!("../../examples/ensurance/services.yaml"),
    threshold: None,
};

/// What a batch pod does.
#[derive(Clone, Copy)]
pub enum Batch {
    /// All its threads are always busy.
    Busy,
    /// A fixed amount of work per second.
    Paced(Service),
}

impl Batch {
    /// CPU that it uses where it gets all that it wants.
    pub fn wants(self, pod: &ScenePod) -> MilliCpu {
        match self {
            Self::Busy => MilliCpu(1000 * pod.threads as u64),
            Self::Paced(service) => needs(service),
        }
    }
}

fn needs(service: Service) -> MilliCpu {
    let micros = u64::from(service.rate) * u64::try_from(service.work.as_micros()).unwrap();
    MilliCpu(micros / 1000)
}

pub fn pod(name: &str, qos: QosClass, request: u64, threads: usize, workload: &str) -> ScenePod {
    ScenePod {
        name: name.to_owned(),
        qos,
        request: MilliCpu(request),
        limit: None,
        threads,
        labels: [("workload".to_owned(), workload.to_owned())].into(),
    }
}

impl Scene {
    pub fn all(cpus: u32) -> Vec<Self> {
        vec![
            Self::burst(cpus),
            Self::many(cpus, 5),
            Self::many(cpus, 10),
            Self::many(cpus, 25),
            Self::wakeups(cpus),
            Self::chain(cpus),
        ]
    }

    /// The demo's scene: the important pod needs four times what it requested.
    pub fn burst(cpus: u32) -> Self {
        let DemoPods {
            important,
            service,
            batch,
            ..
        } = DemoPods::for_cpus(cpus);
        Self {
            name: "burst",
            ways: [&Way::ALL[..], &[Way::LowestWeight, Way::Crane]].concat(),
            max_rounds: usize::MAX,
            weights_of_v2: true,
            about: format!(
                "a service that requests {} and needs {} ({} requests a second of {} ms, {} threads) beside two Burstable pods \
                 that request as much and have {} busy threads each",
                important.request,
                needs(service),
                service.rate,
                service.work.as_millis(),
                service.threads,
                batch[0].threads,
            ),
            important: vec![important],
            service,
            batch: batch.into_iter().map(|pod| (pod, Batch::Busy)).collect(),
            by_waiting: ByWaiting {
                threshold: Some(WAITING),
                ..PRESSURE
            },
            max_ratio: 1.1,
            must_hold: vec![Way::Standing],
            length: Duration::from_secs(10),
        }
    }

    /// The service of the burst beside many batch pods: the weight of each adds up.
    pub fn many(cpus: u32, per_cpu: u32) -> Self {
        let burst = Self::burst(cpus);
        let request = burst.important[0].request;
        let count = per_cpu * cpus;
        let batch = (1..=count).map(|number| {
            let name = format!("batch-{number}");
            let pod = pod(&name, QosClass::Burstable, request.0, 1, "batch");
            (pod, Batch::Busy)
        });
        let name = match per_cpu {
            5 => "many-5-per-cpu",
            10 => "many-10-per-cpu",
            _ => "many-25-per-cpu",
        };
        // The idle class holds up to 5 pods per CPU, BestEffort any number: docs/protection.md, "Weights add up".
        let must_hold = if per_cpu == 5 {
            vec![Way::Standing, Way::BestEffort]
        } else {
            vec![Way::BestEffort]
        };
        Self {
            name,
            ways: Way::MANY.to_vec(),
            max_rounds: 2,
            about: format!(
                "the service of burst beside {count} batch pods that request as much, with one busy thread each; BestEffort: they request \
                 nothing"
            ),
            batch: batch.collect(),
            max_ratio: 1.3,
            must_hold,
            // A rule's idle class comes after a second; the requests that waited are served by second 6.
            length: Duration::from_secs(14),
            ..burst
        }
    }

    /// Short requests beside many threads: what counts is how soon a thread that wakes up gets a CPU.
    pub fn wakeups(cpus: u32) -> Self {
        let threads = 8 * cpus as usize;
        let service = Service {
            threads: cpus as usize,
            rate: 100 * cpus,
            work: Duration::from_micros(500),
            request_timeout: Duration::from_millis(300),
            first_of_chain: false,
        };
        Self {
            name: "wake-ups",
            ways: Way::ALL.to_vec(),
            max_rounds: usize::MAX,
            weights_of_v2: false,
            about: format!(
                "{} short requests a second (0.5 ms) to a service that requests {}m, which is more than it needs, beside a \
                 BestEffort pod with {threads} busy threads",
                service.rate,
                500 * cpus
            ),
            important: vec![pod(
                "important",
                QosClass::Burstable,
                u64::from(500 * cpus),
                service.threads,
                "service",
            )],
            service,
            batch: vec![(
                pod("batch", QosClass::BestEffort, 0, threads, "batch"),
                Batch::Busy,
            )],
            by_waiting: PRESSURE,
            max_ratio: 1.1,
            must_hold: Vec::new(),
            length: Duration::from_secs(6),
        }
    }

    /// Services that call each other: the latency of each adds up. Batch does a fixed amount of work.
    pub fn chain(cpus: u32) -> Self {
        const LENGTH: u32 = 8;
        let service = Service {
            threads: 1,
            rate: 75 * cpus,
            work: Duration::from_micros(500),
            request_timeout: Duration::from_millis(300),
            first_of_chain: true,
        };
        let stages = (1..=LENGTH).map(|number| {
            let name = format!("service-{number}");
            pod(
                &name,
                QosClass::Burstable,
                u64::from(30 * cpus),
                1,
                "service",
            )
        });
        // With the services' 30 % of the CPUs: 92 %.
        let batch = Service {
            threads: 2 * cpus as usize,
            rate: 31 * cpus,
            work: Duration::from_millis(10),
            request_timeout: Duration::from_hours(1),
            first_of_chain: false,
        };
        let threads = batch.threads;
        let burstable = pod(
            "batch-b",
            QosClass::Burstable,
            u64::from(150 * cpus),
            threads,
            "batch",
        );
        Self {
            name: "chain",
            ways: Way::ALL.to_vec(),
            max_rounds: usize::MAX,
            weights_of_v2: false,
            about: format!(
                "{LENGTH} services in a row that request {}m each, {} requests a second of 0.5 ms in each, beside a BestEffort \
                 and a Burstable pod (request {}m) of {threads} threads each that want 31 % of the CPUs each: 92 % in all",
                30 * cpus,
                service.rate,
                150 * cpus
            ),
            important: stages.collect(),
            service,
            batch: vec![
                (
                    pod("batch-a", QosClass::BestEffort, 0, threads, "batch"),
                    Batch::Paced(batch),
                ),
                (burstable, Batch::Paced(batch)),
            ],
            by_waiting: SERVICES,
            max_ratio: 1.3,
            must_hold: Vec::new(),
            length: Duration::from_secs(7),
        }
    }

    /// The scene as a way has it: with `BestEffort` batch pods, or as it is.
    pub fn with(&self, way: Way) -> Self {
        let mut scene = self.clone();
        if way == Way::BestEffort {
            for (pod, _) in &mut scene.batch {
                (pod.qos, pod.request) = (QosClass::BestEffort, MilliCpu::ZERO);
            }
        }
        scene
    }

    /// All pods, the important ones first.
    pub fn pods(&self) -> Vec<&ScenePod> {
        let batch = self.batch.iter().map(|(pod, _)| pod);
        self.important.iter().chain(batch).collect()
    }

    /// The pods' cgroups, with the weights that they have under a way.
    pub fn cgroups(&self, ground: &Ground, way: Way) -> Arc<SceneCgroups> {
        let cgroups = ground.cgroups(&self.pods());
        for pod in self.pods().into_iter().filter(|_| self.weights_of_v2) {
            cgroups.weigh_as_on_v2(pod, pod.request).unwrap();
        }
        for (pod, _) in self.batch.iter().filter(|_| way == Way::LowestWeight) {
            cgroups.weigh_as_on_v2(pod, MilliCpu::ZERO).unwrap();
        }
        cgroups
    }
}
