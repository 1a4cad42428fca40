//! The expected load against a plain reference over the whole history, second by second. A pod has as many MiB in use as millicores.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::pod;
use plimsoll::engine::Engine;
use plimsoll::engine::load::NodeLoad;
use plimsoll::engine::plan::{Plan, Unknown};
use plimsoll::engine::pod::{Pod, Resources};
use plimsoll::engine::sample::{CpuTimes, MemoryParts, NodeMemory, PodSample, Sample};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::{Bytes, MilliCpu};
use proptest::prelude::*;

const CPUS: u32 = 32;
const MEMORY: u64 = 1 << 36;
const WINDOW: u64 = 300;
/// Samples further apart make a gap.
const MAX_INTERVAL: u64 = 30;
/// Seconds since boot at the start of a history.
const BOOT: u64 = 1_000_000;

/// Millicores in each second of a life.
#[derive(Clone, Debug)]
struct Shape {
    base: u64,
    peak: u64,
    /// Seconds of a cycle, and how many of them are at the peak.
    cycle: u64,
    busy: u64,
}

impl Shape {
    fn at(&self, age: u64) -> u64 {
        if age % self.cycle < self.busy {
            self.peak
        } else {
            self.base
        }
    }

    fn steady(cpu: u64) -> Self {
        Self {
            base: cpu,
            peak: cpu,
            cycle: 1,
            busy: 0,
        }
    }
}

/// A pod of the history.
#[derive(Clone, Debug)]
struct Life {
    /// Seconds since the start of the history in which it runs.
    runs: Range<u64>,
    shape: Shape,
    request: u64,
    /// When its counter starts over.
    resets: Vec<u64>,
}

/// Everything that happens on a node.
#[derive(Clone, Debug)]
struct History {
    lives: Vec<Life>,
    system: Shape,
    /// When it is sampled.
    samples: Vec<u64>,
}

/// What a pod used up to each second: `used[t]` is the sum of the first `t` seconds of the history.
type Sums = Vec<u64>;

/// The plain reference: it knows every second.
struct Reference<'a> {
    history: &'a History,
    lives: Vec<Sums>,
    system: Sums,
}

fn sums(seconds: u64, used: impl Fn(u64) -> u64) -> Sums {
    let mut sum = 0;
    let mut sums = vec![0];
    for second in 0..seconds {
        sum += used(second);
        sums.push(sum);
    }
    sums
}

impl Life {
    /// The counter of its CPU time at this second, in millicore seconds. At the second of a reset it is read before it.
    fn counter(&self, sums: &Sums, at: u64) -> u64 {
        let resets = self.resets.iter().copied().filter(|it| *it < at);
        let reset = resets.max().unwrap_or_default();
        let sum = |second: u64| sums[usize::try_from(second).unwrap()];
        sum(at) - sum(reset)
    }
}

impl<'a> Reference<'a> {
    fn of(history: &'a History) -> Self {
        let end = history.samples.last().unwrap() + 1;
        let life = |life: &Life| {
            sums(end, |second| {
                if life.runs.contains(&second) {
                    life.shape.at(second - life.runs.start)
                } else {
                    0
                }
            })
        };
        Self {
            history,
            lives: history.lives.iter().map(life).collect(),
            system: sums(end, |second| history.system.at(second)),
        }
    }

    /// Whether the pod is listed at `at`: it has run for some time, and is not gone.
    fn lives(&self, life: usize, at: u64) -> bool {
        let runs = &self.history.lives[life].runs;
        runs.start < at && at <= runs.end
    }

    /// The memory in use at this second, in MiB: the system's, and that of each pod.
    fn memory(&self, at: u64) -> (u64, Vec<u64>) {
        let of = |(number, life): (usize, &Life)| {
            if self.lives(number, at) {
                life.shape.at(at - life.runs.start)
            } else {
                0
            }
        };
        let pods = self.history.lives.iter().enumerate().map(of).collect();
        (self.history.system.at(at), pods)
    }

