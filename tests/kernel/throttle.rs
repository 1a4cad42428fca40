//! The throttler on a real kernel, cgroup v1 or v2.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::kernel_support::{
    TestCgroups, assert_fine, at, bursting, idle, standing, test_cgroups, throttle,
    throttle_of_cgroups, uid,
};
use plimsoll::crd::pod_facts::ContainerFacts;
use plimsoll::engine::plan::{CpuClass, Feedback, PodThrottle};
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::node::actuate::throttle::{ThrottleOutcome, Throttler};
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::collect::{SampledPod, Sampler};
use plimsoll::node::journal::Effects;

/// Steps down to the floor and back, and checks that every file is restored.
fn step_down_and_back(cgroups: &TestCgroups, pod: &CgroupPath, original: &str) {
    let mut throttler = cgroups.throttler();
    let find = cgroups.find();
    for (second, quota) in [900, 700, 500, 300, 100, 200, 400, 800]
        .into_iter()
        .enumerate()
    {
        let now = at(second as u64);
        assert_fine(&throttler.verify(now));
        assert_fine(&throttler.apply(now, &[throttle("pod", quota)], &find));
        let expected = cgroups.quota_text(Some(quota * 100));
        assert_eq!(cgroups.quota(pod), expected);
        assert_eq!(cgroups.journal_lines().len(), 1);
        let line = &cgroups.journal_lines()[0];
        assert!(
            line.contains(&format!("\"original\":\"{original}\"")),
            "{line}"
        );
    }
    assert_fine(&throttler.apply(at(9), &[], &find));
    assert_eq!(cgroups.quota(pod), original);
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn an_unlimited_pod_is_throttled_in_steps_and_restored() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let original = cgroups.quota_text(None);
    assert_eq!(cgroups.quota(&pod), original);
    step_down_and_back(&cgroups, &pod, &original);
}

#[test]
fn a_limited_pod_is_throttled_in_steps_and_restored() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(123_457));
    let original = cgroups.quota_text(Some(123_457));
    step_down_and_back(&cgroups, &pod, &original);
}

#[test]
fn an_unusual_period_is_preserved() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if cgroups.is_v2() {
        cgroups.write(&pod, "cpu.max", "30000 20000");
    } else {
        cgroups.write(&pod, "cpu.cfs_period_us", "20000");
        cgroups.write(&pod, "cpu.cfs_quota_us", "30000");
    }
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[throttle("pod", 500)], &cgroups.find());
    let expected = if cgroups.is_v2() {
        "10000 20000"
    } else {
        "10000"
    };
    assert_eq!(cgroups.quota(&pod), expected);
    throttler.apply(at(1), &[], &cgroups.find());
    let original = if cgroups.is_v2() {
        "30000 20000"
    } else {
        "30000"
    };
    assert_eq!(cgroups.quota(&pod), original);
}

#[test]
fn a_quota_below_the_kernel_minimum_is_raised_to_it() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &[throttle("pod", 3)], &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(1000)));
}

#[test]
fn a_limit_below_the_target_is_unchanged() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(20_000));
    let mut throttler = cgroups.throttler();
    assert!(
        throttler
            .apply(at(0), &[throttle("pod", 300)], &cgroups.find())
            .is_empty()
    );
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(20_000)));
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn limited_containers_are_throttled_instead_of_the_pod() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let web = cgroups.container(&pod, "web");
    let log = cgroups.container(&pod, "log");
    cgroups.set_quota(&web, Some(80_000));
    cgroups.set_quota(&log, Some(40_000));
    let mut throttler = cgroups.throttler();
    let both = throttle_of_cgroups("pod", &[("web", Some(400)), ("log", Some(200))]);
    assert_fine(&throttler.apply(at(0), &[both], &cgroups.find()));
    assert_eq!(cgroups.quota(&web), cgroups.quota_text(Some(40_000)));
    assert_eq!(cgroups.quota(&log), cgroups.quota_text(Some(20_000)));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    let one = throttle_of_cgroups("pod", &[("web", Some(400)), ("log", None)]);
    assert_fine(&throttler.apply(at(1), &[one], &cgroups.find()));
    assert_eq!(cgroups.quota(&log), cgroups.quota_text(Some(40_000)));
    assert_fine(&throttler.apply(at(2), &[], &cgroups.find()));
    assert_eq!(cgroups.quota(&web), cgroups.quota_text(Some(80_000)));
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn pod_and_container_are_written_in_the_order_the_kernel_needs() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let web = cgroups.container(&pod, "web");
    cgroups.set_quota(&pod, Some(80_000));
    cgroups.set_quota(&web, Some(80_000));
    let mut throttler = cgroups.throttler();
    for (second, quota) in [500, 200, 600].into_iter().enumerate() {
        let target_cgroups = throttle_of_cgroups("pod", &[("", Some(quota)), ("web", Some(quota))]);
        assert_fine(&throttler.apply(at(second as u64), &[target_cgroups], &cgroups.find()));
        assert_eq!(cgroups.quota(&web), cgroups.quota_text(Some(quota * 100)));
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(quota * 100)));
    }
    assert_fine(&throttler.apply(at(5), &[], &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(80_000)));
    assert_eq!(cgroups.quota(&web), cgroups.quota_text(Some(80_000)));
}

