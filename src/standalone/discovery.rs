//! The thread that looks for pods and for edits of the policies, so that the tick never waits for a file.

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
use super::pods::{self, Declared, Found, Sources};
use super::policies::{self, Loaded, Overrides};
use super::sources::Source;
use super::wake::Bell;
use crate::engine::policy::NodeFacts;
use crate::node::cgroup::Hierarchy;

/// How often it looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// What it looks at.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Where policies are.
    pub policies: Vec<PathBuf>,
    /// Where pods are.
    pub pods: Sources,
    /// The cgroup trees.
    pub hierarchy: Arc<Hierarchy>,
    /// Our own cgroups.
    pub own: OwnCgroups,
    /// What policies are compiled for.
    pub node: NodeFacts,
    /// What the command line says over them.
    pub overrides: Overrides,
}

/// What it found changed.
#[derive(Debug)]
pub enum News {
    /// The policy files, as they are now.
    Policies(Loaded),
    /// The pods, as they are now.
    Pods(Found),
}

/// What was there at the last look.
#[derive(Debug, Default)]
pub struct Seen {
    policy_files: Fingerprint,
    pod_files: Fingerprint,
    sources: Vec<Source>,
    manifests: Manifests,
    found: Found,
}

impl Watched {
    /// The first look: everything, at once. What has turned broken since goes on as an earlier process had it.
    pub fn look(&self, former: &Inputs) -> (Seen, Loaded, Found) {
        // Stamps first: an edit during the load is seen at the next look.
        let policy_files = Fingerprint::take(&self.policies);
        let pod_files = Fingerprint::take(&self.pods.manifests);
        let loaded = self.load(former.policies());
        let manifests = self.read_pods(former.pods());
        let found = self.find(&manifests);
        let seen = Seen {
            policy_files,
            pod_files,
            sources: loaded.sources.clone(),
            manifests,
            found: found.clone(),
        };
        (seen, loaded, found)
    }

    fn load(&self, former: &[Source]) -> Loaded {
        policies::load(&self.policies, &self.node, self.overrides, former)
    }

    fn read_pods(&self, former: &[Declared]) -> Manifests {
        let mut manifests = Manifests::read(&self.pods.manifests);
        manifests.hold(former);
        manifests
    }

    fn find(&self, manifests: &Manifests) -> Found {
        pods::find(manifests, &self.pods.parents, &self.hierarchy, &self.own)
    }

    fn changed_policies(&self, seen: &mut Seen) -> Option<Loaded> {
        let files = Fingerprint::take(&self.policies);
        if files == seen.policy_files {
            return None;
        }
        seen.policy_files = files;
        let loaded = self.load(&seen.sources);
        seen.sources.clone_from(&loaded.sources);
        Some(loaded)
    }

    /// Cgroups come and go without any manifest being touched, so these are always looked for.
    fn changed_pods(&self, seen: &mut Seen) -> Option<Found> {
        let files = Fingerprint::take(&self.pods.manifests);
        if files != seen.pod_files {
            seen.pod_files = files;
            seen.manifests = self.read_pods(&seen.found.declared());
        }
        let found = self.find(&seen.manifests);
        if found == seen.found {
            return None;
        }
        seen.found = found.clone();
        Some(found)
    }
}

/// The running thread. Dropping it ends it.
#[derive(Debug)]
pub struct Discovery {
    news: Receiver<News>,
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Discovery {
    /// Starts it, from what was seen at the first look. It rings `bell` where it has news.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn start(watched: Watched, seen: Seen, bell: Bell) -> io::Result<Self> {
        let (sender, news) = mpsc::sync_channel(4);
        let (stop, stopped) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("discovery".to_owned())
            .spawn(move || watch(&watched, seen, &sender, &stopped, &bell))?;
        Ok(Self {
            news,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The next piece of news, without waiting.
    pub fn news(&self) -> Option<News> {
        self.news.try_recv().ok()
    }

    /// The thread still runs.
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
            // It can only have panicked, which the panic hook has told.
            let _ended = thread.join();
        }
    }
}

fn watch(
    watched: &Watched,
    mut seen: Seen,
    sender: &SyncSender<News>,
    stopped: &Receiver<()>,
    bell: &Bell,
) {
    let mut pending: Vec<News> = Vec::new();
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(INTERVAL) {
        if let Some(loaded) = watched.changed_policies(&mut seen) {
            pending.retain(|news| !matches!(news, News::Policies(_)));
            pending.push(News::Policies(loaded));
        }
        if let Some(found) = watched.changed_pods(&mut seen) {
            pending.retain(|news| !matches!(news, News::Pods(_)));
            pending.push(News::Pods(found));
        }
        if !pending.is_empty() {
            pending = send(pending, sender);
            bell.ring();
        }
    }
}

/// Sends what there is room for; the rest waits for the next look, where newer news takes its place.
fn send(pending: Vec<News>, sender: &SyncSender<News>) -> Vec<News> {
    let unsent = pending
        .into_iter()
        .filter_map(|news| match sender.try_send(news) {
            Err(TrySendError::Full(news)) => Some(news),
            Ok(()) | Err(TrySendError::Disconnected(_)) => None,
        });
    unsent.collect()
}
