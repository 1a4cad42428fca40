//! The scenes: which pods there are, what they request and use, and when they come and go. All from a seed; the same for every
//! scheduler.

use std::sync::Arc;

use fastrand::Rng;

use super::node::CPUS;
use super::shapes::{self, Shape};
use super::{Amounts, TICK};

/// Memory that a pod requests for each CPU that it requests.
const MEMORY_PER_CPU: u64 = 3 << 30;
const MINUTE: u64 = 60;
const HOUR: u64 = 3600;
const OWNERS: usize = 48;
/// What pods request, in millicores, and what they use of it: a third much less, a third about as much, a third twice as much.
const REQUESTS: [u64; 4] = [100, 250, 500, 1000];
const USED: [f64; 3] = [0.3, 0.8, 2.0];
/// Mean CPUs of a pod of these.
const MEAN_USE: f64 = 0.4625 * 1.0333;

/// The trace of the recorded processes.
const TRACE: &[u8] = include_bytes!("traces/processes.trace");

/// What the pods of one owner are made from.
#[derive(Clone, Debug)]
pub struct Template {
    pub owner: Arc<str>,
    pub requests: Amounts,
    /// Mean CPUs that it uses.
    pub uses: f64,
    /// Rules may evict it.
    pub batch: bool,
    /// Its use over time, relative to the mean; one of the workload's.
    shape: usize,
    /// It follows the day.
    daily: bool,
}

/// A pod to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    pub at: u64,
    pub template: usize,
    /// Seconds that it runs; `None`: to the end.
    pub length: Option<u64>,
    /// Where in its shape it starts.
    phase: usize,
}

/// A node that is emptied.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    pub at: u64,
    pub node: usize,
}

/// All pods of one run.
#[derive(Clone, Debug)]
pub struct Workload {
    pub nodes: usize,
    pub templates: Vec<Template>,
    /// By time.
    pub arrivals: Vec<Arrival>,
    pub drain: Option<Drain>,
    /// It is measured from here...
    pub from: u64,
    /// ...to here.
    pub until: u64,
    shapes: Vec<Shape>,
}

impl Workload {
    /// The CPUs that the pod would use.
    pub fn demand(&self, arrival: Arrival, now: u64) -> f64 {
        let template = &self.templates[arrival.template];
        let shape = &self.shapes[template.shape];
        let tick = usize::try_from(now / TICK).unwrap();
        let day = if template.daily { of_day(now) } else { 1.0 };
        template.uses * day * shape[(tick + arrival.phase) % shape.len()]
    }
}

/// What services use at this time of the day, of their peak at 14:00; a third of that at 2:00.
fn of_day(now: u64) -> f64 {
    let hour = (now % (24 * HOUR)) as f64 / HOUR as f64;
    let angle = (hour - 14.0) / 24.0 * std::f64::consts::TAU;
    (2.0 + angle.cos()) / 3.0
}

/// A scene.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scene {
    Steady,
    Burst,
    Day,
    Spiky,
}

impl Scene {
    pub const ALL: [Self; 4] = [Self::Steady, Self::Burst, Self::Day, Self::Spiky];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Burst => "burst",
            Self::Day => "day",
            Self::Spiky => "spiky",
        }
    }

    pub const fn about(self) -> &'static str {
        match self {
            Self::Steady => {
                "pods come and go, each for 40 minutes in the mean; together they use 70 % of all CPUs and request about as much, \
                 but a third of them uses twice what it requests and a third uses 30 %; half of them may be evicted; 2 hours"
            }
            Self::Burst => {
                "services that use 55 %; then one node is emptied, and half a minute later 200 pods come at once, each of which \
                 requests 0.5 CPU and uses 1; 40 minutes"
            }
            Self::Day => {
                "services that use 60 % of all CPUs at 14:00 and a third of that at 2:00, and are replaced after 6 hours in the mean; batch \
                 pods of 10 to 60 minutes, which use 40 % from 22:00 to 6:00 and 10 % otherwise; a day"
            }
            Self::Spiky => {
                "as steady, at 50 %, but half of the pods use little and three times their mean or more now and then; 2 hours"
            }
        }
    }

    /// How many nodes it has where the others have so many: a day is long.
    pub const fn nodes(self, nodes: usize) -> usize {
        match self {
            Self::Day => nodes * 3 / 10,
            _ => nodes,
        }
    }

    /// Its pods, on so many nodes.
    pub fn workload(self, nodes: usize, seed: u64) -> Workload {
        let mut maker = Maker::new(nodes, seed);
        match self {
            Self::Steady => maker.steady(0.70, &["service", "batch"]),
            Self::Spiky => maker.steady(0.50, &["service", "spiky"]),
            Self::Burst => maker.burst(),
            Self::Day => maker.day(),
        }
        maker.finish()
    }
}

struct Maker {
    random: Rng,
    names: Vec<String>,
    workload: Workload,
}

impl Maker {
    fn new(nodes: usize, seed: u64) -> Self {
        let (names, shapes) = shapes::of_trace(TRACE).into_iter().unzip();
        Self {
            random: Rng::with_seed(seed),
            names,
            workload: Workload {
                nodes,
                templates: Vec::new(),
                arrivals: Vec::new(),
                drain: None,
                from: 0,
                until: 0,
                shapes,
            },
        }
    }

    fn finish(mut self) -> Workload {
        self.workload.arrivals.sort_by_key(|arrival| arrival.at);
        self.workload
    }

    fn cpus(&self) -> f64 {
        self.workload.nodes as f64 * f64::from(CPUS)
    }

    fn shape(&self, name: &str) -> usize {
        self.names.iter().position(|it| it == name).unwrap()
    }

