//! The loop: hears what the API server tells, brings the machine up to date, lets it tick, tells what happened.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use futures::future::FutureExt;
use futures::stream::StreamExt;
use kube::Client;
use tokio::sync::watch;
use tokio::time::sleep;

use super::emergency_stop::{EmergencyStop, RELEASE};
use super::ending::{self, Ending, NodeView};
use super::feed::{Change, Failure, Feed, Named, Source, feed};
use super::memory::Memory;
use super::metrics::{KindLabels, Metrics};
use super::node_lock::NodeLock;
use super::objects::{self, SeenNode, SeenWatermark};
use super::place::Place;
use super::pods::Pods;
use super::report::{Reporter, Target, log};
use super::rules::{Rules, Seen, Trouble};
use super::start::{Known, PREDECESSOR, Start};
use super::undo::{undo, undo_left};
use super::vitals::Vitals;
use super::{AgentError, Machine, Options, Stop};
use crate::engine::plan::Change as PlanChange;
use crate::engine::time::BootTime;
use crate::node::actuate::api::ApiServer;
use crate::node::actuate::taint::Watched;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::clock;
use crate::node::direct_report::{Leader, Links};
use crate::node::machine::state_dir::Writer;
use crate::node::machine::workload::Workload;
use crate::node::machine::{self, Settings};
use crate::node::report::node_metric;
use crate::ordered;

/// While there is no machine yet, what it needs is looked for this often.
const RETRY: Duration = Duration::from_millis(500);
/// Meanwhile it is looked this often whether the time of something has come that the last agent left in force.
const DEADLINES: Duration = Duration::from_mins(1);

const OFFLINE: &str =
    "the API server does not tell: going by the rules and pods that the last agent kept";

/// The agent of a node.
pub struct Agent {
    client: Client,
    options: Options,
    hierarchy: Hierarchy,
    metrics: Arc<Metrics>,
    feed: Feed,
    node: Named<SeenNode>,
    /// The same for the task that keeps the taint.
    marked: watch::Sender<Watched>,
    watermark: Named<SeenWatermark>,
    rules: Rules,
    stop: EmergencyStop,
    pods: Pods,
    place: Place,
    /// Why watches fail, until they tell something again.
    failures: BTreeMap<Source, Failure>,
    memory: Memory,
    reporter: Reporter,
    /// Of the `NodeMetric`.
    builder: node_metric::Builder,
    /// Evicts pods for this node.
    leader: Leader,
    vitals: Vitals,
    lock: Option<NodeLock>,
    machine: Option<Box<Machine>>,
    /// When deadlines are looked at next, while there is no machine.
    deadlines_due: BootTime,
    begun: BootTime,
    /// When there is something to do without being told anything.
    due: BootTime,
    /// What is waited for, as it was last told.
    waiting: String,
    /// What is wrong with the rules, as it was last told.
    trouble: Option<Trouble>,
    evaluated: bool,
}

impl Agent {
    /// Begins to watch.
    pub fn new(
        client: Client,
        options: Options,
        hierarchy: Hierarchy,
        metrics: Arc<Metrics>,
        vitals: Vitals,
        links: Links,
        now: BootTime,
    ) -> Result<Self, AgentError> {
        let mut memory = Memory::new(&options.state_dir).map_err(AgentError::BootId)?;
        let this = Writer::this_process().map_err(AgentError::BootId)?;
        let reporter = Reporter::start(&client, &options.node, &this.boot_id);
        let builder = node_metric::Builder::new(&options.node, &this.boot_id, now, Rng::new());
        let leader = Leader::new(
            client.clone(),
            &options.node,
            &this.boot_id,
            options.reports.as_ref(),
            links,
        );
        Ok(Self {
            leader,
            feed: feed(&client, &options.node, &options.lease_namespace),
            place: Place::new(hierarchy.clone(), options.kubelet_root.clone()),
            pods: Pods::new(options.own.clone()),
            client,
            options,
            hierarchy,
            metrics,
            node: Named::default(),
            marked: watch::Sender::new(Watched::default()),
            watermark: Named::default(),
            rules: memory.rules().as_ref().map(Rules::kept).unwrap_or_default(),
            stop: EmergencyStop::kept(memory.stop()),
            failures: BTreeMap::new(),
            memory,
            reporter,
            builder,
            vitals,
            lock: None,
            machine: None,
            deadlines_due: now,
            begun: now,
            due: now,
            waiting: String::new(),
            trouble: None,
            evaluated: false,
        })
    }

