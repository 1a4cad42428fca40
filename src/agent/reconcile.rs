//! The agent's loop: handles watch events, updates the machine, runs its tick, reports what happened.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use futures::future::FutureExt;
use futures::stream::StreamExt;
use kube::Client;
use tokio::sync::watch;
use tokio::time::sleep;

use super::cgroup_locator::CgroupLocator;
use super::emergency_stop::{EmergencyStop, RESTORE_WITHIN};
use super::feed::{AgentWatch, Failure, Feed, WatchChange, WatchedObject, feed};
use super::load_signs::schedule::INTERVAL_ALONE;
use super::load_signs::{LoadSignsTask, WantedCrane, WantedSigns, crane_values};
use super::metrics::AgentMetrics;
use super::node_lock::NodeLock;
use super::objects::{self, SeenNode, SeenWatermark};
use super::pods::NodePods;
use super::regret::Regret;
use super::reporter::{Reporter, StatusTarget, log};
use super::restore::{restore_leftovers, restore_running};
use super::rules::{Rules, RulesProblem, Seen};
use super::saved_state::SavedFiles;
use super::shutdown::{self, Shutdown};
use super::soft_taint::SoftTaint;
use super::start::{PREDECESSOR_TIMEOUT, Start, StartState};
use super::telemetry::Telemetry;
use super::{AgentError, Machine, Options, Stop};
use crate::agent::backend::ApiServer;
use crate::agent::direct_report::{LeaderClient, Links};
use crate::agent::report::node_metric;
use crate::agent::taint::WatchedNode;
use crate::clock;
use crate::crd::node_selector::NodeView;
use crate::engine::load::NodeLoad;
use crate::engine::plan::PlanChange;
use crate::engine::time::BootTime;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::machine::state_dir::WriterProcess;
use crate::node::machine::workload::Workload;
use crate::node::machine::{self, MachineSettings};
use crate::serve::KindLabels;

/// How often starting the machine is retried.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Until then, how often the journal of the last agent is checked for expired deadlines.
const DEADLINE_INTERVAL: Duration = Duration::from_mins(1);

const OFFLINE: &str =
    "no answer from the API server: using the rules and pods saved by the last agent";

/// The agent of a node.
pub struct Agent {
    client: Client,
    options: Options,
    hierarchy: Hierarchy,
    metrics: Arc<AgentMetrics>,
    feed: Feed,
    node: WatchedObject<SeenNode>,
    /// The same for the tasks that reconcile the taint and the load signs.
    taint_watch: watch::Sender<WatchedNode>,
    watermark: WatchedObject<SeenWatermark>,
    rules: Rules,
    stop: EmergencyStop,
    pods: NodePods,
    locator: CgroupLocator,
    /// Why watches fail, until they deliver something again.
    failures: BTreeMap<AgentWatch, Failure>,
    saved: SavedFiles,
    reporter: Reporter,
    /// Builds the `NodeMetric`.
    builder: node_metric::Builder,
    /// Evicts pods for this node.
    leader: LeaderClient,
    /// Has what the leader asks for.
    links: Links,
    signs: LoadSignsTask,
    soft_taint: SoftTaint,
    regret: Regret,
    telemetry: Telemetry,
    lock: Option<NodeLock>,
    machine: Option<Box<Machine>>,
    /// When deadlines are checked next while there is no machine.
    deadline_check_due: BootTime,
    started: BootTime,
    /// When the loop runs next without a watch event.
    due: BootTime,
    /// What the start waits for, as last logged.
    waiting: String,
    /// What is wrong with the rules, as last logged.
    problem: Option<RulesProblem>,
    evaluated: bool,
}

