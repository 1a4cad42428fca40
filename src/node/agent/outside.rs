//! What the agent does beyond the node's cgroups.

use std::time::Duration;

use crate::engine::plan::{Evict, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::machine::enforce::Effect;
use crate::node::machine::outside::Outside;
use crate::node::machine::workload::Workload;

/// An eviction that was refused is not tried again before that.
const REFUSAL_PAUSE: Duration = Duration::from_mins(1);

/// The cluster, as the machine of this node acts on it.
#[derive(Debug, Default)]
pub struct Cluster {}

impl Outside for Cluster {
    type Pending = PodUid;

    fn keep_scheduling(&mut self, _: &Scheduling, _: BootTime, _: &mut Vec<Effect>) {}

    fn evict(&mut self, evict: &Evict, _: &Workload, now: BootTime, effects: &mut Vec<Effect>) {
        let until = now + REFUSAL_PAUSE;
        let words = "this version does not evict yet";
        effects.push(Effect::refused(&evict.uid, until, words));
    }

    fn poll(&mut self, _: BootTime, _: &mut Vec<Effect>) {}

    fn evicting(&self) -> impl Iterator<Item = &PodUid> {
        std::iter::empty()
    }

    fn pending(&self) -> Vec<PodUid> {
        Vec::new()
    }

    fn resume(&mut self, _: Vec<PodUid>) {}
}
