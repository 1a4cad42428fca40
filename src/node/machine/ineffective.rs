//! Why an action has no effect: what the engine observed, and the cause as far as this machine shows it.

use std::fs;
use std::path::Path;

use super::Machine;
use super::backend::Backend;
use crate::engine::plan::Ineffective;
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;

/// An action without effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IneffectiveAction {
    /// The pod's UID.
    pub uid: PodUid,
    /// `namespace/name` of the pod.
    pub pod: String,
    /// The rule that decided it.
    pub rule: RuleId,
    /// What was observed, and why.
    pub cause: Cause,
}

/// What was observed, and why: the reason and message of the condition `ActionIneffective`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// One word, in `CamelCase`.
    pub reason: &'static str,
    /// A sentence without the pod's name.
    pub message: String,
}

/// What this machine shows about a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The attached `sched_ext` scheduler.
    pub scheduler: Option<String>,
    /// The pod's cgroup exists.
    pub has_cgroup: bool,
    /// Why the last reclaim on this machine failed.
    pub reclaim_failure: Option<String>,
}

/// The reasons of [`Cause`].
pub mod reason {
    /// Another writer keeps changing what we set.
    pub const CONTESTED: &str = "Contested";
    /// A `sched_ext` scheduler is attached.
    pub const SCHED_EXT: &str = "SchedExt";
    /// The pod is not in the cgroup where the layout expects it.
    pub const WRONG_LAYOUT: &str = "WrongLayout";
    /// The quota is in the kernel's file, but the pod uses more.
    pub const NOT_ENFORCED: &str = "QuotaNotEnforced";
    /// The pod's usage of CPU cannot be read.
    pub const NOT_MEASURED: &str = "NotMeasured";
    /// Reclaim freed nothing.
    pub const NOTHING_RECLAIMED: &str = "NothingReclaimed";
    /// An evicted pod is not terminating.
    pub const NOT_TERMINATING: &str = "NotTerminating";
    /// Two evictions in a row did not lower the metric.
    pub const NO_EFFECT: &str = "NoEffect";
    /// All of them.
    pub const ALL: [&str; 8] = [
        CONTESTED,
        SCHED_EXT,
        WRONG_LAYOUT,
        NOT_ENFORCED,
        NOT_MEASURED,
        NOTHING_RECLAIMED,
        NOT_TERMINATING,
        NO_EFFECT,
    ];
}

impl Cause {
    /// The cause of what the engine observed.
    pub fn of(observed: Ineffective, evidence: &Evidence) -> Self {
        let (reason, message) = match observed {
            Ineffective::Contested => (
                reason::CONTESTED,
                "another writer keeps changing its cgroup files".to_owned(),
            ),
            Ineffective::QuotaExceeded { uses, quota } => {
                let (reason, why) = why_not_enforced(evidence);
                (
                    reason,
                    format!("it uses {uses} of CPU with a quota of {quota}: {why}"),
                )
            }
            Ineffective::NotMeasured if !evidence.has_cgroup => return Self::no_cgroup(),
            Ineffective::NotMeasured => (
                reason::NOT_MEASURED,
                "its CPU usage cannot be read".to_owned(),
            ),
            Ineffective::NothingReclaimed => (
                reason::NOTHING_RECLAIMED,
                evidence.reclaim_failure.as_ref().map_or_else(
                    || "reclaiming its page cache freed nothing".to_owned(),
                    |why| format!("no page cache can be reclaimed: {why}"),
                ),
            ),
            Ineffective::NotTerminating => (
                reason::NOT_TERMINATING,
                "its eviction was accepted, but it is not terminating".to_owned(),
            ),
        };
        Self { reason, message }
    }

    /// Evictions of a rule did not lower its metric.
    pub fn no_effect() -> Self {
        Self {
            reason: reason::NO_EFFECT,
            message: "two evictions in a row did not lower the metric, so the rule evicts no more until it is Normal: what \
                      waits may want more than the node has"
                .to_owned(),
        }
    }

    /// The pod has no cgroup where the layout expects it.
    pub fn no_cgroup() -> Self {
        Self {
            reason: reason::WRONG_LAYOUT,
            message: "it has no cgroup where the kubelet's pods are expected: check the layout (docs/install.md)"
                .to_owned(),
        }
    }
}

