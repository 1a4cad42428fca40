//! Journal problems: full and read-only disks, damage, foreign writers, and recovery at the start.

use std::fs;
use std::path::Path;

use crate::kernel_support::{
    TestCgroups, assert_fine, at, idle, test_cgroups, throttle, throttle_of_cgroups, uid,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use plimsoll::clock::boot_time;
use plimsoll::engine::plan::Feedback;
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::node::actuate::throttle::{ReleaseResult, ThrottleOutcome, Throttler};
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};

/// A small disk mounted on the state directory.
struct Disk<'a>(&'a Path);

impl<'a> Disk<'a> {
    fn on(directory: &'a Path) -> Option<Self> {
        let size = Some("size=64k");
        match mount(
            Some("tmpfs"),
            directory,
            Some("tmpfs"),
            MsFlags::empty(),
            size,
        ) {
            Ok(()) => Some(Self(directory)),
            Err(error) => {
                eprintln!("skipped: failed to mount a tmpfs: {error}");
                None
            }
        }
    }

    fn fill(&self) {
        fs::write(self.0.join("filler"), vec![0; 1 << 20]).unwrap_err();
    }

    fn free(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }

    fn set_read_only(&self, read_only: bool) {
        let flags = if read_only {
            MsFlags::MS_RDONLY
        } else {
            MsFlags::empty()
        };
        let flags = flags | MsFlags::MS_REMOUNT;
        mount(None::<&str>, self.0, None::<&str>, flags, None::<&str>).unwrap();
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        umount2(self.0, MntFlags::MNT_DETACH).ok();
    }
}

fn failed(outcomes: &[ThrottleOutcome]) -> Vec<Feedback> {
    let journal = outcomes
        .iter()
        .filter(|o| matches!(o, ThrottleOutcome::JournalFailed { .. }))
        .count();
    assert_eq!(journal, 1, "{outcomes:?}");
    outcomes
        .iter()
        .filter_map(ThrottleOutcome::feedback)
        .collect()
}

/// While the journal cannot be written, nothing new is throttled and restores run; afterwards all works again.
fn without_a_journal(cgroups: &TestCgroups, state: &Path, spoil: impl Fn(), repair: impl Fn()) {
    let (old, new) = (cgroups.pod("old"), cgroups.pod("new"));
    let (mut throttler, _) = Throttler::open(state, cgroups.hierarchy.clone(), at(0)).unwrap();
    let find = cgroups.find();
    assert_fine(&throttler.apply(at(0), &[throttle("old", 500)], &find));
    spoil();

    let plan = [throttle("old", 300), throttle("new", 300)];
    let feedback = failed(&throttler.apply(at(1), &plan, &find));
    let not = |name| Feedback::ThrottleFailed { uid: uid(name) };
    assert_eq!(feedback, [not("new"), not("old")]);
    assert_eq!(cgroups.quota(&new), cgroups.quota_text(None));
    assert_eq!(cgroups.quota(&old), cgroups.quota_text(Some(50_000)));
    assert!(throttler.verify(at(1)).is_empty(), "reported once");

    assert_eq!(failed(&throttler.apply(at(2), &[], &find)), []);
    assert_eq!(cgroups.quota(&old), cgroups.quota_text(None));

    repair();
    assert!(throttler.verify(at(3)).is_empty());
    let journal = fs::read_to_string(state.join("journal")).unwrap();
    assert_eq!(journal.lines().count(), 2, "no record is left: {journal}");
    assert_fine(&throttler.apply(at(4), &plan, &find));
    assert_eq!(cgroups.quota(&new), cgroups.quota_text(Some(30_000)));
    assert_fine(&throttler.restore_all(at(5)));
}

#[test]
fn a_full_disk_blocks_new_throttles_but_not_restores() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let state = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::on(state.path()) else {
        return;
    };
    without_a_journal(&cgroups, state.path(), || disk.fill(), || disk.free());
}

#[test]
fn a_read_only_disk_blocks_new_throttles_but_not_restores() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let state = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::on(state.path()) else {
        return;
    };
    without_a_journal(
        &cgroups,
        state.path(),
        || disk.set_read_only(true),
        || disk.set_read_only(false),
    );
}

#[test]
fn a_journal_on_a_read_only_disk_can_be_restored() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let state = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::on(state.path()) else {
        return;
    };
    let open = || Throttler::open(state.path(), cgroups.hierarchy.clone(), boot_time()).unwrap();
    open()
        .0
        .apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    disk.set_read_only(true);
    assert_eq!(failed(&open().0.restore_all(at(1))), []);
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
}

