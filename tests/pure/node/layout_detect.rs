//! Detection of cgroup trees on v1, v2 and hybrid machines.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::collect_support::Fake;
use plimsoll::node::cgroup::Hierarchy;
use plimsoll::node::cgroup::layout::{LayoutError, cgroup_mounts};
use proptest::prelude::*;

fn detect(mountinfo: &str) -> Option<Hierarchy> {
    Hierarchy::from_mounts(&cgroup_mounts(mountinfo.as_bytes()))
}

fn v1(cpu: &str, cpuacct: &str, memory: &str, freezer: &str, unified: Option<&str>) -> Hierarchy {
    Hierarchy::V1 {
        cpu: cpu.into(),
        cpuacct: cpuacct.into(),
        memory: Some(memory.into()),
        freezer: Some(freezer.into()),
        unified: unified.map(PathBuf::from),
    }
}

const V2: &str = "\
25 30 0:23 / /sys rw,nosuid shared:7 - sysfs sysfs rw
30 25 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
31 1 0:27 / /tmp rw - tmpfs tmpfs rw
";

const JOINED: &str = "\
32 24 0:28 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
33 32 0:29 / /sys/fs/cgroup/systemd rw shared:10 - cgroup cgroup rw,xattr,name=systemd
34 32 0:32 / /sys/fs/cgroup/net_cls,net_prio rw shared:14 - cgroup cgroup rw,net_cls,net_prio
35 32 0:33 / /sys/fs/cgroup/cpu,cpuacct rw shared:15 - cgroup cgroup rw,cpu,cpuacct
36 32 0:34 / /sys/fs/cgroup/memory rw shared:16 - cgroup cgroup rw,memory
37 32 0:35 / /sys/fs/cgroup/freezer rw shared:17 - cgroup cgroup rw,freezer
";

#[test]
fn a_v2_machine_has_one_tree() {
    let root = "/sys/fs/cgroup".into();
    assert_eq!(detect(V2), Some(Hierarchy::V2 { root }));
}

#[test]
fn joined_v1_controllers_share_their_tree() {
    let cpu = "/sys/fs/cgroup/cpu,cpuacct";
    let expected = v1(
        cpu,
        cpu,
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/freezer",
        None,
    );
    assert_eq!(detect(JOINED), Some(expected));
}

#[test]
fn a_hybrid_machine_has_its_controllers_on_v1() {
    let text = "\
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    let expected = v1(
        "/sys/fs/cgroup/cpu",
        "/sys/fs/cgroup/cpuacct",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/freezer",
        Some("/sys/fs/cgroup/unified"),
    );
    assert_eq!(detect(text), Some(expected));
}

#[test]
fn without_cpu_on_v1_the_v2_tree_is_used() {
    let text = "\
33 31 0:30 / /sys/fs/cgroup/net_cls rw - cgroup cgroup rw,net_cls
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    let root = "/sys/fs/cgroup/unified".into();
    assert_eq!(detect(text), Some(Hierarchy::V2 { root }));
}

#[test]
fn a_mount_of_the_whole_tree_is_preferred() {
    let text = "\
40 31 0:26 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup2 rw
41 31 0:26 / /host/sys/fs/cgroup rw - cgroup2 cgroup2 rw
";
    let root = "/host/sys/fs/cgroup".into();
    assert_eq!(detect(text), Some(Hierarchy::V2 { root }));
}

#[test]
fn escapes_are_decoded_and_bad_lines_skipped() {
    let text =
        "garbage\n1 2\n30 25 0:26 / /my\\040cg\\134x rw - cgroup2 cgroup2 rw\n1 2 3 4 5 6\n- - -\n";
    let root = "/my cg\\x".into();
    assert_eq!(detect(text), Some(Hierarchy::V2 { root }));
    assert_eq!(detect(""), None);
    assert_eq!(detect("30 25 0:26 / /c rw - cgroup cgroup rw,cpu\n"), None);
}

