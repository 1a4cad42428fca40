//! SIGKILL before and after every effect on disk and in the kernel, and recovery by the next process.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use crate::kernel_support::{
    TestCgroups, assert_fine, at, bursting, idle, standing, test_cgroups, throttle,
    throttle_of_cgroups,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use plimsoll::engine::plan::PodThrottle;
use plimsoll::engine::pod::PodUid;
use plimsoll::node::actuate::throttle::Throttler;
use plimsoll::node::cgroup::{CgroupPath, Controller, Hierarchy};
use plimsoll::node::journal::{Effects, Journal, JournalRecord};
use serde::{Deserialize, Serialize};

/// Instructions for the process that is killed.
#[derive(Serialize, Deserialize)]
struct Orders {
    parent: CgroupPath,
    state: PathBuf,
    /// It is killed at the n-th hook call, before or after an effect.
    die_at: usize,
    /// It only recovers what the last process left, and restores it.
    recover: bool,
    resized: String,
    unlimited: String,
}

const ORDERS: &str = "PLIMSOLL_CRASH_ORDERS";

fn plan(quota: u64, target_cgroups: bool) -> Vec<PodThrottle> {
    let mut plan = vec![
        throttle("plain", quota),
        throttle("limited", quota - 50),
        idle(throttle("class", quota)),
        standing("standing"),
    ];
    // A rule's quota comes and goes on top of a burst.
    plan.push(match quota {
        200 => throttle("burst", 300),
        _ => bursting("burst", 400),
    });
    if target_cgroups {
        let split =
            throttle_of_cgroups("split", &[("web", Some(quota)), ("log", Some(quota - 50))]);
        plan.push(split);
    }
    plan
}

/// The process that is killed. Started by the tests below.
#[test]
#[ignore = "used by the other tests"]
#[allow(
    clippy::disallowed_methods,
    reason = "a test binary takes no custom arguments"
)]
fn victim() {
    let Ok(orders) = std::env::var(ORDERS) else {
        return;
    };
    let orders: Orders = serde_json::from_str(&orders).unwrap();
    let hierarchy = Hierarchy::detect(Path::new("/proc"), None).unwrap();
    let mut left = orders.die_at;
    let effects = Effects::watched(move |_| {
        left -= 1;
        if left == 0 {
            kill(Pid::this(), Signal::SIGKILL).unwrap();
        }
    });
    let opened = Throttler::open_with(&orders.state, hierarchy.clone(), at(0), effects);
    let (mut throttler, _) = opened.unwrap();
    if !orders.recover {
        live(&mut throttler, &orders, &hierarchy);
    }
    assert_fine(&throttler.restore_all(at(9)));
}

/// A run with all kinds of changes: steps down and up, added and removed pods, a sweep, a resize.
fn live(throttler: &mut Throttler, orders: &Orders, hierarchy: &Hierarchy) {
    let find = |uid: &PodUid| orders.parent.join(&uid.0).ok();
    let write = |pod: &str, value: &str| {
        let file = if hierarchy.is_v2() {
            "cpu.max"
        } else {
            "cpu.cfs_quota_us"
        };
        let path = orders.parent.join(pod).unwrap();
        let dir = hierarchy.dir(Controller::Cpu, &path).unwrap();
        fs::write(dir.join(file), value).unwrap();
    };
    assert_fine(&throttler.apply(at(1), &plan(500, true), &find));
    assert_fine(&throttler.apply(at(2), &plan(200, true), &find));
    write("plain", &orders.unlimited);
    write("limited", &orders.resized);
    fs::write(orders.state.join("resized"), "").unwrap();
    assert_fine(&throttler.verify(at(3)));
    assert_fine(&throttler.apply(at(3), &plan(300, true), &find));
    assert_fine(&throttler.apply(at(4), &plan(400, false), &find));
    assert_fine(&throttler.apply(at(5), &plan(100, true), &find));
}

/// The test's cgroups: one for each kind of original.
struct Stage {
    cgroups: TestCgroups,
    /// Cgroup, file, original.
    files: Vec<(CgroupPath, &'static str, String)>,
}

const RESIZED: u64 = 120_000;

impl Stage {
    fn set() -> Option<Self> {
        let cgroups = test_cgroups()?;
        let (plain, limited) = (cgroups.pod("plain"), cgroups.pod("limited"));
        let (class, split) = (cgroups.pod("class"), cgroups.pod("split"));
        let standing = cgroups.pod("standing");
        let burst = cgroups.pod("burst");
        let bursting = cgroups.container(&burst, "web");
        let web = cgroups.container(&split, "web");
        let log = cgroups.container(&split, "log");
        let quota = |path: &CgroupPath, micros| {
            (
                path.clone(),
                cgroups.quota_file(),
                cgroups.quota_text(micros),
            )
        };
        let mut files = vec![
            quota(&plain, None),
            quota(&limited, Some(80_000)),
            quota(&class, None),
            quota(&split, None),
            quota(&web, Some(60_000)),
            quota(&log, Some(70_000)),
            quota(&burst, Some(90_000)),
            quota(&bursting, Some(30_000)),
            (class.clone(), cgroups.weight_file(), "37".to_owned()),
            (standing.clone(), cgroups.weight_file(), "41".to_owned()),
        ];
        if cgroups.has(&limited, cgroups.burst_file()) {
            files.push((limited.clone(), cgroups.burst_file(), "30000".to_owned()));
            files.push((burst.clone(), cgroups.burst_file(), "0".to_owned()));
            files.push((bursting.clone(), cgroups.burst_file(), "5000".to_owned()));
        }
        if cgroups.has(&class, "cpu.idle") {
            files.push((class.clone(), "cpu.idle", "0".to_owned()));
            files.push((standing.clone(), "cpu.idle", "0".to_owned()));
        }
        Some(Self { cgroups, files })
    }