#[test]
fn the_state_directory_is_created_or_the_failure_reported() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let state = cgroups.state.path().join("plimsoll");
    Throttler::open(&state, cgroups.hierarchy.clone(), at(0)).unwrap();
    assert!(state.is_dir());
    let nowhere = cgroups.state.path().join("no/plimsoll");
    let error = Throttler::open(&nowhere, cgroups.hierarchy.clone(), at(0)).unwrap_err();
    assert!(error.to_string().contains("--state-dir"), "{error}");
}

#[test]
fn a_second_process_is_rejected_with_the_pid_of_the_first() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let _first = cgroups.throttler();
    let error =
        Throttler::open(cgroups.state.path(), cgroups.hierarchy.clone(), at(0)).unwrap_err();
    let pid = format!("process {}", std::process::id());
    assert!(error.to_string().contains(&pid), "{error}");
}

#[test]
fn a_damaged_journal_changes_nothing() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pods = [cgroups.pod("a"), cgroups.pod("b")];
    let plan = [throttle("a", 300), throttle("b", 300)];
    cgroups.throttler().apply(at(0), &plan, &cgroups.find());
    let journal = cgroups.state.path().join("journal");
    let text = fs::read_to_string(&journal).unwrap();
    let cut = &text[..text.len() / 2];
    let altered = text.replacen("\"original\"", "\"Original\"", 1);
    for damaged in [cut, &altered, "", "something else\n"] {
        fs::write(&journal, damaged).unwrap();
        let error =
            Throttler::open(cgroups.state.path(), cgroups.hierarchy.clone(), at(1)).unwrap_err();
        let named = error.to_string().contains(&journal.display().to_string());
        assert!(named, "{error}");
        for pod in &pods {
            assert_eq!(cgroups.quota(pod), cgroups.quota_text(Some(30_000)));
        }
        assert_eq!(fs::read_to_string(&journal).unwrap(), damaged);
    }
    fs::write(&journal, text).unwrap();
    cgroups.throttler().restore_all(at(2));
    assert_eq!(cgroups.quota(&pods[0]), cgroups.quota_text(None));
}

#[test]
fn the_next_process_adopts_wanted_throttles_and_restores_others() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let (wanted, unwanted) = (cgroups.pod("wanted"), cgroups.pod("unwanted"));
    cgroups.set_quota(&wanted, Some(90_000));
    let plan = [throttle("wanted", 300), throttle("unwanted", 300)];
    cgroups.throttler().apply(at(0), &plan, &cgroups.find());
    let (mut throttler, recovered) = cgroups.open();
    let [_, adopted] = &recovered.throttles[..] else {
        unreachable!("{recovered:?}")
    };
    assert_eq!(adopted.uid, uid("wanted"));
    assert_eq!(adopted.ratio, 50);
    let original = Quota::Limit(MilliCpu(900));
    assert_eq!(
        adopted.target_cgroups,
        [("".into(), MilliCpu(1000), original)]
    );
    assert_eq!(recovered.pods.len(), 2);
    assert_fine(&throttler.apply(at(1), &[throttle("wanted", 200)], &cgroups.find()));
    assert_eq!(cgroups.quota(&wanted), cgroups.quota_text(Some(20_000)));
    assert_eq!(cgroups.quota(&unwanted), cgroups.quota_text(None));
    assert_fine(&throttler.apply(at(2), &[], &cgroups.find()));
    assert_eq!(cgroups.quota(&wanted), cgroups.quota_text(Some(90_000)));
}

#[test]
fn an_idle_class_is_adopted_with_its_base() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    if !cgroups.has(&pod, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    let plan = [idle(throttle_of_cgroups("pod", &[("", None)]))];
    cgroups.throttler().apply(at(0), &plan, &cgroups.find());
    let (mut throttler, recovered) = cgroups.open();
    let [adopted] = &recovered.throttles[..] else {
        unreachable!("{recovered:?}")
    };
    assert!(adopted.idle);
    assert_eq!(
        adopted.target_cgroups,
        [("".into(), MilliCpu(1000), Quota::Unlimited)]
    );
    assert!(
        throttler.apply(at(1), &plan, &cgroups.find()).is_empty(),
        "it is already idle"
    );
    throttler.restore_all(at(2));
    assert_eq!(cgroups.read(&pod, "cpu.idle"), "0");
}

#[test]
fn a_foreign_value_found_at_the_start_becomes_the_original() {
    for goes_on in [false, true] {
        let Some(cgroups) = test_cgroups() else {
            return;
        };
        let pod = cgroups.pod("pod");
        cgroups
            .throttler()
            .apply(at(0), &[throttle("pod", 300)], &cgroups.find());
        cgroups.set_quota(&pod, Some(70_000));
        let (mut throttler, _) = cgroups.open();
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(70_000)));
        if goes_on {
            assert_fine(&throttler.apply(at(1), &[throttle("pod", 300)], &cgroups.find()));
            assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
        }
        assert_fine(&throttler.apply(at(2), &[], &cgroups.find()));
        assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(70_000)));
        assert!(cgroups.journal_lines().is_empty());
    }
}