impl Agent {
    /// Starts the watches.
    pub fn new(
        client: Client,
        options: Options,
        hierarchy: Hierarchy,
        metrics: Arc<AgentMetrics>,
        telemetry: Telemetry,
        links: Links,
        now: BootTime,
    ) -> Result<Self, AgentError> {
        let mut saved = SavedFiles::new(&options.state_dir).map_err(AgentError::BootId)?;
        let this = WriterProcess::this_process().map_err(AgentError::BootId)?;
        let reporter = Reporter::start(&client, &options.node, &this.boot_id);
        let builder = node_metric::Builder::new(&options.node, &this.boot_id, now, Rng::new());
        let leader = LeaderClient::new(
            client.clone(),
            &options.node,
            &this.boot_id,
            options.reports.as_ref(),
            links.clone(),
        );
        let taint_watch = watch::Sender::new(WatchedNode::default());
        let zone = options.crane_annotations.clone();
        let signs = LoadSignsTask::start(client.clone(), taint_watch.subscribe(), zone);
        Ok(Self {
            leader,
            links,
            signs,
            soft_taint: SoftTaint::default(),
            regret: Regret::default(),
            feed: feed(&client, &options.node, &options.lease_namespace),
            locator: CgroupLocator::new(hierarchy.clone(), options.kubelet_root.clone()),
            pods: NodePods::new(options.own.clone()),
            stop: EmergencyStop::from_saved(&options.node, saved.stop()),
            client,
            options,
            hierarchy,
            metrics,
            node: WatchedObject::default(),
            taint_watch,
            watermark: WatchedObject::default(),
            rules: saved
                .rules()
                .as_ref()
                .map(Rules::from_saved)
                .unwrap_or_default(),
            failures: BTreeMap::new(),
            saved,
            reporter,
            builder,
            telemetry,
            lock: None,
            machine: None,
            deadline_check_due: now,
            started: now,
            due: now,
            waiting: String::new(),
            problem: None,
            evaluated: false,
        })
    }

