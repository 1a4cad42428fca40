//! Carries out a plan with the actuators, and converts their outcomes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use super::backend::Backend;
use super::workload::Workload;
use crate::engine::plan::{Feedback, Plan, PodThrottle, TargetCgroup};
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;
use crate::engine::units::Bytes;
use crate::messages::event::NoticeKind;
use crate::node::actuate::reclaim::{ReclaimOutcome, Reclaimer};
use crate::node::actuate::throttle::{OpenError, Recovered, ThrottleOutcome, Throttler};
use crate::node::cgroup::control_file::Role;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::collect::Sampler;
use crate::node::journal::JournalRecord;

/// How often failed restores are retried.
const RESTORE_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The throttler and the reclaimer.
#[derive(Debug)]
pub struct Actuators {
    hierarchy: Hierarchy,
    throttler: Throttler,
    reclaimer: Reclaimer,
    /// The rule of each pod's last reclaim.
    reclaiming: BTreeMap<PodUid, RuleId>,
    /// Why the last reclaim failed.
    reclaim_failure: Option<String>,
    /// For each throttled pod: whether its containers are limited instead of the pod.
    pinned: BTreeMap<PodUid, bool>,
    /// When throttles outside the plan were last restored; `None` before the first plan.
    last_restore: Option<BootTime>,
}

/// One thing that was done or observed: feedback for the engine and a notice for the user.
#[derive(Debug)]
pub struct Effect {
    /// The pod that it is about.
    pub pod: Option<PodUid>,
    /// Feedback for the engine before its next step.
    pub feedback: Option<Feedback>,
    detail: Detail,
}

#[derive(Debug)]
enum Detail {
    FileSet {
        file: String,
        from: String,
        to: String,
    },
    Cgroup(String),
    ThrottleFailed(String),
    NotWritten(String),
    Eviction(String),
    NoticeKind(NoticeKind),
}

impl Effect {
    /// Progress of an eviction, described by `message`.
    pub fn evicting(uid: &PodUid, message: impl Into<String>) -> Self {
        Self {
            pod: Some(uid.clone()),
            feedback: None,
            detail: Detail::Eviction(message.into()),
        }
    }

    /// An eviction was accepted; `message` says so.
    pub fn evicted(uid: &PodUid, message: impl Into<String>) -> Self {
        Self {
            feedback: Some(Feedback::EvictionAccepted { uid: uid.clone() }),
            ..Self::evicting(uid, message)
        }
    }

    /// An eviction was refused and must not be retried before `until`; `message` says why.
    pub fn refused(uid: &PodUid, until: BootTime, message: impl Into<String>) -> Self {
        let uid = uid.clone();
        Self {
            pod: Some(uid.clone()),
            feedback: Some(Feedback::EvictionRefused { uid, until }),
            detail: Detail::Eviction(message.into()),
        }
    }

    /// The pod no longer runs; `message` gives details.
    pub fn gone(uid: &PodUid, message: impl Into<String>) -> Self {
        let uid = uid.clone();
        Self {
            pod: Some(uid.clone()),
            feedback: Some(Feedback::Gone { uid }),
            detail: Detail::Eviction(message.into()),
        }
    }

    /// A notice for the user that is not about a pod.
    pub const fn notice(kind: NoticeKind) -> Self {
        Self {
            pod: None,
            feedback: None,
            detail: Detail::NoticeKind(kind),
        }
    }

    /// The pod is already gone.
    fn vanished(uid: &PodUid) -> Self {
        Self::gone(uid, "it is gone")
    }

    /// Whether the pod no longer runs.
    pub const fn is_end(&self) -> bool {
        matches!(self.feedback, Some(Feedback::Gone { .. }))
    }

