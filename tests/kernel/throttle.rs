//! The throttler on a real kernel, cgroup v1 or v2.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::kernel_support::{World, assert_fine, at, idle, on_levers, throttle, uid, world};
use plimsoll::crd::pod_facts::ContainerFacts;
use plimsoll::engine::plan::{Feedback, Throttle};
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::node::actuate::throttle::{Outcome, Throttler};
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::collect::{Sampler, Target};
use plimsoll::node::journal::Effects;

/// Steps down to the floor and back, and checks that every file is restored.
fn step_down_and_back(world: &World, pod: &CgroupPath, original: &str) {
    let mut throttler = world.throttler();
    let find = world.find();
    for (second, quota) in [900, 700, 500, 300, 100, 200, 400, 800]
        .into_iter()
        .enumerate()
    {
        let now = at(second as u64);
        assert_fine(&throttler.verify(now));
        assert_fine(&throttler.apply(now, &[throttle("pod", quota)], &find));
        let expected = world.quota_text(Some(quota * 100));
        assert_eq!(world.quota(pod), expected);
        assert_eq!(world.journal_lines().len(), 1);
        let line = &world.journal_lines()[0];
        assert!(
            line.contains(&format!("\"original\":\"{original}\"")),
            "{line}"
        );
    }
    assert_fine(&throttler.apply(at(9), &[], &find));
    assert_eq!(world.quota(pod), original);
    assert!(world.journal_lines().is_empty());
}

#[test]
fn an_unlimited_pod_is_throttled_in_steps_and_restored() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let original = world.quota_text(None);
    assert_eq!(world.quota(&pod), original);
    step_down_and_back(&world, &pod, &original);
}

#[test]
fn a_limited_pod_is_throttled_in_steps_and_restored() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.set_quota(&pod, Some(123_457));
    let original = world.quota_text(Some(123_457));
    step_down_and_back(&world, &pod, &original);
}

#[test]
fn an_unusual_period_is_preserved() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    if world.is_v2() {
        world.write(&pod, "cpu.max", "30000 20000");
    } else {
        world.write(&pod, "cpu.cfs_period_us", "20000");
        world.write(&pod, "cpu.cfs_quota_us", "30000");
    }
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[throttle("pod", 500)], &world.find());
    let expected = if world.is_v2() {
        "10000 20000"
    } else {
        "10000"
    };
    assert_eq!(world.quota(&pod), expected);
    throttler.apply(at(1), &[], &world.find());
    let original = if world.is_v2() {
        "30000 20000"
    } else {
        "30000"
    };
    assert_eq!(world.quota(&pod), original);
}

#[test]
fn a_quota_below_the_kernel_minimum_is_raised_to_it() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let mut throttler = world.throttler();
    assert_fine(&throttler.apply(at(0), &[throttle("pod", 3)], &world.find()));
    assert_eq!(world.quota(&pod), world.quota_text(Some(1000)));
}

#[test]
fn a_limit_below_the_target_is_unchanged() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.set_quota(&pod, Some(20_000));
    let mut throttler = world.throttler();
    assert!(
        throttler
            .apply(at(0), &[throttle("pod", 300)], &world.find())
            .is_empty()
    );
    assert_eq!(world.quota(&pod), world.quota_text(Some(20_000)));
    assert!(world.journal_lines().is_empty());
}

#[test]
fn limited_containers_are_throttled_instead_of_the_pod() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let web = world.container(&pod, "web");
    let log = world.container(&pod, "log");
    world.set_quota(&web, Some(80_000));
    world.set_quota(&log, Some(40_000));
    let mut throttler = world.throttler();
    let both = on_levers("pod", &[("web", Some(400)), ("log", Some(200))]);
    assert_fine(&throttler.apply(at(0), &[both], &world.find()));
    assert_eq!(world.quota(&web), world.quota_text(Some(40_000)));
    assert_eq!(world.quota(&log), world.quota_text(Some(20_000)));
    assert_eq!(world.quota(&pod), world.quota_text(None));
    let one = on_levers("pod", &[("web", Some(400)), ("log", None)]);
    assert_fine(&throttler.apply(at(1), &[one], &world.find()));
    assert_eq!(world.quota(&log), world.quota_text(Some(40_000)));
    assert_fine(&throttler.apply(at(2), &[], &world.find()));
    assert_eq!(world.quota(&web), world.quota_text(Some(80_000)));
    assert!(world.journal_lines().is_empty());
}