    /// Runs until it is stopped; true if everything that had to be restored was.
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
                    self.apply(change);
                    while let Some(Some(change)) = self.feed.next().now_or_never() {
                        self.apply(change);
                    }
                }
                () = sleep(left) => {}
            }
            let now = clock::boot_time();
            self.metrics.loop_ran(now);
            if now >= self.due {
                self.reconcile(now)?;
            }
        }
        let stop = (*stop.borrow()).unwrap_or(Stop::Terminated);
        Box::pin(self.shut_down(stop)).await
    }

    fn apply(&mut self, change: WatchChange) {
        let source = match change {
            WatchChange::Failed(source, failure) => return self.failed(source, failure),
            WatchChange::Node(event) => {
                self.node.apply(event);
                let node = self.node.seen.present();
                self.taint_watch.send_replace(WatchedNode {
                    node: node.map(|node| node.taint_snapshot.clone()),
                    lists: self.node.lists,
                });
                AgentWatch::Node
            }
            WatchChange::Watermark(event) => {
                self.watermark.apply(event);
                AgentWatch::Watermark
            }
            WatchChange::Pods(event) => {
                self.pods.apply(event);
                AgentWatch::Pods
            }
            WatchChange::Stop(event) => {
                self.stop.apply(event);
                AgentWatch::Stop
            }
        };
        if self.failures.remove(&source).is_some() {
            tracing::info!(kind = source.kind(), "watching again");
        }
    }

    fn failed(&mut self, source: AgentWatch, failure: Failure) {
        let kind = source.kind();
        let labels = KindLabels { kind };
        self.metrics.watch_errors.get_or_create(&labels).inc();
        if self.failures.get(&source) != Some(&failure) {
            tracing::warn!(kind, why = failure.why, "failed to watch; trying again");
            self.failures.insert(source, failure);
        }
    }

    /// Applies changes, and ticks when that is due.
    fn reconcile(&mut self, now: BootTime) -> Result<(), AgentError> {
        let uid = self.node.seen.present().map(objects::uid);
        let changed = self.rules.evaluate(self.watermark.seen.as_ref(), uid, now);
        let stop_changed = self.stop.evaluate();
        let stopped = self.stop.reason().is_some();
        self.metrics.stopped.set(i64::from(stopped));
        if stop_changed {
            self.report_stop();
        }
        if self.machine.is_none() {
            self.start(now)?;
        } else if changed || stop_changed {
            self.apply_rules();
        }
        self.saved.poll(now);
        self.report_problem(now);
        let Some(machine) = &mut self.machine else {
            self.enforce_deadlines(now);
            self.due = now + RETRY_INTERVAL;
            return Ok(());
        };
        if self.pods.are_complete()
            && let Some(workloads) = self.pods.refresh(&mut self.locator)
        {
            self.saved.save_pods(&workloads);
            machine.set_pods(workloads);
            machine.set_pending_pods(self.pods.pending());
            let pods = &self.pods;
            machine.backend_mut().set_pods(|uid| pods.has(uid));
            self.reporter.recount(machine);
            self.builder.changed();
        }
        if now >= machine.next_tick() || self.builder.needs_sample(now) {
            self.tick();
        }
        if let Some(machine) = &self.machine {
            let due = machine.next_tick();
            self.due = self.builder.due().map_or(due, |report| due.min(report));
        }
        Ok(())
    }

    fn report_stop(&mut self) {
        let reason = self.stop.reason();
        if let Some(reason) = reason {
            tracing::warn!(reason, "stopped: what is in force is being restored");
        } else {
            tracing::info!("the emergency stop is over: the rules are evaluated again");
        }
        self.reporter.stop(reason, true);
    }

    /// Reports when the rules in force are not those of the API server.
    fn report_problem(&mut self, now: BootTime) {
        let problem = self.rules.problem();
        let target = self.watermark.seen.present().map(target);
        if self.machine.is_none() {
            self.reporter.report_waiting(&self.rules, target, now);
            return;
        }
        if problem == self.problem.as_ref() {
            return;
        }
        self.reporter.mark_changed();
        if let Some(problem) = problem {
            tracing::warn!("the last valid rules stay in force: {problem}");
        } else {
            tracing::info!("the rules of the API server are in force again");
        }
        self.problem = problem.cloned();
    }

    fn start_state(&self) -> StartState {
        let failure = self.failures.iter().next();
        StartState {
            node: match &self.node.seen {
                Seen::Unknown => None,
                Seen::Absent => Some(false),
                Seen::Present(_) => Some(true),
            },
            rules: self.watermark.seen.is_known() && self.rules.policy().is_some(),
            pods: self.pods.are_complete(),
            stop: self.stop.is_known(),
            stop_saved: self.stop.was_saved(),
            stopped: self.stop.reason().is_some(),
            rules_saved: self.rules.policy().is_some(),
            problem: self.rules.problem().map(ToString::to_string),
            failure: failure.map(|(source, failure)| (source.kind(), failure.clone())),
        }
    }

    fn start(&mut self, now: BootTime) -> Result<(), AgentError> {
        match self
            .start_state()
            .start(&self.options.node, self.started, now)
        {
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
            self.pods.mark_changed();
            self.pods.refresh(&mut self.locator).unwrap_or_default()
        } else {
            self.saved.pods(&self.hierarchy)
        };
        let known = workloads.iter().map(|workload| &workload.cgroup);
        let kubepods = match self.locator.resolve(known) {
            Ok(kubepods) => kubepods,
            Err(error) => {
                self.wait(error.to_string());
                return Ok(());
            }
        };
        let opened = self.open(&kubepods, workloads, now);
        match opened {
            Ok(()) => Ok(()),
            Err(error)
                if error.is_another_agent() && now.since(self.started) < PREDECESSOR_TIMEOUT =>
            {
                self.wait(format!("{error}; waiting in case it is shutting down"));
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
            self.lock = Some(NodeLock::acquire(&self.hierarchy, kubepods)?);
        }
        let settings = MachineSettings {
            hierarchy: self.hierarchy.clone(),
            proc_root: self.options.proc_root.clone(),
            sys_root: self.options.sys_root.clone(),
            net_dev: self.options.net_dev.clone(),
            node_address: self.options.node_address,
            state_dir: self.options.state_dir.clone(),
            sample_interval: self.options.sample_interval,
            evaluation_period: self.options.evaluation_period,
            sample_everything: false,
            windows: Arc::clone(&self.options.windows),
        };
        let policy = self
            .stop
            .active_part(self.rules.policy())
            .unwrap_or_default();
        let pods = workloads.clone();
        let (client, node) = (self.client.clone(), &self.options.node);
        let leader = self.leader.clone();
        let period = self.options.evaluation_period;
        let taints = self.taint_watch.subscribe();
        let api = |_: &_| ApiServer::start(client, node, leader, taints, period);
        let mut machine = Machine::open(settings, api, policy, workloads, now)?;
        machine.set_pending_pods(self.pods.pending());
        tracing::info!(
            node = self.options.node,
            kubepods = kubepods.as_str(),
            rules = machine.policy().rules.len(),
            pods = pods.len(),
            adopted = machine.adopted(),
            "node is enforced"
        );
        self.reporter.adopt(&machine);
        self.reporter.stop(self.stop.reason(), false);
        self.machine = Some(Box::new(machine));
        self.saved.save_pods(&pods);
        self.apply_rules();
        Ok(())
    }

    fn wait(&mut self, why: String) {
        self.metrics.ready(Err(&why));
        if self.waiting != why {
            tracing::info!("waiting: {why}");
            self.waiting = why;
        }
    }

    /// However long the start waits, what the last agent left in force is restored at the deadline in its journal.
    fn enforce_deadlines(&mut self, now: BootTime) {
        if now < self.deadline_check_due {
            return;
        }
        self.deadline_check_due = now + DEADLINE_INTERVAL;
        let (state_dir, hierarchy) = (&self.options.state_dir, self.hierarchy.clone());
        match machine::restore_expired(state_dir, hierarchy, now).map_err(AgentError::from) {
            Ok(events) => events.iter().for_each(log),
            // Its owner enforces the deadlines.
            Err(error) if error.is_another_agent() => {}
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Applies the rules to the machine, except those that the emergency stop disables.
    fn apply_rules(&mut self) {
        let policy = self.stop.active_part(self.rules.policy());
        let stopped = self.stop.reason();
        let Some(machine) = &mut self.machine else {
            return;
        };
        self.saved.save_stop(stopped);
        let Some(policy) = policy else { return };
        let hash = self.rules.spec().map(|spec| spec.hash.as_str());
        let hash = Arc::from(hash.unwrap_or_default());
        machine.backend().set_policy(Arc::clone(&policy), hash);
        machine.backend().set_remove_condition(stopped.is_some());
        machine.set_policy(Arc::clone(&policy));
        if stopped.is_some() {
            machine.release_within(RESTORE_WITHIN);
        }
        if self.rules.policy().is_some() {
            self.saved.save_rules(self.rules.spec());
        }
        self.reporter.recount(machine);
        // So that the Lease gets the thresholds of these rules.
        self.builder.changed();
        let names = policy.rules.iter();
        let names = names.map(|rule| (rule.id.clone(), rule.metric.to_string()));
        self.metrics.rules(names.collect::<BTreeMap<_, _>>());
        tracing::info!(
            rules = policy.rules.len(),
            refused = self.rules.refused().len(),
            hash = self.rules.spec().map(|spec| &*spec.hash),
            "rules applied"
        );
        for refusal in self.rules.refused() {
            tracing::warn!("not enforced: {refusal}");
        }
    }

    fn tick(&mut self) {
        let Some(machine) = &mut self.machine else {
            return;
        };
        // Rates are computed over time: it must be that of the reading, not of what was done before.
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
        self.telemetry.loop_ran(node_uid, now);
        if machine.backend().lacks_message() {
            let reports: Vec<_> = machine.reports().collect();
            machine.backend_mut().set_message(reports.into_iter());
        }
        self.evaluated |= machine.plan().evaluated;
        let target = self.watermark.seen.present().map(target);
        self.reporter
            .report_tick(machine, &self.rules, target, &self.pods, &self.metrics, now);
        let load = self.signal_load(now);
        self.report(reports, load);
        self.update_readiness();
        let took = clock::boot_time().since(now);
        self.metrics.tick.observe(took.as_secs_f64());
    }

    /// Passes the node's load on to schedulers, and returns it. An emergency stop removes what they see.
    fn signal_load(&mut self, now: BootTime) -> Option<NodeLoad> {
        let machine = self.machine.as_ref()?;
        let load = machine.load().ok();
        let percent = load.as_ref().map(|load| load.percent);
        let stopped = self.stop.reason().is_some();
        let asks = self.links.requests();
        let crane = if stopped || self.options.crane_annotations.is_none() {
            WantedCrane::Removed
        } else {
            WantedCrane::Values(crane_values(machine.windows(), load.as_ref()))
        };
        self.signs.want(WantedSigns {
            load: percent,
            remove: stopped || !self.options.load_label,
            crane,
            interval: asks
                .and_then(|it| it.label_interval)
                .unwrap_or(INTERVAL_ALONE),
        });
        let permitted = if self.options.soft_taint && !stopped {
            asks.map(|it| it.may_be_busy)
        } else {
            Some(false)
        };
        let busy = self.soft_taint.update(now, percent, permitted);
        machine.backend().set_busy(busy);
        self.builder.observe_load(percent);
        let regret = self.regret.update(now, percent, self.pods.bound());
        if let Some(regret) = regret {
            self.metrics.regret.observe(regret);
        }
        load
    }

    /// Builds a report if one was due; else checks whether the next tick needs one.
    fn report(&mut self, due: bool, load: Option<NodeLoad>) {
        let Some(machine) = &self.machine else { return };
        if !due {
            let mut changes = machine.plan().transitions.iter().map(|it| &it.change);
            if changes.any(|change| matches!(change, PlanChange::State { .. })) {
                self.builder.changed();
            }
            self.builder.observe(machine.sample());
            return;
        }
        let changed = self.builder.due().is_none();
        let (metric, json) = self.builder.build(&node_metric::MetricView {
            time: clock::wall_time(),
            sample: machine.sample(),
            windows: machine.windows(),
            load,
            pods: machine.pods(),
            protected: machine.protected_pods().collect(),
            reports: &machine.reports().collect::<Vec<_>>(),
        });
        let (metric, usage) = (Arc::new(metric), self.builder.reported_usage());
        self.telemetry.measured(machine, usage, &metric, changed);
        self.metrics.reported(metric, json);
    }

    /// The agent is ready once the rules were evaluated, or if it has none.
    fn update_readiness(&self) {
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
                .ready(Err("the rules have not been evaluated yet")),
        }
    }

    async fn shut_down(mut self, stop: Stop) -> Result<bool, AgentError> {
        let shutdown = match stop {
            Stop::Interrupted => Shutdown::Restore("interrupted".to_owned()),
            Stop::Terminated => self.shutdown_decision().await,
        };
        let now = clock::boot_time();
        match shutdown {
            Shutdown::Restore(why) => {
                tracing::info!(why, "restoring everything");
                self.restore(&why, now).await
            }
            Shutdown::Leave(why) => {
                if let Some(machine) = &mut self.machine {
                    machine.save_for_restart(now).iter().for_each(log);
                    self.saved.finish();
                    let throttled = machine.throttled_pods();
                    tracing::info!(why, throttled, "what is in force stays in force");
                }
                Ok(true)
            }
        }
    }

    async fn shutdown_decision(&self) -> Shutdown {
        let Some(own) = &self.options.own else {
            return shutdown::without_owner(None);
        };
        let Some(owner) = self.pods.own_daemon_set() else {
            return shutdown::without_owner(self.failures.get(&AgentWatch::Pods));
        };
        let node = NodeView {
            name: &self.options.node,
            labels: self.node.seen.present().map(|node| &node.labels),
        };
        shutdown::decide(&self.client, &own.namespace, owner, node).await
    }

    async fn restore(self, why: &str, now: BootTime) -> Result<bool, AgentError> {
        let (client, node) = (&self.client, &*self.options.node);
        // It must not write the label again.
        drop(self.signs);
        let restored = match self.machine {
            Some(machine) => restore_running(machine, self.reporter, client, node, why, now).await,
            None => {
                restore_leftovers(&self.options, self.hierarchy, Some(client), why, now).await?
            }
        };
        // If something is left, the controller must report a missing agent: the Lease stays.
        if restored {
            self.telemetry.release().await;
        }
        Ok(restored)
    }
}

fn target(watermark: &SeenWatermark) -> StatusTarget<'_> {
    StatusTarget {
        uid: objects::uid(watermark),
        generation: watermark.generation,
        reported: watermark.reported,
    }
}
