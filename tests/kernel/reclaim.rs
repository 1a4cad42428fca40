//! Page cache reclaim on a real kernel.

use std::time::Duration;

use crate::kernel_support::{TestCgroups, test_cgroups, uid, wait_for};
use plimsoll::engine::units::Bytes;
use plimsoll::node::actuate::reclaim::{ReclaimOutcome, Reclaimer};
use plimsoll::node::cgroup::CgroupPath;

const MIB: u64 = 1 << 20;

fn finish(reclaimer: &mut Reclaimer) -> ReclaimOutcome {
    let mut done = None;
    wait_for(Duration::from_mins(1), || {
        done = reclaimer.poll().pop();
        done.is_some()
    });
    done.unwrap()
}

/// Leaves 48 MiB of page cache in the pod.
fn fill(cgroups: &mut TestCgroups, pod: &CgroupPath) -> tempfile::TempDir {
    // On a disk: a tmpfs has no page cache.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = directory.path().join("big");
    let script = format!(
        "dd if=/dev/zero of={0} bs=1M count=48; sync",
        file.display()
    );
    cgroups.spawn(pod, &format!("{script}; sleep 1000"));
    let current = || cgroups.read(pod, "memory.current").parse::<u64>().unwrap();
    assert!(wait_for(Duration::from_mins(1), || current() > 40 * MIB));
    directory
}

#[test]
fn page_cache_is_reclaimed_in_the_background() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.is_v2() || !cgroups.has(&pod, "memory.reclaim") {
        eprintln!("skipped: this kernel has no memory.reclaim");
        return;
    }
    let _disk = fill(&mut cgroups, &pod);
    let mut reclaimer = Reclaimer::new(cgroups.hierarchy.clone());
    // Dirty pages cannot be reclaimed yet, so retry, as the next evaluation does.
    let mut freed = 0;
    let enough = wait_for(Duration::from_mins(1), || {
        assert!(
            reclaimer
                .request(&uid("pod"), &pod, Bytes(40 * MIB))
                .is_none()
        );
        let outcome = finish(&mut reclaimer);
        let ReclaimOutcome::Reclaimed { freed: bytes, .. } = outcome else {
            unreachable!("{outcome:?}")
        };
        freed += bytes.0;
        freed > 24 * MIB
    });
    assert!(enough, "freed only {freed} bytes");
    let left: u64 = cgroups.read(&pod, "memory.current").parse().unwrap();
    assert!(left < 24 * MIB, "{left} bytes are left");
}

#[test]
fn a_removed_pod_is_reported() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    if !cgroups.is_v2() {
        eprintln!("skipped: cgroup v1 has no memory.reclaim");
        return;
    }
    let mut reclaimer = Reclaimer::new(cgroups.hierarchy.clone());
    let nowhere = cgroups.parent.join("nowhere").unwrap();
    assert!(
        reclaimer
            .request(&uid("pod"), &nowhere, Bytes(MIB))
            .is_none()
    );
    let outcome = finish(&mut reclaimer);
    assert!(
        matches!(outcome, ReclaimOutcome::Gone { .. }),
        "{outcome:?}"
    );
}

#[test]
fn reclaim_is_unsupported_on_cgroup_v1() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    if cgroups.is_v2() {
        eprintln!("skipped: this is cgroup v2");
        return;
    }
    let pod = cgroups.pod("pod");
    let mut reclaimer = Reclaimer::new(cgroups.hierarchy.clone());
    let outcome = reclaimer.request(&uid("pod"), &pod, Bytes(MIB)).unwrap();
    let ReclaimOutcome::Unsupported { reason, .. } = outcome else {
        unreachable!("{outcome:?}")
    };
    assert!(reason.contains("v1"), "{reason}");
}