#[test]
fn pod_and_container_are_written_in_the_order_the_kernel_needs() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let web = world.container(&pod, "web");
    world.set_quota(&pod, Some(80_000));
    world.set_quota(&web, Some(80_000));
    let mut throttler = world.throttler();
    for (second, quota) in [500, 200, 600].into_iter().enumerate() {
        let levers = on_levers("pod", &[("", Some(quota)), ("web", Some(quota))]);
        assert_fine(&throttler.apply(at(second as u64), &[levers], &world.find()));
        assert_eq!(world.quota(&web), world.quota_text(Some(quota * 100)));
        assert_eq!(world.quota(&pod), world.quota_text(Some(quota * 100)));
    }
    assert_fine(&throttler.apply(at(5), &[], &world.find()));
    assert_eq!(world.quota(&pod), world.quota_text(Some(80_000)));
    assert_eq!(world.quota(&web), world.quota_text(Some(80_000)));
}

#[test]
fn a_pod_rejected_by_the_kernel_does_not_stop_others() {
    let Some(world) = world() else { return };
    if world.is_v2() {
        eprintln!("skipped: cgroup v2 does not compare quotas of parent and child");
        return;
    }
    let bad = world.pod("bad");
    let web = world.container(&bad, "web");
    world.set_quota(&web, Some(80_000));
    let good = world.pod("good");
    let mut throttler = world.throttler();
    let plan = [throttle("bad", 200), throttle("good", 200)];
    let outcomes = throttler.apply(at(0), &plan, &world.find());
    let feedback: Vec<_> = outcomes.iter().filter_map(Outcome::feedback).collect();
    assert_eq!(feedback, [Feedback::ThrottleFailed { uid: uid("bad") }]);
    assert_eq!(world.quota(&bad), world.quota_text(None));
    assert_eq!(world.quota(&good), world.quota_text(Some(20_000)));
    throttler.verify(at(1));
    assert_eq!(
        world.journal_lines().len(),
        1,
        "a file that was not changed has no record"
    );
}

#[test]
fn a_restarted_limited_container_is_throttled_again() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let first = world.container(&pod, "first");
    world.set_quota(&first, Some(80_000));
    let mut throttler = world.throttler();
    let find = world.find();
    assert_fine(&throttler.apply(at(0), &[on_levers("pod", &[("first", Some(300))])], &find));
    world.remove(&first);
    let second = world.container(&pod, "second");
    world.set_quota(&second, Some(80_000));
    assert_fine(&throttler.verify(at(1)));
    assert!(world.journal_lines().is_empty());
    assert_fine(&throttler.apply(at(2), &[on_levers("pod", &[("second", Some(300))])], &find));
    assert_eq!(world.quota(&second), world.quota_text(Some(30_000)));
    assert_fine(&throttler.apply(at(3), &[], &find));
    assert_eq!(world.quota(&second), world.quota_text(Some(80_000)));
}

/// A throttle to half a CPU for each target cgroup of the sampler.
fn planned(sampler: &mut Sampler) -> Throttle {
    let levers = sampler.targets(&uid("pod"));
    let levers: Vec<_> = levers
        .iter()
        .map(|lever| (&*lever.cgroup, Some(500)))
        .collect();
    on_levers("pod", &levers)
}