    /// Runs until it is stopped; true where everything that had to be undone was.
    pub async fn run(
        mut self,
        mut stop: watch::Receiver<Option<Stop>>,
    ) -> Result<bool, AgentError> {
        loop {
            let left = self.due.since(clock::boot_time());
            tokio::select! {
                biased;
                _ = stop.wait_for(Option::is_some) => break,
                Some(change) = self.feed.next() => {
                    self.take(change);
                    while let Some(Some(change)) = self.feed.next().now_or_never() {
                        self.take(change);
                    }
                }
                () = sleep(left) => {}
            }
            let now = clock::boot_time();
            self.metrics.beat(now);
            if now >= self.due {
                self.turn(now)?;
            }
        }
        let stop = (*stop.borrow()).unwrap_or(Stop::Terminated);
        Box::pin(self.end(stop)).await
    }

    fn take(&mut self, change: Change) {
        let source = match change {
            Change::Failed(source, failure) => return self.failed(source, failure),
            Change::Node(event) => {
                self.node.take(event);
                let node = self.node.seen.present();
                self.marked.send_replace(Watched {
                    node: node.map(|node| node.marked.clone()),
                    lists: self.node.lists,
                });
                Source::Node
            }
            Change::Watermark(event) => {
                self.watermark.take(event);
                Source::Watermark
            }
            Change::Pods(event) => {
                self.pods.take(event);
                Source::Pods
            }
            Change::Stop(event) => {
                self.stop.take(event);
                Source::Stop
            }
        };
        if self.failures.remove(&source).is_some() {
            tracing::info!(kind = source.kind(), "watching again");
        }
    }

    fn failed(&mut self, source: Source, failure: Failure) {
        let kind = source.kind();
        let labels = KindLabels { kind };
        self.metrics.watch_errors.get_or_create(&labels).inc();
        if self.failures.get(&source) != Some(&failure) {
            tracing::warn!(kind, why = failure.why, "failed to watch; trying again");
            self.failures.insert(source, failure);
        }
    }

    /// Does what is due.
    fn turn(&mut self, now: BootTime) -> Result<(), AgentError> {
        let uid = self
            .node
            .seen
            .present()
            .map(|node| objects::uid(node).to_owned());
        let changed = self
            .rules
            .judge(self.watermark.seen.as_ref(), uid.as_deref(), now);
        let stop_changed = self.stop.judge();
        let stopped = self.stop.reason().is_some();
        self.metrics.stopped.set(i64::from(stopped));
        if stop_changed {
            self.tell_stop();
        }
        if self.machine.is_none() {
            self.start(now)?;
        } else if changed || stop_changed {
            self.give_rules();
        }
        self.memory.retry(now);
        self.tell_trouble(now);
        let Some(machine) = &mut self.machine else {
            self.keep_deadlines(now);
            self.due = now + RETRY;
            return Ok(());
        };
        if self.pods.are_complete()
            && let Some(workloads) = self.pods.refresh(&mut self.place)
        {
            self.memory.keep_pods(&workloads);
            machine.set_pods(workloads);
            let pods = &self.pods;
            machine.outside_mut().set_pods(|uid| pods.has(uid));
            self.reporter.recount(machine);
            self.builder.changed();
        }
        if now >= machine.next_tick() || self.builder.calls_for_sample(now) {
            self.tick();
        }
        if let Some(machine) = &self.machine {
            let due = machine.next_tick();
            self.due = self.builder.due().map_or(due, |report| due.min(report));
        }
        Ok(())
    }

    fn tell_stop(&mut self) {
        let reason = self.stop.reason();
        if let Some(reason) = reason {
            tracing::warn!(
                reason,
                "everything is stopped: what is in force is given back"
            );
        } else {
            tracing::info!("the emergency stop is over: the rules are judged anew");
        }
        self.reporter.stop(reason, true);
    }

    /// Says where what is kept is not what the API server has.
    fn tell_trouble(&mut self, now: BootTime) {
        let trouble = self.rules.trouble();
        let target = self.watermark.seen.present().map(target);
        if self.machine.is_none() {
            self.reporter.tell_waiting(&self.rules, target, now);
            return;
        }
        if trouble == self.trouble.as_ref() {
            return;
        }
        self.reporter.again();
        if let Some(trouble) = trouble {
            tracing::warn!("the last rules are held: {trouble}");
        } else {
            tracing::info!("the rules of the API server are kept again");
        }
        self.trouble = trouble.cloned();
    }

    fn known(&self) -> Known {
        let failure = self.failures.iter().next();
        Known {
            node: match &self.node.seen {
                Seen::Unknown => None,
                Seen::Absent => Some(false),
                Seen::Present(_) => Some(true),
            },
            rules: self.watermark.seen.is_known() && self.rules.policy().is_some(),
            pods: self.pods.are_complete(),
            stop: self.stop.is_known(),
            stop_kept: self.stop.was_kept(),
            stopped: self.stop.reason().is_some(),
            kept: self.rules.policy().is_some(),
            trouble: self.rules.trouble().map(ToString::to_string),
            failure: failure.map(|(source, failure)| (source.kind(), failure.clone())),
        }
    }

