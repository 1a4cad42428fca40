//! The node's load: what it is expected to use, relative to where its rules act.
//!
//! ```text
//! expected CPU    = system over 5 min + running pods (own use, in their first 15 s blended with the prior)
//!                   + pods bound here that have not started (prior, for 5 min: one that starts no container may never run)
//! expected memory = in use now + what pods younger than 5 min are expected to add (`prior`: the estimate from their
//!                   requests)
//! load            = highest of max(expected, history) / load line, and pressure / threshold, of the enforced rules
//! ```
//! See [`expected`] for pods, [`history`] for the peaks of the last day, and [`line`] for the load. `system` is what the
//! node was busy with beside its pods: kernel threads, daemons, and time that the hypervisor took (steal).
//!
//! - A pod that we throttle counts with what it used before while it uses at least 90 % of its quota, since it wants more;
//!   else with its own use.
//! - A pod without a reading in the current sample counts as it was last known; its share of the node's busy time then
//!   counts as the system's as well. A counter that went back has started over; one that jumped counts as if the pod had
//!   gone on as before.
//! - Without two samples of the node within 30 s of each other, with an impossible CPU counter, or with no memory reading
//!   for 30 s, the load is unknown: never 0. After a gap of more than 30 s (a suspended machine, a stopped process)
//!   everything that is measured over time starts over, since the CPU counters may have stood still in it.
//! - Unknown memory of a pod counts as none used, so that all of its prior is still to come, and as no part of a peak.
//! - Without a wall clock, rules with hours count as in force.
//!
//! The tracker takes at most 40 KB for 110 pods and allocates only when the pods change. Its state is saved with the
//! windows: a process that continues within 30 s loses nothing; a later one starts to measure pods again (the load is unknown until
//! its second sample, and means are over the time since) but keeps peaks, parts and ratios. Without saved state it takes the
//! peaks of [`NodeWindows`] in full, as if no pod that was in them had ended.

mod expected;
mod history;
mod line;
mod owners;
#[cfg(test)]
mod tests;
mod window;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use self::expected::{PodUse, SampleGap, cpu_prior, memory_prior, usual};
pub use self::history::{DAY_WEIGHT, HOUR_WEIGHT};
use self::history::{Peaks, PodShares};
use self::line::{Capacity, ResourceUse};
pub use self::line::{
    DEFAULT_LINE, LoadLine, LoadTerm, NodeLoad, PressureLoad, ResourceLoad, load_lines,
};
use self::owners::{Owners, Ratios};
pub use self::window::WINDOW;
use self::window::{Intervals, RunTime, millicores, ticks};
use super::Engine;
use super::ledger::{ThrottleLedger, allowance};
use super::metric::Resource;
use super::plan::Unknown;
use super::pod::{Pod, PodUid};
use super::sample::{CpuTimes, Sample};
use super::time::BootTime;
use super::units::{Bytes, MilliCpu, Quota};
use super::values::memory;
use super::weight_share::Cpus;
use super::window::{MAX_INTERVAL, NodeWindows, Span};

/// The interval of samples of the pods.
const POD_INTERVAL: Duration = Duration::from_secs(10);
/// The same while a pod is young: with every sample of the node, which is usually taken each second.
const YOUNG_POD_INTERVAL: Duration = Duration::from_millis(900);
/// The interval at which memory that cannot be reclaimed is read: peaks include it.
const MEMORY_INTERVAL: Duration = Duration::from_mins(1);
/// The same while pods younger than 5 minutes still grow.
const NEW_MEMORY_INTERVAL: Duration = Duration::from_secs(5);
/// A throttled pod that uses at least this share of its quota wants more.
const WANTS_MORE: f64 = 0.9;

/// What the next sample needs beside what rules demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The pods.
    pub pods: bool,
    /// With the pods, their memory that cannot be reclaimed ([`super::Demand::pod_memory`]).
    pub memory: bool,
}

/// The state that is saved across restarts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadState {
    node: NodeState,
    pods: Vec<SavedPod>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedPod {
    uid: PodUid,
    used: PodUse,
    parts: PodShares,
}