#[test]
fn a_limited_container_can_restart_while_its_pod_is_throttled() {
    let Some(world) = world() else { return };
    if world.is_v2() {
        eprintln!("skipped: cgroup v2 does not compare quotas of parent and child");
        return;
    }
    let pod = world.pod("pod");
    world.container(&pod, "pause");
    let limited = |missing| Target {
        uid: uid("pod"),
        cgroup: pod.clone(),
        containers: Some(ContainerFacts {
            limited: true,
            missing,
        }),
    };
    let mut sampler = Sampler::new(Path::new("/proc"), world.hierarchy.clone());
    let mut throttler = world.throttler();
    // It crashed and its cgroup is gone, but the API server does not report it yet.
    sampler.set_pods([limited(false)].into_iter());
    let plan = [planned(&mut sampler)];
    assert_fine(&throttler.apply(at(0), &plan, &world.find()));
    assert_eq!(world.quota(&pod), world.quota_text(None));
    let main = world.container(&pod, "main");
    world.set_quota(&main, Some(80_000));
    let plan = [planned(&mut sampler)];
    assert_fine(&throttler.apply(at(1), &plan, &world.find()));
    assert_eq!(world.quota(&main), world.quota_text(Some(50_000)));
    // An already throttled pod stays throttled by its containers, even if an earlier process did not do so.
    for pin in [true, false] {
        sampler.set_pods([limited(true)].into_iter());
        sampler.pin_targets(&uid("pod"), pin);
        assert_eq!(planned(&mut sampler).levers.len(), 2);
    }
    // Once the API server reports it, the pod is not a new victim.
    sampler.unpin_targets(&uid("pod"));
    assert_eq!(planned(&mut sampler).levers.len(), 0);
}

#[test]
fn a_removed_pod_is_dropped_and_reported() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.pod("other");
    let mut throttler = world.throttler();
    let plan = [throttle("pod", 200), throttle("other", 200)];
    throttler.apply(at(0), &plan, &world.find());
    world.remove(&pod);
    let outcomes = throttler.verify(at(1));
    let feedback: Vec<_> = outcomes.iter().filter_map(Outcome::feedback).collect();
    assert_eq!(feedback, [Feedback::Gone { uid: uid("pod") }]);
    assert_eq!(world.journal_lines().len(), 1);
    let outcomes = throttler.apply(at(2), &plan, &world.find());
    assert!(
        matches!(&outcomes[..], [Outcome::Gone { .. }]),
        "{outcomes:?}"
    );
}

#[test]
fn a_pod_may_be_removed_at_any_point() {
    let Some(world) = world() else { return };
    let stays = world.pod("stays");
    for vanish_at in 1.. {
        let goes = world.pod("goes");
        world.set_quota(&goes, Some(80_000));
        let mut remove = world.removal(&goes);
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        let effects = Effects::watched(move |_| {
            if count.fetch_add(1, Ordering::Relaxed) + 1 == vanish_at {
                remove();
            }
        });
        let state = world.state.path();
        let opened = Throttler::open_with(state, world.hierarchy.clone(), at(0), effects);
        let mut throttler = opened.unwrap().0;
        for (second, quota) in [500, 300, 400].into_iter().enumerate() {
            let now = at(second as u64);
            assert_fine(&throttler.verify(now));
            let plan = [
                idle(throttle("goes", quota)),
                idle(throttle("stays", quota)),
            ];
            assert_fine(&throttler.apply(now, &plan, &world.find()));
            assert_eq!(world.quota(&stays), world.quota_text(Some(quota * 100)));
        }
        assert_fine(&throttler.apply(at(3), &[], &world.find()));
        assert_fine(&throttler.verify(at(4)));
        assert_eq!(world.quota(&stays), world.quota_text(None));
        assert!(world.journal_lines().is_empty(), "vanished at {vanish_at}");
        if calls.load(Ordering::Relaxed) < vanish_at {
            assert!(vanish_at > 40, "the hook was called only {vanish_at} times");
            return;
        }
        world.remove(&goes);
    }
}

#[test]
fn another_cgroup_of_the_same_name_is_never_written() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[throttle("pod", 200)], &world.find());
    world.remove(&pod);
    world.pod("pod");
    world.set_quota(&pod, Some(70_000));
    throttler.apply(at(1), &[], &world.find());
    assert_eq!(world.quota(&pod), world.quota_text(Some(70_000)));
    assert!(world.journal_lines().is_empty());
}

