//! Files of the kernel, and answers of exporters.

use std::fmt::Write;
use std::path::{Component, Path};

use crate::engine::sample::{NodeMemory, Series};
use crate::node::cgroup::kubepods::{Driver, container_id, parse_pod_cgroup, pod_cgroup};
use crate::node::cgroup::layout::cgroup_mounts;
use crate::node::cgroup::parse::{
    Bandwidth, cfs_quota, cpu_max, fields, fraction, lines, number, unsigned,
};
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::collect::waits::{io_bytes, periods};
use crate::node::collect::{proc, prometheus as exposition};

/// Maximum number of series of a probe.
const MAX_SERIES: usize = 1000;

/// Files of a cgroup.
pub fn cgroup(bytes: &[u8]) {
    if let Some(value) = number(bytes) {
        assert_eq!(number(format!("{value}\n").as_bytes()), Some(value));
        assert_eq!(unsigned(bytes.trim_ascii_end()), Some(value));
        assert_eq!(number(bytes.trim_ascii_end()), None, "it was cut off");
    }
    assert!(fraction(bytes).is_none_or(|value| value.is_finite() && value >= 0.0));
    if let Some(bandwidth) = cpu_max(bytes) {
        let text = format!("{}\n", bandwidth.text_v2());
        assert_eq!(cpu_max(text.as_bytes()), Some(bandwidth));
        assert!(bandwidth.period > 0);
        assert!(!bandwidth.min(bandwidth).allows_more_than(bandwidth));
    }
    if let Some(quota) = cfs_quota(bytes) {
        let period = 100_000;
        let text = format!("{}\n", Bandwidth { quota, period }.text_v1());
        assert_eq!(cfs_quota(text.as_bytes()), Some(quota));
    }
    assert!(lines(bytes).all(|line| !line.contains(&b'\n')));
    // A prefix reads the same whatever follows.
    let half = &bytes[..bytes.len() / 2];
    for (part, whole) in periods(half).into_iter().zip(periods(bytes)) {
        assert!(part.is_none() || part == whole);
    }
    assert!(bytes.is_empty() || io_bytes(bytes).is_none() || bytes.ends_with(b"\n"));
}

/// Files of `/proc`.
pub fn proc(bytes: &[u8]) {
    if let Some(times) = proc::cpu_times(bytes, 10_000_000) {
        assert!(times.online > 0);
    }
    let all = proc::cpu_times_of(bytes, 1, |_| true);
    assert!(all.is_none_or(|times| times.online > 0));
    let none = proc::cpu_times_of(bytes, 1, |_| false);
    assert_eq!(none, None);
    if let Some(memory) = proc::memory(bytes) {
        let (total, available) = (memory.total.0 / 1024, memory.available.0 / 1024);
        let hugetlb = memory.hugetlb.0 / 1024;
        let text =
            format!("MemTotal: {total} kB\nMemAvailable: {available} kB\nHugetlb: {hugetlb} kB\n");
        let read = proc::memory(text.as_bytes()).map(NodeMemory::used);
        assert_eq!(read, Some(memory.used()));
    }
    let loads = proc::load(bytes).into_iter().flatten();
    assert!(
        loads
            .into_iter()
            .all(|load| load.is_finite() && load >= 0.0)
    );
    let half = &bytes[..bytes.len() / 2];
    let tasks = proc::tasks(half);
    assert!(tasks.is_none() || tasks == proc::tasks(bytes));
    for line in lines(bytes) {
        if let Some((name, _)) = proc::disk(line) {
            assert_eq!(fields(name.as_bytes()).count(), 1);
        }
        if let Some((name, _)) = proc::interface(line) {
            assert!(!name.is_empty() && name != "lo");
        }
    }
}

/// Pressure files.
pub fn pressure(bytes: &[u8]) {
    let Some(read) = proc::pressure(bytes) else {
        return;
    };
    let averages = read.some.into_iter().chain(read.full.into_iter().flatten());
    assert!(averages.into_iter().all(|it| it.is_finite() && it >= 0.0));
    let line = |kind: &str, [ten, sixty, three_hundred]: [f64; 3], total: Option<u64>| {
        let total = total.map(|nanos| format!(" total={}", nanos / 1000));
        let total = total.unwrap_or_default();
        format!("{kind} avg10={ten} avg60={sixty} avg300={three_hundred}{total}\n")
    };
    let mut text = line("some", read.some, read.totals[0]);
    text += &read
        .full
        .map_or_else(String::new, |full| line("full", full, read.totals[1]));
    assert_eq!(proc::pressure(text.as_bytes()), Some(read));
}

/// `mountinfo`, and names of cgroups.
pub fn mounts(bytes: &[u8]) {
    let mounts = cgroup_mounts(bytes);
    assert!(mounts.len() <= lines(bytes).count() + 1);
    if let Some(found) = Hierarchy::from_mounts(&mounts) {
        let v1 = mounts.iter().any(|mount| mount.controllers.is_some());
        assert!(found.is_v2() || v1);
    }
    for text in std::str::from_utf8(bytes).into_iter().flat_map(str::lines) {
        if let Ok(path) = CgroupPath::new(text) {
            let inside = |part| matches!(part, Component::Normal(_));
            assert!(Path::new(path.as_str()).components().all(inside));
            assert_eq!(CgroupPath::new(path.as_str()).as_ref(), Ok(&path));
            check_pod_name(&path);
        }
        assert!(container_id(text).is_none_or(|id| text.contains(id)));
    }
}

/// The pod in a cgroup's name is found in the names of both cgroup drivers.
fn check_pod_name(path: &CgroupPath) {
    let Some(pod) = parse_pod_cgroup(path) else {
        return;
    };
    for driver in [Driver::Cgroupfs, Driver::Systemd] {
        let cgroup = pod_cgroup(driver, "/", &pod).expect("a path");
        assert_eq!(parse_pod_cgroup(&cgroup).as_ref(), Some(&pod));
    }
}

/// The answer to a probe.
pub fn prometheus(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(all) = exposition::parse(text, |_| true, MAX_SERIES) else {
        return;
    };
    assert!(all.len() <= text.lines().count().min(MAX_SERIES));
    assert!(all.iter().all(|series| series.labels.is_sorted()));
    let written = written(&all);
    let again = exposition::parse(&written, |_| true, MAX_SERIES);
    assert_eq!(again.map(|again| self::written(&again)), Ok(written));
    let few = exposition::parse(text, |name| name.starts_with('a'), MAX_SERIES);
    let wanted = all.iter().filter(|series| series.name.starts_with('a'));
    assert_eq!(few.map(|few| few.len()), Ok(wanted.count()));
}

fn written(all: &[Series]) -> String {
    let mut text = String::new();
    for series in all {
        let labels = series.labels.iter().map(|(name, value)| {
            let value = value.replace('\\', r"\\").replace('"', "\\\"");
            format!("{name}=\"{}\"", value.replace('\n', "\\n"))
        });
        let labels: Vec<String> = labels.collect();
        let labels = labels.join(",");
        let _ = writeln!(text, "{}{{{labels}}} {}", series.name, series.value);
    }
    text
}
