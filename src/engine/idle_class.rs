//! Whether the idle class may be used on this node.
//!
//! The kubelet of Kubernetes 1.36 and 1.37 copies each pod's CPU weight into its `status.resources`. The weight of an idle
//! cgroup reads 0, which becomes a request of 1.8e12 CPUs, and the kubelet rejects every new pod that requests CPU. An older
//! kubelet, or one whose feature gate `InPlacePodLevelResourcesVerticalScaling` is off, has no such field.

use std::time::Duration;

use super::time::BootTime;
use super::track::{Tracked, TrackedPods};

/// The idle class is used again this long after the last running pod had `status.resources`, so that a restart of the
/// kubelet does not move pods back and forth.
const HOLD: Duration = Duration::from_mins(10);

/// When the idle class may be used again.
#[derive(Debug, Default)]
pub(super) struct IdleClass {
    unsafe_until: Option<BootTime>,
}

impl IdleClass {
    /// Looks at the status of the pods.
    pub(super) fn observe(&mut self, now: BootTime, pods: &TrackedPods) {
        if is_reported(pods) {
            self.unsafe_until = Some(now + HOLD);
        }
    }

    /// Whether the pods say since the last evaluation, at `now`, that it is unsafe.
    pub(super) fn became_unsafe(&self, now: BootTime, pods: &TrackedPods) -> bool {
        !self.is_unsafe(now) && is_reported(pods)
    }

    /// When to look again after an evaluation at `now`.
    pub(super) fn due(&self, now: BootTime) -> Option<BootTime> {
        self.unsafe_until.filter(|until| now < *until)
    }

    pub(super) fn is_unsafe(&self, now: BootTime) -> bool {
        self.unsafe_until.is_some_and(|until| now < until)
    }
}

fn is_reported(pods: &TrackedPods) -> bool {
    let reports = |it: &Tracked| it.pod.running && it.pod.resources_reported;
    pods.all().iter().any(reports)
}