#[test]
fn a_given_root_is_identified_by_its_file_names() {
    let fake = Fake::new();
    fake.file("two/cgroup.controllers", "cpuset cpu io memory pids\n");
    let root = fake.root().join("two");
    assert_eq!(Hierarchy::below(&root).unwrap(), Hierarchy::V2 { root });

    let one = fake.directory("one");
    fake.directory("one/cpu,cpuacct");
    fake.directory("one/memory");
    fake.directory("one/freezer");
    let joined = one.join("cpu,cpuacct");
    let expected = Hierarchy::V1 {
        cpu: joined.clone(),
        cpuacct: joined.clone(),
        memory: Some(one.join("memory")),
        freezer: Some(one.join("freezer")),
        unified: None,
    };
    assert_eq!(Hierarchy::below(&one).unwrap(), expected);

    // The layout of systemd: a link for each controller.
    symlink("cpu,cpuacct", one.join("cpu")).unwrap();
    symlink("cpu,cpuacct", one.join("cpuacct")).unwrap();
    let Hierarchy::V1 { cpu, cpuacct, .. } = Hierarchy::below(&one).unwrap() else {
        panic!("expected v1");
    };
    assert_eq!(cpu.canonicalize().unwrap(), joined.canonicalize().unwrap());
    assert_eq!(cpuacct, one.join("cpuacct"));
}

#[test]
fn an_invalid_root_is_rejected_with_what_was_expected() {
    let fake = Fake::new();
    let message = Hierarchy::below(fake.root()).unwrap_err().to_string();
    for part in [
        "cgroup.controllers",
        "`cpu` and `cpuacct`",
        "/sys/fs/cgroup",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let missing = Hierarchy::detect(Path::new("/proc"), Some(&fake.root().join("no")));
    assert!(matches!(missing, Err(LayoutError::NotARoot { .. })));

    fake.file("cgroup.controllers", "hugetlb\n");
    let message = Hierarchy::below(fake.root()).unwrap_err().to_string();
    assert!(message.contains("no cpu controller"), "{message}");
}

#[test]
fn a_directory_that_is_not_a_cgroup_fs_is_rejected() {
    let fake = Fake::new();
    fake.file("two/cgroup.controllers", "cpu memory\n");
    for name in ["one/cpu", "one/cpuacct"] {
        fake.directory(name);
    }
    for name in ["one", "two"] {
        let root = fake.root().join(name);
        let result = Hierarchy::detect(Path::new("/proc"), Some(&root));
        let message = result.unwrap_err().to_string();
        assert!(message.contains("no cgroup file system"), "{message}");
    }
}

#[test]
fn missing_mounts_are_an_error_with_advice() {
    let fake = Fake::new();
    let unread = Hierarchy::detect(fake.root(), None);
    assert!(matches!(unread, Err(LayoutError::Mounts { .. })));
    fake.file("self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n");
    let message = Hierarchy::detect(fake.root(), None)
        .unwrap_err()
        .to_string();
    assert!(message.contains("--cgroup-root"), "{message}");
}

#[test]
fn detection_by_mounts_and_by_root_agree_on_this_machine() {
    let mounted = Hierarchy::detect(Path::new("/proc"), None);
    let rooted = Hierarchy::detect(Path::new("/proc"), Some(Path::new("/sys/fs/cgroup")));
    match (mounted, rooted) {
        (Ok(mounted), Ok(rooted)) => assert_eq!(mounted.is_v2(), rooted.is_v2()),
        (mounted, rooted) => eprintln!("skipped: no cgroups here: {mounted:?}, {rooted:?}"),
    }
}

proptest! {
    #[test]
    fn arbitrary_mount_lists_do_not_panic(text in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Hierarchy::from_mounts(&cgroup_mounts(&text));
    }

    #[test]
    fn truncated_mount_lists_do_not_panic(end in 0..JOINED.len()) {
        let _ = detect(&JOINED[..end]);
    }
}