#[test]
fn a_pod_rejected_by_the_kernel_does_not_stop_others() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    if cgroups.is_v2() {
        eprintln!("skipped: cgroup v2 does not compare quotas of parent and child");
        return;
    }
    let bad = cgroups.pod("bad");
    let web = cgroups.container(&bad, "web");
    cgroups.set_quota(&web, Some(80_000));
    let good = cgroups.pod("good");
    let mut throttler = cgroups.throttler();
    let plan = [throttle("bad", 200), throttle("good", 200)];
    let outcomes = throttler.apply(at(0), &plan, &cgroups.find());
    let feedback: Vec<_> = outcomes
        .iter()
        .filter_map(ThrottleOutcome::feedback)
        .collect();
    assert_eq!(feedback, [Feedback::ThrottleFailed { uid: uid("bad") }]);
    assert_eq!(cgroups.quota(&bad), cgroups.quota_text(None));
    assert_eq!(cgroups.quota(&good), cgroups.quota_text(Some(20_000)));
    throttler.verify(at(1));
    assert_eq!(
        cgroups.journal_lines().len(),
        1,
        "a file that was not changed has no record"
    );
}

#[test]
fn a_restarted_limited_container_is_throttled_again() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let first = cgroups.container(&pod, "first");
    cgroups.set_quota(&first, Some(80_000));
    let mut throttler = cgroups.throttler();
    let find = cgroups.find();
    assert_fine(&throttler.apply(
        at(0),
        &[throttle_of_cgroups("pod", &[("first", Some(300))])],
        &find,
    ));
    cgroups.remove(&first);
    let second = cgroups.container(&pod, "second");
    cgroups.set_quota(&second, Some(80_000));
    assert_fine(&throttler.verify(at(1)));
    assert!(cgroups.journal_lines().is_empty());
    assert_fine(&throttler.apply(
        at(2),
        &[throttle_of_cgroups("pod", &[("second", Some(300))])],
        &find,
    ));
    assert_eq!(cgroups.quota(&second), cgroups.quota_text(Some(30_000)));
    assert_fine(&throttler.apply(at(3), &[], &find));
    assert_eq!(cgroups.quota(&second), cgroups.quota_text(Some(80_000)));
}

/// A throttle to half a CPU for each target cgroup of the sampler.
fn planned(sampler: &mut Sampler) -> PodThrottle {
    let target_cgroups = sampler.targets(&uid("pod"));
    let target_cgroups: Vec<_> = target_cgroups
        .iter()
        .map(|target_cgroup| (&*target_cgroup.cgroup, Some(500)))
        .collect();
    throttle_of_cgroups("pod", &target_cgroups)
}

#[test]
fn a_limited_container_can_restart_while_its_pod_is_throttled() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    if cgroups.is_v2() {
        eprintln!("skipped: cgroup v2 does not compare quotas of parent and child");
        return;
    }
    let pod = cgroups.pod("pod");
    cgroups.container(&pod, "pause");
    let limited = |missing| SampledPod {
        uid: uid("pod"),
        cgroup: pod.clone(),
        containers: Some(ContainerFacts {
            limited: true,
            missing,
        }),
    };
    let mut sampler = Sampler::new(Path::new("/proc"), cgroups.hierarchy.clone());
    let mut throttler = cgroups.throttler();
    // It crashed and its cgroup is gone, but the API server does not report it yet.
    sampler.set_pods([limited(false)].into_iter());
    let plan = [planned(&mut sampler)];
    assert_fine(&throttler.apply(at(0), &plan, &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    let main = cgroups.container(&pod, "main");
    cgroups.set_quota(&main, Some(80_000));
    let plan = [planned(&mut sampler)];
    assert_fine(&throttler.apply(at(1), &plan, &cgroups.find()));
    assert_eq!(cgroups.quota(&main), cgroups.quota_text(Some(50_000)));
    // An already throttled pod stays throttled by its containers, even if an earlier process did not do so.
    for pin in [true, false] {
        sampler.set_pods([limited(true)].into_iter());
        sampler.pin_targets(&uid("pod"), pin);
        assert_eq!(planned(&mut sampler).target_cgroups.len(), 2);
    }
    // Once the API server reports it, the pod is not a new victim.
    sampler.unpin_targets(&uid("pod"));
    assert_eq!(planned(&mut sampler).target_cgroups.len(), 0);
}

#[test]
fn a_removed_pod_is_dropped_and_reported() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.pod("other");
    let mut throttler = cgroups.throttler();
    let plan = [throttle("pod", 200), throttle("other", 200)];
    throttler.apply(at(0), &plan, &cgroups.find());
    cgroups.remove(&pod);
    let outcomes = throttler.verify(at(1));
    let feedback: Vec<_> = outcomes
        .iter()
        .filter_map(ThrottleOutcome::feedback)
        .collect();
    assert_eq!(feedback, [Feedback::Gone { uid: uid("pod") }]);
    assert_eq!(cgroups.journal_lines().len(), 1);
    let outcomes = throttler.apply(at(2), &plan, &cgroups.find());
    assert!(
        matches!(&outcomes[..], [ThrottleOutcome::Gone { .. }]),
        "{outcomes:?}"
    );
}

#[test]
fn a_pod_may_be_removed_at_any_point() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let stays = cgroups.pod("stays");
    for vanish_at in 1.. {
        let goes = cgroups.pod("goes");
        cgroups.set_quota(&goes, Some(80_000));
        let mut remove = cgroups.removal(&goes);
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        let effects = Effects::watched(move |_| {
            if count.fetch_add(1, Ordering::Relaxed) + 1 == vanish_at {
                remove();
            }
        });
        let state = cgroups.state.path();
        let opened = Throttler::open_with(state, cgroups.hierarchy.clone(), at(0), effects);
        let mut throttler = opened.unwrap().0;
        for (second, quota) in [500, 300, 400].into_iter().enumerate() {
            let now = at(second as u64);
            assert_fine(&throttler.verify(now));
            let plan = [
                idle(throttle("goes", quota)),
                idle(throttle("stays", quota)),
            ];
            assert_fine(&throttler.apply(now, &plan, &cgroups.find()));
            assert_eq!(cgroups.quota(&stays), cgroups.quota_text(Some(quota * 100)));
        }
        assert_fine(&throttler.apply(at(3), &[], &cgroups.find()));
        assert_fine(&throttler.verify(at(4)));
        assert_eq!(cgroups.quota(&stays), cgroups.quota_text(None));
        assert!(
            cgroups.journal_lines().is_empty(),
            "vanished at {vanish_at}"
        );
        if calls.load(Ordering::Relaxed) < vanish_at {
            assert!(vanish_at > 40, "the hook was called only {vanish_at} times");
            return;
        }
        cgroups.remove(&goes);
    }
}

