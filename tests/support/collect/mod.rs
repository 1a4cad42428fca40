//! Fixtures for collector tests: real cgroups below a parent of their own, and fake kernel directories.
#![allow(dead_code, reason = "each test file uses only a part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use plimsoll::engine::Demand;
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::sample::{PodSample, Sample};
use plimsoll::node::cgroup::{CgroupPath, Controller, Hierarchy};

/// A parent for this test's cgroups in every tree of the machine, removed recursively on drop.
pub struct CgroupFixture {
    pub hierarchy: Hierarchy,
    pub parent: CgroupPath,
    children: Vec<Child>,
}

static FIXTURES: AtomicU32 = AtomicU32::new(0);

impl CgroupFixture {
    /// `None`, with the reason printed, if cgroups cannot be created.
    pub fn make() -> Option<Self> {
        let hierarchy = match Hierarchy::detect(Path::new("/proc"), None) {
            Ok(hierarchy) => hierarchy,
            Err(error) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        let number = FIXTURES.fetch_add(1, Ordering::Relaxed);
        let name = format!("plimsoll-collect-{}-{number}", std::process::id());
        let fixture = Self {
            hierarchy,
            parent: CgroupPath::new(&name).unwrap(),
            children: Vec::new(),
        };
        for directory in fixture.hierarchy.dirs(&fixture.parent) {
            if let Err(error) = fs::create_dir(&directory) {
                eprintln!("skipped: failed to create {}: {error}", directory.display());
                return None;
            }
            let of_parent = directory.parent().into_iter();
            of_parent
                .chain([&*directory])
                .for_each(|it| fixture.enable_controllers(it));
        }
        Some(fixture)
    }

    /// The cgroup `name` below the parent.
    pub fn path(&self, name: &str) -> CgroupPath {
        self.parent.join(name).unwrap()
    }

    /// Creates the cgroup `name` in every tree.
    pub fn mkdir(&self, name: &str) -> CgroupPath {
        let path = self.path(name);
        for directory in self.hierarchy.dirs(&path) {
            fs::create_dir_all(&directory).unwrap();
            self.enable_controllers(directory.parent().unwrap());
        }
        path
    }

    /// On v2, the children of a cgroup have only the controllers that it enables. A test fails if it needs one that cannot be enabled.
    fn enable_controllers(&self, directory: &Path) {
        if self.hierarchy.is_v2() {
            let _ = fs::write(directory.join("cgroup.subtree_control"), "+cpu +memory");
        }
    }

    /// Removes the cgroup `name` and its descendants from every tree.
    pub fn rmdir(&self, name: &str) {
        for directory in self.hierarchy.dirs(&self.path(name)) {
            remove_tree(&directory);
        }
    }

    pub fn dir(&self, controller: Controller, name: &str) -> PathBuf {
        self.hierarchy.dir(controller, &self.path(name)).unwrap()
    }

    /// Starts `script` in a shell inside the cgroup `name`.
    pub fn spawn(&mut self, name: &str, script: &str) -> u32 {
        let child = Command::new("sh")
            .args(["-c", &format!("read go; {script}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        for directory in self.hierarchy.dirs(&self.path(name)) {
            fs::write(directory.join("cgroup.procs"), pid.to_string()).unwrap();
        }
        let mut stdin = child.stdin.as_ref().unwrap();
        std::io::Write::write_all(&mut stdin, b"\n").unwrap();
        self.children.push(child);
        pid
    }

    /// Kills the processes started by [`Self::spawn`].
    pub fn stop_all(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.children.clear();
    }
}

impl Drop for CgroupFixture {
    fn drop(&mut self) {
        self.stop_all();
        for directory in self.hierarchy.dirs(&self.parent) {
            remove_tree(&directory);
        }
    }
}

/// Removes a cgroup and its descendants; busy ones are retried while their last tasks exit.
fn remove_tree(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    let _ = wait_for(Duration::from_secs(5), || {
        !directory.exists() || fs::remove_dir(directory).is_ok()
    });
}

/// Waits until `condition` is true; false after the deadline.
pub fn wait_for(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    #[allow(clippy::disallowed_methods, reason = "a deadline in a test")]
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > deadline {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    true
}

/// A fake kernel directory: files are written as given.
pub struct Fake(pub tempfile::TempDir);

impl Fake {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, path: &str, text: impl AsRef<[u8]>) -> &Self {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub fn directory(&self, path: &str) -> PathBuf {
        let path = self.root().join(path);
        fs::create_dir_all(&path).unwrap();
        path
    }
}

/// A demand for everything that a sampler can read.
pub fn everything() -> Demand {
    Demand {
        load: true,
        pressure: [true; 3],
        disks: true,
        interfaces: true,
        pod_memory: true,
        pod_quota: true,
        pod_pressure: true,
        pod_io: true,
        tasks: true,
        run_delay: true,
        throttled: true,
        probes: Vec::new(),
    }
}

/// The pod `uid` in the sample.
pub fn pod<'a>(sample: &'a Sample, uid: &str) -> Option<&'a PodSample> {
    sample.pods.iter().find(|pod| *pod.uid.0 == *uid)
}

pub fn uid(name: &str) -> PodUid {
    PodUid::from(name)
}
