//! `plimsoll demo` where cgroups cannot be written.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::unistd::geteuid;

use super::support::{RunningDemo, demo, serialize};

const NOBODY: u32 = 65534;

#[test]
fn without_root_it_says_why_and_what_to_do() {
    let _serial = serialize();
    let mut command = demo(&["--plain", "--seconds", "10"]);
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let (output, code) = RunningDemo::start(command).wait();
    assert_eq!(code, Some(3), "{output}");
    for text in [
        "The demo cannot run on this machine: failed to create the cgroup",
        "Permission denied",
        "What to do: run it as root",
        "What it looks like: docs/demo.svg",
    ] {
        assert!(output.contains(text), "{text}: {output}");
    }
    assert!(!output.contains("Plimsoll demo on"), "{output}");
}

#[test]
fn read_only_cgroups_are_named_as_the_reason() {
    if !geteuid().is_root() {
        eprintln!("skipped: mounting read-only needs root");
        return;
    }
    let _serial = serialize();
    let program = env!("CARGO_BIN_EXE_plimsoll");
    let mut command = Command::new("unshare");
    let read_only = "for tree in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do \
        mount -o remount,bind,ro $tree || exit 99; done";
    command.args(["-m", "sh", "-c"]);
    command.arg(format!(
        "{read_only}; exec {program} demo --plain --seconds 10"
    ));
    let (output, code) = RunningDemo::start(command).wait();
    if code == Some(99) {
        eprintln!("skipped: cgroups cannot be mounted read-only here: {output}");
        return;
    }
    assert_eq!(code, Some(3), "{output}");
    assert!(output.contains("Read-only file system"), "{output}");
    assert!(
        output.contains("mounted read-only, as in most containers"),
        "{output}"
    );
}

#[test]
fn a_directory_that_is_not_a_cgroup_root_is_refused() {
    let _serial = serialize();
    let empty = tempfile::tempdir().expect("a directory");
    let root = empty.path().to_str().expect("a plain path");
    let (output, code) =
        RunningDemo::start(demo(&["--plain", "--seconds", "10", "--cgroup-root", root])).wait();
    assert_eq!(code, Some(3), "{output}");
    assert!(output.contains("is not a cgroup root"), "{output}");
}

#[test]
fn cpus_that_this_process_may_not_use_are_named() {
    let _serial = serialize();
    let (output, code) = RunningDemo::start(demo(&["--plain", "--cpus", "0,8000"])).wait();
    assert_eq!(code, Some(2), "{output}");
    assert!(output.contains("[0, 8000]"), "{output}");
    assert!(output.contains("this process may use [0"), "{output}");
}
