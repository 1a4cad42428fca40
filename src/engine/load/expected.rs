//! What a pod is expected to use: what it has used since it started, at most over the last 5 minutes, and at the very
//! beginning what pods usually use of what they request.
//!
//! A 5-minute average lags twice: it shows a fifth of a pod that started a minute ago, and still shows one that has ended.
//! Every pod has a counter of its own, so neither has to be guessed:
//!
//! ```text
//! own      = CPU time of the pod over min(5 min, its age)
//! prior    = min(limit, 0.85 x request, or 250m without one)
//! weight   = min(1, age / 15 s)
//! expected = weight x own + (1 - weight) x prior
//! ```
//! The shares 0.85 of the CPU request and 0.70 of the memory request are those that Koordinator's `LoadAwareScheduling`
//! estimates with; the use of earlier pods of the same owner replaces them where it is known.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::owners::Ratios;
use super::window::{Intervals, RunTime, WINDOW, millicores, ticks};
use crate::engine::pod::Pod;
use crate::engine::sample::PodSample;
use crate::engine::time::BootTime;

/// From this age on only what was measured counts.
const MEASURED_FROM: Duration = Duration::from_secs(15);
/// A use over less time says nothing: the kernel updates the counters at its own ticks.
const MIN_MEASURED: Duration = Duration::from_millis(100);
/// Share of the CPU request that a pod is expected to use.
const CPU_SHARE: f64 = 0.85;
/// What a pod without a CPU request is expected to use, in millicores.
const CPU_WITHOUT_REQUEST: f64 = 250.0;
/// Share of the memory request that a pod is expected to use.
const MEMORY_SHARE: f64 = 0.70;
/// What a pod without a memory request is expected to use, in bytes.
const MEMORY_WITHOUT_REQUEST: f64 = (200 << 20) as f64;
/// A counter that grew by more than this multiple of what the CPUs can do is wrong.
const MAX_PLAUSIBLE: f64 = 1.05;
/// What the kernel may count into the next interval.
const TICK_TOLERANCE: Duration = Duration::from_millis(20);

/// CPU in millicores, or memory in bytes, that the pod is expected to use by its request, without its limit.
pub(super) fn usual(pod: &Pod) -> [f64; 2] {
    let cpu = match pod.cpu_request.0 {
        0 => CPU_WITHOUT_REQUEST,
        request => CPU_SHARE * request as f64,
    };
    let memory = match pod.resources.memory_request.0 {
        0 => MEMORY_WITHOUT_REQUEST,
        request => MEMORY_SHARE * request as f64,
    };
    [cpu, memory]
}

/// CPU in millicores that the pod is expected to use before it is measured.
pub(super) fn cpu_prior(pod: &Pod, ratios: Ratios) -> f64 {
    let [cpu, _] = usual(pod);
    let limit = pod.resources.cpu_limit.map(|limit| limit.0 as f64);
    (cpu * ratios.cpu()).min(limit.unwrap_or(f64::INFINITY))
}

/// Bytes that the pod is expected to use.
pub(super) fn memory_prior(pod: &Pod, ratios: Ratios) -> f64 {
    let [_, memory] = usual(pod);
    let limit = pod.resources.memory_limit.map(|limit| limit.0 as f64);
    (memory * ratios.memory()).min(limit.unwrap_or(f64::INFINITY))
}

/// When a pod started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Start {
    /// Before it was first seen, or not yet.
    #[default]
    Unknown,
    /// It was seen to start after the last sample.
    Now,
    /// Then.
    At(BootTime),
}

/// The measured use of one pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodUse {
    start: Start,
    /// The first reading since it started; `None` before.
    first: Option<BootTime>,
    /// The time of the last one.
    last: BootTime,
    /// Its CPU counter, in ticks.
    counter: u64,
    pub(super) run_time: RunTime,
    /// Memory that cannot be reclaimed, in bytes, at the last sample that had it.
    pub(super) memory: Option<u64>,
}

/// What happened to the node since the last sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleGap {
    /// The last sample; `None` without one, or after a gap.
    pub(super) before: Option<BootTime>,
    /// There was never a sample before.
    pub(super) is_first: bool,
    /// The CPUs online.
    pub(super) cpus: f64,
}

impl PodUse {
    /// Forgets everything that is measured over time, as after a gap.
    pub(super) fn restart(&mut self) {
        self.first = None;
        self.run_time.clear();
    }

    /// The pod was seen to start. Returns what it ran before, which is no part of its own use any more.
    pub(super) fn begin(&mut self) -> RunTime {
        self.start = Start::Now;
        self.first = self.first.map(|_| self.last);
        std::mem::take(&mut self.run_time)
    }