/// The state of the whole node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeState {
    intervals: Intervals,
    /// Of all its CPUs.
    busy: RunTime,
    /// Of pods that have ended, and of the others before their first sample.
    untracked: RunTime,
    /// At the last sample with pods.
    cpu: Option<CpuTimes>,
    owners: Owners,
    peaks: Peaks,
}

/// One pod with a cgroup.
#[derive(Clone, Debug)]
struct Track {
    pod: Arc<Pod>,
    used: PodUse,
    parts: PodShares,
    /// Where its owner was found last.
    owner_hint: u8,
    /// The first sample since it is bound to the node.
    seen: Option<BootTime>,
}

/// A pod bound to the node that has no cgroup yet.
#[derive(Clone, Debug)]
struct PendingPod {
    pod: Arc<Pod>,
    /// The first sample since it is bound to the node.
    seen: Option<BootTime>,
}

/// A pod that has not started that long after it was first seen may never start, as with an image that cannot be pulled.
const START_TIMEOUT: Duration = WINDOW;

fn may_start(seen: Option<BootTime>, now: BootTime) -> bool {
    seen.is_none_or(|seen| now.since(seen) < START_TIMEOUT)
}

/// Memory of the node, in bytes.
#[derive(Clone, Copy, Debug)]
struct MemoryReading {
    at: BootTime,
    used: f64,
    total: f64,
}

/// Tracks what the node and its pods use.
#[derive(Debug, Default)]
pub(super) struct LoadTracker {
    node: NodeState,
    /// Sorted by UID.
    tracks: Vec<Track>,
    pending: Vec<PendingPod>,
    memory: Option<MemoryReading>,
    /// The last sample of the node: its time, and the wall clock.
    latest: BootTime,
    time: Option<Timestamp>,
    /// When the memory of the pods was last read.
    memory_read: Option<BootTime>,
}

impl NodeState {
    /// Advances to a sample; `None` if it is not new. Starts over if nothing is known of the time since the last one.
    fn advance(&mut self, at: BootTime, cpu: CpuTimes) -> Option<SampleGap> {
        let before = self.intervals.at;
        if self.cpu.is_some() && at == before {
            return None;
        }
        let elapsed = at.since(before);
        let last = self.cpu.replace(cpu);
        let is_first = last.is_none();
        let last = last.filter(|_| at > before && elapsed <= MAX_INTERVAL);
        let busy = last.and_then(|last| {
            cpu.busy_since(last, elapsed)?;
            ticks(cpu.busy).checked_sub(ticks(last.busy))
        });
        if let Some(busy) = busy {
            self.busy.add(busy);
            self.intervals.at = at;
        } else {
            self.intervals = Intervals::starting(at);
            self.busy.clear();
            self.untracked.clear();
        }
        Some(SampleGap {
            before: busy.map(|_| before),
            is_first,
            cpus: f64::from(cpu.online),
        })
    }

    fn is_valid(&self) -> bool {
        self.intervals.is_valid() && self.owners.is_valid()
    }

    /// Ticks in the window of everything that is no tracked pod's but the system's, if `pods` were tracked.
    fn system(&self, pods: f64) -> f64 {
        let start = self.intervals.start;
        let busy = self.busy.within(&self.intervals, start);
        (busy - self.untracked.within(&self.intervals, start) - pods).max(0.0)
    }
}

impl Track {
    fn new(pod: &Arc<Pod>) -> Self {
        Self {
            pod: Arc::clone(pod),
            used: PodUse::default(),
            parts: PodShares::default(),
            owner_hint: 0,
            seen: None,
        }
    }

    /// Whether it will use what is expected of it before it is measured.
    fn has_prior(&self, now: BootTime) -> bool {
        self.pod.running || may_start(self.seen, now)
    }

    /// Whether it started within the window, or has not started.
    fn is_new(&self, now: BootTime) -> bool {
        !self.pod.running || self.used.age(now) < WINDOW
    }
}

