//! What the samples must contain for the rules in force.

use super::metric::{ActionKind, Metric, RankBy};
use super::policy::Probe;
use super::run::Run;

/// What the next samples must contain; the sampler reads nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one flag for each file that may be left unread"
)]
pub struct Demand {
    /// `/proc/loadavg`
    pub load: bool,
    /// `/proc/pressure/{cpu,memory,io}`
    pub pressure: [bool; 3],
    /// `/proc/diskstats`
    pub disks: bool,
    /// `/proc/1/net/dev`
    pub interfaces: bool,
    /// `memory.stat` of every pod.
    pub pod_memory: bool,
    /// `cpu.pressure`, `memory.pressure` and `io.pressure` of every pod, where the files exist.
    pub pod_pressure: bool,
    /// `io.stat` of every pod, where the file exists.
    pub pod_io: bool,
    /// `procs_running` and `procs_blocked` of `/proc/stat`.
    pub tasks: bool,
    /// The quota file of every target cgroup.
    pub pod_quota: bool,
    /// `schedstat` of every container's threads.
    pub run_delay: bool,
    /// `cpu.stat` of every container.
    pub throttled: bool,
    /// HTTP probes.
    pub probes: Vec<Probe>,
}

impl Demand {
    /// Adds what a rule needs.
    pub(super) fn add(&mut self, run: &Run) {
        match run.rule.metric {
            Metric::Load(_) => (self.load, self.tasks) = (true, true),
            Metric::Pressure { kind, .. } => self.pressure[kind as usize] = true,
            Metric::Disk(_) => self.disks = true,
            Metric::Interface(_) => self.interfaces = true,
            Metric::RunQueueTime => self.run_delay = true,
            Metric::ThrottledRatio => self.throttled = true,
            Metric::PodStall(_) | Metric::Protected(_) => self.pod_pressure = true,
            _ => {}
        }
        let acts = |kind: ActionKind| run.rule.uses(kind);
        let ranks = acts(ActionKind::CpuThrottle) || acts(ActionKind::Eviction);
        let rank_by = run.rule.metric.rank_by();
        self.pod_memory |= acts(ActionKind::ForceGc) || (ranks && rank_by != RankBy::Cpu);
        self.pod_io |= ranks && rank_by == RankBy::Io;
        self.pod_quota |= acts(ActionKind::CpuThrottle);
        if let (Metric::Probe(_), Some(probe)) = (&run.rule.metric, &run.rule.probe)
            && !self.probes.contains(probe)
        {
            self.probes.push(probe.clone());
        }
    }
}
