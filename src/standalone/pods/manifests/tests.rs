use std::fs;

use super::super::find;
use super::super::own::OwnCgroups;
use super::*;

/// A fake cgroup root and a directory of manifests.
struct TestMachine {
    dir: tempfile::TempDir,
}

impl TestMachine {
    fn with_cgroups(cgroups: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temp dir");
        for cgroup in cgroups {
            fs::create_dir_all(dir.path().join("cgroup").join(cgroup)).expect("a cgroup");
        }
        fs::create_dir(dir.path().join("pods")).expect("a directory");
        Self { dir }
    }

    fn find(&self, parents: &[&str]) -> PodScan {
        let manifests = Manifests::read(&[self.dir.path().join("pods")]);
        self.resolve(&manifests, parents)
    }

    fn resolve(&self, manifests: &Manifests, parents: &[&str]) -> PodScan {
        let parents: Vec<CgroupPath> = parents
            .iter()
            .map(|parent| CgroupPath::new(parent).expect("a path"))
            .collect();
        let root = self.dir.path().join("cgroup");
        let own = OwnCgroups::parse("0::/ours/me");
        find(manifests, &parents, &Hierarchy::V2 { root }, &own)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.dir.path().join("pods").join(file), text).expect("a manifest");
    }
}

fn pod(name: &str, cgroup: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  annotations:\n    plimsoll.dev/cgroup: {cgroup}\n\
         spec:\n  containers:\n  - name: c\n    resources:\n      requests:\n        cpu: 1\n"
    )
}

fn names(found: &PodScan) -> Vec<String> {
    let name = |workload: &Workload| workload.pod.full_name().to_string();
    found.workloads.iter().map(name).collect()
}

#[test]
fn pods_of_several_documents_and_files_are_found() {
    let machine = TestMachine::with_cgroups(&["batch/a", "batch/b", "batch/c", "web"]);
    machine.write(
        "1.yaml",
        &format!(
            "# jobs\n---\n{}---\n{}",
            pod("a", "batch/a"),
            pod("b", "batch/b")
        ),
    );
    machine.write(
        "2.json",
        r#"{"kind": "List", "apiVersion": "v1", "items": [{"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "namespace": "shop", "uid": "u-1", "annotations": {"plimsoll.dev/cgroup": "web"}},
            "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80}]}]}}]}"#,
    );
    machine.write("notes.txt", "not a manifest");
    for directory in ["jobs", ".git"] {
        fs::create_dir(machine.dir.path().join("pods").join(directory)).expect("a directory");
    }
    machine.write("jobs/3.yml", &pod("c", "batch/c"));
    machine.write(".git/4.yml", "not looked at");
    std::os::unix::fs::symlink("..", machine.dir.path().join("pods/jobs/round")).expect("a link");
    let found = machine.find(&[]);
    assert_eq!(found.refused, []);
    assert_eq!(
        names(&found),
        ["default/a", "default/b", "shop/web", "default/c"]
    );
    assert!(found.workloads.iter().all(|workload| workload.pod.running));
    assert!(found.workloads[0].pod.uid.0.starts_with("default/a@"));
    assert_eq!(found.workloads[2].pod.uid.0.as_ref(), "u-1");
}

#[test]
fn a_broken_pod_is_reported_with_its_line_and_affects_no_other() {
    let machine = TestMachine::with_cgroups(&["good", "ours/me", "a", "a/b"]);
    std::os::unix::fs::symlink("good", machine.dir.path().join("cgroup/link")).expect("a link");
    let bad = [
        (
            pod("none", "x").replace("plimsoll.dev/cgroup", "other"),
            "no annotation `plimsoll.dev/cgroup`",
        ),
        (pod("absolute", "/good"), "must stay below the cgroup root"),
        (pod("dots", "good/../.."), "must stay below the cgroup root"),
        (pod("empty", "''"), "the cgroup path is empty"),
        (
            pod("link", "link"),
            "`link` in the cgroup path `link` is a symbolic link",
        ),
        (
            pod("absent", "nowhere"),
            "the cgroup `nowhere` does not exist (yet)",
        ),
        (
            pod("cpu", "a").replace("cpu: 1", "cpu: many"),
            "failed to read cpu `many`",
        ),
        (
            pod("kind", "a").replace("kind: Pod", "kind: Job"),
            "a `Job` of `v1`",
        ),
        (
            pod("spec", "a").replace("  containers:", "  container:"),
            "not a Pod",
        ),
        ("a: [1".to_owned(), "is no"),
        ("a:\n\tb: 1".to_owned(), "the indentation contains a tab"),
        ("just text".to_owned(), ""),
        (
            pod("good", "a"),
            "its UID or name is already that of pod default/good",
        ),
        (pod("double", "good"), "overlaps `good` of pod default/good"),
    ];
    let with_uid = |document: &str| document.replace("  name: good", "  name: good\n  uid: same");
    let mut text = with_uid(&pod("good", "good"));
    for (document, _) in &bad {
        text = format!("{text}---\n{}\n", with_uid(document));
    }
    text = format!("{text}---\n{}", pod("last", "a/b"));
    machine.write("all.yaml", &text);
    let found = machine.find(&[]);
    assert_eq!(names(&found), ["default/good", "default/last"]);
    assert_eq!(found.refused.len(), bad.len(), "{:#?}", found.refused);
    let starts: Vec<usize> = (1..)
        .zip(text.lines())
        .filter_map(|(number, line)| (line == "---").then_some(number))
        .collect();
    for (i, ((document, reason), refusal)) in bad.iter().zip(&found.refused).enumerate() {
        assert!(refusal.reason.contains(reason), "{document}\n{refusal}");
        assert!(
            (starts[i]..=starts[i + 1]).contains(&refusal.position.line),
            "{document}\n{refusal}"
        );
    }
}

