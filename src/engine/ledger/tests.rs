use super::super::testing::pod;
use super::*;

const SPEC: CpuThrottle = CpuThrottle {
    min_ratio: 10,
    step: 40,
    idle: false,
};

fn throttled_cgroup(cgroup: &str, base: u64, original: Quota) -> ThrottledCgroup {
    ThrottledCgroup::new(Arc::from(cgroup), MilliCpu(base), original)
}

fn limit(millicores: u64) -> Quota {
    Quota::Limit(MilliCpu(millicores))
}

fn target_cgroup(cgroup: &str, quota: Quota) -> TargetCgroupSample {
    TargetCgroupSample {
        cgroup: Arc::from(cgroup),
        cpu_nanos: None,
        quota: Some(quota),
    }
}

fn claim(rule: &str, ratio: u8, idle: bool) -> Claim {
    let depth = Depth { ratio, idle };
    Claim {
        rule: RuleId::from(rule),
        depth,
        before: depth,
        step: 10,
        is_fast: false,
        retired: None,
    }
}

#[test]
fn steps_down_stop_at_the_minimum_ratio_and_steps_up_at_the_original() {
    let mut depth = Depth::NONE;
    let mut ratios = Vec::new();
    for _ in 0..4 {
        depth = depth.lower_ratio(SPEC);
        ratios.push(depth.ratio);
    }
    assert_eq!(ratios, [60, 20, 10, 10]);
    ratios.clear();
    for _ in 0..4 {
        depth = depth.raise(SPEC.step);
        ratios.push(depth.ratio);
    }
    assert_eq!(ratios, [50, 90, 100, 100]);
    assert_eq!(depth, Depth::NONE);
}

#[test]
fn the_idle_class_is_left_last() {
    let down = Depth {
        ratio: 60,
        idle: true,
    };
    let up = down.raise(40);
    assert_eq!((up.ratio, up.idle), (100, true));
    assert_eq!(up.raise(40), Depth::NONE);
}

#[test]
fn a_minimum_ratio_above_the_current_ratio_changes_nothing() {
    let depth = Depth {
        ratio: 5,
        idle: false,
    };
    assert_eq!(depth.lower_ratio(SPEC), depth);
}

#[test]
fn a_quota_stays_above_request_and_twenty_millicores_and_below_the_original() {
    let table = [
        // base, request, original, ratio, quota
        (1000, 0, Quota::Unlimited, 100, None),
        (1000, 0, Quota::Unlimited, 50, Some(500)),
        (1000, 700, Quota::Unlimited, 50, Some(700)),
        (150, 0, Quota::Unlimited, 10, Some(20)),
        (0, 0, Quota::Unlimited, 90, Some(20)),
        (1000, 0, limit(2000), 50, Some(500)),
        (1000, 1000, limit(1000), 50, None),
        (5, 0, limit(5), 50, None),
        (1000, 0, Quota::Unlimited, 0, Some(20)),
    ];
    for (base, request, original, ratio, expected) in table {
        let mut pod = pod("a");
        pod.cpu_request = MilliCpu(request);
        let quota = throttled_cgroup("", base, original).quota(&pod, ratio);
        assert_eq!(quota, expected.map(MilliCpu), "{base} {original} {ratio}");
    }
}

#[test]
fn a_container_is_not_throttled_below_its_own_request() {
    let mut pod = pod("a");
    pod.cpu_request = MilliCpu(900);
    pod.container_requests
        .insert("main".to_owned(), MilliCpu(300));
    let at_half = |cgroup| throttled_cgroup(cgroup, 400, Quota::Unlimited).quota(&pod, 50);
    assert_eq!(at_half("main"), Some(MilliCpu(300)));
    assert_eq!(at_half("sidecar"), Some(MilliCpu(200)));
    assert_eq!(at_half(""), Some(MilliCpu(900)));
}

#[test]
fn the_allowance_is_the_sum_over_the_target_cgroups() {
    let target_cgroups = [
        throttled_cgroup("a", 1000, limit(1500)),
        throttled_cgroup("b", 100, Quota::Unlimited),
    ];
    assert_eq!(allowance(&target_cgroups, &pod("a"), 50), limit(550));
    assert_eq!(allowance(&target_cgroups, &pod("a"), 100), Quota::Unlimited);
    assert_eq!(allowance(&target_cgroups[..1], &pod("a"), 100), limit(1500));
}

