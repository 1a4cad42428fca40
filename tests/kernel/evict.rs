//! Eviction through real cgroups.

use std::fs;
use std::time::Duration;

use crate::kernel_support::{TestCgroups, test_cgroups, uid, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use plimsoll::clock::boot_time;
use plimsoll::node::actuate::evict::{CgroupEvictor, EvictError, EvictOutcome};
use plimsoll::node::cgroup::{CgroupPath, Controller};

const LONG: Duration = Duration::from_mins(5);
const IGNORES_SIGTERM: &str = "trap '' TERM";
const WAIT: &str = "while :; do sleep 0.05; done";

/// Ticks until the eviction has finished.
fn run(cgroups: &mut TestCgroups, evictor: &mut CgroupEvictor) -> EvictOutcome {
    let mut last = None;
    let over = wait_for(Duration::from_mins(1), || {
        last = evictor.tick(boot_time()).pop();
        cgroups.reap();
        last.is_some()
    });
    assert!(over, "the eviction does not finish");
    last.unwrap()
}

fn evict(cgroups: &mut TestCgroups, pod: &CgroupPath, grace: Duration) -> EvictOutcome {
    let mut evictor = CgroupEvictor::new(cgroups.hierarchy.clone());
    evictor.start(&uid("pod"), pod, grace, boot_time()).unwrap();
    run(cgroups, &mut evictor)
}

/// The script writes to this file on SIGTERM.
fn marker(cgroups: &TestCgroups) -> String {
    cgroups.state.path().join("marker").display().to_string()
}

fn signals_received(cgroups: &TestCgroups) -> usize {
    fs::read_to_string(marker(cgroups))
        .unwrap_or_default()
        .lines()
        .count()
}

/// Runs `script`, and returns when its shell has set the trap.
fn ready(cgroups: &mut TestCgroups, pod: &CgroupPath, trap: &str, script: &str) -> u32 {
    let flag = cgroups.state.path().join("ready");
    let pid = cgroups.spawn(pod, &format!("{trap}; touch {}; {script}", flag.display()));
    assert!(wait_for(Duration::from_secs(20), || flag.exists()));
    pid
}

#[test]
fn a_pod_that_handles_sigterm_exits_within_its_grace() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let web = cgroups.container(&pod, "web");
    let log = cgroups.container(&pod, "log");
    let script = format!("trap 'echo >> {}; exit' TERM", marker(&cgroups));
    ready(&mut cgroups, &web, &script, WAIT);
    cgroups.spawn(&log, "sleep 1000");
    let outcome = evict(&mut cgroups, &pod, LONG);
    assert!(
        matches!(outcome, EvictOutcome::Exited { .. }),
        "{outcome:?}"
    );
    assert_eq!(signals_received(&cgroups), 1, "it had no time to clean up");
    assert!(cgroups.procs(&web).is_empty() && cgroups.procs(&log).is_empty());
}

#[test]
fn a_pod_that_ignores_sigterm_is_killed_after_its_grace() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    ready(&mut cgroups, &pod, IGNORES_SIGTERM, WAIT);
    let outcome = evict(&mut cgroups, &pod, Duration::from_secs(1));
    let EvictOutcome::Killed { after, .. } = outcome else {
        unreachable!("{outcome:?}")
    };
    assert!(after >= Duration::from_secs(1), "killed after {after:?}");
    assert!(cgroups.procs(&pod).is_empty());
}

#[test]
fn a_forking_pod_is_killed_completely() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let inside = cgroups.container(&pod, "main");
    ready(
        &mut cgroups,
        &inside,
        IGNORES_SIGTERM,
        "while :; do sleep 3 & sleep 0.005; done",
    );
    let outcome = evict(&mut cgroups, &pod, Duration::from_millis(300));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
    assert!(cgroups.procs(&inside).is_empty());
}

#[test]
fn without_a_freezer_the_processes_are_still_killed() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if cgroups.is_v2() {
        eprintln!("skipped: cgroup v2 always has cgroup.kill or cgroup.freeze");
        return;
    }
    let Some(freezer) = cgroups.hierarchy.dir(Controller::Freezer, &pod) else {
        eprintln!("skipped: this machine has no freezer");
        return;
    };
    fs::remove_dir(freezer).unwrap();
    ready(
        &mut cgroups,
        &pod,
        IGNORES_SIGTERM,
        "while :; do sleep 1 & sleep 0.02; done",
    );
    let outcome = evict(&mut cgroups, &pod, Duration::from_millis(100));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
}

