//! Bad input to `plimsoll run` gives a clear error and changes nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use crate::run_support::{BINARY, Machine, eventually, pod, throttle};
use nix::sys::signal::Signal;

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    machine
}

/// Exit code 2, `words` on standard error, and no events.
fn assert_refused(output: &Output, words: &[&str]) {
    let why = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{why}");
    for word in words {
        assert!(why.contains(word), "`{word}` is not in: {why}");
    }
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{why}");
}

#[test]
fn a_bad_policy_is_reported_with_its_line_and_the_others_are_enforced() {
    let machine = machine();
    let rule = "apiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: broken}\nspec:\n  rules:\n  \
                - name: nothing\n    actionName: act\n";
    machine.write("policies/broken.yaml", rule);
    machine.write("policies/garbage.yaml", "\t: [");
    machine.write(
        "policies/kind.yaml",
        "apiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQos\nmetadata: {name: n}\n",
    );
    let mut daemon = machine.start(&[]);
    assert_eq!(daemon.wait_for_change("started")["rules"], 1);
    let problems: Vec<String> = daemon
        .changes("policyProblem")
        .iter()
        .map(|line| format!("{}:{} {}", line["file"], line["line"], line["message"]))
        .collect();
    for (file, words) in [
        ("broken.yaml", "metricRule"),
        ("garbage.yaml", "tab"),
        ("kind.yaml", "NodeQOS"),
    ] {
        let reported = problems
            .iter()
            .any(|problem| problem.contains(file) && problem.contains(words));
        assert!(reported, "{file}: {problems:#?}");
    }
    machine.load.set(1900);
    daemon.wait_for_change("throttle");
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn missing_policies_do_not_release_what_is_in_force() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert!(daemon.stop(Signal::SIGTERM).success());
    let throttled = machine.quota("batch");
    assert_ne!(throttled, original);
    fs::rename(machine.path("policies"), machine.path("elsewhere")).unwrap();
    assert_refused(
        &machine.run_command(&[]).output().unwrap(),
        &["failed to read the policies", "with -f"],
    );
    assert_eq!(machine.quota("batch"), throttled);
    assert!(machine.restore().status.success());
    assert_eq!(machine.quota("batch"), original);
}

