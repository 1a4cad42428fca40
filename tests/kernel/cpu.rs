//! The effect of throttling on CPU usage as measured by the kernel.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::kernel_support::{
    TestCgroups, assert_fine, at, idle, test_cgroups, throttle, throttle_of_cgroups, wait_for,
};

/// Serializes tests that measure.
fn measuring() -> Option<(TestCgroups, MutexGuard<'static, ()>)> {
    static QUIET: Mutex<()> = Mutex::new(());
    let guard = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
    let cgroups = test_cgroups()?;
    cgroups.prefer();
    Some((cgroups, guard))
}

#[test]
fn measured_cpu_use_follows_the_quota() {
    let Some((mut cgroups, _quiet)) = measuring() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let inside = cgroups.container(&pod, "main");
    cgroups.burn(&inside, 2);
    let mut throttler = cgroups.throttler();
    for quota in [500, 200] {
        assert_fine(&throttler.apply(at(0), &[throttle("pod", quota)], &cgroups.find()));
        // The rest of the last period is used up first.
        cgroups.measure(&pod, Duration::from_millis(300));
        let used = cgroups.measure(&pod, Duration::from_secs(4));
        println!("quota {quota}m: used {used:.0}m");
        // One more period may start in the window than fits into it.
        let max = quota as f64 * (1.03 + 0.1 / 4.0);
        assert!(used <= max, "used {used:.0}m of {quota}m");
        assert!(used >= 0.9 * quota as f64, "used {used:.0}m of {quota}m");
    }
    throttler.apply(at(1), &[], &cgroups.find());
    let used = cgroups.measure(&pod, Duration::from_secs(2));
    assert!(used > 600.0, "still limited to {used:.0}m");
}

#[test]
fn a_restarted_container_stays_throttled_with_its_pod() {
    let Some((mut cgroups, _quiet)) = measuring() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let first = cgroups.container(&pod, "first");
    cgroups.burn(&first, 1);
    let mut throttler = cgroups.throttler();
    assert_fine(&throttler.apply(at(0), &[throttle("pod", 200)], &cgroups.find()));
    cgroups.remove(&first);
    let second = cgroups.container(&pod, "second");
    cgroups.burn(&second, 2);
    assert!(throttler.verify(at(1)).is_empty());
    cgroups.measure(&pod, Duration::from_millis(300));
    let used = cgroups.measure(&pod, Duration::from_secs(3));
    assert!(used <= 200.0 * (1.03 + 0.1 / 3.0), "used {used:.0}m");
    assert_fine(&throttler.apply(at(2), &[], &cgroups.find()));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
}

#[test]
fn an_idle_class_pod_yields_to_a_normal_one() {
    let Some((mut cgroups, _quiet)) = measuring() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let other = cgroups.pod("other");
    if !cgroups.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    let cpus = std::thread::available_parallelism().unwrap().get();
    cgroups.burn(&pod, cpus);
    cgroups.burn(&other, cpus);
    let mut throttler = cgroups.throttler();
    let plan = [idle(throttle_of_cgroups("pod", &[("", None)]))];
    assert_fine(&throttler.apply(at(0), &plan, &cgroups.find()));
    let (busy, idle) = std::thread::scope(|scope| {
        let busy = scope.spawn(|| cgroups.measure(&other, Duration::from_secs(3)));
        let idle = cgroups.measure(&pod, Duration::from_secs(3));
        (busy.join().unwrap(), idle)
    });
    println!("busy {busy:.0}m, idle {idle:.0}m");
    assert!(idle < 0.2 * busy, "busy {busy:.0}m, idle {idle:.0}m");
}

#[test]
fn busy_loops_use_a_full_cpu() {
    let Some((mut cgroups, _quiet)) = measuring() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups.burn(&pod, 1);
    let burns = wait_for(Duration::from_secs(20), || {
        cgroups.measure(&pod, Duration::from_millis(300)) > 400.0
    });
    assert!(burns);
}