    /// The memory that is expected to be used, in MiB: what is in use, and what pods younger than 5 minutes are expected to add.
    fn expected_memory(&self, at: u64) -> f64 {
        let (system, pods) = self.memory(at);
        let used = system + pods.iter().sum::<u64>();
        let alive = (0..pods.len()).filter(|life| self.lives(*life, at));
        let new = alive.filter(|life| self.age(*life, at) < WINDOW);
        let missing = new.map(|life| {
            let prior = match self.history.lives[life].request {
                0 => 200.0,
                request => 0.7 * request as f64,
            };
            (prior - pods[life] as f64).max(0.0)
        });
        used as f64 + missing.sum::<f64>()
    }

    /// Seconds since the sample in which a pod was first listed. One that was there at the very first sample is old.
    fn age(&self, life: usize, at: u64) -> u64 {
        match self.first_listed(life) {
            first if first == self.history.samples[0] => u64::MAX,
            first => at - first,
        }
    }

    fn first_listed(&self, life: usize) -> u64 {
        let start = self.history.lives[life].runs.start;
        let mut samples = self.history.samples.iter().copied();
        samples.find(|it| *it > start).unwrap()
    }

    /// Mean millicores over the seconds before `at`.
    fn mean(sums: &Sums, from: u64, at: u64) -> f64 {
        let index = |second: u64| usize::try_from(second).unwrap();
        let used = sums[index(at)] - sums[index(from)];
        used as f64 / (at - from) as f64
    }

    /// The first sample after the last gap, of all samples up to `at`.
    fn measured_from(&self, at: u64) -> u64 {
        let samples: Vec<u64> = self
            .history
            .samples
            .iter()
            .copied()
            .filter(|it| *it <= at)
            .collect();
        let mut from = samples[0];
        for pair in samples.windows(2) {
            if pair[1] - pair[0] > MAX_INTERVAL {
                from = pair[1];
            }
        }
        from
    }

    /// Expected millicores of one pod at a sample.
    fn pod(&self, life: usize, at: u64, measured: u64) -> f64 {
        let request = &self.history.lives[life].request;
        let prior = if *request == 0 {
            250.0
        } else {
            0.85 * *request as f64
        };
        let first = self.first_listed(life).max(measured);
        if first == at {
            return prior;
        }
        let from = first.max(at.saturating_sub(WINDOW));
        let own = Self::mean(&self.lives[life], from, at);
        let weight = (self.age(life, at) as f64 / 15.0).min(1.0);
        weight * own + (1.0 - weight) * prior
    }

    /// Expected millicores of the node.
    fn expected(&self, at: u64) -> f64 {
        let measured = self.measured_from(at);
        let from = measured.max(at.saturating_sub(WINDOW));
        let alive = (0..self.lives.len()).filter(|life| self.lives(*life, at));
        let pods: f64 = alive.map(|life| self.pod(life, at, measured)).sum();
        pods + Self::mean(&self.system, from, at)
    }

    /// How far the tracker may be off: it interpolates within the oldest interval, and does not see what a pod used between
    /// its last sample and its end, or a restart of its counter.
    fn tolerance(&self, at: u64) -> f64 {
        let measured = self.measured_from(at);
        let from = measured.max(at.saturating_sub(WINDOW));
        let last_sample = |before: u64| {
            let samples = self.history.samples.iter().copied();
            samples.filter(|it| *it <= before).max().unwrap_or_default()
        };
        let mut unseen = 0.0;
        for (life, sums) in self.history.lives.iter().zip(&self.lives) {
            let ends = life.resets.iter().chain([&life.runs.end]).copied();
            for end in ends.filter(|end| (from..at).contains(end)) {
                let seen = last_sample(end).max(measured);
                let began = seen.max(life.runs.start);
                if began < end {
                    // The pod itself may be younger than the window.
                    let length = at - from.max(life.runs.start);
                    unseen +=
                        Self::mean(sums, began, end) * (end - began) as f64 / length.max(1) as f64;
                }
            }
            unseen += self.mistaken(life, sums, from, at);
        }
        let ran = self
            .history
            .lives
            .iter()
            .filter(|life| life.runs.start < at && life.runs.end >= from);
        let peaks: u64 = ran.map(|life| life.shape.peak.max(life.shape.base)).sum();
        let system = self.history.system.peak.max(self.history.system.base);
        unseen + 0.04 * (peaks + system) as f64 + 5.0
    }