#[test]
fn a_foreign_process_in_the_same_named_freezer_is_left_alone() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let Some(freezer) = cgroups
        .hierarchy
        .dir(Controller::Freezer, &pod)
        .filter(|_| !cgroups.is_v2())
    else {
        eprintln!("skipped: this machine has no freezer of its own");
        return;
    };
    ready(&mut cgroups, &pod, IGNORES_SIGTERM, WAIT);
    let other = cgroups.pod("other");
    let foreign = cgroups.spawn(&other, "exec sleep 1000");
    fs::write(freezer.join("cgroup.procs"), foreign.to_string()).unwrap();
    let outcome = evict(&mut cgroups, &pod, Duration::from_millis(100));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
    assert_eq!(cgroups.procs(&other), [i32::try_from(foreign).unwrap()]);
    assert_eq!(
        fs::read_to_string(freezer.join("freezer.state")).unwrap(),
        "THAWED\n"
    );
}

#[test]
fn a_paused_pod_is_killed_after_its_grace() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let Some(freezer) = cgroups.hierarchy.dir(Controller::Freezer, &pod) else {
        eprintln!("skipped: this machine has no freezer");
        return;
    };
    // On v2 an unhandled signal ends even a frozen process.
    ready(&mut cgroups, &pod, IGNORES_SIGTERM, WAIT);
    let (file, frozen) = if cgroups.is_v2() {
        ("cgroup.freeze", "1")
    } else {
        ("freezer.state", "FROZEN")
    };
    fs::write(freezer.join(file), frozen).unwrap();
    let outcome = evict(&mut cgroups, &pod, Duration::from_millis(500));
    assert!(
        matches!(outcome, EvictOutcome::Killed { .. }),
        "{outcome:?}"
    );
}

#[test]
fn a_stopped_process_receives_sigterm() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let pid = cgroups.spawn(&pod, "exec sleep 1000");
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGSTOP).unwrap();
    let outcome = evict(&mut cgroups, &pod, LONG);
    assert!(
        matches!(outcome, EvictOutcome::Exited { .. }),
        "{outcome:?}"
    );
}

#[test]
fn the_next_process_continues_without_a_second_sigterm() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let script = format!("trap 'echo >> {}' TERM", marker(&cgroups));
    ready(&mut cgroups, &pod, &script, WAIT);
    let mut first = CgroupEvictor::new(cgroups.hierarchy.clone());
    first
        .start(&uid("pod"), &pod, Duration::from_secs(1), boot_time())
        .unwrap();
    first.start(&uid("pod"), &pod, LONG, boot_time()).unwrap();
    assert!(wait_for(Duration::from_secs(20), || signals_received(
        &cgroups
    ) == 1));
    let pending: Vec<_> = first.pending().cloned().collect();
    let saved = serde_json::to_string(&pending).unwrap();
    drop(first);
    let mut second = CgroupEvictor::new(cgroups.hierarchy.clone());
    second.resume(serde_json::from_str(&saved).unwrap());
    let outcome = run(&mut cgroups, &mut second);
    let EvictOutcome::Killed { after, .. } = outcome else {
        unreachable!("{outcome:?}")
    };
    assert!(after >= Duration::from_secs(1), "killed after {after:?}");
    assert_eq!(signals_received(&cgroups), 1);
    assert_eq!(second.pending().count(), 0);
}

#[test]
fn another_cgroup_of_the_same_name_is_left_alone() {
    let Some(mut cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    ready(&mut cgroups, &pod, IGNORES_SIGTERM, WAIT);
    let mut evictor = CgroupEvictor::new(cgroups.hierarchy.clone());
    evictor
        .start(&uid("pod"), &pod, Duration::from_millis(1), boot_time())
        .unwrap();
    cgroups.remove(&pod);
    cgroups.pod("pod");
    cgroups.spawn(&pod, "sleep 1000");
    let outcome = run(&mut cgroups, &mut evictor);
    assert!(
        matches!(outcome, EvictOutcome::Exited { .. }),
        "{outcome:?}"
    );
    assert!(!cgroups.procs(&pod).is_empty());
}

#[test]
fn the_own_cgroup_is_refused() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let ourselves = std::process::id().to_string();
    let mut evictor = CgroupEvictor::new(cgroups.hierarchy.clone());
    cgroups.write(&pod, "cgroup.procs", &ourselves);
    let refused = evictor.start(&uid("pod"), &cgroups.parent, LONG, boot_time());
    let root = cgroups
        .dir(&cgroups.parent)
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
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let mut evictor = CgroupEvictor::new(cgroups.hierarchy.clone());
    let nowhere = cgroups.parent.join("nowhere").unwrap();
    let refused = evictor.start(&uid("pod"), &nowhere, LONG, boot_time());
    assert!(matches!(refused, Err(EvictError::Gone(_))), "{refused:?}");
}
