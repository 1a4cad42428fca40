//! CPU burst: a service with a CPU limit that it reaches in short peaks only.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use plimsoll::clock::boot_time;
use plimsoll::engine::pod::QosClass;
use plimsoll::engine::units::MilliCpu;
use plimsoll::scene::cgroups::SceneCgroups;
use plimsoll::scene::latency::{Latencies, TimeSpan};
use plimsoll::scene::load::Service;
use plimsoll::scene::pod::ScenePod;
use plimsoll::scene::process::Worker;

use crate::figures::{Figures, median};
use crate::round::{Ground, Meters, run_until};
use crate::scenes::{self, Scene};
use crate::ways::{Control, Way};

pub const NAME: &str = "cpu-burst";
const LIMIT: MilliCpu = MilliCpu(500);
/// Half of the limit on average: a peak of five in a period of 100 ms reaches it.
const SERVICE: Service = Service {
    threads: 2,
    rate: 25,
    work: Duration::from_millis(10),
    request_timeout: Duration::from_secs(1),
    first_of_chain: false,
};
const SETTLE: Duration = Duration::from_secs(3);
/// Four repetitions of the arrivals.
const LENGTH: Duration = Duration::from_secs(12);
/// The bars, against the limit alone.
const MAX_THROTTLED: f64 = 0.1;
const MAX_P99: f64 = 0.7;

/// What the service has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Has {
    NoLimit,
    Limit,
    /// `examples/ensurance/standing.yaml`.
    LimitAndBurst,
}

impl Has {
    const ALL: [Self; 3] = [Self::NoLimit, Self::Limit, Self::LimitAndBurst];

    const fn name(self) -> &'static str {
        match self {
            Self::NoLimit => "no limit",
            Self::Limit => "limit",
            Self::LimitAndBurst => "limit and burst",
        }
    }

    const fn way(self) -> Way {
        match self {
            Self::NoLimit => Way::Alone,
            Self::Limit => Way::Unprotected,
            Self::LimitAndBurst => Way::Standing,
        }
    }
}

/// Medians of the rounds.
struct Row {
    name: &'static str,
    p50: f64,
    p99: f64,
    /// Periods of 100 ms in which it was throttled, in percent.
    throttled: f64,
    used: f64,
}

/// With no limit, with the limit, and with limit and burst.
pub struct BurstFigures([Row; 3]);

/// Three ways in each round, one after the other.
pub fn measure(ground: &Ground, rounds: usize) -> BurstFigures {
    let mut measured = Has::ALL.map(|has| (has, Vec::new()));
    for _ in 0..rounds {
        for (has, of_way) in &mut measured {
            let mut throttled = 0.0;
            let figures = ground.undisturbed(|| {
                let (figures, percent) = round(ground, *has);
                throttled = percent;
                figures
            });
            println!(
                "{NAME} {}: throttled in {throttled:.1} % of the periods, {}",
                has.name(),
                figures.line()
            );
            of_way.push((figures, throttled));
        }
    }
    BurstFigures(measured.map(|(has, rounds)| {
        let of = |value: &dyn Fn(&Figures) -> f64| median(rounds.iter().map(|(it, _)| value(it)));
        Row {
            name: has.name(),
            p50: of(&|it| it.latency.p50_ms),
            p99: of(&|it| it.latency.p99_ms),
            throttled: median(rounds.iter().map(|(_, throttled)| *throttled)),
            used: of(&|it| it.important),
        }
    }))
}

fn round(ground: &Ground, has: Has) -> (Figures, f64) {
    let service = ScenePod {
        limit: (has != Has::NoLimit).then_some(LIMIT),
        ..scenes::pod(
            "service",
            QosClass::Burstable,
            LIMIT.0,
            SERVICE.threads,
            "service",
        )
    };
    let scene = Scene {
        important: vec![service.clone()],
        batch: Vec::new(),
        ..Scene::burst(ground.cpus)
    };
    let cgroups = ground.cgroups(&scene.pods());
    let worker = Worker::start(&ground.program, &service, SERVICE, &cgroups).unwrap();
    let mut control = Control::start(has.way(), ground, &cgroups, &scene, &[]);
    let started = boot_time();
    run_until(started + SETTLE, &mut control);
    let mut meters = Meters::new(&cgroups, &scene.important, &[]);
    let before = periods(&cgroups, &service);
    run_until(started + SETTLE + LENGTH, &mut control);
    let [node, important, batch] = meters.millicores();
    let after = periods(&cgroups, &service);
    run_until(boot_time() + SERVICE.request_timeout, &mut control);
    drop(control);
    let mut latencies = Latencies::default();
    latencies.extend(worker.finished_requests());
    let span = TimeSpan {
        from: started + SETTLE,
        to: started + SETTLE + LENGTH,
    };
    let figures = Figures {
        latency: latencies.over(span).unwrap(),
        node,
        important,
        batch,
        others: (node - important).max(0.0),
        round: None,
    };
    let [periods, throttled] = [0, 1].map(|field| after[field].saturating_sub(before[field]));
    (figures, throttled as f64 * 100.0 / periods.max(1) as f64)
}

/// `nr_periods` and `nr_throttled` so far.
fn periods(cgroups: &Arc<SceneCgroups>, pod: &ScenePod) -> [u64; 2] {
    cgroups.periods(&cgroups.cgroup(pod)).unwrap()
}

impl BurstFigures {
    /// In markdown.
    pub fn table(&self, text: &mut String) {
        write!(
            text,
            "\n### CPU burst\nScene: a service with a limit of {LIMIT} that uses half of it on average ({} requests a second of {} ms, {} threads), alone \
             on the machine; a burst of 500m.\n\n| the service has | p50 ms | p99 ms | throttled periods | CPU |\n|---|---|---|---|---|\n",
            SERVICE.rate,
            SERVICE.work.as_millis(),
            SERVICE.threads,
        )
        .unwrap();
        for row in &self.0 {
            writeln!(
                text,
                "| {} | {:.1} | {:.1} | {:.1} % | {:.0}m |",
                row.name, row.p50, row.p99, row.throttled, row.used
            )
            .unwrap();
        }
        text.push('\n');
        match self.missed() {
            None => writeln!(
                text,
                "Bar met: throttled periods at most {MAX_THROTTLED} times, and p99 at most {MAX_P99} times those with the limit alone."
            ),
            Some(missed) => writeln!(text, "Bar missed: {missed}."),
        }
        .unwrap();
    }

    /// The bar, if it was missed.
    pub fn missed(&self) -> Option<String> {
        let [_, limit, burst] = &self.0;
        let (throttled, p99) = (burst.throttled / limit.throttled, burst.p99 / limit.p99);
        let met = limit.throttled > 0.0 && throttled <= MAX_THROTTLED && p99 <= MAX_P99;
        (!met).then(|| {
            format!(
                "{NAME}: throttled periods {throttled:.2} times (bar {MAX_THROTTLED}) and p99 {p99:.2} times (bar {MAX_P99}) those with \
                 the limit alone"
            )
        })
    }
}