    /// Mean millicores of a pod whose counter, when it was read after a restart, had passed what it showed before: only the difference
    /// can be taken for its use, so that what it showed before is missed.
    fn mistaken(&self, life: &Life, sums: &Sums, from: u64, at: u64) -> f64 {
        let samples = self.history.samples.iter().filter(|it| **it <= at);
        let samples: Vec<u64> = samples
            .copied()
            .filter(|it| *it > life.runs.start)
            .collect();
        let pairs = samples.windows(2).filter(|pair| pair[1] > from);
        let missed = pairs.filter_map(|pair| {
            let restarted = life.resets.iter().any(|it| (pair[0]..pair[1]).contains(it));
            let [before, after] = [life.counter(sums, pair[0]), life.counter(sums, pair[1])];
            (restarted && after >= before).then_some(before)
        });
        let length = at.saturating_sub(from.max(life.runs.start));
        missed.sum::<u64>() as f64 / length.max(1) as f64
    }

    /// The mean of the 5 minutes before `at`, without the pods that have ended by `now`.
    fn lasting(&self, at: u64, now: u64) -> f64 {
        let from = at - WINDOW;
        let stays = (0..self.lives.len()).filter(|life| self.history.lives[*life].runs.end >= now);
        let pods: f64 = stays
            .map(|life| Self::mean(&self.lives[life], from, at))
            .sum();
        pods + Self::mean(&self.system, from, at)
    }

    /// The peak of memory counts with the lower of what is in use and its mean of 5 minutes: a mean rises late, and falls late.
    fn lasting_memory(&self, at: u64, now: u64) -> f64 {
        let (system, pods) = self.memory(at);
        let used = (system + pods.iter().sum::<u64>()) as f64;
        let ended = (0..pods.len()).filter(|life| self.history.lives[*life].runs.end < now);
        // There are as many MiB as millicores.
        self.total(at).min(used) - ended.map(|life| pods[life] as f64).sum::<f64>()
    }

    /// The mean of the 5 minutes before `at` of everything.
    fn total(&self, at: u64) -> f64 {
        self.lasting(at, 0)
    }

    /// Bounds of the peak of the last `window` seconds without the pods that have ended: at least what is left of the
    /// highest mean, at most the highest of what is left of each, also of a bucket that is `bucket` seconds older.
    fn peak(now: u64, window: u64, bucket: u64, lasting: impl Fn(u64, u64) -> f64) -> (f64, f64) {
        let times = |window: u64| (now.saturating_sub(window).max(WINDOW)..=now).step_by(20);
        let total = |at: u64| (lasting(at, 0), at);
        let highest = times(window).map(total).max_by(|a, b| a.0.total_cmp(&b.0));
        let least = highest.map_or(0.0, |(_, at)| lasting(at, now));
        let most = times(window + bucket)
            .map(|at| lasting(at, now))
            .fold(0.0, f64::max);
        (least, most)
    }

    /// Bounds of the history, which is weighted by hour and day.
    fn lasting_peak(now: u64, lasting: impl Fn(u64, u64) -> f64) -> (f64, f64) {
        let hour = Self::peak(now, 3600, 300, &lasting);
        let day = Self::peak(now, 86_400, 7200, &lasting);
        let weighted = |bounds: fn((f64, f64)) -> f64| (0.9 * bounds(hour)).max(0.8 * bounds(day));
        (weighted(|it| it.0), weighted(|it| it.1))
    }
}