impl LoadTracker {
    /// Replaces the pods with a cgroup; they must be sorted by UID.
    pub(super) fn set_pods<'a>(&mut self, pods: impl ExactSizeIterator<Item = &'a Arc<Pod>>) {
        let mut old = std::mem::replace(&mut self.tracks, Vec::with_capacity(pods.len()))
            .into_iter()
            .peekable();
        for pod in pods {
            while let Some(ended) = old.next_if(|track| track.pod.uid < pod.uid) {
                self.end(&ended.used.run_time, &ended.parts);
            }
            let known = old.next_if(|track| track.pod.uid == pod.uid);
            let mut track = known.unwrap_or_else(|| Track {
                seen: self.pending_since(&pod.uid),
                ..Track::new(pod)
            });
            if pod.running && !track.pod.running {
                self.node.untracked.absorb(&track.used.begin());
            }
            track.pod = Arc::clone(pod);
            self.tracks.push(track);
        }
        old.for_each(|ended| self.end(&ended.used.run_time, &ended.parts));
    }

    /// Removes a pod that has ended.
    pub(super) fn remove(&mut self, uid: &PodUid) {
        if let Ok(index) = self.find(uid) {
            let ended = self.tracks.remove(index);
            self.end(&ended.used.run_time, &ended.parts);
        }
    }

    /// Replaces the pods without a cgroup.
    fn set_pending(&mut self, pods: Vec<Arc<Pod>>) {
        let pods = pods.into_iter().map(|pod| PendingPod {
            seen: self.pending_since(&pod.uid),
            pod,
        });
        self.pending = pods.collect();
    }

    fn pending_since(&self, uid: &PodUid) -> Option<BootTime> {
        let mut pending = self.pending.iter();
        pending.find(|pending| pending.pod.uid == *uid)?.seen
    }

    fn end(&mut self, run_time: &RunTime, parts: &PodShares) {
        self.node.untracked.absorb(run_time);
        self.node.peaks.end(parts);
    }

    fn find(&self, uid: &PodUid) -> Result<usize, usize> {
        self.tracks.binary_search_by(|track| track.pod.uid.cmp(uid))
    }

    /// Adds a sample. Without pods, although there are some, it was taken between two samples of them.
    pub(super) fn add(&mut self, sample: &Sample, windows: &NodeWindows, ledger: &ThrottleLedger) {
        self.latest = sample.at;
        self.time = sample.time;
        let pending = self.pending.iter_mut().map(|pending| &mut pending.seen);
        let tracks = self.tracks.iter_mut().map(|track| &mut track.seen);
        for seen in pending.chain(tracks) {
            seen.get_or_insert(sample.at);
        }
        if let Ok((used, total)) = memory(&sample.node) {
            let at = sample.at;
            self.memory = Some(MemoryReading { at, used, total });
        }
        let has_pods = self.tracks.is_empty() || !sample.pods.is_empty();
        let cpu = sample.node.cpu.filter(|cpu| has_pods && cpu.online > 0);
        let Some(step) = cpu.and_then(|cpu| self.node.advance(sample.at, cpu)) else {
            return;
        };
        if step.before.is_none() {
            self.tracks
                .iter_mut()
                .for_each(|track| track.used.restart());
        }
        self.add_pods(sample, step);
        while let Some(slot) = self.node.intervals.expire() {
            self.each_run_time(|run_time| run_time.expire(slot));
        }
        if self.node.intervals.is_due() {
            let slot = self.node.intervals.close();
            self.each_run_time(|run_time| run_time.close(slot));
            self.record_peaks(windows);
            self.learn(ledger);
        }
    }

    fn add_pods(&mut self, sample: &Sample, step: SampleGap) {
        for track in self.tracks.iter_mut().filter(|track| track.pod.running) {
            let age = age(&track.pod, sample.time);
            track.used.resolve_start(sample.at, age, step.is_first);
        }
        let mut next = 0;
        for entry in &sample.pods {
            let expected = self
                .tracks
                .get(next)
                .filter(|track| track.pod.uid == entry.uid);
            let found = match expected {
                Some(_) => Ok(next),
                None => self.find(&entry.uid),
            };
            let Ok(index) = found else { continue };
            next = index + 1;
            let track = &mut self.tracks[index];
            let before = track.used.add(entry, step, &self.node.intervals);
            self.node.untracked.add(before);
            if entry.memory_parts.is_some() {
                self.memory_read = Some(sample.at);
            }
        }
    }

    fn each_run_time(&mut self, mut change: impl FnMut(&mut RunTime)) {
        change(&mut self.node.busy);
        change(&mut self.node.untracked);
        for track in &mut self.tracks {
            change(&mut track.used.run_time);
        }
    }

    /// Records the averages of the last 5 minutes without the pods that have ended.
    fn record_peaks(&mut self, windows: &NodeWindows) {
        let NodeState {
            intervals,
            busy,
            untracked,
            cpu,
            peaks,
            ..
        } = &mut self.node;
        if peaks.is_empty() {
            peaks.seed(intervals.at, windows);
        }
        peaks.advance(
            intervals.at,
            self.tracks.iter_mut().map(|track| &mut track.parts),
        );
        let length = intervals.length();
        if let Some(cpu) = cpu.filter(|_| length * 2 >= WINDOW) {
            let percent =
                |ticks: f64| millicores(ticks, length).map_or(0.0, |used| cpu.percent(used));
            let start = intervals.start;
            let tracked = busy.within(intervals, start) - untracked.within(intervals, start);
            let parts = self.tracks.iter_mut().map(|track| {
                let part = percent(track.used.used(intervals));
                (&mut track.parts, part)
            });
            peaks.record(Resource::Cpu, percent(tracked), parts);
        }
        let average = windows
            .of(Resource::Memory)
            .average(Span::FiveMinutes)
            .value;
        if let (Some(memory), Some(average)) = (self.memory, average) {
            let percent = |bytes: f64| bytes / memory.total * 100.0;
            let parts = self.tracks.iter_mut().map(|track| {
                let part = percent(track.used.memory.unwrap_or_default() as f64);
                (&mut track.parts, part)
            });
            // The average still has the memory of pods that have ended, and the use may be a short peak.
            peaks.record(Resource::Memory, average.min(percent(memory.used)), parts);
        }
    }

    /// Learns what pods of the same owner use.
    fn learn(&mut self, ledger: &ThrottleLedger) {
        self.node.owners.next_round();
        for track in &mut self.tracks {
            let Some(owner) = &track.pod.owner else {
                continue;
            };
            let is_usual = track.pod.running && ledger.measured(&track.pod.uid).is_none();
            if is_usual && track.used.is_settled(&self.node.intervals) {
                let [cpu, memory] = usual(&track.pod);
                let seen = [
                    track.used.own(&self.node.intervals).map(|own| own / cpu),
                    track.used.memory.map(|used| used as f64 / memory),
                ];
                self.node.owners.learn(owner, &mut track.owner_hint, seen);
            }
        }
    }

    /// Pods bound to the node that are not among those with a cgroup and may still start.
    fn pending(&self) -> impl Iterator<Item = &Pod> {
        self.pending
            .iter()
            .filter(|pending| may_start(pending.seen, self.latest))
            .map(|pending| &*pending.pod)
            .filter(|pod| self.find(&pod.uid).is_err())
    }

    /// Expected CPU of the node in millicores, and the part of newcomers that a 5-minute average does not show.
    fn cpu(&self, ledger: &ThrottleLedger) -> [f64; 2] {
        let NodeState {
            intervals, owners, ..
        } = &self.node;
        let length = intervals.length();
        let rate = |ticks: f64| millicores(ticks, length).unwrap_or_default();
        let prior = |pod: &Pod| cpu_prior(pod, owners.of(pod.owner.as_ref()));
        let (mut total, mut newcomers, mut tracked) = (0.0, 0.0, 0.0);
        for track in &self.tracks {
            let used = track.used.used(intervals);
            let has_prior = track.has_prior(self.latest);
            let prior = || if has_prior { prior(&track.pod) } else { 0.0 };
            let expected = track.used.expected(intervals, track.pod.running, prior);
            let expected = match throttled_demand(track, ledger, intervals) {
                Some(before) => expected.max(before),
                None => expected,
            };
            tracked += used;
            total += expected;
            if track.is_new(intervals.at) {
                newcomers += (expected - rate(used)).max(0.0);
            }
        }
        let pending: f64 = self.pending().map(prior).sum();
        total += rate(self.node.system(tracked));
        [total + pending, newcomers + pending]
    }

    /// Memory, in bytes, that recently started pods are expected to use and do not use yet.
    fn missing_memory(&self) -> f64 {
        let prior = |pod: &Pod| memory_prior(pod, self.node.owners.of(pod.owner.as_ref()));
        let new = self
            .tracks
            .iter()
            .filter(|track| track.is_new(self.node.intervals.at) && track.has_prior(self.latest));
        let lacks = new.map(|track| {
            let used = track.used.memory.unwrap_or_default();
            (prior(&track.pod) - used as f64).max(0.0)
        });
        lacks.sum::<f64>() + self.pending().map(prior).sum::<f64>()
    }

    /// The CPUs over the last 15 to 30 s; `None` where [`Engine::load`] is unknown.
    pub(super) fn recent_cpus(&self) -> Option<Cpus> {
        let NodeState {
            intervals,
            busy,
            cpu,
            ..
        } = &self.node;
        let is_stale = self.latest.since(intervals.at) > MAX_INTERVAL;
        if is_stale || intervals.at == intervals.start {
            return None;
        }
        let (used, begin) = busy.recent(intervals);
        Some(Cpus {
            online: f64::from((*cpu)?.online),
            busy: millicores(used, intervals.at.since(begin))? / 1000.0,
        })
    }

    /// The millicores that a pod used in that time, none where it has only started; `None` if they are not known.
    pub(super) fn recent_use(&self, uid: &PodUid) -> Option<f64> {
        let used = &self.tracks[self.find(uid).ok()?].used;
        let intervals = &self.node.intervals;
        let is_new = || used.is_young(intervals.at).then_some(0.0);
        used.recent(intervals).or_else(is_new)
    }

    /// What the next sample needs.
    fn needs(&self, now: BootTime) -> Needs {
        let intervals = &self.node.intervals;
        let since = now.since(intervals.at);
        let running = || self.tracks.iter().filter(|track| track.pod.running);
        let is_young = |track: &Track| track.used.is_young(intervals.at);
        let waits = since >= YOUNG_POD_INTERVAL
            && (intervals.at == intervals.start || running().any(is_young));
        let interval = if running().any(|track| track.is_new(now)) {
            NEW_MEMORY_INTERVAL
        } else {
            MEMORY_INTERVAL
        };
        Needs {
            pods: !self.tracks.is_empty() && (waits || since >= POD_INTERVAL),
            memory: self
                .memory_read
                .is_none_or(|read| now.since(read) >= interval),
        }
    }

    /// The use of `[CPU, memory]`, and the capacity.
    ///
    /// # Errors
    /// See [`Engine::load`].
    fn used(
        &self,
        windows: &NodeWindows,
        ledger: &ThrottleLedger,
    ) -> Result<([ResourceUse; 2], Capacity), Unknown> {
        let cpu = self.node.cpu.ok_or(Unknown::Missing)?;
        let memory = self.memory.ok_or(Unknown::Missing)?;
        let intervals = &self.node.intervals;
        if self.latest.since(intervals.at.min(memory.at)) > MAX_INTERVAL {
            return Err(Unknown::Stale);
        }
        if intervals.at == intervals.start {
            return Err(Unknown::Rebased);
        }
        let percent = |bytes: f64| bytes / memory.total * 100.0;
        let history = |resource| self.node.peaks.history(resource, windows);
        let [expected, newcomers] = self.cpu(ledger).map(|used| cpu.percent(used));
        let missing = self.missing_memory();
        let used = [
            ResourceUse {
                expected,
                newcomers,
                history: history(Resource::Cpu),
            },
            ResourceUse {
                expected: percent(memory.used + missing),
                newcomers: percent(missing),
                history: history(Resource::Memory),
            },
        ];
        let capacity = Capacity {
            cpu: f64::from(cpu.online) * 1000.0,
            memory: memory.total,
        };
        Ok((used, capacity))
    }
}