#[test]
fn a_restore_reports_the_final_state_of_each_file() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let names = ["back", "foreign", "gone", "original", "remade"];
    let pods = names.map(|name| cgroups.pod(name));
    let plan = names.map(|name| throttle(name, 300));
    cgroups.throttler().apply(at(0), &plan, &cgroups.find());
    cgroups.set_quota(&pods[1], Some(70_000));
    cgroups.remove(&pods[2]);
    cgroups.set_quota(&pods[3], None);
    cgroups.remove(&pods[4]);
    cgroups.pod("remade");
    let (mut throttler, recovered) = cgroups.open();
    let mut outcomes = recovered.outcomes;
    outcomes.extend(throttler.restore_all(at(1)));
    let mut fates: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            ThrottleOutcome::Released { uid, result, .. } => {
                Some((uid.to_string(), result.clone()))
            }
            _ => None,
        })
        .collect();
    fates.sort_by(|a, b| a.0.cmp(&b.0));
    let (unlimited, theirs) = (cgroups.quota_text(None), cgroups.quota_text(Some(70_000)));
    let expected = [
        ReleaseResult::Restored(unlimited.as_str().into()),
        ReleaseResult::Left(theirs.as_str().into()),
        ReleaseResult::Gone,
        ReleaseResult::Original(unlimited.as_str().into()),
        ReleaseResult::Gone,
    ];
    let expected: Vec<_> = names.map(str::to_owned).into_iter().zip(expected).collect();
    assert_eq!(fates, expected);
    assert!(cgroups.journal_lines().is_empty());
    assert_eq!(cgroups.quota(&pods[4]), unlimited);
}

#[test]
fn expired_throttles_are_restored_at_the_start() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups
        .throttler()
        .apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    let later = at(31 * 60);
    let (_, recovered) =
        Throttler::open(cgroups.state.path(), cgroups.hierarchy.clone(), later).unwrap();
    assert!(recovered.throttles.is_empty(), "{recovered:?}");
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn the_journal_of_another_boot_is_dropped() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    cgroups
        .throttler()
        .apply(at(0), &[throttle("pod", 300)], &cgroups.find());
    let journal = cgroups.state.path().join("journal");
    let text = fs::read_to_string(&journal).unwrap();
    let (body, _) = text.trim_end().rsplit_once('\n').unwrap();
    let boot = body.split(' ').nth(2).unwrap();
    let body = format!("{}\n", body.replacen(boot, "another-boot", 1));
    let sum = crc32fast::hash(body.as_bytes());
    fs::write(&journal, format!("{body}crc32 {sum:08x}\n")).unwrap();
    let (mut throttler, recovered) = cgroups.open();
    assert!(
        recovered.throttles.is_empty() && recovered.outcomes.is_empty(),
        "{recovered:?}"
    );
    throttler.restore_all(at(1));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(Some(30_000)));
}

/// The test's cgroups, mounted read-only as in a container.
fn read_only<'a>(cgroups: &TestCgroups, directory: &'a Path) -> Option<(Disk<'a>, Hierarchy)> {
    let source = cgroups.dir(&cgroups.parent);
    let bind = |flags| mount(Some(&source), directory, None::<&str>, flags, None::<&str>);
    if let Err(error) = bind(MsFlags::MS_BIND) {
        eprintln!("skipped: failed to bind: {error}");
        return None;
    }
    let mounted = Disk(directory);
    bind(MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY).unwrap();
    let hierarchy = match &cgroups.hierarchy {
        Hierarchy::V2 { .. } => Hierarchy::V2 {
            root: directory.to_owned(),
        },
        Hierarchy::V1 { cpuacct, .. } => Hierarchy::V1 {
            cpu: directory.to_owned(),
            cpuacct: cpuacct.clone(),
            memory: None,
            freezer: None,
            unified: None,
        },
    };
    Some((mounted, hierarchy))
}

#[test]
fn read_only_cgroups_are_reported_and_leave_no_record() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let pod = cgroups.pod("pod");
    let directory = tempfile::tempdir().unwrap();
    let Some((_mounted, hierarchy)) = read_only(&cgroups, directory.path()) else {
        return;
    };
    let (mut throttler, _) = Throttler::open(cgroups.state.path(), hierarchy, at(0)).unwrap();
    let find = |_: &_| CgroupPath::new("pod").ok();
    let outcomes = throttler.apply(at(0), &[throttle("pod", 300)], &find);
    let [ThrottleOutcome::Failed { error, .. }] = &outcomes[..] else {
        unreachable!("{outcomes:?}")
    };
    assert!(error.to_string().contains("read-only"), "{error}");
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    assert!(cgroups.journal_lines().is_empty());
}