#[test]
fn another_cgroup_of_the_same_name_is_never_written() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[throttle("pod", 200)], &cgroups.find());
    cgroups.remove(&pod);
    cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(70_000));
    throttler.apply(at(1), &[], &cgroups.find());
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(70_000)));
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn a_burst_is_lowered_before_and_restored_after_its_quota() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, cgroups.burst_file()) {
        eprintln!("skipped: this kernel has no burst");
        return;
    }
    cgroups.set_quota(&pod, Some(90_000));
    cgroups.write(&pod, cgroups.burst_file(), "50000");
    let mut throttler = cgroups.throttler();
    let expected = [
        (600, "50000", 1),
        (300, "30000", 2),
        (100, "10000", 2),
        (800, "10000", 2),
    ];
    for (second, (quota, burst, records)) in expected.into_iter().enumerate() {
        let plan = [throttle("pod", quota)];
        assert_fine(&throttler.apply(at(second as u64), &plan, &cgroups.find()));
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(quota * 100)));
        assert_eq!(cgroups.read(&pod, cgroups.burst_file()), burst);
        assert_eq!(cgroups.journal_lines().len(), records);
    }
    assert_fine(&throttler.apply(at(9), &[], &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(90_000)));
    assert_eq!(cgroups.read(&pod, cgroups.burst_file()), "50000");
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn a_burst_is_restored_after_a_quota_that_was_rejected_first() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if cgroups.is_v2() || !cgroups.has(&pod, cgroups.burst_file()) {
        eprintln!("skipped: this kernel rejects no quota, or has no burst");
        return;
    }
    cgroups.set_quota(&pod, Some(90_000));
    cgroups.write(&pod, cgroups.burst_file(), "50000");
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &[throttle("pod", 300)], &cgroups.find()));
    // A parent that allows less than the child's original.
    cgroups.set_quota(&cgroups.parent, Some(60_000));
    let outcomes = throttler.restore_except(at(1), &[]);
    let failed = |outcome: &ThrottleOutcome| matches!(outcome, ThrottleOutcome::Failed { .. });
    assert!(outcomes.iter().all(failed), "{outcomes:?}");
    assert_eq!(cgroups.read(&pod, cgroups.burst_file()), "30000");
    assert_eq!(cgroups.journal_lines().len(), 2);
    cgroups.set_quota(&cgroups.parent, None);
    assert_fine(&throttler.restore_except(at(2), &[]));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(90_000)));
    assert_eq!(cgroups.read(&pod, cgroups.burst_file()), "50000");
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn a_burst_waits_for_a_quota_file_that_cannot_be_opened() {
    let fake = tempfile::tempdir().unwrap();
    let (root, state) = (fake.path().join("cg"), fake.path().join("state"));
    let file = |name: &str| root.join("pod").join(name);
    std::fs::create_dir_all(root.join("pod")).unwrap();
    std::fs::write(file("cpu.max"), "900000 100000").unwrap();
    std::fs::write(file("cpu.max.burst"), "500000").unwrap();
    let hierarchy = Hierarchy::V2 { root: root.clone() };
    let find = |_: &_| CgroupPath::new("pod").ok();
    let open = || Throttler::open(&state, hierarchy.clone(), at(0)).unwrap().0;
    assert_fine(&open().apply(at(0), &[throttle("pod", 3000)], &find));
    assert_eq!(
        std::fs::read_to_string(file("cpu.max.burst")).unwrap(),
        "300000"
    );
    let elsewhere = fake.path().join("elsewhere");
    std::fs::rename(file("cpu.max"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, file("cpu.max")).unwrap();
    let mut throttler = open();
    throttler.restore_except(at(1), &[]);
    assert_eq!(
        std::fs::read_to_string(file("cpu.max.burst")).unwrap(),
        "300000"
    );
    std::fs::rename(&elsewhere, file("cpu.max")).unwrap();
    assert_fine(&throttler.restore_except(at(2), &[]));
    assert_eq!(
        std::fs::read_to_string(file("cpu.max")).unwrap(),
        "900000 100000"
    );
    assert_eq!(
        std::fs::read_to_string(file("cpu.max.burst")).unwrap(),
        "500000"
    );
}

#[test]
fn idle_class_is_set_and_the_exact_weight_restored() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    for weight in ["4", "37", "1234"] {
        cgroups.write(&pod, cgroups.weight_file(), weight);
        let mut throttler = cgroups.throttler();
        let only_idle = idle(throttle_of_cgroups("pod", &[("", None)]));
        let outcomes = throttler.apply(at(0), std::slice::from_ref(&only_idle), &cgroups.find());
        assert_fine(&outcomes);
        assert_eq!(cgroups.read(&pod, "cpu.idle"), "1");
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
        assert_eq!(cgroups.journal_lines().len(), 2);
        let both = idle(throttle("pod", 300));
        assert_fine(&throttler.apply(at(1), &[both], &cgroups.find()));
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
        assert!(throttler.verify(at(2)).is_empty());
        assert_fine(&throttler.apply(at(3), &[only_idle], &cgroups.find()));
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
        assert_fine(&throttler.apply(at(4), &[], &cgroups.find()));
        assert_eq!(cgroups.read(&pod, "cpu.idle"), "0");
        assert_eq!(cgroups.read(&pod, cgroups.weight_file()), weight);
        assert!(cgroups.journal_lines().is_empty());
    }
}

