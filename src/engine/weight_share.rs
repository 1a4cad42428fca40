//! The batch weight share of a node: how much of the CPU weight beside its most exposed protected pod belongs to busy batch
//! pods.
//!
//! The kernel divides each CPU by the weights of the cgroups that want it, level by level. A pod in the idle class keeps a small
//! weight, and every batch pod adds its own:
//!
//! ```text
//! share = (batch / CPUs) / (batch / CPUs + own / min(threads, CPUs))
//! ```
//! - `own` is the weight of the protected pod. `threads`, which are not known, are the CPUs that it used in the last 15 to 30 s,
//!   rounded up, at least 1: a pod that is held up uses less, and so has a lower share than it should.
//! - `batch` is the sum of the weights of the batch pods beside it, each as in the class that a policy gives it, or would give it.
//!   Beside a Burstable pod: those of its slice, and what the pods of other classes weigh against the whole slice, scaled to it by
//!   (weights of the busy pods of the slice / weight of the slice). Beside a Guaranteed pod: the Guaranteed ones, and of each of
//!   the two slices as much as its batch pods have of its busy pods' weights.
//! - A pod is busy if it used [`MIN_QUOTA`], or, where the CPUs are full, half of what its weight entitles it to beside all pods:
//!   dozens of pods in the idle class get less than that quota each, and wait for more.
//!
//! Pods without a CPU request have no weight to protect them, and no share of their own. Pods with exclusive CPUs are not known
//! as such.
//!
//! Weights are those of the kernel's scheduler, 1024 for a task at nice 0, from the requests as the kubelet sets them
//! (`MilliCPUToShares`, and on cgroup v2 `getCPUWeight`, in `pkg/kubelet/cm`, the same from 1.33 to 1.37; the formula of newer
//! runc is used for containers only).

use super::Engine;
use super::ledger::MIN_QUOTA;
use super::metric::{Rung, RungUse};
use super::pod::{Pod, QosClass};
use super::track::Tracked;
use super::units::MilliCpu;

/// Above this percentage the tail latency of the protected pod shows it: docs/protection.md, "Weights add up".
pub const HIGH_PERCENT: f64 = 10.0;

/// The kernel's weight of a cgroup in the idle class (`WEIGHT_IDLEPRIO`).
const IDLE_WEIGHT: f64 = 3.0;
/// The CPUs are full from this share of busy time on.
const FULL: f64 = 0.95;
const CLASSES: usize = 3;

/// `cpu.shares` for a CPU request, as the kubelet's `MilliCPUToShares` computes it: 1024 a CPU, in 2..=262144.
pub fn shares(request: MilliCpu) -> u64 {
    (request.0.saturating_mul(1024) / 1000).clamp(2, 262_144)
}

/// `cpu.weight` for `cpu.shares` in 2..=262144, as the kubelet's `getCPUWeight` computes it: linear, in 1..=10000.
pub fn weight(shares: u64) -> u64 {
    1 + shares.saturating_sub(2) * 9999 / 262_142
}

/// How the kernel of a node weighs cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuWeights {
    /// By cgroup v2.
    pub v2: bool,
    /// It has the idle class; if not, pods get the lowest weight in its place.
    pub idle: bool,
}

impl CpuWeights {
    /// Of a node with cgroup v2 and the idle class.
    pub const V2: Self = Self {
        v2: true,
        idle: true,
    };

    /// What the cgroup of a pod with this CPU request weighs.
    pub fn of(self, request: MilliCpu) -> f64 {
        let shares = shares(request);
        if self.v2 {
            // `sched_weight_from_cgroup` of the kernel.
            (weight(shares) as f64 * 10.24).round()
        } else {
            shares as f64
        }
    }

    fn lowest(self) -> f64 {
        self.of(MilliCpu::ZERO)
    }

    fn idle(self) -> f64 {
        if self.idle {
            IDLE_WEIGHT
        } else {
            self.lowest()
        }
    }
}

/// A running pod.
#[derive(Clone, Copy, Debug)]
struct Competitor {
    class: QosClass,
    request: MilliCpu,
    /// Of its cgroup, against the others of its level.
    weight: f64,
    /// Millicores.
    used: f64,
    /// It is no protected pod.
    batch: bool,
}

/// The CPUs of a node over the last 15 to 30 s.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cpus {
    /// Online.
    pub(super) online: f64,
    /// How many were busy.
    pub(super) busy: f64,
}

impl Cpus {
    fn are_full(self) -> bool {
        self.busy >= self.online * FULL
    }
}

/// Sums of weights, by class of quality of service.
#[derive(Clone, Copy, Debug, Default)]
struct Levels {
    /// Of all pods of the class.
    all: [f64; CLASSES],
    /// Of the busy ones.
    busy: [f64; CLASSES],
    /// Of the busy batch pods.
    batch: [f64; CLASSES],
    /// What the class weighs in the kubelet's top cgroup: its slice; of Guaranteed pods, which have none, those that are busy.
    top: [f64; CLASSES],
}