#[test]
fn a_small_step_is_not_mistaken_for_the_floor() {
    let target_cgroups = [throttled_cgroup("", 50, Quota::Unlimited)];
    assert_eq!(
        target_cgroups[0].quota(&pod("a"), 99),
        target_cgroups[0].quota(&pod("a"), 98)
    );
    assert!(!at_floor(&target_cgroups, &pod("a"), 99, 10));
    assert!(at_floor(&target_cgroups, &pod("a"), 20, 10), "10 m already");
    assert!(at_floor(&target_cgroups, &pod("a"), 100, 100));
}

#[test]
fn the_claim_with_the_lowest_ratio_is_in_force() {
    let mut entry = ThrottleEntry::new(
        PodUid::from("a"),
        vec![throttled_cgroup("", 1000, Quota::Unlimited)],
    );
    entry.set_claim(claim("n/b", 60, false));
    entry.set_claim(claim("n/c", 100, true));
    entry.set_claim(claim("n/a", 80, false));
    assert_eq!(
        entry.depth(),
        Depth {
            ratio: 60,
            idle: true
        }
    );
    let mut throttles = Vec::new();
    let ledger = ThrottleLedger(vec![entry]);
    let write = |uid, index, throttles: &mut Vec<PodThrottle>| {
        let tracked = Tracked::new(Arc::new(pod(uid)), BootTime::default());
        let view = InForce {
            tracked: &tracked,
            now: BootTime::default(),
            idle_unsafe: false,
        };
        ledger.write(&view, index, throttles)
    };
    assert!(write("a", 0, &mut throttles));
    assert_eq!(throttles[0].rule, RuleId::from("n/b"));
    assert_eq!(throttles[0].target_cgroups[0].quota, Some(MilliCpu(600)));
    assert!(!write("b", 1, &mut throttles));
    let mut ledger = ledger;
    ledger.0[0].claims.clear();
    ledger.prune();
    assert!(ledger.get(&PodUid::from("a")).is_none());
}

#[test]
fn a_restarted_container_inherits_the_share_of_its_predecessor() {
    let target_cgroups = vec![
        throttled_cgroup("old", 600, limit(1000)),
        throttled_cgroup("side", 200, Quota::Unlimited),
    ];
    let mut entry = ThrottleEntry::new(PodUid::from("a"), target_cgroups);
    entry.sync_cgroups(&pod("a"), &[]);
    assert_eq!(
        entry.target_cgroups.len(),
        2,
        "a pod that could not be read is left as it is"
    );
    let now = [
        target_cgroup("new", limit(1000)),
        target_cgroup("side", Quota::Unlimited),
    ];
    entry.sync_cgroups(&pod("a"), &now);
    let expected = [
        throttled_cgroup("side", 200, Quota::Unlimited),
        throttled_cgroup("new", 600, limit(1000)),
    ];
    assert_eq!(entry.target_cgroups, expected);
    entry.sync_cgroups(
        &pod("a"),
        &[
            target_cgroup("side", Quota::Unlimited),
            target_cgroup("tiny", limit(50)),
        ],
    );
    assert_eq!(
        entry.target_cgroups[1],
        throttled_cgroup("tiny", 600, limit(50))
    );
}

#[test]
fn containers_that_appear_together_share_and_get_at_least_their_requests() {
    let mut pod = pod("a");
    pod.container_requests.insert("y".to_owned(), MilliCpu(700));
    let mut entry = ThrottleEntry::new(
        PodUid::from("a"),
        vec![throttled_cgroup("old", 600, limit(1000))],
    );
    let now = [
        target_cgroup("x", limit(1000)),
        target_cgroup("y", limit(1000)),
    ];
    entry.sync_cgroups(&pod, &now);
    assert_eq!(
        entry.target_cgroups,
        [
            throttled_cgroup("x", 300, limit(1000)),
            throttled_cgroup("y", 700, limit(1000))
        ]
    );
}