    /// The notice for the user; `name` is the pod's name.
    pub fn into_notice(self, name: Option<String>) -> NoticeKind {
        match self.detail {
            Detail::FileSet { file, from, to } => NoticeKind::FileSet {
                pod_name: name,
                file,
                from,
                to,
            },
            Detail::Cgroup(what) => NoticeKind::Cgroup {
                pod_name: name,
                what,
            },
            Detail::ThrottleFailed(reason) => NoticeKind::ThrottleFailed {
                pod_name: name,
                reason,
            },
            Detail::NoticeKind(kind) => kind,
            Detail::NotWritten(reason) => NoticeKind::StateNotWritten { reason },
            Detail::Eviction(what) => NoticeKind::Eviction {
                pod_name: name,
                what,
            },
        }
    }
}

impl From<ThrottleOutcome> for Effect {
    fn from(outcome: ThrottleOutcome) -> Self {
        let feedback = outcome.feedback();
        let message = outcome.to_string();
        let pod = pod(&outcome).cloned();
        let detail = match outcome {
            ThrottleOutcome::Set { file, from, to, .. } => Detail::FileSet {
                file: file.display().to_string(),
                from: from.into(),
                to: to.into(),
            },
            ThrottleOutcome::Failed {
                throttling: true, ..
            }
            | ThrottleOutcome::NotThrottled { .. } => Detail::ThrottleFailed(message),
            ThrottleOutcome::JournalFailed { .. } => Detail::NotWritten(message),
            _ => Detail::Cgroup(message),
        };
        Self {
            pod,
            feedback,
            detail,
        }
    }
}

const fn pod(outcome: &ThrottleOutcome) -> Option<&PodUid> {
    match outcome {
        ThrottleOutcome::Set { uid, .. }
        | ThrottleOutcome::Released { uid, .. }
        | ThrottleOutcome::Foreign { uid, .. }
        | ThrottleOutcome::Resized { uid, .. }
        | ThrottleOutcome::Contested { uid, .. }
        | ThrottleOutcome::Expired { uid }
        | ThrottleOutcome::Gone { uid }
        | ThrottleOutcome::Failed { uid, .. }
        | ThrottleOutcome::NotThrottled { uid } => Some(uid),
        ThrottleOutcome::Swept { .. }
        | ThrottleOutcome::NoBurst
        | ThrottleOutcome::JournalFailed { .. } => None,
    }
}

impl Actuators {
    /// Locks the state directory and adopts the throttles in its journal.
    ///
    /// # Errors
    /// See [`Throttler::open`].
    pub fn open(
        state_dir: &Path,
        hierarchy: Hierarchy,
        now: BootTime,
    ) -> Result<(Self, Recovered), OpenError> {
        let (throttler, recovered) = Throttler::open(state_dir, hierarchy.clone(), now)?;
        let actuators = Self {
            throttler,
            reclaimer: Reclaimer::new(hierarchy.clone()),
            reclaiming: BTreeMap::new(),
            reclaim_failure: None,
            hierarchy,
            pinned: BTreeMap::new(),
            last_restore: None,
        };
        Ok((actuators, recovered))
    }

    /// Verifies the throttles of the last `plan`, extends them, and collects finished reclaims. Does not allocate when
    /// there is nothing to report.
    pub fn check(&mut self, now: BootTime, plan: &Plan, effects: &mut Vec<Effect>) {
        let throttles = &plan.throttles;
        self.throttler.extend(now, throttles);
        effects.extend(self.throttler.verify(now).into_iter().map(Effect::from));
        // Without rules there may never be another plan.
        let is_due = |last| now.since(last) >= RESTORE_RETRY_INTERVAL;
        if self.last_restore.is_some_and(is_due) && self.throttler.has_unrestored(throttles) {
            self.last_restore = Some(now);
            let outcomes = self.throttler.restore_except(now, throttles);
            effects.extend(outcomes.into_iter().map(Effect::from));
        }
        for outcome in self.reclaimer.poll() {
            effects.extend(self.reclaimed(outcome));
        }
    }