#[test]
fn a_standing_class_outlives_resets_restarts_and_processes_and_ends_exactly() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    cgroups.write(&pod, cgroups.weight_file(), "37");
    let plan = [standing("pod")];
    let class = || {
        let read = |file| cgroups.read(&pod, file);
        (read("cpu.idle"), read(cgroups.weight_file()))
    };
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &plan, &cgroups.find()));
    assert_eq!(class().0, "1");
    // As `systemctl daemon-reload` does.
    cgroups.write(&pod, "cpu.idle", "0");
    assert_fine(&throttler.verify(at(1)));
    assert_eq!(class().0, "1");
    let container = cgroups.container(&pod, "first");
    cgroups.remove(&container);
    cgroups.container(&pod, "second");
    assert_fine(&throttler.apply(at(2), &plan, &cgroups.find()));
    assert_eq!(class().0, "1", "containers come and go in the pod's class");
    // A rule's quota comes and goes on top.
    let both = idle(throttle("pod", 300));
    assert_fine(&throttler.apply(at(3), &[both], &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
    assert_fine(&throttler.apply(at(4), &plan, &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    assert_eq!(class().0, "1");
    drop(throttler);
    let (mut throttler, recovered) = cgroups.open();
    assert_eq!(recovered.throttles.len(), 1);
    assert_eq!(recovered.throttles[0].rule.pod_qos(), Some("batch"));
    assert_fine(&throttler.apply(at(5), &[], &cgroups.find()));
    assert_eq!(class(), ("0".to_owned(), "37".to_owned()));
    assert!(cgroups.journal_lines().is_empty());
}

/// A pod with a limit of 0.9 CPUs, and a container with one of 0.3; `None` if this kernel has no burst.
fn limited_pod(cgroups: &TestCgroups) -> Option<(CgroupPath, CgroupPath)> {
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, cgroups.burst_file()) {
        eprintln!("skipped: this kernel has no burst");
        return None;
    }
    cgroups.set_quota(&pod, Some(90_000));
    let container = cgroups.container(&pod, "web");
    cgroups.set_quota(&container, Some(30_000));
    Some((pod, container))
}

#[test]
fn a_burst_is_given_to_pod_and_containers_up_to_their_quotas_and_ends_exactly() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let Some((pod, container)) = limited_pod(&cgroups) else {
        return;
    };
    let unlimited = cgroups.container(&pod, "sidecar");
    cgroups.write(&container, cgroups.burst_file(), "1000");
    let bursts = || [&pod, &container, &unlimited].map(|it| cgroups.read(it, cgroups.burst_file()));
    let plan = [bursting("pod", 500)];
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &plan, &cgroups.find()));
    assert_eq!(bursts(), ["50000", "30000", "0"]);
    assert_eq!(cgroups.journal_lines().len(), 2);
    assert!(throttler.verify(at(1)).is_empty());
    assert_eq!(throttler.count_lowered(), 0, "it is not throttled");
    assert_eq!(throttler.by_container().count(), 0);
    drop(throttler);
    let (mut throttler, recovered) = cgroups.open();
    assert_eq!(recovered.throttles.len(), 1);
    assert_eq!(recovered.throttles[0].burst.0, 500);
    assert!(!recovered.throttles[0].idle);
    assert_fine(&throttler.apply(at(2), &[bursting("pod", 200)], &cgroups.find()));
    assert_eq!(bursts(), ["20000", "20000", "0"]);
    assert_fine(&throttler.apply(at(3), &[], &cgroups.find()));
    assert_eq!(bursts(), ["0", "1000", "0"]);
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn a_container_that_restarts_has_its_burst_once_it_has_its_limit() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let Some((pod, container)) = limited_pod(&cgroups) else {
        return;
    };
    let plan = bursting("pod", 100);
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), std::slice::from_ref(&plan), &cgroups.find()));
    let mut tick = |second| {
        throttler.verify(at(second));
        let changed = throttler.take_changed();
        for uid in &changed {
            let path = cgroups.find()(uid);
            assert_fine(&throttler.reapply(at(second), &plan, path));
        }
        changed.len()
    };
    let settled = (1..9).map(&mut tick).collect::<Vec<_>>();
    assert_eq!(settled.last(), Some(&0), "nothing changes any more");
    cgroups.remove(&container);
    let restarted = cgroups.container(&pod, "web-2");
    tick(10);
    cgroups.set_quota(&restarted, Some(30_000));
    tick(11);
    assert_eq!(cgroups.read(&restarted, cgroups.burst_file()), "10000");
    let settled = (12..20).map(&mut tick).collect::<Vec<_>>();
    assert_eq!(settled.last(), Some(&0));
}

