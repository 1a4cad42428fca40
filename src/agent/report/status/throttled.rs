//! The throttled pods, from the journal's records.

use std::collections::BTreeMap;

use super::{StatusView, is_quota};
use crate::crd::node_watermark::{BurstStatus, ThrottledStatus};
use crate::engine::pod::PodUid;
use crate::engine::units::MilliCpu;
use crate::node::cgroup::control_file::ControlFileKind;
use crate::node::cgroup::parse;
use crate::node::journal::JournalRecord;

/// Longest list.
const MAX_PODS: usize = 1024;
/// Default CFS period of kernel and kubelet in microseconds, for files that do not contain it.
const DEFAULT_PERIOD_MICROS: u64 = 100_000;

/// One entry per pod, by name.
pub(super) fn status(view: &StatusView) -> Vec<ThrottledStatus> {
    let mut pods: BTreeMap<&PodUid, Vec<&JournalRecord>> = BTreeMap::new();
    let throttles = view.records.iter().filter(|it| it.is_of_throttle());
    for record in throttles {
        pods.entry(&record.uid).or_default().push(record);
    }
    let of = |(uid, records): (&PodUid, Vec<&JournalRecord>)| pod(view, uid, &records);
    let mut pods: Vec<_> = pods.into_iter().filter_map(of).collect();
    pods.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    pods.truncate(MAX_PODS);
    pods
}

/// The pods with a burst, by name.
pub(super) fn bursts(view: &StatusView) -> Vec<BurstStatus> {
    let mut pods: BTreeMap<&PodUid, MilliCpu> = BTreeMap::new();
    for record in view.records.iter().filter(|it| it.is_given_burst()) {
        let burst = pods.entry(&record.uid).or_default();
        *burst = record.base.max(*burst);
    }
    let of = |(uid, burst): (&PodUid, MilliCpu)| {
        let (namespace, pod) = view.names.get(uid)?.split_once('/')?;
        Some(BurstStatus {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            millicores: i64::try_from(burst.0).unwrap_or(i64::MAX),
        })
    };
    let mut pods: Vec<_> = pods.into_iter().filter_map(of).collect();
    pods.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    pods.truncate(MAX_PODS);
    pods
}

fn pod(view: &StatusView, uid: &PodUid, records: &[&JournalRecord]) -> Option<ThrottledStatus> {
    let strictest = records.iter().min_by_key(|record| record.ratio)?;
    let name = view.names.get(uid).map_or("", String::as_str);
    let (namespace, name) = name.split_once('/').unwrap_or(("", &uid.0));
    // On v1 a pod's sandbox is a container too: without a limit and without use, it does not count.
    let used = |record: &&&JournalRecord| record.base.0 > 0;
    let any_used = records.iter().any(|record| used(&record));
    let counts = |record: &&&JournalRecord| is_quota(record) && (!any_used || used(record));
    let quotas = || records.iter().filter(counts);
    let before = |record: &&JournalRecord| millicores(record, &record.original);
    let now = |record: &&JournalRecord| millicores(record, &record.ours);
    let has_quota = quotas().next().is_some();
    let to = quotas().map(now).sum::<Option<u64>>();
    let from = quotas().map(before).sum::<Option<u64>>();
    let number = |number: u64| i64::try_from(number).ok();
    Some(ThrottledStatus {
        namespace: namespace.to_owned(),
        pod: name.to_owned(),
        uid: uid.to_string(),
        rule: strictest.rule.to_string(),
        ratio: i64::from(strictest.ratio),
        from_millicores: from.filter(|_| has_quota).and_then(number),
        to_millicores: to.filter(|_| has_quota).and_then(number),
    })
}

/// The limit in a quota file; `None`: no limit.
fn millicores(record: &JournalRecord, text: &str) -> Option<u64> {
    // Records do not contain the newline.
    let text = format!("{text}\n");
    let (quota, period) = match record.file {
        ControlFileKind::CpuMax => {
            let bandwidth = parse::cpu_max(text.as_bytes())?;
            (bandwidth.quota?, bandwidth.period)
        }
        _ => (parse::cfs_quota(text.as_bytes())??, DEFAULT_PERIOD_MICROS),
    };
    (quota * 1000).checked_div(period)
}