    /// Resets everything to the originals.
    fn reset(&self) {
        for (path, file, original) in &self.files {
            self.cgroups.write(path, file, original);
        }
        for name in ["journal", "resized"] {
            fs::remove_file(self.cgroups.state.path().join(name)).ok();
        }
    }

    fn originals(&self) -> Vec<(CgroupPath, &'static str, String)> {
        let resized = self.cgroups.state.path().join("resized").exists();
        let mut files = self.files.clone();
        if resized {
            files[1].2 = self.cgroups.quota_text(Some(RESIZED));
        }
        files
    }

    fn run(&self, die_at: usize, recover: bool) -> ExitStatus {
        let orders = Orders {
            parent: self.cgroups.parent.clone(),
            state: self.cgroups.state.path().to_owned(),
            die_at,
            recover,
            resized: self.cgroups.quota_text(Some(RESIZED)),
            unlimited: self.cgroups.quota_text(None),
        };
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::victim", "--ignored", "--nocapture"])
            .env(ORDERS, serde_json::to_string(&orders).unwrap())
            .output()
            .unwrap();
        let killed = output.status.signal() == Some(9);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            killed || output.status.success(),
            "it failed for another reason: {stderr}"
        );
        output.status
    }

    /// I1: every file that holds our value has exactly one record with its original.
    fn assert_recorded(&self, when: &str) {
        let records = Journal::new(self.cgroups.state.path())
            .unwrap()
            .load()
            .unwrap();
        for (path, file, original) in self.originals() {
            let current = self.cgroups.read(&path, file);
            let of_file: Vec<&JournalRecord> = records
                .iter()
                .filter(|record| record.cgroup.join(&record.target_cgroup).as_ref() == Ok(&path))
                .filter(|record| record.file.name() == file)
                .collect();
            assert!(of_file.len() <= 1, "{when}: {path}/{file} has two records");
            if current == original {
                continue;
            }
            let [record] = of_file[..] else {
                panic!("{when}: {path}/{file} is at {current} and has no record");
            };
            let known = [&*record.ours, &*record.previous];
            let by_kernel = record.file.is_weight_around_idle(&current);
            assert!(
                known.contains(&&*current) || by_kernel,
                "{when}: {record:?} but {current}"
            );
            // Between a foreign change and the next check, the record has their last value.
            let before = &self
                .files
                .iter()
                .find(|f| f.0 == path && f.1 == file)
                .unwrap()
                .2;
            let matches_original = *record.original == *original || *record.original == **before;
            assert!(matches_original, "{when}: {record:?} instead of {original}");
        }
    }

    fn assert_restored(&self, when: &str) {
        for (path, file, original) in self.originals() {
            assert_eq!(
                self.cgroups.read(&path, file),
                original,
                "{when}: {path}/{file}"
            );
        }
        assert!(
            self.cgroups.journal_lines().is_empty(),
            "{when}: the journal is not empty"
        );
    }

    /// Kills one process after another, each at the next effect, until one completes.
    fn each_crash(&self, mut after: impl FnMut(usize)) -> usize {
        for die_at in 1.. {
            self.reset();
            if self.run(die_at, false).success() {
                self.assert_restored("after a complete run");
                return die_at - 1;
            }
            let when = format!("killed at {die_at}");
            self.assert_recorded(&when);
            after(die_at);
            self.assert_restored(&when);
        }
        unreachable!("some run completes")
    }
}

#[test]
fn after_a_kill_at_any_effect_everything_is_restored() {
    let Some(stage) = Stage::set() else { return };
    let crashes = stage.each_crash(|die_at| {
        let (mut throttler, recovered) = stage.cgroups.open();
        assert_fine(&recovered.outcomes);
        stage.assert_recorded(&format!("killed at {die_at}, adopted"));
        assert_fine(&throttler.restore_all(at(1)));
    });
    println!("{crashes} crashes");
    assert!(crashes > 60, "the hook was called only {crashes} times");
}

#[test]
fn after_a_kill_at_any_effect_throttling_continues() {
    let Some(stage) = Stage::set() else { return };
    let find = stage.cgroups.find();
    stage.each_crash(|die_at| {
        let when = format!("killed at {die_at}, continued");
        let (mut throttler, _) = stage.cgroups.open();
        assert_fine(&throttler.apply(at(1), &plan(150, true), &find));
        stage.assert_recorded(&when);
        let plain = stage.cgroups.parent.join("plain").unwrap();
        assert_eq!(
            stage.cgroups.quota(&plain),
            stage.cgroups.quota_text(Some(15_000)),
            "{when}"
        );
        assert_fine(&throttler.verify(at(2)));
        stage.assert_recorded(&when);
        assert_fine(&throttler.apply(at(3), &[], &find));
    });
}

#[test]
fn after_a_kill_during_recovery_everything_is_restored() {
    let Some(stage) = Stage::set() else { return };
    stage.each_crash(|die_at| {
        // Only the first few effects of each recovery: all of them would take minutes.
        if die_at % 11 == 0 {
            for again in 1.. {
                if stage.run(again, true).success() {
                    return;
                }
                stage.assert_recorded(&format!("killed at {die_at} and again at {again}"));
            }
        }
        stage.cgroups.throttler().restore_all(at(1));
    });
}
