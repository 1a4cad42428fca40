//! What reaches beyond the node's cgroups, which `run` and the agent do each in their own way.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::enforce::Effect;
use super::workload::Workload;
use crate::engine::plan::{Evict, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;

/// Keeps new work away and evicts: a file and signals on a single machine, the API server in a cluster.
///
/// Everything here is called from within the tick, by the one thread that runs it. Nothing may wait: whoever has to
/// ask an API server hands the wish to a task, and tells in [`Self::poll`] what came of it. Nothing may allocate
/// while there is nothing to do and nothing to tell.
pub trait Outside {
    /// What is kept of an eviction over a restart.
    type Pending: Serialize + DeserializeOwned;

    /// Keeps new work away, or welcomes it, as `wanted` says. It is a level: every evaluation says it anew, and
    /// [`Scheduling::Hold`] leaves things as they are. [`Scheduling::Enabled`] also comes when everything is put
    /// back. What fails is told ([`Effect::trouble`]) and tried again by itself or at the next call.
    fn keep_scheduling(&mut self, wanted: &Scheduling, now: BootTime, effects: &mut Vec<Effect>);

    /// Begins to evict a pod whose cgroup is, at this moment, the one that was found for it. Never twice at a time:
    /// of a pod that is being evicted already nothing needs to be said.
    ///
    /// What came of it is told, here or in a later [`Self::poll`], as one of
    ///
    /// | effect | what the engine makes of it |
    /// |---|---|
    /// | [`Effect::evicting`] | it goes on: the pod counts as released until the round has settled |
    /// | [`Effect::refused`] | nothing was released; the next candidate is taken, this one not before `until` |
    /// | [`Effect::gone`] | it is over |
    fn evict(
        &mut self,
        evict: &Evict,
        workload: &Workload,
        now: BootTime,
        effects: &mut Vec<Effect>,
    );

    /// Tells what came of earlier calls, and goes on with what was begun. Called at every tick.
    fn poll(&mut self, now: BootTime, effects: &mut Vec<Effect>);

    /// The evictions that have begun and not ended.
    fn evicting(&self) -> impl Iterator<Item = &PodUid>;

    /// What the next process needs to go on with these.
    fn pending(&self) -> Vec<Self::Pending>;

    /// Goes on with the evictions that an earlier process of this boot began. Only called where some rule acts.
    fn resume(&mut self, pending: Vec<Self::Pending>);
}
