//! The thread that finds pods and edits of the policies, so that the tick never waits for files.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::fingerprint::Fingerprint;
use super::inputs::Inputs;
use super::pods::manifests::Manifests;
use super::pods::own::OwnCgroups;
use super::pods::{self, Declared, PodScan, PodSources};
use super::policies::{self, Loaded};
use super::sources::PolicySource;
use super::wake::Waker;
use crate::engine::policy::NodeFacts;
use crate::node::cgroup::Hierarchy;

/// Interval between scans.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// The paths that it scans, and how.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Policy files and directories.
    pub policies: Vec<PathBuf>,
    /// Sources of pods.
    pub pods: PodSources,
    /// The cgroup trees.
    pub hierarchy: Arc<Hierarchy>,
    /// The cgroups of this process.
    pub own: OwnCgroups,
    /// The facts that policies are compiled for.
    pub node: NodeFacts,
    /// Every rule is a Preview.
    pub preview: bool,
}

/// A change that it found.
#[derive(Debug)]
pub enum Update {
    /// The current policies.
    Policies(Loaded),
    /// The current pods.
    Pods(PodScan),
}

/// The result of the last scan.
#[derive(Debug, Default)]
pub struct LastScan {
    policy_files: Fingerprint,
    pod_files: Fingerprint,
    sources: Vec<PolicySource>,
    manifests: Manifests,
    found: PodScan,
}

impl Watched {
    /// The first, full scan. Objects that are broken now stay as an earlier process saved them.
    pub fn scan(&self, former: &Inputs) -> (LastScan, Loaded, PodScan) {
        // Fingerprints first: the next scan finds edits made during this one.
        let policy_files = Fingerprint::take(&self.policies);
        let pod_files = Fingerprint::take(&self.pods.manifests);
        let loaded = self.load(former.policies());
        let manifests = self.read_pods(former.pods());
        let found = self.find(&manifests);
        let snapshot = LastScan {
            policy_files,
            pod_files,
            sources: loaded.sources.clone(),
            manifests,
            found: found.clone(),
        };
        (snapshot, loaded, found)
    }

    fn load(&self, former: &[PolicySource]) -> Loaded {
        policies::load(&self.policies, &self.node, self.preview, former)
    }

    fn read_pods(&self, former: &[Declared]) -> Manifests {
        let mut manifests = Manifests::read(&self.pods.manifests);
        manifests.keep_former(former);
        manifests
    }

    fn find(&self, manifests: &Manifests) -> PodScan {
        pods::find(manifests, &self.pods.parents, &self.hierarchy, &self.own)
    }

    fn changed_policies(&self, snapshot: &mut LastScan) -> Option<Loaded> {
        let files = Fingerprint::take(&self.policies);
        if files == snapshot.policy_files {
            return None;
        }
        snapshot.policy_files = files;
        let loaded = self.load(&snapshot.sources);
        snapshot.sources.clone_from(&loaded.sources);
        Some(loaded)
    }

    /// Always scans cgroups: they come and go without a change of a manifest.
    fn changed_pods(&self, snapshot: &mut LastScan) -> Option<PodScan> {
        let files = Fingerprint::take(&self.pods.manifests);
        if files != snapshot.pod_files {
            snapshot.pod_files = files;
            snapshot.manifests = self.read_pods(&snapshot.found.declared());
        }
        let found = self.find(&snapshot.manifests);
        if found == snapshot.found {
            return None;
        }
        snapshot.found = found.clone();
        Some(found)
    }
}

/// The running thread; stopped on drop.
#[derive(Debug)]
pub struct Discovery {
    updates: Receiver<Update>,
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Discovery {
    /// Starts it after the first scan. It wakes `waker` after an update.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn start(watched: Watched, snapshot: LastScan, waker: Waker) -> io::Result<Self> {
        let (sender, updates) = mpsc::sync_channel(4);
        let (stop, stopped) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("discovery".to_owned())
            .spawn(move || watch(&watched, snapshot, &sender, &stopped, &waker))?;
        Ok(Self {
            updates,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The next update, if there is one.
    pub fn next_update(&self) -> Option<Update> {
        self.updates.try_recv().ok()
    }

    /// Whether the thread still runs.
    pub fn is_alive(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was printed by the panic hook.
            let _panicked = thread.join();
        }
    }
}

fn watch(
    watched: &Watched,
    mut snapshot: LastScan,
    sender: &SyncSender<Update>,
    stopped: &Receiver<()>,
    waker: &Waker,
) {
    let mut pending: Vec<Update> = Vec::new();
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(SCAN_INTERVAL) {
        if let Some(loaded) = watched.changed_policies(&mut snapshot) {
            pending.retain(|update| !matches!(update, Update::Policies(_)));
            pending.push(Update::Policies(loaded));
        }
        if let Some(found) = watched.changed_pods(&mut snapshot) {
            pending.retain(|update| !matches!(update, Update::Pods(_)));
            pending.push(Update::Pods(found));
        }
        if !pending.is_empty() {
            pending = send(pending, sender);
            waker.wake();
        }
    }
}

/// Sends what fits into the channel and returns the rest, which the next scan replaces or sends.
fn send(pending: Vec<Update>, sender: &SyncSender<Update>) -> Vec<Update> {
    let unsent = pending
        .into_iter()
        .filter_map(|update| match sender.try_send(update) {
            Err(TrySendError::Full(update)) => Some(update),
            Ok(()) | Err(TrySendError::Disconnected(_)) => None,
        });
    unsent.collect()
}