    fn start(&mut self, now: BootTime) -> Result<(), AgentError> {
        match self.known().start(&self.options.node, self.begun, now) {
            Start::Wait(why) => {
                self.wait(why);
                return Ok(());
            }
            Start::Offline if self.waiting != OFFLINE => {
                OFFLINE.clone_into(&mut self.waiting);
                tracing::warn!("{OFFLINE}");
            }
            Start::Offline | Start::Now => {}
        }
        let workloads = if self.pods.are_complete() {
            self.pods.again();
            self.pods.refresh(&mut self.place).unwrap_or_default()
        } else {
            self.memory.pods(&self.hierarchy)
        };
        let known = workloads.iter().map(|workload| &workload.cgroup);
        let kubepods = match self.place.settle(known) {
            Ok(kubepods) => kubepods,
            Err(error) => {
                self.wait(error.to_string());
                return Ok(());
            }
        };
        let opened = self.open(&kubepods, workloads, now);
        match opened {
            Ok(()) => Ok(()),
            Err(error) if error.is_busy() && now.since(self.begun) < PREDECESSOR => {
                self.wait(format!("{error}; it may be ending: it is waited for"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn open(
        &mut self,
        kubepods: &CgroupPath,
        workloads: Vec<Workload>,
        now: BootTime,
    ) -> Result<(), AgentError> {
        if self.lock.is_none() {
            self.lock = Some(NodeLock::take(&self.hierarchy, kubepods)?);
        }
        let settings = Settings {
            hierarchy: self.hierarchy.clone(),
            proc_root: self.options.proc_root.clone(),
            net_dev: self.options.net_dev.clone(),
            node_address: self.options.node_address,
            state_dir: self.options.state_dir.clone(),
            sample_interval: self.options.sample_interval,
            sample_everything: false,
        };
        let policy = self.stop.leaves(self.rules.policy()).unwrap_or_default();
        let pods = workloads.clone();
        let (client, node) = (self.client.clone(), &self.options.node);
        let leader = self.leader.clone();
        let api = |_: &_| ApiServer::start(client, node, leader, self.marked.subscribe());
        let machine = Machine::open(settings, api, policy, workloads, now)?;
        tracing::info!(
            node = self.options.node,
            kubepods = kubepods.as_str(),
            rules = machine.policy().rules.len(),
            pods = pods.len(),
            adopted = machine.adopted(),
            "keeping the node"
        );
        self.reporter.adopt(&machine);
        self.reporter.stop(self.stop.reason(), false);
        self.machine = Some(Box::new(machine));
        self.memory.keep_pods(&pods);
        self.give_rules();
        Ok(())
    }

    fn wait(&mut self, why: String) {
        self.metrics.ready(Err(&why));
        if self.waiting != why {
            tracing::info!("waiting: {why}");
            self.waiting = why;
        }
    }

    /// However long the wait: what the last agent left in force stays no longer than its journal says.
    fn keep_deadlines(&mut self, now: BootTime) {
        if now < self.deadlines_due {
            return;
        }
        self.deadlines_due = now + DEADLINES;
        let (state_dir, hierarchy) = (&self.options.state_dir, self.hierarchy.clone());
        match machine::restore_expired(state_dir, hierarchy, now).map_err(AgentError::from) {
            Ok(events) => events.iter().for_each(log),
            // That one keeps them.
            Err(error) if error.is_busy() => {}
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Hands the machine the rules, as far as the emergency stop leaves any.
    fn give_rules(&mut self) {
        let policy = self.stop.leaves(self.rules.policy());
        let stopped = self.stop.reason();
        let Some(machine) = &mut self.machine else {
            return;
        };
        self.memory.keep_stop(stopped);
        let Some(policy) = policy else { return };
        let hash = self.rules.spec().map(|spec| spec.hash.as_str());
        let hash = Arc::from(hash.unwrap_or_default());
        machine.outside().set_policy(Arc::clone(&policy), hash);
        machine.outside().leave_no_trace(stopped.is_some());
        machine.set_policy(Arc::clone(&policy));
        if stopped.is_some() {
            machine.release_within(RELEASE);
        }
        if self.rules.policy().is_some() {
            self.memory.keep_rules(self.rules.spec());
        }
        self.reporter.recount(machine);
        // So that the Lease soon has the marks of these rules.
        self.builder.changed();
        let names = policy.rules.iter();
        let names = names.map(|rule| (rule.id.clone(), rule.metric.to_string()));
        self.metrics.rules(ordered::map(names));
        tracing::info!(
            rules = policy.rules.len(),
            refused = self.rules.refused().len(),
            hash = self.rules.spec().map(|spec| &*spec.hash),
            "rules taken"
        );
        for refusal in self.rules.refused() {
            tracing::warn!("not kept: {refusal}");
        }
    }

    fn tick(&mut self) {
        let Some(machine) = &mut self.machine else {
            return;
        };
        // What a sample counts is divided by time: that of the reading, not of what was done before.
        let now = clock::boot_time();
        let reports = self.builder.is_due(now);
        if reports {
            machine.sample_for_report();
        }
        let events = machine.tick(now);
        for event in events.iter().filter(|event| !event.is_detail()) {
            log(event);
        }
        self.metrics.sampled(now);
        let node_uid = self.node.seen.present().map(objects::uid);
        self.vitals.turned(node_uid, now);
        if machine.outside().is_unexplained() {
            let reports: Vec<_> = machine.reports().collect();
            machine.outside_mut().explain(reports.into_iter());
        }
        self.evaluated |= machine.plan().evaluated;
        let target = self.watermark.seen.present().map(target);
        self.reporter
            .tell(machine, &self.rules, target, &self.metrics, now);
        self.report(reports);
        self.tell_ready();
        let took = clock::boot_time().since(now);
        self.metrics.tick.observe(took.as_secs_f64());
    }

    /// Measures the node anew where that was due; else looks whether it should be at the next tick.
    fn report(&mut self, due: bool) {
        let Some(machine) = &self.machine else { return };
        if !due {
            let mut changes = machine.plan().transitions.iter().map(|it| &it.change);
            if changes.any(|change| matches!(change, PlanChange::State { .. })) {
                self.builder.changed();
            }
            self.builder.see(machine.sample());
            return;
        }
        let changed = self.builder.due().is_none();
        let (metric, json) = self.builder.build(&node_metric::View {
            time: clock::wall_time(),
            sample: machine.sample(),
            windows: machine.windows(),
            pods: machine.pods(),
            protected: machine.protected_pods().collect(),
            reports: &machine.reports().collect::<Vec<_>>(),
        });
        let (metric, told) = (Arc::new(metric), self.builder.told());
        self.vitals.measured(machine, told, &metric, changed);
        self.metrics.reported(metric, json);
    }

    /// Ready is who has judged the rules once, or knows that there are none.
    fn tell_ready(&self) {
        let refusal = self.failures.values().find(|failure| failure.is_refusal());
        let none = self
            .rules
            .policy()
            .is_some_and(|policy| policy.rules.is_empty());
        match refusal {
            Some(failure) => self.metrics.ready(Err(&failure.why)),
            None if self.evaluated || none => self.metrics.ready(Ok(())),
            None => self
                .metrics
                .ready(Err("the rules have not been judged yet")),
        }
    }

    async fn end(mut self, stop: Stop) -> Result<bool, AgentError> {
        let ending = match stop {
            Stop::Interrupted => Ending::Restore("interrupted".to_owned()),
            Stop::Terminated => self.ask().await,
        };
        let now = clock::boot_time();
        match ending {
            Ending::Restore(why) => {
                tracing::info!(why, "undoing everything");
                self.restore(&why, now).await
            }
            Ending::Leave(why) => {
                if let Some(machine) = &mut self.machine {
                    machine.leave(now).iter().for_each(log);
                    let throttled = machine.throttled_pods();
                    tracing::info!(why, throttled, "what is in force stays in force");
                }
                Ok(true)
            }
        }
    }

    async fn ask(&self) -> Ending {
        let Some(own) = &self.options.own else {
            return ending::unowned(None);
        };
        let Some(owner) = self.pods.own_daemon_set() else {
            return ending::unowned(self.failures.get(&Source::Pods));
        };
        let node = NodeView {
            name: &self.options.node,
            labels: self.node.seen.present().map(|node| &node.labels),
        };
        ending::ask(&self.client, &own.namespace, owner, node).await
    }

    async fn restore(self, why: &str, now: BootTime) -> Result<bool, AgentError> {
        let (client, node) = (&self.client, &*self.options.node);
        let undone = match self.machine {
            Some(machine) => undo(machine, self.reporter, client, node, why, now).await,
            None => undo_left(&self.options, self.hierarchy, Some(client), why, now).await?,
        };
        // Where something is left, somebody should wonder where the agent is.
        if undone {
            self.vitals.release().await;
        }
        Ok(undone)
    }
}

fn target(watermark: &SeenWatermark) -> Target<'_> {
    Target {
        uid: objects::uid(watermark),
        generation: watermark.generation,
        reported: watermark.reported,
    }
}