#[test]
fn a_burst_is_lowered_before_and_restored_after_its_quota() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    if !world.has(&pod, world.burst_file()) {
        eprintln!("skipped: this kernel has no burst");
        return;
    }
    world.set_quota(&pod, Some(90_000));
    world.write(&pod, world.burst_file(), "50000");
    let mut throttler = world.throttler();
    let expected = [
        (600, "50000", 1),
        (300, "30000", 2),
        (100, "10000", 2),
        (800, "10000", 2),
    ];
    for (second, (quota, burst, records)) in expected.into_iter().enumerate() {
        let plan = [throttle("pod", quota)];
        assert_fine(&throttler.apply(at(second as u64), &plan, &world.find()));
        assert_eq!(world.quota(&pod), world.quota_text(Some(quota * 100)));
        assert_eq!(world.read(&pod, world.burst_file()), burst);
        assert_eq!(world.journal_lines().len(), records);
    }
    assert_fine(&throttler.apply(at(9), &[], &world.find()));
    assert_eq!(world.quota(&pod), world.quota_text(Some(90_000)));
    assert_eq!(world.read(&pod, world.burst_file()), "50000");
    assert!(world.journal_lines().is_empty());
}

#[test]
fn a_burst_is_restored_after_a_quota_that_was_rejected_first() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    if world.is_v2() || !world.has(&pod, world.burst_file()) {
        eprintln!("skipped: this kernel rejects no quota, or has no burst");
        return;
    }
    world.set_quota(&pod, Some(90_000));
    world.write(&pod, world.burst_file(), "50000");
    let mut throttler = world.throttler();
    assert_fine(&throttler.apply(at(0), &[throttle("pod", 300)], &world.find()));
    // A parent that allows less than the child's original.
    world.set_quota(&world.parent, Some(60_000));
    let outcomes = throttler.restore_except(at(1), &[]);
    let failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed { .. });
    assert!(outcomes.iter().all(failed), "{outcomes:?}");
    assert_eq!(world.read(&pod, world.burst_file()), "30000");
    assert_eq!(world.journal_lines().len(), 2);
    world.set_quota(&world.parent, None);
    assert_fine(&throttler.restore_except(at(2), &[]));
    assert_eq!(world.quota(&pod), world.quota_text(Some(90_000)));
    assert_eq!(world.read(&pod, world.burst_file()), "50000");
    assert!(world.journal_lines().is_empty());
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
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    if !world.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    for weight in ["4", "37", "1234"] {
        world.write(&pod, world.weight_file(), weight);
        let mut throttler = world.throttler();
        let only_idle = idle(on_levers("pod", &[("", None)]));
        let outcomes = throttler.apply(at(0), std::slice::from_ref(&only_idle), &world.find());
        assert_fine(&outcomes);
        assert_eq!(world.read(&pod, "cpu.idle"), "1");
        assert_eq!(world.quota(&pod), world.quota_text(None));
        assert_eq!(world.journal_lines().len(), 2);
        let both = idle(throttle("pod", 300));
        assert_fine(&throttler.apply(at(1), &[both], &world.find()));
        assert_eq!(world.quota(&pod), world.quota_text(Some(30_000)));
        assert!(throttler.verify(at(2)).is_empty());
        assert_fine(&throttler.apply(at(3), &[only_idle], &world.find()));
        assert_eq!(world.quota(&pod), world.quota_text(None));
        assert_fine(&throttler.apply(at(4), &[], &world.find()));
        assert_eq!(world.read(&pod, "cpu.idle"), "0");
        assert_eq!(world.read(&pod, world.weight_file()), weight);
        assert!(world.journal_lines().is_empty());
    }
}

#[test]
fn a_pod_that_is_already_idle_class_is_unchanged() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    if !world.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    world.write(&pod, "cpu.idle", "1");
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[idle(throttle("pod", 300))], &world.find());
    assert_eq!(world.journal_lines().len(), 1);
    throttler.apply(at(1), &[], &world.find());
    assert_eq!(world.read(&pod, "cpu.idle"), "1");
}