/// The engine on a node with this history.
struct Node<'a> {
    history: &'a History,
    reference: Reference<'a>,
    engine: Engine,
    plan: Plan,
    /// The pods that are listed.
    listed: Vec<usize>,
}

impl<'a> Node<'a> {
    fn new(history: &'a History) -> Self {
        Self {
            history,
            reference: Reference::of(history),
            engine: Engine::new(),
            plan: Plan::default(),
            listed: Vec::new(),
        }
    }

    fn pod(&self, life: usize) -> Arc<Pod> {
        Arc::new(Pod {
            cpu_request: MilliCpu(self.history.lives[life].request),
            resources: Resources {
                memory_request: mebibytes(self.history.lives[life].request),
                ..Resources::default()
            },
            ..pod(&format!("pod-{life:03}"))
        })
    }

    fn read(&self, life: usize, at: u64) -> PodSample {
        let counter = self.history.lives[life].counter(&self.reference.lives[life], at);
        let (_, memory) = self.reference.memory(at);
        PodSample {
            cpu_nanos: Some(counter * 1_000_000),
            memory_parts: Some(MemoryParts {
                unreclaimable: mebibytes(memory[life]),
                ..MemoryParts::default()
            }),
            ..PodSample::new(self.pod(life).uid.clone(), time(at))
        }
    }

    fn sample(&self, at: u64) -> Sample {
        let sum = |sums: &Sums| sums[usize::try_from(at).unwrap()];
        let busy = sum(&self.reference.system) + self.reference.lives.iter().map(sum).sum::<u64>();
        let mut sample = Sample {
            at: time(at),
            pods: self
                .listed
                .iter()
                .map(|life| self.read(*life, at))
                .collect(),
            ..Sample::default()
        };
        sample.node.cpu = Some(CpuTimes {
            busy: busy * 1_000_000,
            idle: (u64::from(CPUS) * 1000 * at).saturating_sub(busy) * 1_000_000,
            online: CPUS,
        });
        let (system, pods) = self.reference.memory(at);
        sample.node.memory = Some(NodeMemory {
            total: Bytes(MEMORY),
            available: Bytes(MEMORY - mebibytes(system + pods.iter().sum::<u64>()).0),
            ..NodeMemory::default()
        });
        sample
    }

    fn step(&mut self, at: u64) -> Result<NodeLoad, Unknown> {
        let lives = 0..self.history.lives.len();
        let listed: Vec<usize> = lives
            .filter(|life| self.reference.lives(*life, at))
            .collect();
        if listed != self.listed {
            self.engine
                .set_pods(listed.iter().map(|life| self.pod(*life)).collect());
            self.listed = listed;
        }
        let sample = self.sample(at);
        self.engine.step(sample.at, &sample, &mut self.plan);
        self.engine.load()
    }
}

fn time(second: u64) -> BootTime {
    BootTime::default() + Duration::from_secs(BOOT + second)
}

fn mebibytes(count: u64) -> Bytes {
    Bytes(count << 20)
}

/// Of a share of the node's memory, in percent.
fn mebibytes_of(percent: f64) -> f64 {
    percent / 100.0 * (MEMORY >> 20) as f64
}

fn millicores(load: &NodeLoad) -> f64 {
    load.cpu.expected * f64::from(CPUS) * 10.0
}

/// Compares every sample.
fn compare(history: &History) -> Result<(), TestCaseError> {
    let mut node = Node::new(history);
    for at in &history.samples {
        let found = node.step(*at);
        let measured = node.reference.measured_from(*at);
        if *at == measured {
            prop_assert_eq!(found, Err(Unknown::Rebased));
            continue;
        }
        let found = found.unwrap();
        let memory = node.reference.expected_memory(*at);
        let found_memory = mebibytes_of(found.memory.expected);
        prop_assert!(
            (found_memory - memory).abs() < 0.01,
            "{at}: {found_memory} MiB, not {memory}"
        );
        let (found, wanted) = (millicores(&found), node.reference.expected(*at));
        let tolerance = node.reference.tolerance(*at);
        prop_assert!(
            (found - wanted).abs() <= tolerance,
            "{at}: {found}, not {wanted} +- {tolerance}"
        );
    }
    Ok(())
}

