//! The order of victims: who is acted on first.

use std::cmp::Ordering;

use super::pod::Pod;

/// Compares two candidates with their use of the resource; `Less` is acted on first: elastic users, lower priority,
/// `BestEffort` before `Burstable` before `Guaranteed`, higher usage, younger, name. Namespace and UID make it total.
pub(super) fn compare((a, a_uses): (&Pod, u64), (b, b_uses): (&Pod, u64)) -> Ordering {
    b.elastic
        .cmp(&a.elastic)
        .then(a.priority.cmp(&b.priority))
        .then(a.qos.cmp(&b.qos))
        .then(b_uses.cmp(&a_uses))
        .then(b.started.cmp(&a.started))
        .then_with(|| a.name.cmp(&b.name))
        .then_with(|| a.namespace.cmp(&b.namespace))
        .then_with(|| a.uid.cmp(&b.uid))
}