#[test]
fn a_burst_yields_before_a_quota_of_a_rule_and_comes_back_after_it() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let Some((pod, container)) = limited_pod(&cgroups) else {
        return;
    };
    let bursts = || [&pod, &container].map(|it| cgroups.read(it, cgroups.burst_file()));
    let given = [bursting("pod", 500)];
    // The pod's quota on v2, the containers' on v1.
    let by_pod = throttle("pod", 200);
    let by_container = throttle_of_cgroups("pod", &[("web", Some(100))]);
    let mut throttler = cgroups.throttler();
    for (target, quota, plan) in [(&pod, 20_000, by_pod), (&container, 10_000, by_container)] {
        if *target == pod && !cgroups.is_v2() {
            // There a parent may not have less than its child.
            continue;
        }
        let original = cgroups.quota(target);
        assert_fine(&throttler.apply(at(0), &given, &cgroups.find()));
        assert_eq!(bursts(), ["50000", "30000"]);
        assert_fine(&throttler.apply(at(1), &[plan], &cgroups.find()));
        assert_eq!(bursts(), ["0", "0"]);
        assert_eq!(cgroups.quota(target), cgroups.quota_text(Some(quota)));
        assert_fine(&throttler.apply(at(2), &given, &cgroups.find()));
        assert_eq!(bursts(), ["50000", "30000"]);
        assert_eq!(cgroups.quota(target), original);
        assert_fine(&throttler.apply(at(3), &[], &cgroups.find()));
        assert_eq!(bursts(), ["0", "0"]);
        assert!(cgroups.journal_lines().is_empty());
    }
}

#[test]
fn a_resize_below_the_burst_succeeds_once_the_burst_has_yielded() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let Some((_, container)) = limited_pod(&cgroups) else {
        return;
    };
    let given = [bursting("pod", 500)];
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &given, &cgroups.find()));
    let quota = cgroups.dir(&container).join(cgroups.quota_file());
    let refused = std::fs::write(&quota, cgroups.quota_text(Some(10_000)));
    assert_eq!(
        refused.unwrap_err().raw_os_error(),
        Some(22),
        "why it yields"
    );
    assert_fine(&throttler.apply(at(1), &[], &cgroups.find()));
    cgroups.set_quota(&container, Some(10_000));
    assert_fine(&throttler.apply(at(2), &given, &cgroups.find()));
    assert_eq!(cgroups.read(&container, cgroups.burst_file()), "10000");
    cgroups.set_quota(&container, Some(40_000));
    assert_fine(&throttler.apply(at(3), &given, &cgroups.find()));
    assert_eq!(cgroups.read(&container, cgroups.burst_file()), "40000");
}

#[test]
fn a_burst_that_another_writer_resets_is_given_again_until_it_is_contested() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let Some((pod, _)) = limited_pod(&cgroups) else {
        return;
    };
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &[bursting("pod", 500)], &cgroups.find()));
    let mut contested = false;
    for second in 1..=4 {
        cgroups.write(&pod, cgroups.burst_file(), "0");
        let outcomes = throttler.verify(at(second * 10));
        let is_contest = |it: &ThrottleOutcome| matches!(it, ThrottleOutcome::Contested { .. });
        contested = outcomes.iter().any(is_contest);
        let expected = if second < 4 { "50000" } else { "0" };
        assert_eq!(cgroups.read(&pod, cgroups.burst_file()), expected);
    }
    assert!(contested, "systemd never resets a burst");
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn a_kernel_without_burst_is_reported_once() {
    let fake = tempfile::tempdir().unwrap();
    let (root, state) = (fake.path().join("cg"), fake.path().join("state"));
    for pod in ["a", "b"] {
        std::fs::create_dir_all(root.join(pod)).unwrap();
        std::fs::write(root.join(pod).join("cpu.max"), "90000 100000").unwrap();
    }
    let mut throttler = Throttler::open(&state, Hierarchy::V2 { root }, at(0))
        .unwrap()
        .0;
    let plan = [bursting("a", 500), bursting("b", 500)];
    let find = |uid: &PodUid| CgroupPath::new(&uid.0).ok();
    let outcomes = throttler.apply(at(0), &plan, &find);
    assert!(
        matches!(outcomes[..], [ThrottleOutcome::NoBurst]),
        "{outcomes:?}"
    );
    assert_eq!(outcomes[0].feedback(), None);
    assert!(throttler.apply(at(1), &plan, &find).is_empty());
}

#[test]
fn a_pod_that_is_already_idle_class_is_unchanged() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    cgroups.write(&pod, "cpu.idle", "1");
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[idle(throttle("pod", 300))], &cgroups.find());
    assert_eq!(cgroups.journal_lines().len(), 1);
    throttler.apply(at(1), &[], &cgroups.find());
    assert_eq!(cgroups.read(&pod, "cpu.idle"), "1");
}

#[test]
fn a_removed_idle_class_is_set_again_in_the_same_tick() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    cgroups.write(&pod, cgroups.weight_file(), "37");
    let mut throttler = cgroups.throttler();
    throttler.apply(
        at(0),
        &[idle(throttle_of_cgroups("pod", &[("", None)]))],
        &cgroups.find(),
    );
    cgroups.write(&pod, "cpu.idle", "0");
    assert_fine(&throttler.verify(at(1)));
    assert_eq!(cgroups.read(&pod, "cpu.idle"), "1");
    // With a new weight, which becomes the original.
    cgroups.write(&pod, "cpu.idle", "0");
    cgroups.write(&pod, cgroups.weight_file(), "55");
    assert_fine(&throttler.verify(at(2)));
    assert_eq!(cgroups.read(&pod, "cpu.idle"), "1");
    throttler.apply(at(3), &[], &cgroups.find());
    assert_eq!(cgroups.read(&pod, "cpu.idle"), "0");
    assert_eq!(cgroups.read(&pod, cgroups.weight_file()), "55");
}