    /// Applies the throttles and reclaims of the plan to the pods whose cgroup still exists.
    pub fn apply(
        &mut self,
        now: BootTime,
        plan: &Plan,
        pods: &BTreeMap<PodUid, Workload>,
        effects: &mut Vec<Effect>,
    ) {
        self.last_restore = Some(now);
        let hierarchy = &self.hierarchy;
        let lookup =
            |uid: &PodUid| existing(hierarchy, pods, uid).map(|known| known.cgroup.clone());
        let throttles = self.startable(&plan.throttles, pods);
        let outcomes = self.throttler.apply(now, &throttles, &lookup);
        effects.extend(outcomes.into_iter().map(Effect::from));
        let reclaims = plan.reclaims.iter().filter_map(|reclaim| {
            let cgroup = lookup(&reclaim.uid)?;
            self.reclaiming
                .insert(reclaim.uid.clone(), reclaim.rule.clone());
            self.reclaimer
                .request(&reclaim.uid, &cgroup, reclaim.amount)
        });
        let reclaims: Vec<_> = reclaims.collect();
        let outcomes = reclaims.into_iter().filter_map(|it| self.reclaimed(it));
        effects.extend(outcomes);
    }

    /// The throttles without those that would keep a container on cgroup v1 from starting: a pod quota below its
    /// container's. Such throttles are from an earlier process, or from before a container got its limit.
    fn startable<'a>(
        &self,
        throttles: &'a [PodThrottle],
        pods: &BTreeMap<PodUid, Workload>,
    ) -> Cow<'a, [PodThrottle]> {
        let is_limited = |uid: &PodUid| {
            let facts = pods.get(uid).and_then(|known| known.containers);
            facts.is_some_and(|facts| facts.limited)
        };
        let is_own = |target_cgroup: &TargetCgroup| {
            target_cgroup.cgroup.is_empty() && target_cgroup.quota.is_some()
        };
        let refuses = |throttle: &PodThrottle| {
            throttle.target_cgroups.iter().any(is_own) && is_limited(&throttle.uid)
        };
        if self.hierarchy.is_v2() || !throttles.iter().any(refuses) {
            return Cow::Borrowed(throttles);
        }
        let mut throttles = throttles.to_vec();
        for throttle in throttles.iter_mut().filter(|throttle| refuses(throttle)) {
            let own = throttle
                .target_cgroups
                .iter_mut()
                .filter(|target_cgroup| is_own(target_cgroup));
            own.for_each(|target_cgroup| target_cgroup.quota = None);
        }
        Cow::Owned(throttles)
    }

    /// The pods throttled by their containers whose containers changed. Does not allocate while there are none.
    pub fn take_changed(&mut self) -> Vec<PodUid> {
        self.throttler.take_changed()
    }

    /// Throttles the current containers of one of these pods.
    pub fn reapply(
        &mut self,
        now: BootTime,
        throttle: &PodThrottle,
        pods: &BTreeMap<PodUid, Workload>,
        effects: &mut Vec<Effect>,
    ) {
        let path = existing(&self.hierarchy, pods, &throttle.uid).map(|known| known.cgroup.clone());
        let outcomes = self.throttler.reapply(now, throttle, path);
        effects.extend(outcomes.into_iter().map(Effect::from));
    }

    fn reclaimed(&mut self, outcome: ReclaimOutcome) -> Option<Effect> {
        let uid = outcome.uid().clone();
        let rule = match outcome {
            ReclaimOutcome::Busy { .. } => None,
            _ => self.reclaiming.remove(&uid),
        };
        let nothing = |rule| Feedback::NothingReclaimed {
            uid: uid.clone(),
            rule,
        };
        let (feedback, text) = match outcome {
            ReclaimOutcome::Busy { .. } => return None,
            ReclaimOutcome::Gone { .. } => return Some(Effect::vanished(&uid)),
            ReclaimOutcome::Reclaimed { freed, .. } => {
                self.reclaim_failure = None;
                let rule = rule.filter(|_| freed == Bytes::ZERO);
                (
                    rule.map(nothing),
                    format!("{freed} of page cache reclaimed"),
                )
            }
            ReclaimOutcome::Unsupported { reason, .. } => {
                self.reclaim_failure = Some(reason.to_owned());
                let text = format!("no page cache can be reclaimed: {reason}");
                (rule.map(nothing), text)
            }
            ReclaimOutcome::Failed { error, .. } => {
                let text = error.to_string();
                self.reclaim_failure = Some(text.clone());
                (rule.map(nothing), text)
            }
        };
        let detail = Detail::Cgroup(text);
        Some(Effect {
            pod: Some(uid),
            feedback,
            detail,
        })
    }

    /// Restores everything.
    pub fn restore_all(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        effects.extend(
            self.throttler
                .restore_all(now)
                .into_iter()
                .map(Effect::from),
        );
    }

    /// Makes the sampler keep measuring the cgroups that are limited, whatever their quotas become.
    pub fn pin_targets(&mut self, sampler: &mut Sampler) {
        let mut wanted = BTreeMap::new();
        // Idle class and weight are always on the pod's own cgroup.
        let limits = |record: &JournalRecord| record.file.role() == Role::Quota;
        for record in self.throttler.records().filter(limits) {
            let by_container = wanted.entry(record.uid).or_insert(false);
            *by_container |= !record.target_cgroup.is_empty();
        }
        // Also while it has no container: the kernel would reject a restarted container's quota if the pod had a lower one.
        for uid in self.throttler.by_container() {
            wanted.insert(uid.clone(), true);
        }
        for uid in self.pinned.keys().filter(|uid| !wanted.contains_key(*uid)) {
            sampler.unpin_targets(uid);
        }
        for (uid, by_container) in &wanted {
            sampler.pin_targets(uid, *by_container);
        }
        self.pinned = wanted;
    }

    /// How many pods are throttled, not only given a burst.
    pub fn count_lowered(&self) -> usize {
        self.throttler.count_lowered()
    }

    /// The pods with changed files.
    pub fn throttled_pods(&self) -> impl Iterator<Item = &PodUid> {
        self.throttler.throttled_pods()
    }

    /// Every changed cgroup file.
    pub fn records(&self) -> impl Iterator<Item = JournalRecord> + '_ {
        self.throttler.records()
    }

    /// Makes `backend` evict the pods of the plan that still exist.
    pub fn evict(
        &self,
        now: BootTime,
        plan: &Plan,
        pods: &BTreeMap<PodUid, Workload>,
        backend: &mut impl Backend,
        effects: &mut Vec<Effect>,
    ) {
        for evict in &plan.evictions {
            match existing(&self.hierarchy, pods, &evict.uid) {
                Some(workload) => backend.evict(evict, workload, now, effects),
                None => effects.push(Effect::vanished(&evict.uid)),
            }
        }
    }

    /// Whether any file of the pod is changed.
    pub fn is_throttled(&self, uid: &PodUid) -> bool {
        self.throttler
            .throttled_pods()
            .any(|throttled| throttled == uid)
    }

    /// Why the last reclaim failed.
    pub fn reclaim_failure(&self) -> Option<&str> {
        self.reclaim_failure.as_deref()
    }

    /// Whether any process runs in `cgroup` or below it.
    pub fn is_populated(&self, cgroup: &CgroupPath) -> bool {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup);
        dir.is_some_and(|dir| has_processes(&dir))
    }
}

/// The pod, if its cgroup still exists.
fn existing<'a>(
    hierarchy: &Hierarchy,
    pods: &'a BTreeMap<PodUid, Workload>,
    uid: &PodUid,
) -> Option<&'a Workload> {
    let workload = pods.get(uid)?;
    workload.exists(hierarchy).then_some(workload)
}

fn has_processes(dir: &Path) -> bool {
    let own = fs::read_to_string(dir.join("cgroup.procs"));
    if own.is_ok_and(|processes| !processes.is_empty()) {
        return true;
    }
    let Ok(entries) = fs::read_dir(dir) else {
        return false;
    };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .any(|entry| has_processes(&entry.path()))
}