#[test]
fn records_of_unreadable_files_are_retained() {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    let (pod, other) = (cgroups.pod("pod"), cgroups.pod("other"));
    let directory = tempfile::tempdir().unwrap();
    let Some((mounted, hierarchy)) = read_only(&cgroups, directory.path()) else {
        return;
    };
    let find = |uid: &PodUid| CgroupPath::new(&uid.0).ok();
    let writable = match &hierarchy {
        Hierarchy::V2 { .. } => Hierarchy::V2 {
            root: cgroups.dir(&cgroups.parent),
        },
        Hierarchy::V1 { .. } => Hierarchy::V1 {
            cpu: cgroups.dir(&cgroups.parent),
            cpuacct: cgroups.dir(&cgroups.parent),
            memory: None,
            freezer: None,
            unified: None,
        },
    };
    let open = |hierarchy| Throttler::open(cgroups.state.path(), hierarchy, at(0)).unwrap();
    let plan = [throttle("pod", 300), throttle("other", 300)];
    open(writable.clone()).0.apply(at(0), &plan, &find);
    let journal = cgroups.journal_lines();

    let (mut throttler, recovered) = open(hierarchy);
    let failed = recovered
        .outcomes
        .iter()
        .filter(|o| matches!(o, ThrottleOutcome::Failed { .. }));
    assert_eq!(failed.count(), 2, "{recovered:?}");
    throttler.apply(at(1), &[], &find);
    throttler.restore_all(at(2));
    assert_eq!(cgroups.journal_lines(), journal);
    let pods: Vec<_> = throttler.throttled_pods().map(|uid| &*uid.0).collect();
    assert_eq!(pods, ["other", "pod"], "not restored");
    drop((throttler, mounted));

    assert_fine(&open(writable).0.restore_all(at(3)));
    assert_eq!(cgroups.quota(&pod), cgroups.quota_text(None));
    assert_eq!(cgroups.quota(&other), cgroups.quota_text(None));
    assert!(cgroups.journal_lines().is_empty());
}

/// A plain directory stands in for a kernel without `cpu.idle`. All values have the same length, since writes do not
/// truncate.
#[test]
fn without_an_idle_class_the_pod_gets_the_minimum_weight() {
    let directory = tempfile::tempdir().unwrap();
    let pod = directory.path().join("pod");
    fs::create_dir(&pod).unwrap();
    fs::write(pod.join("cpu.weight"), "7\n").unwrap();
    let hierarchy = Hierarchy::V2 {
        root: directory.path().to_owned(),
    };
    let state = directory.path().join("state");
    let (mut throttler, _) = Throttler::open(&state, hierarchy.clone(), at(0)).unwrap();
    let find = |_: &_| CgroupPath::new("pod").ok();
    let plan = [idle(throttle_of_cgroups("pod", &[("", None)]))];
    assert_fine(&throttler.apply(at(0), &plan, &find));
    let weight = || fs::read_to_string(pod.join("cpu.weight")).unwrap();
    assert_eq!(weight(), "1\n");
    fs::write(pod.join("cpu.weight"), "7\n").unwrap();
    assert_fine(&throttler.verify(at(1)));
    assert_eq!(weight(), "1\n");
    drop(throttler);
    let (mut throttler, recovered) = Throttler::open(&state, hierarchy, at(2)).unwrap();
    assert!(recovered.throttles[0].idle);
    assert_fine(&throttler.apply(at(3), &[], &find));
    assert_eq!(weight(), "7\n");
}

#[test]
fn a_cgroup_behind_a_symbolic_link_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let real = directory.path().join("real");
    fs::create_dir(&real).unwrap();
    fs::write(real.join("cpu.max"), "max 100000\n").unwrap();
    std::os::unix::fs::symlink(&real, directory.path().join("link")).unwrap();
    let hierarchy = Hierarchy::V2 {
        root: directory.path().to_owned(),
    };
    let (mut throttler, _) =
        Throttler::open(&directory.path().join("state"), hierarchy, at(0)).unwrap();
    let outcomes = throttler.apply(at(0), &[throttle("link", 300)], &|_| {
        CgroupPath::new("link").ok()
    });
    assert!(
        matches!(&outcomes[..], [ThrottleOutcome::Failed { .. }]),
        "{outcomes:?}"
    );
    assert_eq!(
        fs::read_to_string(real.join("cpu.max")).unwrap(),
        "max 100000\n"
    );
}