#[test]
fn a_larger_foreign_quota_is_lowered_and_becomes_the_original() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(80_000));
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    cgroups.set_quota(&pod, Some(150_000));
    let outcomes = throttler.verify(at(1));
    let feedback: Vec<_> = outcomes
        .iter()
        .filter_map(ThrottleOutcome::feedback)
        .collect();
    let resized = Feedback::Resized {
        uid: uid("pod"),
        cgroup: "".into(),
        original: Quota::Limit(MilliCpu(1500)),
    };
    let uids = vec![uid("pod")];
    assert_eq!(feedback, [Feedback::Overwritten { uids }, resized]);
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
    assert!(throttler.verify(at(2)).is_empty());
    throttler.apply(at(3), &[], &cgroups.find());
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(150_000)));
}

#[test]
fn a_smaller_foreign_quota_stays() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(80_000));
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    cgroups.set_quota(&pod, Some(10_000));
    let outcomes = throttler.verify(at(1));
    assert!(
        outcomes
            .iter()
            .any(|o| matches!(o, ThrottleOutcome::Resized { .. })),
        "{outcomes:?}"
    );
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(10_000)));
    assert!(cgroups.journal_lines().is_empty(), "it is no longer ours");
    throttler.apply(at(2), &[throttle("pod", 50)], &cgroups.find());
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(5_000)));
    throttler.apply(at(3), &[], &cgroups.find());
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(10_000)));
}

#[test]
fn a_foreign_change_between_check_and_write_is_not_lost() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(80_000));
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    throttler.verify(at(1));
    cgroups.set_quota(&pod, Some(150_000));
    throttler.apply(at(1), &[throttle("pod", 200)], &cgroups.find());
    throttler.verify(at(2));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(20_000)));
    throttler.apply(at(3), &[], &cgroups.find());
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(150_000)));
}

#[test]
fn a_reset_of_all_pods_counts_once_and_is_reverted() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pods: Vec<_> = ["a", "b", "c"]
        .iter()
        .map(|name| cgroups.pod(name))
        .collect();
    let plan = ["a", "b", "c"].map(|name| throttle(name, 300));
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &plan, &cgroups.find());
    for second in 1..=3 {
        for pod in &pods {
            cgroups.set_quota(pod, None);
        }
        let outcomes = throttler.verify(at(second));
        let swept = outcomes
            .iter()
            .filter(|o| matches!(o, ThrottleOutcome::Swept { uids } if uids.len() == 3))
            .count();
        assert_eq!(swept, 1, "{outcomes:?}");
        let feedback: Vec<_> = outcomes
            .iter()
            .filter_map(ThrottleOutcome::feedback)
            .collect();
        let [Feedback::Overwritten { uids }] = &feedback[..] else {
            panic!("{feedback:?}");
        };
        assert_eq!(uids.len(), 3);
        for pod in &pods {
            assert_eq!(cgroups.quota(pod), cgroups.quota_text(Some(30_000)));
        }
    }
    // After a minute the count starts over.
    for pod in &pods {
        cgroups.set_quota(pod, None);
    }
    let outcomes = throttler.verify(at(70));
    let contested =
        |outcome: &ThrottleOutcome| matches!(outcome, ThrottleOutcome::Contested { .. });
    assert!(!outcomes.iter().any(contested), "{outcomes:?}");
    assert_eq!(cgroups.quota(&pods[0]), cgroups.quota_text(Some(30_000)));
}

/// Resets everything as `systemctl daemon-reload` does, ten times in a minute, and checks that each is reverted. The pod named
/// `class` has no quota: systemd before 252 leaves it alone.
fn ten_reloads_in_a_minute(names: &[&str], resets_class: bool) {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let class = |name: &str| idle(throttle_of_cgroups(name, &[("", None)]));
    let plan: Vec<_> = names
        .iter()
        .map(|name| match *name {
            "class" => class(name),
            name => throttle(name, 300),
        })
        .collect();
    let pods: Vec<_> = names.iter().map(|name| cgroups.pod(name)).collect();
    if !cgroups.has(&pods[0], "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &plan, &cgroups.find()));
    for reload in 1..=10 {
        for (name, pod) in names.iter().zip(&pods) {
            match *name {
                "class" if resets_class => cgroups.write(pod, "cpu.idle", "0"),
                "class" => {}
                _ => cgroups.set_quota(pod, None),
            }
        }
        let outcomes = throttler.verify(at(reload * 6));
        let swept = |it: &ThrottleOutcome| matches!(it, ThrottleOutcome::Swept { .. });
        assert_eq!(
            outcomes.iter().filter(|it| swept(it)).count(),
            1,
            "{outcomes:?}"
        );
        for (name, pod) in names.iter().zip(&pods) {
            match *name {
                "class" => assert_eq!(cgroups.read(pod, "cpu.idle"), "1", "reload {reload}"),
                _ => assert_eq!(
                    cgroups.quota(pod),
                    cgroups.quota_text(Some(30_000)),
                    "reload {reload} of {names:?}"
                ),
            }
        }
    }
    assert_fine(&throttler.apply(at(61), &[], &cgroups.find()));
    for pod in &pods {
        assert_eq!(cgroups.quota(pod), cgroups.quota_text(None));
        assert_eq!(cgroups.read(pod, "cpu.idle"), "0");
    }
}

#[test]
fn daemon_reloads_are_no_contest_however_many_come() {
    ten_reloads_in_a_minute(&["only"], true);
    ten_reloads_in_a_minute(&["class"], true);
    ten_reloads_in_a_minute(&["a", "b", "c", "d", "e"], true);
    for resets_class in [true, false] {
        ten_reloads_in_a_minute(&["a", "b", "class"], resets_class);
        ten_reloads_in_a_minute(&["a", "class"], resets_class);
    }
}

/// Four changes, `interval` seconds apart, of the first of these pods, which are throttled. Returns whether it is contested.
fn is_contested(names: &[&str], interval: u64, theirs: Option<u64>) -> bool {
    let Some(cgroups) = test_cgroups() else {
        return true;
    };
    let plan: Vec<_> = names.iter().map(|pod| throttle(pod, 300)).collect();
    let pods: Vec<_> = names.iter().map(|pod| cgroups.pod(pod)).collect();
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &plan, &cgroups.find());
    let mut outcomes = Vec::new();
    for change in 1..=4 {
        let value = theirs.map(|quota| quota + change);
        cgroups.set_quota(&pods[0], value);
        outcomes.extend(throttler.verify(at(change * interval)));
    }
    outcomes
        .iter()
        .any(|it| matches!(it, ThrottleOutcome::Contested { .. }))
}