fn shape() -> impl Strategy<Value = Shape> {
    (0..800_u64, 0..4000_u64, 1..400_u64, 0..100_u64).prop_map(|(base, more, cycle, busy)| Shape {
        base,
        peak: base + more,
        cycle,
        busy: cycle * busy / 100,
    })
}

fn life(seconds: u64) -> impl Strategy<Value = Life> {
    let runs = (0..seconds, 5..seconds);
    let resets = proptest::collection::vec(1..seconds, 0..3);
    (runs, shape(), 0..3000_u64, resets).prop_map(|((start, length), shape, request, resets)| {
        // A third started before the first sample.
        let runs = start.saturating_sub(length / 2)..start + length;
        let resets = resets.into_iter().map(|after| runs.start + after).collect();
        Life {
            runs,
            shape,
            request,
            resets,
        }
    })
}

/// Samples each 1 to 10 seconds, with gaps.
fn samples(seconds: u64) -> impl Strategy<Value = Vec<u64>> {
    let steps = prop_oneof![
        30 => 1..4_u64,
        10 => 4..11_u64,
        1 => 11..200_u64,
    ];
    proptest::collection::vec(steps, 100..600).prop_map(move |steps| {
        let mut at = 0;
        let times = steps.into_iter().map(|step| {
            at += step;
            at
        });
        times.take_while(|at| *at < seconds).collect()
    })
}