#[test]
fn a_removed_idle_class_is_set_again_in_the_same_tick() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    if !world.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    world.write(&pod, world.weight_file(), "37");
    let mut throttler = world.throttler();
    throttler.apply(
        at(0),
        &[idle(on_levers("pod", &[("", None)]))],
        &world.find(),
    );
    world.write(&pod, "cpu.idle", "0");
    assert_fine(&throttler.verify(at(1)));
    assert_eq!(world.read(&pod, "cpu.idle"), "1");
    // With a new weight, which becomes the original.
    world.write(&pod, "cpu.idle", "0");
    world.write(&pod, world.weight_file(), "55");
    assert_fine(&throttler.verify(at(2)));
    assert_eq!(world.read(&pod, "cpu.idle"), "1");
    throttler.apply(at(3), &[], &world.find());
    assert_eq!(world.read(&pod, "cpu.idle"), "0");
    assert_eq!(world.read(&pod, world.weight_file()), "55");
}

#[test]
fn a_larger_foreign_quota_is_lowered_and_becomes_the_original() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.set_quota(&pod, Some(80_000));
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &world.find());
    world.set_quota(&pod, Some(150_000));
    let outcomes = throttler.verify(at(1));
    let feedback: Vec<_> = outcomes.iter().filter_map(Outcome::feedback).collect();
    let resized = Feedback::Resized {
        uid: uid("pod"),
        cgroup: "".into(),
        original: Quota::Limit(MilliCpu(1500)),
    };
    assert_eq!(feedback, [resized]);
    assert_eq!(world.quota(&pod), world.quota_text(Some(30_000)));
    assert!(throttler.verify(at(2)).is_empty());
    throttler.apply(at(3), &[], &world.find());
    assert_eq!(world.quota(&pod), world.quota_text(Some(150_000)));
}

#[test]
fn a_smaller_foreign_quota_stays() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.set_quota(&pod, Some(80_000));
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &world.find());
    world.set_quota(&pod, Some(10_000));
    let outcomes = throttler.verify(at(1));
    assert!(
        outcomes
            .iter()
            .any(|o| matches!(o, Outcome::Resized { .. })),
        "{outcomes:?}"
    );
    assert_eq!(world.quota(&pod), world.quota_text(Some(10_000)));
    assert!(world.journal_lines().is_empty(), "it is no longer ours");
    throttler.apply(at(2), &[throttle("pod", 50)], &world.find());
    assert_eq!(world.quota(&pod), world.quota_text(Some(5_000)));
    throttler.apply(at(3), &[], &world.find());
    assert_eq!(world.quota(&pod), world.quota_text(Some(10_000)));
}

#[test]
fn a_foreign_change_between_check_and_write_is_not_lost() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.set_quota(&pod, Some(80_000));
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &world.find());
    throttler.verify(at(1));
    world.set_quota(&pod, Some(150_000));
    throttler.apply(at(1), &[throttle("pod", 200)], &world.find());
    throttler.verify(at(2));
    assert_eq!(world.quota(&pod), world.quota_text(Some(20_000)));
    throttler.apply(at(3), &[], &world.find());
    assert_eq!(world.quota(&pod), world.quota_text(Some(150_000)));
}

#[test]
fn a_reset_of_all_pods_counts_once_and_is_reverted() {
    let Some(world) = world() else { return };
    let pods: Vec<_> = ["a", "b", "c"].iter().map(|name| world.pod(name)).collect();
    let plan = ["a", "b", "c"].map(|name| throttle(name, 300));
    let mut throttler = world.throttler();
    throttler.apply(at(0), &plan, &world.find());
    for second in 1..=3 {
        for pod in &pods {
            world.set_quota(pod, None);
        }
        let outcomes = throttler.verify(at(second));
        let swept = outcomes
            .iter()
            .filter(|o| matches!(o, Outcome::Swept { pods: 3 }))
            .count();
        assert_eq!(swept, 1, "{outcomes:?}");
        assert!(outcomes.iter().all(|outcome| outcome.feedback().is_none()));
        for pod in &pods {
            assert_eq!(world.quota(pod), world.quota_text(Some(30_000)));
        }
    }
    // After a minute the count starts over.
    for pod in &pods {
        world.set_quota(pod, None);
    }
    assert!(
        throttler
            .verify(at(70))
            .iter()
            .all(|outcome| outcome.feedback().is_none())
    );
    assert_eq!(world.quota(&pods[0]), world.quota_text(Some(30_000)));
}