    /// A template of each mix of requests, use and shape; even ones may be evicted.
    fn owners(&mut self, shapes: &[&str]) {
        for number in 0..OWNERS {
            let request = REQUESTS[number % REQUESTS.len()];
            let uses = USED[number / REQUESTS.len() % USED.len()] * request as f64 / 1000.0;
            let shape = self.shape(shapes[number / 12 % shapes.len()]);
            let batch = number % 2 == (number / REQUESTS.len()) % 2;
            self.template(request, uses, batch, shape, false);
        }
    }

    fn template(
        &mut self,
        request: u64,
        uses: f64,
        batch: bool,
        shape: usize,
        daily: bool,
    ) -> usize {
        let index = self.workload.templates.len();
        self.workload.templates.push(Template {
            owner: format!("owner-{index}").into(),
            requests: [request, request * (MEMORY_PER_CPU / 1000)],
            uses,
            batch,
            shape,
            daily,
        });
        index
    }

    fn arrive(&mut self, at: u64, template: usize, length: Option<u64>) {
        let phase = self.random.usize(..1 << 16);
        self.workload.arrivals.push(Arrival {
            at,
            template,
            length,
            phase,
        });
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "hours of seconds"
    )]
    fn exponential(&mut self, mean: f64) -> u64 {
        (-(1.0 - self.random.f64()).ln() * mean) as u64
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "thousands of pods"
    )]
    fn pods(&self, share: f64) -> usize {
        (self.cpus() * share / MEAN_USE) as usize
    }

    fn steady(&mut self, share: f64, shapes: &[&str]) {
        const MEAN_LENGTH: f64 = 40.0 * 60.0;
        self.owners(shapes);
        self.workload.from = HOUR;
        self.workload.until = 3 * HOUR;
        let pods = self.pods(share);
        // Those that are there already, in the first minutes.
        for number in 0..pods {
            let length = self.exponential(MEAN_LENGTH);
            let at = TICK * 6 + number as u64 * 300 / pods as u64;
            let template = self.random.usize(..OWNERS);
            self.arrive(at, template, Some(length));
        }
        self.keep_arriving(MEAN_LENGTH / pods as f64, |maker| {
            let length = maker.exponential(MEAN_LENGTH);
            (maker.random.usize(..OWNERS), length)
        });
    }

    /// Pods at random times to the end, with this mean pause in seconds.
    fn keep_arriving(&mut self, pause: f64, next: impl Fn(&mut Self) -> (usize, u64)) {
        let mut at = 0.0;
        while at < self.workload.until as f64 {
            at += -(1.0 - self.random.f64()).ln() * pause;
            let (template, length) = next(self);
            self.arrive(super::truncated(at).unsigned_abs(), template, Some(length));
        }
    }

    fn burst(&mut self) {
        self.owners(&["service", "batch"]);
        let pods = self.pods(0.55);
        for number in 0..pods {
            let at = TICK * 6 + number as u64 * 300 / pods as u64;
            let template = self.random.usize(..OWNERS);
            self.arrive(at, template, None);
        }
        self.workload.from = 40 * MINUTE;
        self.workload.until = 80 * MINUTE;
        let node = self.random.usize(..self.workload.nodes);
        self.workload.drain = Some(Drain {
            at: self.workload.from,
            node,
        });
        let shape = self.shape("batch");
        let template = self.template(500, 1.0, true, shape, false);
        for _ in 0..self.workload.nodes * 2 {
            self.arrive(self.workload.from + 30, template, None);
        }
    }

    fn day(&mut self) {
        const SERVICE_LENGTH: f64 = 6.0 * HOUR as f64;
        self.workload.from = HOUR;
        self.workload.until = 25 * HOUR;
        let service = self.shape("service");
        // Their peaks are 60 percent of all CPUs. They request what they use at their peak, or half or twice as much.
        for number in 0..OWNERS {
            let request = REQUESTS[1 + number % 3];
            let uses = [0.5, 1.0, 2.0][number / 3 % 3] * request as f64 / 1000.0;
            self.template(request, uses, false, service, true);
        }
        let mut used = 0.0;
        let mut services = 0;
        while used < 0.60 * self.cpus() {
            let template = self.random.usize(..OWNERS);
            used += self.workload.templates[template].uses;
            services += 1;
            let at = TICK * 6 + self.random.u64(..300);
            let length = self.exponential(SERVICE_LENGTH);
            self.arrive(at, template, Some(length));
        }
        // Rollouts replace them, all day.
        self.keep_arriving(SERVICE_LENGTH / f64::from(services), |maker| {
            let length = maker.exponential(SERVICE_LENGTH);
            (maker.random.usize(..OWNERS), length)
        });
        let batch = ["batch", "build"].map(|name| self.shape(name));
        let jobs: Vec<usize> = (0..OWNERS)
            .map(|number| {
                let mean = [0.15, 0.5, 1.0][number % 3];
                self.template(500, mean, true, batch[number % 2], false)
            })
            .collect();
        // Of mean use, and half an hour long in the mean.
        let mean_cpu_seconds = 0.55 * 35.0 * 60.0;
        let mut at = 0.0;
        while at < self.workload.until as f64 {
            let hour = at / HOUR as f64 % 24.0;
            let share = if (6.0..22.0).contains(&hour) {
                0.10
            } else {
                0.40
            };
            let pause = mean_cpu_seconds / (share * self.cpus());
            at += -(1.0 - self.random.f64()).ln() * pause;
            let template = jobs[self.random.usize(..OWNERS)];
            let length = self.random.u64(10 * MINUTE..60 * MINUTE);
            self.arrive(super::truncated(at).unsigned_abs(), template, Some(length));
        }
    }
}
