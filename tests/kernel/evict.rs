//! Eviction through real cgroups.

use std::fs;
use std::time::Duration;

use crate::kernel_support::{World, uid, wait_for, world};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use plimsoll::node::actuate::evict::{EvictError, EvictOutcome, Evictor};
use plimsoll::node::cgroup::{CgroupPath, Controller};
use plimsoll::node::clock::boot_time;

const LONG: Duration = Duration::from_mins(5);
const STUBBORN: &str = "trap '' TERM";
const WAIT: &str = "while :; do sleep 0.05; done";

/// Ticks until the eviction has finished.
fn run(world: &mut World, evictor: &mut Evictor) -> EvictOutcome {
    let mut last = None;
    let over = wait_for(Duration::from_mins(1), || {
        last = evictor.tick(boot_time()).pop();
        world.reap();
        last.is_some()
    });
    assert!(over, "the eviction does not finish");
    last.unwrap()
}

fn evict(world: &mut World, pod: &CgroupPath, grace: Duration) -> EvictOutcome {
    let mut evictor = Evictor::new(world.hierarchy.clone());
    evictor.start(&uid("pod"), pod, grace, boot_time()).unwrap();
    run(world, &mut evictor)
}

/// The script writes to this file on SIGTERM.
fn marker(world: &World) -> String {
    world.state.path().join("told").display().to_string()
}

fn signals_received(world: &World) -> usize {
    fs::read_to_string(marker(world))
        .unwrap_or_default()
        .lines()
        .count()
}

/// Runs `script`, and returns when its shell has set the trap.
fn ready(world: &mut World, pod: &CgroupPath, trap: &str, script: &str) -> u32 {
    let flag = world.state.path().join("ready");
    let pid = world.spawn(pod, &format!("{trap}; touch {}; {script}", flag.display()));
    assert!(wait_for(Duration::from_secs(20), || flag.exists()));
    pid
}

#[test]
fn a_pod_that_handles_sigterm_exits_within_its_grace() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    let web = world.container(&pod, "web");
    let log = world.container(&pod, "log");
    let script = format!("trap 'echo >> {}; exit' TERM", marker(&world));
    ready(&mut world, &web, &script, WAIT);
    world.spawn(&log, "sleep 1000");
    let outcome = evict(&mut world, &pod, LONG);
    assert!(matches!(outcome, EvictOutcome::Ended { .. }), "{outcome:?}");
    assert_eq!(signals_received(&world), 1, "it had no time to clean up");
    assert!(world.procs(&web).is_empty() && world.procs(&log).is_empty());
}

#[test]
fn a_pod_that_ignores_sigterm_is_killed_after_its_grace() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    ready(&mut world, &pod, STUBBORN, WAIT);
    let outcome = evict(&mut world, &pod, Duration::from_secs(1));
    let EvictOutcome::Killed { after, .. } = outcome else {
        unreachable!("{outcome:?}")
    };
    assert!(after >= Duration::from_secs(1), "killed after {after:?}");
    assert!(world.procs(&pod).is_empty());
}

#[test]
fn a_forking_pod_is_killed_completely() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    let inside = world.container(&pod, "main");
    ready(
        &mut world,
        &inside,
        STUBBORN,
        "while :; do sleep 3 & sleep 0.005; done",
    );
    let outcome = evict(&mut world, &pod, Duration::from_millis(300));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
    assert!(world.procs(&inside).is_empty());
}

#[test]
fn without_a_freezer_the_processes_are_still_killed() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    if world.is_v2() {
        eprintln!("skipped: cgroup v2 always has cgroup.kill or cgroup.freeze");
        return;
    }
    let Some(freezer) = world.hierarchy.dir(Controller::Freezer, &pod) else {
        eprintln!("skipped: this machine has no freezer");
        return;
    };
    fs::remove_dir(freezer).unwrap();
    ready(
        &mut world,
        &pod,
        STUBBORN,
        "while :; do sleep 1 & sleep 0.02; done",
    );
    let outcome = evict(&mut world, &pod, Duration::from_millis(100));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
}

