//! The effect of throttling on CPU usage as measured by the kernel.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::kernel_support::{World, assert_fine, at, idle, on_levers, throttle, wait_for, world};

/// Serializes tests that measure.
fn measuring() -> Option<(World, MutexGuard<'static, ()>)> {
    static QUIET: Mutex<()> = Mutex::new(());
    let guard = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
    let world = world()?;
    world.prefer();
    Some((world, guard))
}

#[test]
fn measured_cpu_use_follows_the_quota() {
    let Some((mut world, _quiet)) = measuring() else {
        return;
    };
    let pod = world.pod("pod");
    let inside = world.container(&pod, "main");
    world.burn(&inside, 2);
    let mut throttler = world.throttler();
    for quota in [500, 200] {
        assert_fine(&throttler.apply(at(0), &[throttle("pod", quota)], &world.find()));
        // The rest of the last period is used up first.
        world.measure(&pod, Duration::from_millis(300));
        let used = world.measure(&pod, Duration::from_secs(4));
        println!("quota {quota}m: used {used:.0}m");
        // One more period may start in the window than fits into it.
        let max = quota as f64 * (1.03 + 0.1 / 4.0);
        assert!(used <= max, "used {used:.0}m of {quota}m");
        assert!(used >= 0.9 * quota as f64, "used {used:.0}m of {quota}m");
    }
    throttler.apply(at(1), &[], &world.find());
    let used = world.measure(&pod, Duration::from_secs(2));
    assert!(used > 600.0, "still limited to {used:.0}m");
}

#[test]
fn a_restarted_container_stays_throttled_with_its_pod() {
    let Some((mut world, _quiet)) = measuring() else {
        return;
    };
    let pod = world.pod("pod");
    let first = world.container(&pod, "first");
    world.burn(&first, 1);
    let mut throttler = world.throttler();
    assert_fine(&throttler.apply(at(0), &[throttle("pod", 200)], &world.find()));
    world.remove(&first);
    let second = world.container(&pod, "second");
    world.burn(&second, 2);
    assert!(throttler.verify(at(1)).is_empty());
    world.measure(&pod, Duration::from_millis(300));
    let used = world.measure(&pod, Duration::from_secs(3));
    assert!(used <= 200.0 * (1.03 + 0.1 / 3.0), "used {used:.0}m");
    assert_fine(&throttler.apply(at(2), &[], &world.find()));
    assert_eq!(world.quota(&pod), world.quota_text(None));
}

#[test]
fn an_idle_class_pod_yields_to_a_normal_one() {
    let Some((mut world, _quiet)) = measuring() else {
        return;
    };
    let pod = world.pod("pod");
    let other = world.pod("other");
    if !world.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    let cpus = std::thread::available_parallelism().unwrap().get();
    world.burn(&pod, cpus);
    world.burn(&other, cpus);
    let mut throttler = world.throttler();
    let plan = [idle(on_levers("pod", &[("", None)]))];
    assert_fine(&throttler.apply(at(0), &plan, &world.find()));
    let (busy, idle) = std::thread::scope(|scope| {
        let busy = scope.spawn(|| world.measure(&other, Duration::from_secs(3)));
        let idle = world.measure(&pod, Duration::from_secs(3));
        (busy.join().unwrap(), idle)
    });
    println!("busy {busy:.0}m, idle {idle:.0}m");
    assert!(idle < 0.2 * busy, "busy {busy:.0}m, idle {idle:.0}m");
}

#[test]
fn busy_loops_use_a_full_cpu() {
    let Some((mut world, _quiet)) = measuring() else {
        return;
    };
    let pod = world.pod("pod");
    world.burn(&pod, 1);
    let burns = wait_for(Duration::from_secs(20), || {
        world.measure(&pod, Duration::from_millis(300)) > 400.0
    });
    assert!(burns);
}