#[test]
fn another_writer_is_told_from_a_daemon_reload() {
    if test_cgroups().is_none() {
        return;
    }
    let other = Some(90_000);
    assert!(is_contested(&["a"], 15, other), "a value of its own");
    assert!(is_contested(&["a", "b"], 15, None), "one pod of two");
    assert!(is_contested(&["a"], 1, None), "the original, at once");
    assert!(!is_contested(&["a"], 6, None), "the original, now and then");
}

#[test]
fn a_contested_pod_is_left_alone_for_five_minutes() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.pod("other");
    let plan = [throttle("pod", 300), throttle("other", 300)];
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &plan, &cgroups.find());
    let mut contested = Vec::new();
    for second in 1..=4 {
        assert!(
            contested.is_empty(),
            "only more than three a minute are too many"
        );
        cgroups.set_quota(&pod, Some(90_000 + second));
        let outcomes = throttler.verify(at(second));
        contested = outcomes
            .iter()
            .filter(|outcome| matches!(outcome, ThrottleOutcome::Contested { .. }))
            .filter_map(ThrottleOutcome::feedback)
            .collect();
    }
    assert!(matches!(&contested[..], [Feedback::Contested { uid, .. }] if uid.0 == "pod".into()));
    let theirs = cgroups.quota_text(Some(90_004));
    assert_eq!(cgroups.quota(&pod), theirs);
    assert_eq!(cgroups.journal_lines().len(), 1);
    throttler.apply(at(60), &plan, &cgroups.find());
    assert_eq!(cgroups.quota(&pod), theirs);
    throttler.apply(at(310), &plan, &cgroups.find());
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
}

#[test]
fn an_unrequested_throttle_ends_at_its_deadline() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let mut throttler = cgroups.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    assert!(throttler.verify(at(29 * 60)).is_empty());
    let outcomes = throttler.verify(at(30 * 60 + 1));
    assert!(
        outcomes
            .iter()
            .any(|o| matches!(o, ThrottleOutcome::Expired { .. })),
        "{outcomes:?}"
    );
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn an_extended_deadline_is_saved_after_half_the_lifetime() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let mut throttler = cgroups.throttler();
    let plan = [throttle("pod", 300)];
    throttler.apply(at(0), &plan, &cgroups.find());
    let first = cgroups.journal_lines();
    throttler.apply(at(14 * 60), &plan, &cgroups.find());
    assert_eq!(cgroups.journal_lines(), first);
    throttler.apply(at(16 * 60), &plan, &cgroups.find());
    assert_ne!(cgroups.journal_lines(), first);
    throttler.verify(at(40 * 60));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
}

#[test]
fn a_tick_without_changes_writes_no_journal() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    cgroups.pod("pod");
    let mut throttler = cgroups.throttler();
    let plan = [throttle("pod", 300)];
    throttler.apply(at(0), &plan, &cgroups.find());
    let journal = cgroups.state.path().join("journal");
    std::fs::remove_file(&journal).unwrap();
    for second in 1..10 {
        assert!(throttler.verify(at(second)).is_empty());
        assert!(
            throttler
                .apply(at(second), &plan, &cgroups.find())
                .is_empty()
        );
    }
    assert!(!journal.exists());
}

#[test]
fn verifying_throttles_does_not_allocate() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let names: Vec<String> = (0..20).map(|number| format!("pod-{number}")).collect();
    let mut throttler = cgroups.throttler();
    let plan: Vec<_> = names
        .iter()
        .map(|name| {
            cgroups.pod(name);
            idle(throttle(name, 300))
        })
        .collect();
    assert_fine(&throttler.apply(at(0), &plan, &cgroups.find()));
    let now = at(1);
    let info = allocation_counter::measure(|| {
        assert!(throttler.verify(now).is_empty());
    });
    assert_eq!(info.count_total, 0);
}

/// A pod in plain directories that stand in for cgroup v2. All values of a file have the same length, since writes do not
/// truncate, and the test plays the kernel: it sets the weight that entering and leaving the idle class entails.
struct FakePod {
    directory: tempfile::TempDir,
    throttler: Throttler,
}

impl FakePod {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("pod")).unwrap();
        let hierarchy = Hierarchy::V2 {
            root: directory.path().to_owned(),
        };
        let state = directory.path().join("state");
        let (throttler, _) = Throttler::open(&state, hierarchy, at(0)).unwrap();
        let pod = Self {
            directory,
            throttler,
        };
        pod.write("cpu.idle", "0");
        pod.write("cpu.weight", "7");
        pod.write("cpu.max", "max 100000");
        pod
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.directory.path().join("pod").join(file)
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.path(file), format!("{text}\n")).unwrap();
    }

    /// `cpu.idle` and `cpu.weight`.
    fn class(&self) -> [String; 2] {
        ["cpu.idle", "cpu.weight"].map(|file| {
            let text = std::fs::read_to_string(self.path(file)).unwrap();
            text.trim().to_owned()
        })
    }

    fn apply(&mut self, second: u64, class: Option<CpuClass>) {
        assert_fine(&self.try_apply(second, class));
    }

    fn try_apply(&mut self, second: u64, class: Option<CpuClass>) -> Vec<ThrottleOutcome> {
        let plan = class.map(|class| PodThrottle {
            class,
            ..throttle_of_cgroups("pod", &[("", None)])
        });
        let plan = Vec::from_iter(plan);
        let find = |_: &_| CgroupPath::new("pod").ok();
        self.throttler.apply(at(second), &plan, &find)
    }

    fn is_journalled(&self, file: &str, original: &str) -> bool {
        let mut records = self.throttler.records();
        records.any(|it| it.file.name() == file && &*it.original == original)
    }
}