impl<B: Backend> Machine<B> {
    /// The actions without effect, with their causes.
    pub fn ineffective(&self) -> Vec<IneffectiveAction> {
        let mut actions = self.engine.ineffective().peekable();
        if actions.peek().is_none() {
            return Vec::new();
        }
        let scheduler = attached_scheduler(&self.settings.sys_root);
        let actions = actions.filter_map(|(uid, rule, observed)| {
            Some(IneffectiveAction {
                uid: uid.clone(),
                pod: self.name(uid)?,
                rule: rule.clone(),
                cause: self.cause(uid, observed, scheduler.clone()),
            })
        });
        actions.collect()
    }

    pub(super) fn cause(
        &self,
        uid: &PodUid,
        observed: Ineffective,
        scheduler: Option<String>,
    ) -> Cause {
        let workload = self.pods.get(uid);
        let workload = workload.filter(|it| it.exists(&self.settings.hierarchy));
        let evidence = Evidence {
            scheduler,
            has_cgroup: workload.is_some(),
            reclaim_failure: self.actuators.reclaim_failure().map(str::to_owned),
        };
        Cause::of(observed, &evidence)
    }
}

fn why_not_enforced(evidence: &Evidence) -> (&'static str, String) {
    match &evidence.scheduler {
        Some(scheduler) => (
            reason::SCHED_EXT,
            format!("the sched_ext scheduler `{scheduler}` is attached, and does not enforce it"),
        ),
        None => (
            reason::NOT_ENFORCED,
            "the kernel does not enforce it, and shows no cause".to_owned(),
        ),
    }
}

/// The attached `sched_ext` scheduler, from `<sys_root>/kernel/sched_ext`.
pub fn attached_scheduler(sys_root: &Path) -> Option<String> {
    let read = |file: &str| fs::read_to_string(sys_root.join("kernel/sched_ext").join(file));
    let state = read("state").ok()?;
    (state.trim() == "enabled").then(|| {
        let name = read("root/ops").unwrap_or_default();
        match name.trim() {
            "" => "unknown".to_owned(),
            name => name.to_owned(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::units::MilliCpu;

    fn exceeded(evidence: &Evidence) -> Cause {
        let observed = Ineffective::QuotaExceeded {
            uses: MilliCpu(1500),
            quota: MilliCpu(500),
        };
        Cause::of(observed, evidence)
    }

    #[test]
    fn an_exceeded_quota_names_its_cause() {
        let cause = exceeded(&Evidence::default());
        assert_eq!(cause.reason, reason::NOT_ENFORCED);
        assert_eq!(
            cause.message,
            "it uses 1500m of CPU with a quota of 500m: the kernel does not enforce it, and shows no cause"
        );
        let attached = Evidence {
            scheduler: Some("simple".to_owned()),
            ..Evidence::default()
        };
        let cause = exceeded(&attached);
        assert_eq!(cause.reason, reason::SCHED_EXT);
        assert!(cause.message.contains("`simple`"), "{}", cause.message);
    }

    #[test]
    fn the_failure_of_a_reclaim_is_named() {
        let evidence = Evidence {
            reclaim_failure: Some("cgroup v1 has no memory.reclaim".to_owned()),
            ..Evidence::default()
        };
        let cause = Cause::of(Ineffective::NothingReclaimed, &evidence);
        assert_eq!(cause.reason, reason::NOTHING_RECLAIMED);
        assert_eq!(
            cause.message,
            "no page cache can be reclaimed: cgroup v1 has no memory.reclaim"
        );
    }

    #[test]
    fn the_attached_scheduler_is_read_from_sysfs() {
        let sys = tempfile::tempdir().unwrap();
        let dir = sys.path().join("kernel/sched_ext");
        assert_eq!(attached_scheduler(sys.path()), None, "an older kernel");
        fs::create_dir_all(dir.join("root")).unwrap();
        fs::write(dir.join("state"), "disabled\n").unwrap();
        assert_eq!(attached_scheduler(sys.path()), None);
        fs::write(dir.join("state"), "enabled\n").unwrap();
        assert_eq!(attached_scheduler(sys.path()).as_deref(), Some("unknown"));
        fs::write(dir.join("root/ops"), "simple\n").unwrap();
        assert_eq!(attached_scheduler(sys.path()).as_deref(), Some("simple"));
    }
}