#[test]
fn an_unknown_container_keeps_the_unassigned_part_of_the_pod_request() {
    let mut pod = pod("a");
    pod.cpu_request = MilliCpu(400);
    let requests = [("old", 300), ("side", 100)];
    pod.container_requests = requests
        .map(|(name, request)| (name.to_owned(), MilliCpu(request)))
        .into();
    let target_cgroups = vec![
        throttled_cgroup("old", 600, limit(1000)),
        throttled_cgroup("side", 200, Quota::Unlimited),
    ];
    let mut entry = ThrottleEntry::new(PodUid::from("a"), target_cgroups);
    let now = [
        target_cgroup("new", limit(1000)),
        target_cgroup("side", Quota::Unlimited),
    ];
    entry.sync_cgroups(&pod, &now);
    let at_floor = |entry: &ThrottleEntry, pod: &Pod| entry.target_cgroups[1].quota(pod, 10);
    assert_eq!(at_floor(&entry, &pod), Some(MilliCpu(300)));
    pod.container_requests
        .insert("new".to_owned(), MilliCpu(50));
    assert_eq!(at_floor(&entry, &pod), Some(MilliCpu(60)), "it is known");
}

#[test]
fn a_cgroup_with_an_unreadable_quota_is_added_later() {
    let mut entry = ThrottleEntry::new(
        PodUid::from("a"),
        vec![throttled_cgroup("old", 600, limit(1000))],
    );
    let mut unread = target_cgroup("new", limit(1000));
    unread.quota = None;
    entry.sync_cgroups(&pod("a"), &[unread]);
    assert_eq!(entry.target_cgroups, []);
    entry.sync_cgroups(&pod("a"), &[target_cgroup("new", limit(1000))]);
    assert_eq!(
        entry.target_cgroups,
        [throttled_cgroup("new", 600, limit(1000))]
    );
}

#[test]
fn a_resize_updates_the_original_and_the_base() {
    let resized = |base, from, to| {
        let mut entry =
            ThrottleEntry::new(PodUid::from("a"), vec![throttled_cgroup("", base, from)]);
        entry.resize("", to);
        (
            entry.target_cgroups[0].base.0,
            entry.target_cgroups[0].original,
            entry.base.0,
        )
    };
    let table = [
        (500, limit(500), limit(800), 800),
        (500, limit(500), limit(300), 300),
        (400, limit(500), limit(800), 400),
        (400, Quota::Unlimited, limit(300), 300),
        (400, limit(500), Quota::Unlimited, 400),
    ];
    for (base, from, to, expected) in table {
        assert_eq!(
            resized(base, from, to),
            (expected, to, expected),
            "{from} {to}"
        );
    }
}

/// A smaller quota set by another writer, such as a reverted resize, has no lasting effect.
#[test]
fn the_base_recovers_when_a_smaller_quota_is_removed() {
    for (wanted, first) in [
        (800, limit(1000)),
        (800, Quota::Unlimited),
        (1000, limit(1000)),
    ] {
        let mut entry =
            ThrottleEntry::new(PodUid::from("a"), vec![throttled_cgroup("", wanted, first)]);
        entry.resize("", limit(200));
        assert_eq!(entry.target_cgroups[0].base, MilliCpu(200));
        entry.resize("", first);
        assert_eq!(
            entry.target_cgroups[0].base,
            MilliCpu(wanted),
            "{wanted} {first}"
        );
        assert_eq!(entry.base, MilliCpu(wanted));
    }
}

#[test]
fn a_step_that_could_not_be_applied_is_reverted() {
    let mut entry = ThrottleEntry::new(
        PodUid::from("a"),
        vec![throttled_cgroup("", 1000, Quota::Unlimited)],
    );
    let mut stepped = claim("n/a", 80, false);
    stepped.depth.ratio = 60;
    entry.set_claim(stepped);
    let mut started = claim("n/b", 90, true);
    started.before = Depth::NONE;
    entry.set_claim(started);
    let mut ledger = ThrottleLedger(vec![entry]);
    ledger.revert(&PodUid::from("a"));
    assert_eq!(ledger.0[0].claims, [claim("n/a", 80, false)]);
}