impl Levels {
    fn of(cpus: Cpus, weights: CpuWeights, pods: impl Iterator<Item = Competitor> + Clone) -> Self {
        let mut levels = Self::default();
        let mut requested = MilliCpu::ZERO;
        for pod in pods.clone() {
            levels.all[pod.class as usize] += pod.weight;
            if pod.class == QosClass::Burstable {
                requested += pod.request;
            }
        }
        let [best_effort, burstable, guaranteed] = levels.all;
        levels.top = [weights.lowest(), weights.of(requested), guaranteed];
        for (top, all) in levels.top.iter_mut().zip([best_effort, burstable, 1.0]) {
            *top *= f64::from(all > 0.0);
        }
        let entitled = |pod: Competitor| levels.entitled(cpus, pod);
        let is_busy = |pod: &Competitor| {
            pod.used >= MIN_QUOTA.0 as f64 || cpus.are_full() && pod.used * 2.0 >= entitled(*pod)
        };
        let (mut busy, mut batch) = ([0.0; CLASSES], [0.0; CLASSES]);
        for pod in pods.filter(is_busy) {
            busy[pod.class as usize] += pod.weight;
            batch[pod.class as usize] += if pod.batch { pod.weight } else { 0.0 };
        }
        (levels.busy, levels.batch) = (busy, batch);
        levels.top[QosClass::Guaranteed as usize] = busy[QosClass::Guaranteed as usize];
        levels
    }

    /// Millicores that the pod gets at least if it wants them, whatever the others want.
    fn entitled(&self, cpus: Cpus, pod: Competitor) -> f64 {
        let class = pod.class as usize;
        let of_class = self.top[class] / self.top.iter().sum::<f64>();
        cpus.online * 1000.0 * of_class * pod.weight / self.all[class]
    }

    /// What batch pods weigh in the kubelet's top cgroup, without those of one class.
    fn batch_at_top(&self, without: Option<QosClass>) -> f64 {
        let classes = (0..CLASSES).filter(|class| without.is_none_or(|it| it as usize != *class));
        let part = |class: usize| match self.busy[class] {
            0.0 => 0.0,
            busy => self.top[class] * self.batch[class] / busy,
        };
        classes.map(part).sum()
    }

    /// The weight of the batch pods beside a protected pod of this class, in the scale of its level.
    fn beside(&self, class: QosClass) -> f64 {
        let level = class as usize;
        match class {
            QosClass::Guaranteed => self.batch_at_top(None),
            QosClass::Burstable | QosClass::BestEffort => {
                let scale = self.busy[level] / self.top[level];
                self.batch[level] + self.batch_at_top(Some(class)) * scale
            }
        }
    }
}

/// The protected pod with the highest batch weight share, by its index, and that share in percent; `None` without a batch pod, or
/// a busy protected pod with a CPU request.
fn most_exposed(
    cpus: Cpus,
    weights: CpuWeights,
    pods: impl Iterator<Item = Competitor> + Clone,
) -> Option<(usize, f64)> {
    if !pods.clone().any(|pod| pod.batch) {
        return None;
    }
    let levels = Levels::of(cpus, weights, pods.clone());
    let is_exposed = |pod: &Competitor| {
        !pod.batch && pod.request > MilliCpu::ZERO && pod.used >= MIN_QUOTA.0 as f64
    };
    let exposed = pods.enumerate().filter(|(_, pod)| is_exposed(pod));
    let shares = exposed.map(|(index, pod)| {
        let threads = (pod.used / 1000.0).ceil().min(cpus.online);
        let batch = levels.beside(pod.class) / cpus.online;
        (index, batch * 100.0 / (batch + pod.weight / threads))
    });
    shares.max_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// The batch weight share of a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightShare<'a> {
    /// The protected pod with the highest share.
    pub pod: &'a Pod,
    /// In percent, 0..=100.
    pub percent: f64,
}