#[test]
fn the_lowest_weight_leaves_the_idle_class_unused_and_is_restored_exactly() {
    let mut pod = FakePod::new();
    pod.apply(0, Some(CpuClass::LowestWeight));
    assert_eq!(pod.class(), ["0", "1"]);
    assert!(pod.is_journalled("cpu.weight", "7"));
    assert_eq!(pod.throttler.records().count(), 1);
    pod.apply(1, None);
    assert_eq!(pod.class(), ["0", "7"]);
    assert_eq!(pod.throttler.records().count(), 0);
}

#[test]
fn a_pod_in_the_idle_class_changes_over_to_the_lowest_weight_and_back() {
    let mut pod = FakePod::new();
    pod.apply(0, Some(CpuClass::Idle));
    pod.write("cpu.weight", "0");
    pod.apply(1, Some(CpuClass::LowestWeight));
    assert_eq!(pod.class(), ["0", "1"]);
    assert!(pod.is_journalled("cpu.weight", "7"));
    assert!(!pod.is_journalled("cpu.idle", "0"));
    // Another process goes on from the journal.
    let hierarchy = Hierarchy::V2 {
        root: pod.directory.path().to_owned(),
    };
    let FakePod {
        directory,
        throttler,
    } = pod;
    drop(throttler);
    let state = directory.path().join("state");
    let (throttler, recovered) = Throttler::open(&state, hierarchy, at(2)).unwrap();
    assert!(recovered.throttles[0].idle);
    let mut pod = FakePod {
        directory,
        throttler,
    };
    pod.apply(3, Some(CpuClass::Idle));
    assert_eq!(pod.class(), ["1", "7"]);
    pod.write("cpu.weight", "0");
    pod.apply(4, None);
    assert_eq!(pod.class(), ["0", "7"]);
}

#[test]
fn a_change_of_class_that_the_journal_refuses_is_made_up_for() {
    let mut pod = FakePod::new();
    pod.apply(0, Some(CpuClass::Idle));
    pod.write("cpu.weight", "0");
    let [state, away] = ["state", "away"].map(|name| pod.directory.path().join(name));
    std::fs::rename(&state, &away).unwrap();
    let outcomes = pod.try_apply(1, Some(CpuClass::LowestWeight));
    let failed = |it: &ThrottleOutcome| matches!(it, ThrottleOutcome::JournalFailed { .. });
    assert!(outcomes.iter().any(failed), "{outcomes:?}");
    assert_eq!(
        pod.class(),
        ["0", "7"],
        "nothing is lowered without a journal"
    );
    std::fs::rename(&away, &state).unwrap();
    pod.apply(2, Some(CpuClass::LowestWeight));
    assert_eq!(pod.class(), ["0", "1"]);
}

#[test]
fn an_idle_class_set_by_somebody_else_stays() {
    let mut pod = FakePod::new();
    pod.write("cpu.idle", "1");
    pod.write("cpu.weight", "0");
    pod.apply(0, Some(CpuClass::LowestWeight));
    pod.apply(1, None);
    assert_eq!(pod.class(), ["1", "0"]);
}

#[test]
fn a_resize_that_ends_the_idle_class_leaves_its_new_weight() {
    let mut pod = FakePod::new();
    pod.apply(0, Some(CpuClass::Idle));
    // systemd writes the weight, which sets the idle class back.
    pod.write("cpu.idle", "0");
    pod.write("cpu.weight", "9");
    assert_fine(&pod.throttler.verify(at(1)));
    assert_eq!(pod.class(), ["1", "9"]);
    pod.write("cpu.weight", "0");
    pod.apply(2, None);
    assert_eq!(pod.class(), ["0", "9"]);
}

#[test]
fn a_resize_between_two_checks_leaves_its_new_weight_too() {
    let mut pod = FakePod::new();
    pod.apply(0, Some(CpuClass::Idle));
    pod.write("cpu.idle", "0");
    pod.write("cpu.weight", "9");
    pod.apply(1, Some(CpuClass::LowestWeight));
    assert_eq!(pod.class(), ["0", "1"]);
    assert!(pod.is_journalled("cpu.weight", "9"));
}

#[test]
fn a_resize_after_the_idle_class_was_left_sets_the_weight_to_restore() {
    let mut pod = FakePod::new();
    pod.apply(0, Some(CpuClass::Idle));
    pod.write("cpu.weight", "0");
    pod.apply(1, Some(CpuClass::LowestWeight));
    assert_eq!(pod.class(), ["0", "1"], "a weight can be written");
    pod.write("cpu.weight", "9");
    assert_fine(&pod.throttler.verify(at(2)));
    assert_eq!(pod.class(), ["0", "1"]);
    pod.apply(3, Some(CpuClass::Idle));
    assert_eq!(pod.class(), ["1", "9"]);
    pod.write("cpu.weight", "0");
    pod.apply(4, None);
    assert_eq!(pod.class(), ["0", "9"]);
}
