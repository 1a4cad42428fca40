//! Which pods an action may be applied to: what the `PodQOS` objects match and allow.

use super::metric::ActionKind;
use super::pod::{Pod, Reserved, UNIT_LABEL};
use super::policy::{Action, Allowed, Membership, PodPolicy, Rule, ScopeRequirement};

/// What the policies allow one action to do to one pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Permit {
    /// A `PodQOS` matches the pod, whatever it allows.
    pub(super) matched: bool,
    /// CPU throttling and reclaim of page cache.
    pub(super) throttle: bool,
    /// Eviction.
    pub(super) evict: bool,
}

impl Permit {
    pub(super) const fn allows(self, kind: ActionKind) -> bool {
        match kind {
            ActionKind::CpuThrottle | ActionKind::ForceGc => self.throttle,
            ActionKind::Eviction => self.evict,
        }
    }

    /// The union over all policies that match the pod.
    pub(super) fn of(policies: &[PodPolicy], pod: &Pod, action: &Action) -> Self {
        let mut permit = Self::default();
        for policy in policies.iter().filter(|policy| policy.matches(pod)) {
            permit.matched = true;
            for entry in policy.allowed.iter().map(|entry| Allowed::of(entry)) {
                permit.throttle |= entry.permits(&action.name, ActionKind::CpuThrottle);
                permit.evict |= entry.permits(&action.name, ActionKind::Eviction);
            }
        }
        permit
    }
}

impl Rule {
    /// Whether it acts on pods in that way, and `policies` allow it on the pod.
    pub fn may_act(&self, policies: &[PodPolicy], pod: &Pod, kind: ActionKind) -> bool {
        let permit = Permit::of(policies, pod, &self.action);
        permit.allows(kind) && !pod.protected && self.uses(kind)
    }
}

impl PodPolicy {
    /// Whether it lets any action touch the pods that it matches.
    pub(super) fn touches_pods(&self) -> bool {
        let allowed = self.allowed.iter().map(|entry| Allowed::of(entry));
        let is_scheduling = |entry: Allowed<'_>| matches!(entry, Allowed::Scheduling);
        !allowed.into_iter().all(is_scheduling)
    }

    /// Whether the labels and every scope of this policy match the pod. A policy with neither matches nothing, and
    /// reserved pods are matched only by a policy that names them.
    pub fn matches(&self, pod: &Pod) -> bool {
        let given = self.labels.is_some() || !self.scopes.is_empty();
        given
            && self
                .labels
                .as_ref()
                .is_none_or(|labels| labels.matches(&pod.labels))
            && self.scopes.iter().all(|scope| scope.matches(pod))
            && self.names_reserved(pod)
    }

    fn names_reserved(&self, pod: &Pod) -> bool {
        match pod.reserved {
            None => true,
            Some(Reserved::Namespace) => self.names_namespace(&pod.namespace),
            Some(Reserved::NamespaceOrUnit) => {
                self.names_namespace(&pod.namespace) || self.names_unit()
            }
        }
    }

    fn names_namespace(&self, namespace: &str) -> bool {
        self.scopes.iter().any(|scope| {
            matches!(scope, ScopeRequirement::Namespace(Membership::In(names)) if names.iter().any(|n| n == namespace))
        })
    }

    fn names_unit(&self) -> bool {
        let mut requirements = self.labels.iter().flat_map(|labels| &labels.requirements);
        requirements.any(|requirement| requirement.key() == UNIT_LABEL)
    }
}

impl ScopeRequirement {
    fn matches(&self, pod: &Pod) -> bool {
        match self {
            Self::Qos(classes) => classes.matches(|class| *class == pod.qos),
            Self::Priority(ranges) => {
                ranges.matches(|(low, high)| (*low..=*high).contains(&pod.priority))
            }
            Self::Namespace(names) => names.matches(|name| *name == pod.namespace),
        }
    }
}

impl<T> Membership<T> {
    fn matches(&self, is: impl Fn(&T) -> bool) -> bool {
        match self {
            Self::In(values) => values.iter().any(is),
            Self::NotIn(values) => !values.iter().any(is),
            Self::Exists => true,
            Self::DoesNotExist => false,
        }
    }
}

#[cfg(test)]
mod tests;