fn history(seconds: u64) -> impl Strategy<Value = History> {
    let lives = proptest::collection::vec(life(seconds), 0..8);
    (lives, shape(), samples(seconds)).prop_map(|(lives, system, samples)| History {
        lives,
        system,
        samples,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn the_expected_load_is_that_of_the_reference(history in history(1500)) {
        compare(&history)?;
    }
}

/// The pod `life` starts and ends beside others. Samples are taken as the node takes them: of pods when the load needs them.
fn sampled_as_needed(history: &History, mut each: impl FnMut(u64, &mut Node<'_>)) {
    let mut node = Node::new(history);
    for at in history.samples.iter().copied() {
        if at == history.samples[0] || node.engine.load_needs(time(at)).pods || !node.is_current(at)
        {
            node.step(at).ok();
        }
        each(at, &mut node);
    }
}

impl Node<'_> {
    /// Whether no pod has started or ended since the last sample.
    fn is_current(&self, at: u64) -> bool {
        let lives = 0..self.history.lives.len();
        let listed: Vec<usize> = lives
            .filter(|life| self.reference.lives(*life, at))
            .collect();
        listed == self.listed
    }
}

#[test]
fn a_pod_counts_with_its_use_at_any_age_and_not_after_its_end() {
    let steady = |runs: Range<u64>, cpu| Life {
        runs,
        shape: Shape::steady(cpu),
        request: cpu * 100 / 85,
        resets: Vec::new(),
    };
    for cpu in [100, 1000, 8000] {
        for offset in 0..10 {
            let (start, end) = (1000 + offset, 1700 + offset);
            let history = History {
                lives: vec![steady(0..5000, 2000), steady(start..end, cpu)],
                system: Shape::steady(700),
                samples: (1..2400).collect(),
            };
            sampled_as_needed(&history, |at, node| {
                let runs = start + 5..=end;
                let has = if runs.contains(&at) { cpu as f64 } else { 0.0 };
                if at > 20 && !(start..start + 5).contains(&at) {
                    let found = millicores(&node.engine.load().unwrap()) - 2700.0;
                    assert!(
                        (found - has).abs() <= 0.05 * cpu as f64,
                        "{cpu} {offset} {at}: {found}, not {has}"
                    );
                }
            });
        }
    }
}

/// A request says nothing: between the request's share and the real use until it is 15 s old, then within 5 %.
#[test]
fn a_pod_of_unknown_use_counts_with_its_use_from_15_seconds_on() {
    for (request, cpu) in [(4000, 500), (100, 6000), (0, 3000)] {
        let new = Life {
            runs: 1000..1900,
            shape: Shape::steady(cpu),
            request,
            resets: Vec::new(),
        };
        let history = History {
            lives: vec![new],
            system: Shape::steady(700),
            samples: (1..2000).collect(),
        };
        let prior = if request == 0 {
            250.0
        } else {
            request as f64 * 0.85
        };
        sampled_as_needed(&history, |at, node| {
            if (1002..=1900).contains(&at) {
                let found = millicores(&node.engine.load().unwrap()) - 700.0;
                let wanted = cpu as f64;
                if at >= 1017 {
                    assert!(
                        (found - wanted).abs() <= wanted * 0.05,
                        "{at}: {found}, not {wanted}"
                    );
                } else {
                    let bounds = prior.min(wanted) * 0.99..=prior.max(wanted) * 1.01;
                    assert!(bounds.contains(&found), "{at}: {found}");
                }
            }
        });
    }
}

/// A day with working hours, nightly jobs, deployments that are rolled, and short jobs.
fn day() -> History {
    let hour = 3600;
    let mut lives = Vec::new();
    let mut add = |runs: Range<u64>, base: u64, peak: u64, cycle: u64, busy: u64| {
        lives.push(Life {
            runs,
            shape: Shape {
                base,
                peak,
                cycle,
                busy,
            },
            request: 1000,
            resets: Vec::new(),
        });
    };
    for number in 0..4 {
        let rolled = (9 + number) * hour + 700 * number;
        add(0..rolled, 300, 1500, 24 * hour, 8 * hour);
        add(rolled..30 * hour, 300, 1300, 900, 300);
    }
    add(2 * hour..4 * hour, 12_000, 12_000, 1, 0);
    add(13 * hour..14 * hour + 200, 6_000, 15_000, 700, 200);
    for number in 0..40 {
        let start = 20 * hour + number * 180;
        add(start..start + 150, 4000, 4000, 1, 0);
    }
    History {
        lives,
        system: Shape {
            base: 400,
            peak: 900,
            cycle: 3600,
            busy: 600,
        },
        samples: (1..26 * hour).step_by(10).collect(),
    }
}

#[test]
fn the_peaks_of_a_day_lose_the_pods_that_have_ended() {
    let history = day();
    let mut node = Node::new(&history);
    let mut relieved = 0;
    for at in history.samples.iter().copied() {
        let load = node.step(at);
        if at < 1800 || at % 1800 != 1 {
            continue;
        }
        let load = load.unwrap();
        // A mean is only recorded every 20 s, and a pod leaves up to 10 s to the system.
        let tolerance = 0.03 * 15_000.0;
        let is_within = |found: f64, (least, most): (f64, f64)| {
            let bounds = least - tolerance..=most + tolerance;
            assert!(bounds.contains(&found), "{at}: {found}, not {bounds:?}");
        };
        let reference = &node.reference;
        let cpu = Reference::lasting_peak(at, |at, now| reference.lasting(at, now));
        let found = load.cpu.history.unwrap() * f64::from(CPUS) * 10.0;
        is_within(found, cpu);
        let memory = Reference::lasting_peak(at, |at, now| reference.lasting_memory(at, now));
        is_within(mebibytes_of(load.memory.history.unwrap()), memory);
        let highest = (WINDOW..=at)
            .step_by(60)
            .map(|at| node.reference.total(at))
            .fold(0.0, f64::max);
        relieved += usize::from(found < 0.8 * highest - 4000.0);
        let wanted = node.reference.expected(at);
        let found = millicores(&load);
        assert!(
            (found - wanted).abs() <= node.reference.tolerance(at),
            "{at}: {found}, not {wanted}"
        );
    }
    assert!(
        relieved > 15,
        "{relieved}: the jobs of the night are taken off"
    );
}