#[test]
fn bad_pods_are_reported_and_the_others_are_managed() {
    let machine = machine();
    machine.write("pods/absolute.yaml", &pod("absolute", "/etc"));
    machine.write("pods/dots.yaml", &pod("dots", "../cpu"));
    machine.write(
        "pods/nothing.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: nothing}\nspec: {containers: [{name: c}]}\n",
    );
    machine.write(
        "pods/absent.yaml",
        &pod("absent", &format!("{}/absent", machine.parent)),
    );
    let mut daemon = machine.start(&[]);
    assert_eq!(daemon.wait_for_change("started")["pods"], 1);
    let refused = daemon.changes("podRefused");
    for (pod, words) in [
        ("default/absolute", "must stay below the cgroup root"),
        ("default/dots", "must stay below the cgroup root"),
        ("default/nothing", "no annotation `plimsoll.dev/cgroup`"),
        ("default/absent", "does not exist (yet)"),
    ] {
        let refusal = refused.iter().find(|line| line["pod"] == pod).unwrap();
        assert!(
            refusal["reason"].as_str().unwrap().contains(words),
            "{refusal}"
        );
    }
    machine.cgroup("absent");
    daemon.wait_for("the pod whose cgroup is created later", |line| {
        line["change"] == "podsChanged" && line["pods"] == 2
    });
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_directory_that_is_not_a_cgroup_root_is_refused() {
    let machine = machine();
    let output = machine
        .command("run")
        .args(["--policies", "/dev/null", "--cgroup-root", "/etc"])
        .output();
    assert_refused(
        &output.unwrap(),
        &["`/etc` is not a cgroup root", "usually /sys/fs/cgroup"],
    );
    assert!(!machine.path("state").exists());
}

#[test]
fn an_empty_proc_is_refused_and_a_broken_one_is_unknown() {
    let machine = machine();
    let empty = machine.path("pods");
    let mut command = machine.command("run");
    command
        .args(["--cgroup-root", "/sys/fs/cgroup", "--policies"])
        .arg(machine.path("policies"))
        .arg("--proc-root")
        .arg(&empty);
    assert_refused(
        &command.output().unwrap(),
        &["failed to read CPU time or memory", "--proc-root"],
    );

    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_change("throttle");
    machine.load.write_garbage();
    let unknown = daemon.wait_for_change("unknown");
    assert_eq!(unknown["rule"], "node/cpu");
    assert!(
        machine.journal().contains("batch"),
        "the throttle stays in force"
    );
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_state_directory_that_cannot_be_created_or_written_is_refused() {
    let machine = machine();
    let run = |state: &str| {
        let mut command = Command::new(BINARY);
        command
            .args(["run", "--state-dir", state, "--policies"])
            .arg(machine.path("policies"))
            .arg("--pods")
            .arg(machine.path("pods"));
        command.output().unwrap()
    };
    assert_refused(
        &run("/no/such/parent/state"),
        &["/no/such/parent/state", "--state-dir"],
    );
    assert_refused(&run("/dev/null"), &["/dev/null", "--state-dir"]);
    assert_refused(&run("/proc/self"), &["/proc/self", "--state-dir"]);
    assert_refused(
        &machine.restore(),
        &["failed to find the state directory", "--state-dir"],
    );
    assert!(!machine.path("state").exists());
}

#[test]
fn a_damaged_journal_is_refused_and_not_changed() {
    let machine = machine();
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_change("fileSet");
    assert!(daemon.stop(Signal::SIGTERM).success());
    let whole = machine.journal();
    let throttled = machine.quota("batch");
    for broken in [
        whole.replace("batch", "other"),
        whole[..whole.len() / 2].to_owned(),
        "not a journal\n".to_owned(),
        "\0\0\0\0".to_owned(),
    ] {
        fs::write(machine.path("state/journal"), &broken).unwrap();
        assert_refused(&machine.run_command(&[]).output().unwrap(), &["journal"]);
        assert_refused(&machine.restore(), &["journal"]);
        assert_eq!(machine.journal(), broken);
        assert_eq!(machine.quota("batch"), throttled);
    }
    fs::write(machine.path("state/journal"), whole).unwrap();
    assert!(machine.restore().status.success());
    assert_ne!(machine.quota("batch"), throttled);
}

#[test]
fn without_permission_run_is_refused_and_a_preview_works() {
    let machine = machine();
    // Every user may read the directories and write the state, but only root may write cgroups.
    for directory in [".", "policies", "pods", "proc"] {
        fs::set_permissions(machine.path(directory), fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::create_dir(machine.path("state")).unwrap();
    fs::set_permissions(machine.path("state"), fs::Permissions::from_mode(0o777)).unwrap();
    let as_nobody = |more: &[&str]| {
        let run = machine.run_command(more);
        let binary = machine.path("plimsoll");
        // By cp: a file open for writing in this process stays so in what other tests fork meanwhile, and cannot be executed.
        let copied = Command::new("cp")
            .arg(run.get_program())
            .arg(&binary)
            .status()
            .unwrap();
        assert!(copied.success());
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(binary)
            .args(run.get_args());
        command
    };
    let output = as_nobody(&[]).output().unwrap();
    assert_refused(&output, &["Permission denied", "run as root", "--preview"]);

    let mut daemon = crate::run_support::Daemon::start(as_nobody(&["--preview"]));
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for("a step", |line| {
        line["change"] == "throttle" && line["would"] == true
    });
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_full_disk_stops_new_throttles_but_not_the_restore() {
    let machine = machine();
    let state = machine.path("state");
    fs::create_dir(&state).unwrap();
    let small = Disk::mount(&state);
    let original = machine.quota("batch");
    small.fill();
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    let failed = daemon.wait_for_change("throttleFailed");
    assert_eq!(failed["podName"], "default/batch");
    assert_eq!(machine.quota("batch"), original);
    assert!(daemon.stop(Signal::SIGINT).success());

    small.free();
    let mut daemon = machine.start(&[]);
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    small.fill();
    assert_ne!(machine.quota("batch"), original);
    assert!(daemon.stop(Signal::SIGINT).success());
    assert_eq!(machine.quota("batch"), original);
}

#[test]
fn a_read_only_state_directory_can_be_restored_from() {
    let machine = machine();
    let state = machine.path("state");
    fs::create_dir(&state).unwrap();
    let disk = Disk::mount(&state);
    let original = machine.quota("batch");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_change("fileSet");
    assert!(!daemon.stop(Signal::SIGKILL).success());
    disk.turn_read_only();
    let output = machine.restore();
    let events = String::from_utf8(output.stdout).unwrap();
    assert_eq!(machine.quota("batch"), original);
    assert!(output.status.success(), "{events}");
    assert!(events.contains("restored to"), "{events}");
    assert!(events.contains("failed to remove"), "{events}");
}

#[test]
fn unreadable_rule_states_are_logged_and_ignored() {
    let machine = machine();
    machine.write("engine.json", "{\"bootId\": 7");
    fs::create_dir(machine.path("state")).unwrap();
    fs::rename(
        machine.path("engine.json"),
        machine.path("state/engine.json"),
    )
    .unwrap();
    let output = machine.run_command(&["--for", "1s"]).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    assert!(log.contains("failed to read the rule states"), "{log}");
}

/// A small disk.
struct Disk {
    path: std::path::PathBuf,
}

impl Disk {
    fn mount(path: &std::path::Path) -> Self {
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(
            Some("plimsoll"),
            path,
            Some("tmpfs"),
            flags,
            Some("size=64k"),
        )
        .unwrap();
        Self {
            path: path.to_owned(),
        }
    }

    fn fill(&self) {
        let _full = fs::write(self.path.join("filler"), vec![0; 128 << 10]);
    }

    fn turn_read_only(&self) {
        let flags = nix::mount::MsFlags::MS_REMOUNT | nix::mount::MsFlags::MS_RDONLY;
        nix::mount::mount(None::<&str>, &self.path, None::<&str>, flags, None::<&str>).unwrap();
    }

    fn free(&self) {
        fs::remove_file(self.path.join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        eventually("the disk is unmounted", || {
            nix::mount::umount(&self.path).ok()
        });
    }
}

#[test]
fn invalid_flags_are_refused_with_a_hint() {
    for (arguments, words) in [
        (&["--period", "50ms"][..], "the shortest period is 100ms"),
        (&["--period", "10"], "such as 200ms, 10s or 1m30s"),
        (&["--for", "0s"], "more than zero"),
        (
            &["--pods-under", "/system.slice"],
            "must stay below the cgroup root",
        ),
        (&["--node-labels", "role"], "KEY=VALUE"),
        (&["--restore"], "cannot be used with"),
    ] {
        let mut command = Command::new(BINARY);
        command
            .args(["run", "--policies", "/dev/null"])
            .args(arguments);
        assert_refused(&command.output().unwrap(), &[words]);
    }
    assert_refused(
        &Command::new(BINARY).arg("run").output().unwrap(),
        &["--filename"],
    );
}