    /// Finds out when a running pod started. `age`: by the wall clock, if it is known; `is_first`: the pod was there at the
    /// first sample.
    pub(super) fn resolve_start(&mut self, at: BootTime, age: Option<Duration>, is_first: bool) {
        self.start = match (self.start, age) {
            (Start::At(start), _) => Start::At(start),
            (Start::Unknown, Some(age)) => Start::At(at.before(age)),
            (Start::Unknown, None) if is_first => Start::At(BootTime::default()),
            (Start::Unknown | Start::Now, _) => Start::At(at),
        };
    }

    /// Its age at `now`; zero if it has not started.
    pub(super) fn age(&self, now: BootTime) -> Duration {
        match self.start {
            Start::At(start) => now.since(start),
            Start::Unknown | Start::Now => Duration::ZERO,
        }
    }

    /// Adds a reading. Returns the ticks that it ran after the last sample and before this first reading.
    pub(super) fn add(
        &mut self,
        sample: &PodSample,
        step: SampleGap,
        intervals: &Intervals,
    ) -> u64 {
        if let Some(memory) = sample.memory_parts {
            self.memory = Some(memory.unreclaimable.0);
        }
        let Some(counter) = sample.cpu_nanos.map(ticks) else {
            return 0;
        };
        let at = sample.at;
        let Some(_) = self.first else {
            (self.first, self.last, self.counter) = (Some(at), at, counter);
            let born = step
                .before
                .filter(|before| self.age(at) <= at.since(*before) + Duration::from_secs(2));
            let plausible =
                born.is_some_and(|before| counter as f64 <= max_ticks(at.since(before), step.cpus));
            return if plausible { counter } else { 0 };
        };
        if at <= self.last {
            return 0;
        }
        let elapsed = at.since(self.last);
        // A counter that went back has started over: what it shows was used since.
        let used = counter.checked_sub(self.counter).unwrap_or(counter);
        let used = if used as f64 <= max_ticks(elapsed, step.cpus) {
            used
        } else {
            // It cannot be right, so the pod is taken to have gone on as before.
            as_before(self.own(intervals).unwrap_or_default(), elapsed)
        };
        self.run_time.add(used);
        (self.last, self.counter) = (at, counter);
        0
    }

    /// Its use over its own life, at most 5 minutes, in millicores; `None` before it was measured twice.
    pub(super) fn own(&self, intervals: &Intervals) -> Option<f64> {
        let first = self.first?;
        let elapsed = self.last.since(intervals.from().max(first));
        if elapsed < MIN_MEASURED {
            return None;
        }
        millicores(self.run_time.within(intervals, first), elapsed)
    }

    /// Its use over the last 15 to 30 s, in millicores; `None` before it was measured twice.
    pub(super) fn recent(&self, intervals: &Intervals) -> Option<f64> {
        let (used, begin) = self.run_time.recent(intervals);
        let elapsed = self.last.since(begin.max(self.first?));
        if elapsed < MIN_MEASURED {
            return None;
        }
        millicores(used, elapsed)
    }

    /// Its mean use since it started, in millicores, from the counter alone.
    fn lifetime_mean(&self, now: BootTime) -> Option<f64> {
        self.first?;
        millicores(self.counter as f64, self.age(now))
    }

    /// What it is expected to use, in millicores. `prior` is called only if it counts.
    pub(super) fn expected(
        &self,
        intervals: &Intervals,
        running: bool,
        prior: impl Fn() -> f64,
    ) -> f64 {
        let own = self.own(intervals);
        if !running {
            // Its init containers may use more than it will.
            return own.unwrap_or_default().max(prior());
        }
        let Some(own) = own else {
            return prior().max(self.lifetime_mean(intervals.at).unwrap_or_default());
        };
        let age = self.age(intervals.at);
        if age >= MEASURED_FROM {
            return own;
        }
        let weight = age.as_secs_f64() / MEASURED_FROM.as_secs_f64();
        weight * own + (1.0 - weight) * prior()
    }

    /// Whether what it used over the last 5 minutes is its use over 5 minutes.
    pub(super) fn is_settled(&self, intervals: &Intervals) -> bool {
        self.first
            .is_some_and(|first| intervals.at.since(first) >= WINDOW)
            && self.age(intervals.at) >= WINDOW
    }

    /// Whether it started so recently that its prior still counts.
    pub(super) fn is_young(&self, now: BootTime) -> bool {
        self.age(now) < MEASURED_FROM
    }

    /// Its ticks in the window.
    pub(super) fn used(&self, intervals: &Intervals) -> f64 {
        self.first
            .map_or(0.0, |first| self.run_time.within(intervals, first))
    }
}

/// As many ticks as the CPUs have.
fn max_ticks(elapsed: Duration, cpus: f64) -> f64 {
    let nanos = elapsed.as_nanos() as f64 * MAX_PLAUSIBLE + TICK_TOLERANCE.as_nanos() as f64;
    cpus * nanos / f64::from(1 << 14)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and far below 2^64"
)]
fn as_before(millicores: f64, elapsed: Duration) -> u64 {
    ticks((millicores / 1000.0 * elapsed.as_nanos() as f64) as u64)
}