#[test]
fn a_foreign_process_in_the_same_named_freezer_is_left_alone() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    let Some(freezer) = world
        .hierarchy
        .dir(Controller::Freezer, &pod)
        .filter(|_| !world.is_v2())
    else {
        eprintln!("skipped: this machine has no freezer of its own");
        return;
    };
    ready(&mut world, &pod, STUBBORN, WAIT);
    let other = world.pod("other");
    let foreign = world.spawn(&other, "exec sleep 1000");
    fs::write(freezer.join("cgroup.procs"), foreign.to_string()).unwrap();
    let outcome = evict(&mut world, &pod, Duration::from_millis(100));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
    assert_eq!(world.procs(&other), [i32::try_from(foreign).unwrap()]);
    assert_eq!(
        fs::read_to_string(freezer.join("freezer.state")).unwrap(),
        "THAWED\n"
    );
}

#[test]
fn a_paused_pod_is_killed_after_its_grace() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    let Some(freezer) = world.hierarchy.dir(Controller::Freezer, &pod) else {
        eprintln!("skipped: this machine has no freezer");
        return;
    };
    // On v2 an unhandled signal ends even a frozen process.
    ready(&mut world, &pod, STUBBORN, WAIT);
    let (file, frozen) = if world.is_v2() {
        ("cgroup.freeze", "1")
    } else {
        ("freezer.state", "FROZEN")
    };
    fs::write(freezer.join(file), frozen).unwrap();
    let outcome = evict(&mut world, &pod, Duration::from_millis(500));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
}

#[test]
fn a_stopped_process_receives_sigterm() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    let pid = world.spawn(&pod, "exec sleep 1000");
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGSTOP).unwrap();
    let outcome = evict(&mut world, &pod, LONG);
    assert!(matches!(outcome, EvictOutcome::Ended { .. }), "{outcome:?}");
}

#[test]
fn the_next_process_continues_without_a_second_sigterm() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    let script = format!("trap 'echo >> {}' TERM", marker(&world));
    ready(&mut world, &pod, &script, WAIT);
    let mut first = Evictor::new(world.hierarchy.clone());
    first
        .start(&uid("pod"), &pod, Duration::from_secs(1), boot_time())
        .unwrap();
    first.start(&uid("pod"), &pod, LONG, boot_time()).unwrap();
    assert!(wait_for(Duration::from_secs(20), || signals_received(
        &world
    ) == 1));
    let pending: Vec<_> = first.pending().cloned().collect();
    let saved = serde_json::to_string(&pending).unwrap();
    drop(first);
    let mut second = Evictor::new(world.hierarchy.clone());
    second.resume(serde_json::from_str(&saved).unwrap());
    let outcome = run(&mut world, &mut second);
    let EvictOutcome::Killed { after, .. } = outcome else {
        unreachable!("{outcome:?}")
    };
    assert!(after >= Duration::from_secs(1), "killed after {after:?}");
    assert_eq!(signals_received(&world), 1);
    assert_eq!(second.pending().count(), 0);
}

#[test]
fn another_cgroup_of_the_same_name_is_left_alone() {
    let Some(mut world) = world() else { return };
    let pod = world.pod("pod");
    ready(&mut world, &pod, STUBBORN, WAIT);
    let mut evictor = Evictor::new(world.hierarchy.clone());
    evictor
        .start(&uid("pod"), &pod, Duration::from_millis(1), boot_time())
        .unwrap();
    world.remove(&pod);
    world.pod("pod");
    world.spawn(&pod, "sleep 1000");
    let outcome = run(&mut world, &mut evictor);
    assert!(matches!(outcome, EvictOutcome::Ended { .. }), "{outcome:?}");
    assert!(!world.procs(&pod).is_empty());
}

#[test]
fn the_own_cgroup_is_refused() {
    let Some(world) = world() else { return };
    let pod = world.pod("pod");
    let ourselves = std::process::id().to_string();
    let mut evictor = Evictor::new(world.hierarchy.clone());
    world.write(&pod, "cgroup.procs", &ourselves);
    let refused = evictor.start(&uid("pod"), &world.parent, LONG, boot_time());
    let root = world
        .dir(&world.parent)
        .parent()
        .unwrap()
        .join("cgroup.procs");
    fs::write(root, &ourselves).unwrap();
    assert!(
        matches!(refused, Err(EvictError::Ourselves(_))),
        "{refused:?}"
    );
    assert_eq!(evictor.pending().count(), 0);
}

#[test]
fn a_missing_cgroup_is_reported() {
    let Some(world) = world() else { return };
    let mut evictor = Evictor::new(world.hierarchy.clone());
    let nowhere = world.parent.join("nowhere").unwrap();
    let refused = evictor.start(&uid("pod"), &nowhere, LONG, boot_time());
    assert!(matches!(refused, Err(EvictError::Gone(_))), "{refused:?}");
}