impl Engine {
    /// The batch weight share over the last 15 to 30 s, as it is or would be with what the policies do to batch pods before any
    /// quota: the module's documentation has the formula. `None` without batch pods, without a busy protected pod that requests
    /// CPU, and while the use of the node or of one of its pods is not known. Takes time in proportion to the pods, and does not
    /// allocate.
    pub fn batch_weight_share(&self, weights: CpuWeights) -> Option<WeightShare<'_>> {
        let cpus = self.load.recent_cpus()?;
        let pods = self.pods.all().iter();
        let pods = pods.filter(|it| it.pod.running && !it.pod.terminating);
        if pods
            .clone()
            .any(|it| self.load.recent_use(&it.pod.uid).is_none())
        {
            return None;
        }
        let competitors = pods.clone().map(|it| self.competitor(it, weights));
        let (index, percent) = most_exposed(cpus, weights, competitors)?;
        let pod = &pods.clone().nth(index)?.pod;
        Some(WeightShare { pod, percent })
    }

    /// The CPUs that batch pods used over the last 15 to 30 s; `None` while the use of the node or of one of them is not known.
    pub fn batch_cpus(&self) -> Option<f64> {
        let _known = self.load.recent_cpus()?;
        let pods = self.pods.all().iter();
        let batch = pods.filter(|it| it.pod.running && !it.pod.terminating && self.is_batch(it));
        let mut used = batch.map(|it| self.load.recent_use(&it.pod.uid));
        let millicores = used.try_fold(0.0, |sum, used| Some(sum + used?))?;
        Some(millicores / 1000.0)
    }

    fn competitor(&self, tracked: &Tracked, weights: CpuWeights) -> Competitor {
        let pod = &tracked.pod;
        let lowered = self.is_lowered(tracked);
        let weight = match lowered {
            false => weights.of(pod.cpu_request),
            true if self.is_idle_unsafe() || pod.resizing => weights.lowest(),
            true => weights.idle(),
        };
        Competitor {
            class: pod.qos,
            request: pod.cpu_request,
            weight,
            used: self.load.recent_use(&pod.uid).unwrap_or_default(),
            batch: self.is_batch(tracked),
        }
    }

    /// Whether an action may touch the pod, or it is in the lowest class. A `PodQOS` in Preview alone leaves its pods protected.
    fn is_batch(&self, tracked: &Tracked) -> bool {
        self.is_lowered(tracked) || !tracked.is_protected()
    }

    /// Whether the pod is in the lowest class, or a policy would put it there.
    fn is_lowered(&self, tracked: &Tracked) -> bool {
        let takes = |it: &super::Run| {
            tracked.permit(it.index).throttle && it.rule.rung(Rung::IdleClass) != RungUse::Unused
        };
        let held = self.ledger.get(&tracked.pod.uid);
        let may =
            tracked.standing.iter().any(|it| it.idle.is_some()) || self.runs.iter().any(takes);
        (may && !tracked.pod.protected) || held.is_some_and(|entry| entry.depth().idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: CpuWeights = CpuWeights::V2;
    const FULL_CPUS: Cpus = Cpus {
        online: 2.0,
        busy: 2.0,
    };

    fn pod(class: QosClass, request: u64, used: f64) -> Competitor {
        let request = MilliCpu(request);
        Competitor {
            class,
            request,
            weight: V2.of(request),
            used,
            batch: false,
        }
    }

    fn batch(class: QosClass, weight: f64, used: f64) -> Competitor {
        Competitor {
            weight,
            batch: true,
            ..pod(class, 300, used)
        }
    }

    /// In percent, beside a Burstable pod that requests 300m and uses 1.2 CPUs.
    fn share(batch: &[Competitor]) -> f64 {
        let important = pod(QosClass::Burstable, 300, 1200.0);
        let all = std::iter::once(important).chain(batch.iter().copied());
        let (index, percent) = most_exposed(FULL_CPUS, V2, all).expect("a share");
        assert_eq!(index, 0);
        percent
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 0.05, "{value}, not {expected}");
    }

    #[test]
    fn weights_are_those_of_the_kubelet_and_the_kernel() {
        assert_eq!(shares(MilliCpu(0)), 2);
        assert_eq!(shares(MilliCpu(200)), 204);
        assert_eq!(shares(MilliCpu(1000)), 1024);
        assert_eq!(shares(MilliCpu(1_000_000)), 262_144);
        assert_eq!(
            [2, 102, 307, 1024, 262_144].map(weight),
            [1, 4, 12, 39, 10_000]
        );
        assert_near(V2.of(MilliCpu(300)), 123.0);
        assert_near(V2.lowest(), 10.0);
        assert_near(V2.idle(), 3.0);
        let v1 = CpuWeights { v2: false, ..V2 };
        assert_near(v1.lowest(), 2.0);
        assert_near(v1.idle(), 3.0);
        assert_near(v1.of(MilliCpu(300)), 307.0);
        let old = CpuWeights { idle: false, ..V2 };
        assert_near(old.idle(), 10.0);
    }

    /// The rows of docs/protection.md: what is up to 1.2 times alone there is near a tenth, what is harmed is far above it.
    #[test]
    fn every_busy_batch_pod_adds_its_weight() {
        let busy = |count, weight| vec![batch(QosClass::Burstable, weight, 60.0); count];
        // 15 / (15 + 123), with both divided by 2.
        assert_near(share(&busy(5, 3.0)), 10.9);
        assert_near(share(&busy(10, 3.0)), 19.6);
        assert_near(share(&busy(50, 3.0)), 54.9);
        assert_near(share(&busy(2, 10.0)), 14.0);
        assert_near(share(&busy(20, 10.0)), 61.9);
    }

    #[test]
    fn best_effort_pods_weigh_as_one_whatever_their_number() {
        let busy = |count, used| share(&vec![batch(QosClass::BestEffort, 10.0, used); count]);
        // 10 / (10 + 123).
        assert_near(busy(1, 800.0), 7.5);
        assert_near(busy(50, 16.0), 7.5);
    }

    #[test]
    fn a_pod_that_hardly_runs_does_not_count_unless_it_waits_for_its_part_of_full_cpus() {
        let few = |used| share(&[batch(QosClass::Burstable, 3.0, used); 10]);
        assert_near(few(19.0), 0.0);
        assert_near(few(20.0), 19.6);
        // Beside the important pod's 123, 50 pods in the idle class are entitled to 22m each.
        let many = vec![batch(QosClass::Burstable, 3.0, 16.0); 50];
        assert_near(share(&many), 54.9);
        let asleep = vec![batch(QosClass::Burstable, 3.0, 5.0); 50];
        assert_near(share(&asleep), 0.0);
        let all = || std::iter::once(pod(QosClass::Burstable, 300, 1200.0)).chain(many.clone());
        let half_idle = Cpus {
            busy: 1.8,
            ..FULL_CPUS
        };
        let (_, percent) = most_exposed(half_idle, V2, all()).expect("a share");
        assert_near(percent, 0.0);
    }

    #[test]
    fn a_guaranteed_pod_competes_with_the_whole_burstable_slice() {
        let guaranteed = pod(QosClass::Guaranteed, 300, 1200.0);
        let idle = batch(QosClass::Burstable, 3.0, 500.0);
        let of = |pods: &[Competitor]| most_exposed(FULL_CPUS, V2, pods.iter().copied());
        // The slice requests 600m, so it weighs 24, 246 in the kernel's scale.
        let (_, percent) = of(&[guaranteed, idle, idle]).expect("a share");
        assert_near(percent, 246.0 / (246.0 + 123.0) * 100.0);
        // With a busy protected pod in it, its batch pods have 6 of 129 of it.
        let service = pod(QosClass::Burstable, 300, 500.0);
        let pods = [guaranteed, service, idle, idle];
        let slice = V2.of(MilliCpu(900));
        let batch = slice * 6.0 / 129.0;
        let (index, percent) = of(&pods).expect("a share");
        assert_eq!(index, 0);
        assert_near(percent, batch / (batch + 123.0) * 100.0);
    }

    #[test]
    fn a_burstable_pod_has_its_part_of_the_slice_beside_other_classes() {
        let beside = batch(QosClass::Guaranteed, 123.0, 500.0);
        // It is the only busy pod of a slice that another pod's request makes heavier.
        let asleep = pod(QosClass::Burstable, 1700, 0.0);
        let slice = V2.of(MilliCpu(2000));
        let expected = 123.0 * 123.0 / slice;
        let percent = share(&[beside, asleep]);
        assert_near(percent, expected / (expected + 123.0) * 100.0);
    }

    #[test]
    fn a_pod_of_one_thread_has_its_whole_weight_on_one_cpu() {
        let pods = [
            pod(QosClass::Burstable, 300, 1000.0),
            batch(QosClass::Burstable, 3.0, 500.0),
        ];
        let (_, percent) = most_exposed(FULL_CPUS, V2, pods.into_iter()).expect("a share");
        assert_near(percent, 1.5 / (1.5 + 123.0) * 100.0);
        let over = pod(QosClass::Burstable, 300, 2100.0);
        let pods = [over, batch(QosClass::Burstable, 3.0, 500.0)];
        let (_, percent) = most_exposed(FULL_CPUS, V2, pods.into_iter()).expect("a share");
        assert_near(percent, 1.5 / (1.5 + 61.5) * 100.0);
    }

    #[test]
    fn the_most_exposed_pod_counts_and_one_without_a_request_or_use_does_not() {
        let batch = batch(QosClass::Burstable, 3.0, 500.0);
        let small = pod(QosClass::Burstable, 100, 500.0);
        let large = pod(QosClass::Burstable, 1000, 500.0);
        let unused = pod(QosClass::Burstable, 10, 19.0);
        let none = pod(QosClass::Burstable, 0, 500.0);
        let best_effort = pod(QosClass::BestEffort, 0, 500.0);
        let of = |pods: &[Competitor]| most_exposed(FULL_CPUS, V2, pods.iter().copied());
        let found = of(&[large, unused, none, best_effort, batch, small]);
        assert_eq!(found.expect("a share").0, 5);
        assert_eq!(of(&[unused, none, best_effort, batch]), None);
        assert_eq!(of(&[large, small]), None);
    }
}
