//! The kubelet's cgroups: names in both directions, and scanning.

use crate::collect_support::{CgroupFixture, Fake};
use plimsoll::engine::pod::{PodUid, QosClass};
use plimsoll::node::cgroup::kubepods::{
    CgroupPodName, Driver, container_id, parse_pod_cgroup, pod_cgroup, scan,
};
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use proptest::prelude::*;

const UID: &str = "0f5a3c9e-27b1-4c58-9d1b-2f6f0e7a1b3c";
const STATIC: &str = "7b1e0f5a3c9e27b14c589d1b2f6f0e7a";
const CONTAINER: &str = "3f1de0cb9a5bb3a65c1d3d7e4f6a7b8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6";

fn pod(qos: QosClass, uid: &str) -> CgroupPodName {
    CgroupPodName {
        qos,
        uid: PodUid::from(uid),
    }
}

fn path(text: &str) -> CgroupPath {
    CgroupPath::new(text).unwrap()
}

#[test]
fn both_drivers_name_a_pod_as_the_kubelet_does() {
    let burstable = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f5a3c9e_27b1_4c58_9d1b_2f6f0e7a1b3c.slice";
    for (driver, root, qos, uid, expected) in [
        (
            Driver::Cgroupfs,
            "/",
            QosClass::Guaranteed,
            UID,
            format!("kubepods/pod{UID}"),
        ),
        (
            Driver::Cgroupfs,
            "/",
            QosClass::Burstable,
            UID,
            format!("kubepods/burstable/pod{UID}"),
        ),
        (
            Driver::Cgroupfs,
            "/e2e/x",
            QosClass::BestEffort,
            STATIC,
            format!("e2e/x/kubepods/besteffort/pod{STATIC}"),
        ),
        (
            Driver::Systemd,
            "",
            QosClass::Burstable,
            UID,
            burstable.to_owned(),
        ),
        (
            Driver::Systemd,
            "/",
            QosClass::Guaranteed,
            STATIC,
            format!("kubepods.slice/kubepods-pod{STATIC}.slice"),
        ),
        (
            Driver::Systemd,
            "/my-root",
            QosClass::BestEffort,
            STATIC,
            format!(
                "my_root.slice/my_root-kubepods.slice/my_root-kubepods-besteffort.slice/my_root-kubepods-besteffort-pod{STATIC}.slice"
            ),
        ),
    ] {
        let name = pod(qos, uid);
        let cgroup = pod_cgroup(driver, root, &name).unwrap();
        assert_eq!(cgroup.as_str(), expected);
        assert_eq!(parse_pod_cgroup(&cgroup), Some(name));
    }
}

#[test]
fn other_cgroups_are_not_pods() {
    for text in [
        "kubepods".to_owned(),
        "kubepods/burstable".to_owned(),
        "kubepods.slice/kubepods-burstable.slice".to_owned(),
        format!("kubepods/burstable/pod{UID}/{CONTAINER}"),
        format!("system.slice/pod{UID}"),
        format!("burstable/pod{UID}"),
        format!("kubepods/other/pod{UID}"),
        "kubepods/podinfo".to_owned(),
        "kubepods/pod".to_owned(),
        format!("kubepods/pod{}", UID.to_uppercase().replace('-', "+")),
        format!("kubepods/pod{STATIC}0"),
        format!("kubepods.slice/kubepods-other-pod{STATIC}.slice"),
        format!("kubepods.slice/cri-containerd-{CONTAINER}.scope"),
    ] {
        assert_eq!(parse_pod_cgroup(&path(&text)), None, "{text}");
    }
}

#[test]
fn container_names_of_every_runtime_are_recognized() {
    for name in [
        CONTAINER.to_owned(),
        format!("cri-containerd-{CONTAINER}.scope"),
        format!("docker-{CONTAINER}.scope"),
        format!("crio-{CONTAINER}.scope"),
        format!("{CONTAINER}.scope"),
    ] {
        assert_eq!(container_id(&name), Some(CONTAINER), "{name}");
    }
    for name in [
        "",
        "init.scope",
        "short",
        "abc.scope",
        &format!("crio-conmon-{CONTAINER}.scope"),
        &format!("{CONTAINER}0"),
        &format!("pod{UID}"),
    ] {
        assert_eq!(container_id(name), None, "{name}");
    }
}

#[test]
fn a_scan_finds_the_pods_of_every_class_with_their_containers() {
    let fake = Fake::new();
    let root = fake.root().to_owned();
    for directory in [
        format!("kubepods/pod{STATIC}/{CONTAINER}"),
        format!("kubepods/burstable/pod{UID}"),
        "kubepods/besteffort/not-a-pod".to_owned(),
        "system.slice/ssh.service".to_owned(),
    ] {
        fake.directory(&directory);
    }
    let hierarchy = Hierarchy::V2 { root };
    let found = scan(&hierarchy, "/").unwrap();
    let names: Vec<_> = found.iter().map(|pod| &pod.name).collect();
    assert_eq!(
        names,
        [
            &pod(QosClass::Burstable, UID),
            &pod(QosClass::Guaranteed, STATIC)
        ]
    );
    assert_eq!(found[1].containers, [CONTAINER]);
    assert_eq!(found[0].containers, [""; 0]);
    assert_eq!(scan(&hierarchy, "/elsewhere").unwrap(), []);
}

#[test]
fn a_scan_finds_systemd_pods_below_a_cgroup_root() {
    let fake = Fake::new();
    let wanted = pod(QosClass::BestEffort, UID);
    let cgroup = pod_cgroup(Driver::Systemd, "/lab", &wanted).unwrap();
    let pause = format!("cri-containerd-{CONTAINER}.scope");
    fake.directory(&format!("{cgroup}/{pause}"));
    fake.directory(&format!("{cgroup}/crio-conmon-{CONTAINER}.scope"));
    let root = fake.root().to_owned();
    let found = scan(&Hierarchy::V2 { root }, "/lab").unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].name, wanted);
    assert_eq!(found[0].cgroup, cgroup);
    assert_eq!(found[0].containers, [pause]);
}

#[test]
fn a_scan_finds_real_cgroups() {
    let Some(ground) = CgroupFixture::make() else {
        return;
    };
    ground.mkdir(&format!("kubepods/burstable/pod{UID}/{CONTAINER}"));
    let found = scan(&ground.hierarchy, ground.parent.as_str()).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].name, pod(QosClass::Burstable, UID));
    assert_eq!(found[0].containers, [CONTAINER]);
}

fn any_class() -> impl Strategy<Value = QosClass> {
    prop_oneof![
        Just(QosClass::Guaranteed),
        Just(QosClass::Burstable),
        Just(QosClass::BestEffort)
    ]
}

fn any_uid() -> impl Strategy<Value = String> {
    let uuid = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}";
    prop_oneof![uuid, "[0-9a-f]{32}"]
}

proptest! {
    #[test]
    fn pod_names_round_trip(
        qos in any_class(),
        uid in any_uid(),
        root in "(/[a-z][a-z0-9-]{0,6}){0,3}",
        systemd: bool,
    ) {
        let driver = if systemd { Driver::Systemd } else { Driver::Cgroupfs };
        let name = pod(qos, &uid);
        let cgroup = pod_cgroup(driver, &root, &name).unwrap();
        prop_assert_eq!(parse_pod_cgroup(&cgroup), Some(name));
    }

    #[test]
    fn arbitrary_paths_do_not_panic(text in "[a-z0-9./_é-]{1,60}") {
        if let Ok(path) = CgroupPath::new(&text) {
            let _ = parse_pod_cgroup(&path);
        }
        let _ = container_id(&text);
    }
}