/// What a throttled pod used before, in millicores, if it wants more than its quota.
fn throttled_demand(track: &Track, ledger: &ThrottleLedger, intervals: &Intervals) -> Option<f64> {
    let throttled = ledger.get(&track.pod.uid)?;
    let ratio = throttled.depth().ratio;
    let Quota::Limit(quota) = allowance(&throttled.target_cgroups, &track.pod, ratio) else {
        return None;
    };
    let recent = track.used.recent(intervals);
    let wants_more = recent.is_none_or(|recent| recent >= WANTS_MORE * quota.0 as f64);
    wants_more.then_some(throttled.base.0 as f64)
}

/// How long ago the pod was started by the wall clock, if both are known.
fn age(pod: &Pod, time: Option<Timestamp>) -> Option<Duration> {
    let seconds = time?.as_second().saturating_sub(pod.started).max(0);
    (pod.started > 0).then(|| Duration::from_secs(seconds.unsigned_abs()))
}

/// What a pod is expected to use before it has started: CPU, and memory.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "amounts of a pod, not negative"
)]
pub fn expected_of(pod: &Pod) -> (MilliCpu, Bytes) {
    let ratios = Ratios::default();
    let (cpu, memory) = (cpu_prior(pod, ratios), memory_prior(pod, ratios));
    (MilliCpu(cpu.round() as u64), Bytes(memory as u64))
}

