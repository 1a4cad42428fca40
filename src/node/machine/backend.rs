//! Scheduling and eviction, which `run` and the agent implement differently.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::enforce::Effect;
use super::workload::Workload;
use crate::engine::plan::{Evict, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;

/// Disables scheduling and evicts: with a file and signals on a single machine, through the API server in a cluster.
///
/// All methods are called from the tick and must not block: an implementation that calls an API server passes the
/// request to a task and returns the outcome from [`Self::poll`]. They must not allocate when there is nothing to do
/// and nothing to report.
pub trait Backend {
    /// The state of an eviction that is saved across restarts.
    type Pending: Serialize + DeserializeOwned;

    /// Disables or enables scheduling. Level-triggered: called at every evaluation, and [`Scheduling::Unchanged`] leaves
    /// things unchanged. [`Scheduling::Enabled`] is also passed when everything is restored. Failures are reported
    /// ([`Effect::notice`]) and retried, at the latest at the next call.
    fn set_scheduling(&mut self, wanted: &Scheduling, now: BootTime, effects: &mut Vec<Effect>);

    /// Starts to evict a pod whose cgroup was just verified. Does nothing for a pod that is already being evicted.
    ///
    /// The outcome is reported, here or in a later [`Self::poll`], as one of
    ///
    /// | effect | the engine's reaction |
    /// |---|---|
    /// | [`Effect::evicting`] | in progress: the pod counts as released until the round has settled |
    /// | [`Effect::refused`] | nothing was released; the next candidate is taken, this one not before `until` |
    /// | [`Effect::gone`] | finished |
    fn evict(
        &mut self,
        evict: &Evict,
        workload: &Workload,
        now: BootTime,
        effects: &mut Vec<Effect>,
    );

    /// Reports outcomes of earlier calls and continues started evictions. Called at every tick.
    fn poll(&mut self, now: BootTime, effects: &mut Vec<Effect>);

    /// The pods with unfinished evictions.
    fn evicting(&self) -> impl Iterator<Item = &PodUid>;

    /// The state that the next process needs to continue these.
    fn pending(&self) -> Vec<Self::Pending>;

    /// Continues the evictions of an earlier process of this boot. Only called if some rule is enforced.
    fn resume(&mut self, pending: Vec<Self::Pending>);
}
