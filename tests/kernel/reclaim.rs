//! Page cache reclaim on a real kernel.

use std::time::Duration;

use crate::kernel_support::{World, uid, wait_for, world};
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
fn fill(world: &mut World, pod: &CgroupPath) -> tempfile::TempDir {
    // On a disk: a tmpfs has no page cache.
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = folder.path().join("big");
    let script = format!(
        "dd if=/dev/zero of={0} bs=1M count=48; sync",
        file.display()
    );
    world.spawn(pod, &format!("{script}; sleep 1000"));
    let current = || world.read(pod, "memory.current").parse::<u64>().unwrap();
    assert!(wait_for(Duration::from_mins(1), || current() > 40 * MIB));
    folder
}

#[test]
fn page_cache_is_reclaimed_in_the_background() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    if !world.is_v2() || !world.has(&pod, "memory.reclaim") {
        eprintln!("skipped: this kernel has no memory.reclaim");
        return;
    }
    let _disk = fill(&mut world, &pod);
    let mut reclaimer = Reclaimer::new(world.hierarchy.clone());
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
    let left: u64 = world.read(&pod, "memory.current").parse().unwrap();
    assert!(left < 24 * MIB, "{left} bytes are left");
}

#[test]
fn a_removed_pod_is_reported() {
    let Some(world) = world() else { return };
    if !world.is_v2() {
        eprintln!("skipped: cgroup v1 has no memory.reclaim");
        return;
    }
    let mut reclaimer = Reclaimer::new(world.hierarchy.clone());
    let nowhere = world.parent.join("nowhere").unwrap();
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
    let Some(world) = world() else { return };
    if world.is_v2() {
        eprintln!("skipped: this is cgroup v2");
        return;
    }
    let pod = world.pod("pod");
    let mut reclaimer = Reclaimer::new(world.hierarchy.clone());
    let outcome = reclaimer.request(&uid("pod"), &pod, Bytes(MIB)).unwrap();
    let ReclaimOutcome::Unsupported { reason, .. } = outcome else {
        unreachable!("{outcome:?}")
    };
    assert!(reason.contains("v1"), "{reason}");
}
