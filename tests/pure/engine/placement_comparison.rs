//! The comparison of schedulers that `make simulate` measures: its formulas beside what real kube-schedulers did, and a small run
//! of it.

use fastrand::Rng;

use crate::placement::cluster::Cluster;
use crate::placement::in_tree::{by_requests, fits, least_allocated, select};
use crate::placement::ours::label_points;
use crate::placement::outcome::Outcome;
use crate::placement::scenes::Scene;
use crate::placement::{Amounts, Way, trimaran};
use plimsoll::crd::load_label::LoadLabel;

/// The nodes and pods of `tests/e2e/suite/placement`.
const CAPACITY: Amounts = [4000, 8192 << 20];
const SMALL: Amounts = [100, 204 << 20];

/// As kube-scheduler 1.34 logged them at `-v=10`, for an empty node less those for one with these requests.
#[test]
fn scores_of_requests_differ_as_a_real_kube_scheduler_logged() {
    let pod = [100, 64 << 20];
    let empty = by_requests([0; 2], pod, CAPACITY);
    let half = [CAPACITY[0] / 2, CAPACITY[1] / 2];
    assert_eq!(empty - by_requests(half, pod, CAPACITY), 50);
    let much_cpu = [CAPACITY[0] * 95 / 100, 0];
    assert_eq!(empty - by_requests(much_cpu, pod, CAPACITY), 48 + 48);
    assert_eq!(least_allocated([CAPACITY[0] + 1, 0], CAPACITY), 50);
}

#[test]
fn trimaran_packs_up_to_its_target() {
    let points = [0.0, 20.0, 40.0, 70.0, 100.0, 100.1].map(trimaran::score);
    assert_eq!(points, [40, 70, 100, 20, 0, 0]);
}

/// A stream of pods while labels are written late: docs/internals/scheduling-comparison.md has what real kube-schedulers did with it.
struct Stream {
    /// Pods a second.
    rate: f64,
    /// Seconds.
    delay: f64,
}

impl Stream {
    /// 100 pods that each add 3 to the load; one node at 60 and 19 at 80. Returns the pods on the first.
    fn pods_on_the_best(&self) -> usize {
        let mut random = Rng::with_seed(1);
        let loads: Vec<u16> = (0..20)
            .map(|node| if node == 0 { 60 } else { 80 })
            .collect();
        let label = |load: u16| LoadLabel::of(f64::from(load)).unwrap();
        let mut seen: Vec<LoadLabel> = loads.iter().map(|load| label(*load)).collect();
        let mut written = seen.clone();
        let mut late: Vec<(f64, usize, LoadLabel)> = Vec::new();
        let mut pods = [0_u16; 20];
        for number in 0..100_u32 {
            let time = f64::from(number) / self.rate;
            for (_, node, label) in late.extract_if(.., |(due, _, _)| *due <= time) {
                seen[node] = label;
            }
            let requested = |node: usize| SMALL.map(|amount| amount * u64::from(pods[node]));
            let feasible = (0..20).filter(|node| fits(requested(*node), SMALL, CAPACITY));
            let feasible: Vec<usize> = feasible.collect();
            let texts: Vec<String> = feasible
                .iter()
                .map(|node| seen[*node].to_string())
                .collect();
            let points = label_points(texts.iter().map(|text| Some(text.as_str())));
            let points: Vec<Option<i64>> = feasible
                .iter()
                .zip(points)
                .map(|(node, points)| Some(points + by_requests(requested(*node), SMALL, CAPACITY)))
                .collect();
            let node = feasible[select(&points, &mut random).unwrap()];
            pods[node] += 1;
            let now = label(loads[node] + 3 * pods[node]);
            let (before, is_full) = (written[node], now.percent() >= 95);
            if now.percent() >= before.percent() + 10 || is_full != (before.percent() >= 95) {
                written[node] = now;
                late.push((time + self.delay, node, now));
            }
        }
        usize::from(pods[0])
    }
}

#[test]
fn a_burst_by_label_goes_where_real_kube_schedulers_sent_it() {
    for (rate, delay, real) in [
        (10.0, 1.0, 16_usize),
        (20.0, 0.2, 16),
        (20.0, 1.0, 26),
        (300.0, 1.0, 40),
    ] {
        let found = Stream { rate, delay }.pods_on_the_best();
        assert!(
            found.abs_diff(real) <= 3,
            "{rate} a second, {delay} s late: {found}, really {real}"
        );
    }
}

/// Each scheduler's outcome of a burst on 20 nodes.
fn burst() -> Vec<(Way, Outcome)> {
    std::thread::scope(|scope| {
        let run = |way: Way| Cluster::new(Scene::Burst.workload(20, 1), way, 1).run();
        let runs = Way::ALL.map(|way| scope.spawn(move || (way, run(way))));
        runs.map(|run| run.join().unwrap()).to_vec()
    })
}

#[test]
fn the_comparison_is_deterministic_and_ours_has_fewer_hot_spots_than_requests_alone() {
    let outcomes = burst();
    let of = |wanted: Way| {
        let mut found = outcomes.iter().filter(|(way, _)| *way == wanted);
        found.next().unwrap().1.clone()
    };
    let bare = of(Way::Default);
    assert_eq!(
        Cluster::new(Scene::Burst.workload(20, 1), Way::Default, 1).run(),
        bare
    );
    assert!(bare.evictions > 0 && bare.hot_minutes > 0.0, "{bare:?}");
    for way in [Way::Label, Way::Extender] {
        let ours = of(way);
        assert!(
            ours.hot_minutes < bare.hot_minutes,
            "{way:?} {ours:?} {bare:?}"
        );
        assert!(ours.pending_minutes < f64::EPSILON, "{way:?} {ours:?}");
    }
}