impl Engine {
    /// The node's load at the last sample, with its terms. Takes time in proportion to the pods, and does not allocate.
    ///
    /// # Errors
    /// - [`Unknown::Missing`]: there was no sample of the node's CPU and memory yet.
    /// - [`Unknown::Rebased`]: there was one sample only since the start, or since a gap of more than 30 s.
    /// - [`Unknown::Stale`]: the last sample of CPU (with the pods, if there are any) or of memory is more than 30 s older
    ///   than the last sample.
    pub fn load(&self) -> Result<NodeLoad, Unknown> {
        let tracker = &self.load;
        let (used, capacity) = tracker.used(&self.windows, &self.ledger)?;
        let at = tracker.node.intervals.at;
        Ok(line::load(at, used, capacity, &self.runs, tracker.time))
    }

    /// Replaces the pods that are bound to this node but have no cgroup yet. They will use what is expected of them,
    /// unless they do not start within 5 minutes.
    pub fn set_pending_pods(&mut self, pods: Vec<Arc<Pod>>) {
        self.load.set_pending(pods);
    }

    /// What the sample at `now` needs for [`Self::load`].
    pub fn load_needs(&self, now: BootTime) -> Needs {
        self.load.needs(now)
    }

    /// What [`Self::load`] is computed from, to be saved across a restart.
    pub fn load_state(&self) -> LoadState {
        let saved = self.load.tracks.iter().map(|track| SavedPod {
            uid: track.pod.uid.clone(),
            used: track.used.clone(),
            parts: track.parts.clone(),
        });
        LoadState {
            node: self.load.node.clone(),
            pods: saved.collect(),
        }
    }

    /// Continues from the state of an earlier process of the same boot. Call it after [`Self::set_pods`]: saved pods that are
    /// not there have ended. An invalid state is ignored.
    pub fn adopt_load(&mut self, mut state: LoadState) {
        if !state.node.is_valid() {
            return;
        }
        state.node.busy.resume();
        state.node.untracked.resume();
        let tracker = &mut self.load;
        tracker.node = state.node;
        for mut saved in state.pods {
            saved.used.run_time.resume();
            match tracker.find(&saved.uid) {
                Ok(index) => {
                    let track = &mut tracker.tracks[index];
                    (track.used, track.parts) = (saved.used, saved.parts);
                }
                Err(_) => tracker.end(&saved.used.run_time, &saved.parts),
            }
        }
    }
}
