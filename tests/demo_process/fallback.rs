//! `plimsoll demo` where cgroups cannot be written.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::unistd::geteuid;

use crate::support::{Running, demo, one_at_a_time};

const NOBODY: u32 = 65534;

#[test]
fn without_the_right_it_says_why_and_shows_a_labelled_replay() {
    let _alone = one_at_a_time();
    let mut command = demo(&["--plain", "--seconds", "10"]);
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let (told, code) = Running::start(command).end();
    assert_eq!(code, Some(3), "{told}");
    assert!(told.contains("failed to make the cgroup"), "{told}");
    assert!(told.contains("Permission denied"), "{told}");
    assert!(told.contains("run it as root"), "{told}");
    assert!(
        told.contains("REPLAY of a recording, not this machine"),
        "{told}"
    );
    assert!(told.contains("(preview, not done): throttle"), "{told}");
    assert!(!told.contains("Plimsoll demo on"), "{told}");
}

#[test]
fn on_read_only_cgroups_it_says_so() {
    if !geteuid().is_root() {
        eprintln!("skipped: mounting read-only needs root");
        return;
    }
    let _alone = one_at_a_time();
    let program = env!("CARGO_BIN_EXE_plimsoll");
    let mut command = Command::new("unshare");
    let read_only = "for tree in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do \
        mount -o remount,bind,ro $tree || exit 99; done";
    command.args(["-m", "sh", "-c"]);
    command.arg(format!(
        "{read_only}; exec {program} demo --plain --seconds 10"
    ));
    let (told, code) = Running::start(command).end();
    if code == Some(99) {
        eprintln!("skipped: cgroups cannot be mounted read-only here: {told}");
        return;
    }
    assert_eq!(code, Some(3), "{told}");
    assert!(told.contains("Read-only file system"), "{told}");
    assert!(
        told.contains("mounted read-only, as in most containers"),
        "{told}"
    );
}

#[test]
fn a_cgroup_root_that_is_none_is_refused_with_what_to_do() {
    let _alone = one_at_a_time();
    let empty = tempfile::tempdir().expect("a folder");
    let root = empty.path().to_str().expect("a plain path");
    let (told, code) =
        Running::start(demo(&["--plain", "--seconds", "10", "--cgroup-root", root])).end();
    assert_eq!(code, Some(3), "{told}");
    assert!(told.contains("is not a cgroup root"), "{told}");
}