#[test]
fn a_contested_pod_is_left_alone_for_five_minutes() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    world.pod("other");
    let plan = [throttle("pod", 300), throttle("other", 300)];
    let mut throttler = world.throttler();
    throttler.apply(at(0), &plan, &world.find());
    let mut contested = Vec::new();
    for second in 1..=4 {
        assert!(
            contested.is_empty(),
            "only more than three a minute are too many"
        );
        world.set_quota(&pod, Some(90_000 + second));
        let outcomes = throttler.verify(at(second));
        contested = outcomes
            .iter()
            .filter(|outcome| matches!(outcome, Outcome::Contested { .. }))
            .filter_map(Outcome::feedback)
            .collect();
    }
    assert!(matches!(&contested[..], [Feedback::Contested { uid, .. }] if uid.0 == "pod".into()));
    let theirs = world.quota_text(Some(90_004));
    assert_eq!(world.quota(&pod), theirs);
    assert_eq!(world.journal_lines().len(), 1);
    throttler.apply(at(60), &plan, &world.find());
    assert_eq!(world.quota(&pod), theirs);
    throttler.apply(at(310), &plan, &world.find());
    assert_eq!(world.quota(&pod), world.quota_text(Some(30_000)));
}

#[test]
fn an_unrequested_throttle_ends_at_its_deadline() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let mut throttler = world.throttler();
    throttler.apply(at(0), &[throttle("pod", 300)], &world.find());
    assert!(throttler.verify(at(29 * 60)).is_empty());
    let outcomes = throttler.verify(at(30 * 60 + 1));
    assert!(
        outcomes
            .iter()
            .any(|o| matches!(o, Outcome::Expired { .. })),
        "{outcomes:?}"
    );
    assert_eq!(world.quota(&pod), world.quota_text(None));
    assert!(world.journal_lines().is_empty());
}

#[test]
fn an_extended_deadline_is_saved_after_half_the_lifetime() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let mut throttler = world.throttler();
    let plan = [throttle("pod", 300)];
    throttler.apply(at(0), &plan, &world.find());
    let first = world.journal_lines();
    throttler.apply(at(14 * 60), &plan, &world.find());
    assert_eq!(world.journal_lines(), first);
    throttler.apply(at(16 * 60), &plan, &world.find());
    assert_ne!(world.journal_lines(), first);
    throttler.verify(at(40 * 60));
    assert_eq!(world.quota(&pod), world.quota_text(Some(30_000)));
}

#[test]
fn a_tick_without_changes_writes_no_journal() {
    let Some(world) = world() else { return };
    world.pod("pod");
    let mut throttler = world.throttler();
    let plan = [throttle("pod", 300)];
    throttler.apply(at(0), &plan, &world.find());
    let journal = world.state.path().join("journal");
    std::fs::remove_file(&journal).unwrap();
    for second in 1..10 {
        assert!(throttler.verify(at(second)).is_empty());
        assert!(throttler.apply(at(second), &plan, &world.find()).is_empty());
    }
    assert!(!journal.exists());
}

#[test]
fn verifying_throttles_does_not_allocate() {
    let Some(world) = world() else { return };
    let names: Vec<String> = (0..20).map(|number| format!("pod-{number}")).collect();
    let mut throttler = world.throttler();
    let plan: Vec<_> = names
        .iter()
        .map(|name| {
            world.pod(name);
            idle(throttle(name, 300))
        })
        .collect();
    assert_fine(&throttler.apply(at(0), &plan, &world.find()));
    let now = at(1);
    let info = allocation_counter::measure(|| {
        assert!(throttler.verify(now).is_empty());
    });
    assert_eq!(info.count_total, 0);
}