#[test]
fn a_manifest_of_5_mib_is_read_and_one_of_17_mib_refused() {
    let machine = TestMachine::with_cgroups(&["a", "b", "c", "d", "e"]);
    let long = "x".repeat(1 << 20);
    let padded = |name: &str| {
        let annotations = format!("  annotations:\n    long: {long}");
        pod(name, name).replace("  annotations:", &annotations)
    };
    let documents = ["a", "b", "c", "d", "e"].map(padded);
    machine.write("long.yaml", &documents.join("---\n"));
    machine.write("vast.yaml", &"#".repeat(17 << 20));
    let found = machine.find(&[]);
    assert_eq!(names(&found).len(), 5, "{:?}", found.refused);
    assert!(
        found.refused[0].reason.contains("split it"),
        "{}",
        found.refused[0]
    );
}

#[test]
fn a_missing_file_and_a_missing_parent_are_reported() {
    let machine = TestMachine::with_cgroups(&["batch/a"]);
    machine.write("a.yaml", &pod("a", "batch/a"));
    let paths = ["/no/such/file.yaml".into(), machine.dir.path().join("pods")];
    let found = machine.resolve(&Manifests::read(&paths), &["nowhere"]);
    assert_eq!(names(&found), ["default/a"]);
    let refused: Vec<String> = found.refused.iter().map(PodRefusal::to_string).collect();
    assert!(
        refused[0].starts_with("/no/such/file.yaml: error: failed to read: No such file"),
        "{refused:?}"
    );
    assert!(
        refused[1].starts_with("nowhere: error: the cgroup `nowhere` does not exist (yet)"),
        "{refused:?}"
    );
}

#[test]
fn every_child_of_a_parent_is_a_pod_unless_a_manifest_names_it() {
    let machine = TestMachine::with_cgroups(&[
        "system.slice/batch.service/deeper",
        "system.slice/ssh.service",
        "system.slice/web.service",
        "system.slice/twice.service/inner",
    ]);
    machine.write(
        "pods.yaml",
        &format!(
            "{}---\n{}",
            pod("web", "system.slice/web.service"),
            pod("inner", "system.slice/twice.service/inner")
        ),
    );
    let found = machine.find(&["system.slice"]);
    assert_eq!(found.refused, []);
    assert_eq!(
        names(&found),
        [
            "default/web",
            "default/inner",
            "system.slice/batch.service",
            "system.slice/ssh.service"
        ]
    );
    let protected = |found: &PodScan| -> Vec<bool> {
        found
            .workloads
            .iter()
            .map(|workload| workload.pod.protected)
            .collect()
    };
    assert_eq!(protected(&found), [false, false, false, true]);
}

#[test]
fn cgroups_of_this_process_are_protected() {
    let machine = TestMachine::with_cgroups(&["ours/me", "ours/other"]);
    machine.write("pods.yaml", &pod("me", "ours/me"));
    let found = machine.find(&["ours"]);
    assert_eq!(names(&found), ["default/me", "ours/other"]);
    assert!(found.workloads[0].pod.protected);
    assert!(!found.workloads[1].pod.protected);
}

#[test]
fn a_manifest_does_not_unprotect_a_unit_that_the_machine_needs() {
    let machine = TestMachine::with_cgroups(&["system.slice/ssh.service", "batch"]);
    machine.write(
        "pods.yaml",
        &format!(
            "{}---\n{}",
            pod("remote", "system.slice/ssh.service"),
            pod("batch", "batch")
        ),
    );
    let found = machine.find(&[]);
    assert_eq!(names(&found), ["default/remote", "default/batch"]);
    assert!(found.workloads[0].pod.protected);
    assert!(!found.workloads[1].pod.protected);
}

#[test]
fn policies_in_the_same_directory_are_skipped() {
    let machine = TestMachine::with_cgroups(&["a"]);
    machine.write("a.yaml", &pod("a", "a"));
    machine.write(
        "policy.yaml",
        "apiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: n}\n",
    );
    let found = machine.find(&[]);
    assert_eq!((names(&found).len(), found.refused), (1, vec![]));
}
