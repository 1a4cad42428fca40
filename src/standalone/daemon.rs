//! The main loop of `plimsoll run`.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::discovery::{Discovery, Update};
use super::host::Machine;
use super::inputs::Inputs;
use super::notify::Notifier;
use super::output::EventOutput;
use super::pods::PodScan;
use super::policies::Loaded;
use super::status::MachineStatus;
use super::wake::Wake;
use crate::clock;
use crate::engine::time::BootTime;
use crate::messages::count;
use crate::messages::event::{Event, NoticeKind, PodRefusal, PolicyProblem};
use crate::node::machine::state_dir;
use crate::trace::record::TraceRecorder;

/// Interval between writes of the status file while something is in force, beside one at every change.
const ACTIVE_STATUS_INTERVAL: Duration = Duration::from_secs(5);
/// The same while nothing is in force.
const IDLE_STATUS_INTERVAL: Duration = Duration::from_secs(30);

/// How long the end waits for policies that are still being written.
const SAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The signals that the loop handles.
pub const SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// The main loop and its state.
#[derive(Debug)]
pub struct Daemon<W> {
    /// The machine that it runs.
    pub machine: Machine,
    /// Timer, signals and wake-ups by the discovery thread.
    pub wake: Wake,
    /// The thread that finds pods and edits.
    pub discovery: Discovery,
    /// Where events go.
    pub output: EventOutput<W>,
    /// Where the trace goes.
    pub recorder: Option<TraceRecorder>,
    /// The service manager.
    pub notifier: Notifier,
    /// When it stops by itself.
    pub end: Option<BootTime>,
    /// The path of the status file.
    pub status_file: PathBuf,
    /// Policies and pods, saved for the next start.
    pub inputs: Inputs,
    /// Problems of the policies.
    pub problems: Vec<PolicyProblem>,
    /// Problems because of which the last good version of an object stays in force.
    pub fallbacks: Vec<PolicyProblem>,
    /// Pods that cannot be managed.
    pub refused: Vec<PodRefusal>,
    /// When the status file was last written.
    pub status_written: Option<BootTime>,
}

/// Why the loop stopped, and what happens to what is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The user stopped it, or the given time is over: restore everything.
    Restore(&'static str),
    /// The service manager stopped it: everything stays in force.
    Leave(&'static str),
}

/// The loop failed. Everything stays in force, as the journal records.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Waiting failed.
    #[error("failed to wait for the next sample: {0}")]
    Wait(#[source] io::Error),
    /// The discovery thread died.
    #[error("the thread that finds pods and edits has died: what is in force stays in force")]
    Discovery,
}

impl<W: Write> Daemon<W> {
    /// Runs until a signal or the given time stops it; true if everything that had to be restored was.
    ///
    /// # Errors
    /// Where the loop cannot continue.
    pub fn run(mut self) -> Result<bool, DaemonError> {
        self.first_tick();
        let stop = loop {
            let signal = self.wake.wait_until(self.deadline());
            if let Some(stop) = signal.map_err(DaemonError::Wait)?.and_then(stop_for) {
                break stop;
            }
            let now = clock::boot_time();
            if self.end.is_some_and(|end| now >= end) {
                break Stop::Restore("the time given with --for is over");
            }
            self.apply_updates(now);
            if now >= self.machine.next_tick() && self.tick().is_err() {
                break Stop::Restore("the output was closed");
            }
            self.notifier.alive(now);
            if !self.discovery.is_alive() {
                return Err(DaemonError::Discovery);
            }
        };
        self.finish(stop);
        let left = self.machine.changed_pods();
        Ok(left == 0 || matches!(stop, Stop::Leave(_)))
    }

    fn deadline(&self) -> BootTime {
        [self.end, self.notifier.next()]
            .into_iter()
            .flatten()
            .fold(self.machine.next_tick(), BootTime::min)
    }

    fn first_tick(&mut self) {
        let now = clock::boot_time();
        self.record_pods();
        let mut events: Vec<Event> = self
            .problems
            .iter()
            .filter(|problem| !self.fallbacks.contains(problem))
            .map(|problem| Event::notice(now, NoticeKind::PolicyProblem(problem.clone())))
            .collect();
        if !self.fallbacks.is_empty() {
            let findings = std::mem::take(&mut self.fallbacks);
            events.push(Event::notice(
                now,
                NoticeKind::PoliciesRejected { findings },
            ));
        }
        let refused = self.refused.clone();
        events.extend(
            refused
                .into_iter()
                .map(|refusal| refused_event(now, refusal)),
        );
        // A closed output is noticed at the first regular tick.
        let _closed = self.print(&events, now);
        let _closed = self.tick();
        let started = NoticeKind::Started {
            rules: self.machine.policy().rules.len(),
            pods: self.machine.pods().len(),
            adopted: self.machine.adopted(),
        };
        let _closed = self.print(&[Event::notice(now, started)], now);
        self.notifier.ready();
        self.notifier.alive(now);
        self.write_status(now);
    }

    fn tick(&mut self) -> io::Result<()> {
        // Rates are divided by the time between readings, so the clock is read right before.
        let now = clock::boot_time();
        let events = self.machine.tick(now);
        let unchanged = events.is_empty();
        let printed = self.output.write(events, now, clock::wall_time());
        self.record(now);
        let acting = self.machine.is_acting();
        let interval = if acting {
            ACTIVE_STATUS_INTERVAL
        } else {
            IDLE_STATUS_INTERVAL
        };
        let stale = self
            .status_written
            .is_some_and(|written| now.since(written) >= interval);
        if !unchanged || stale {
            self.write_status(now);
        } else if self.inputs.is_writing() {
            self.save_inputs(now);
        }
        printed
    }

    fn print(&mut self, events: &[Event], now: BootTime) -> io::Result<()> {
        self.output.write(events, now, clock::wall_time())
    }

    fn record(&mut self, now: BootTime) {
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        let plan = self.machine.plan();
        let transitions = if plan.evaluated {
            plan.transitions.as_slice()
        } else {
            &[]
        };
        if let Err(error) = recorder.tick(now, self.machine.sample(), transitions.iter()) {
            tracing::error!(%error, "recording stopped");
            self.recorder = None;
        }
    }

    fn record_pods(&mut self) {
        let pods = self.machine.pods().values();
        let pods: Vec<_> = pods.map(|known| Arc::clone(&known.pod)).collect();
        if let Some(recorder) = &mut self.recorder
            && let Err(error) = recorder.pods(&pods)
        {
            tracing::error!(%error, "recording stopped");
            self.recorder = None;
        }
    }

    fn apply_updates(&mut self, now: BootTime) {
        while let Some(update) = self.discovery.next_update() {
            let events = match update {
                Update::Policies(loaded) => self.apply_policies(loaded, now),
                Update::Pods(found) => self.apply_pods(found, now),
            };
            // A closed output is noticed at the tick.
            let _closed = self.print(&events, now);
            self.write_status(now);
        }
    }

    fn apply_policies(&mut self, loaded: Loaded, now: BootTime) -> Vec<Event> {
        let findings = loaded.new_errors(&self.problems);
        if !findings.is_empty() {
            return vec![Event::notice(
                now,
                NoticeKind::PoliciesRejected { findings },
            )];
        }
        let rules = loaded.policy.rules.len();
        self.inputs.set_policies(loaded.sources);
        self.machine.set_policy(Arc::new(loaded.policy));
        let former: BTreeSet<_> = std::mem::replace(&mut self.problems, loaded.problems)
            .into_iter()
            .collect();
        let new = self
            .problems
            .iter()
            .filter(|problem| !former.contains(problem));
        let problems = new.map(|problem| NoticeKind::PolicyProblem(problem.clone()));
        std::iter::once(NoticeKind::PoliciesApplied { rules })
            .chain(problems)
            .map(|notice| Event::notice(now, notice))
            .collect()
    }

    fn apply_pods(&mut self, found: PodScan, now: BootTime) -> Vec<Event> {
        let pods = found.workloads.len();
        self.inputs.set_pods(found.declared());
        self.machine.set_pods(found.workloads);
        self.record_pods();
        let former: BTreeSet<_> = std::mem::replace(&mut self.refused, found.refused)
            .into_iter()
            .collect();
        let new = self
            .refused
            .iter()
            .filter(|refusal| !former.contains(refusal));
        let refused = new.map(|refusal| refused_event(now, refusal.clone()));
        std::iter::once(Event::notice(now, NoticeKind::PodsChanged { pods }))
            .chain(refused)
            .collect()
    }

    fn save_inputs(&mut self, now: BootTime) {
        if let Some(error) = self.inputs.save() {
            let reason = error.to_string();
            // A closed output is noticed at the tick.
            let _closed = self.print(
                &[Event::notice(now, NoticeKind::StateNotWritten { reason })],
                now,
            );
        }
    }

    fn write_status(&mut self, now: BootTime) {
        self.status_written = Some(now);
        self.save_inputs(now);
        let mut status = MachineStatus::of(&self.machine, now, clock::wall_time());
        status.problems.clone_from(&self.problems);
        status.refused.clone_from(&self.refused);
        if let Err(error) = state_dir::replace(&self.status_file, &status) {
            tracing::warn!(%error, "failed to write the status file: `plimsoll status --local` shows an older state");
        }
        self.notifier.status(summary(&status));
    }

    fn finish(&mut self, stop: Stop) {
        self.notifier.stopping();
        let now = clock::boot_time();
        let (events, reason) = match stop {
            Stop::Restore(reason) => (self.machine.restore(now), reason),
            Stop::Leave(reason) => (self.machine.save_for_restart(now), reason),
        };
        let _closed = self.output.write(events, now, clock::wall_time());
        let stopped = NoticeKind::Stopped {
            why: reason.to_owned(),
            left_throttled: self.machine.throttled_pods(),
        };
        let _closed = self.print(&[Event::notice(now, stopped)], now);
        self.write_status(now);
        if let Some(error) = self.inputs.save_within(SAVE_TIMEOUT) {
            tracing::warn!(%error, "failed to save the policies for the next start");
        }
    }
}

const fn stop_for(signal: Signal) -> Option<Stop> {
    match signal {
        Signal::SIGINT => Some(Stop::Restore("interrupted")),
        Signal::SIGHUP => Some(Stop::Restore("the terminal was closed")),
        Signal::SIGTERM => Some(Stop::Leave("terminated")),
        _ => None,
    }
}

const fn refused_event(now: BootTime, refusal: PodRefusal) -> Event {
    Event::notice(now, NoticeKind::PodRefused(refusal))
}

/// One line for the service manager.
fn summary(status: &MachineStatus) -> String {
    let throttled: BTreeSet<_> = status.throttled.iter().map(|file| &file.pod_name).collect();
    let mut text = format!(
        "{} over {}",
        count(status.rules.len(), "rule"),
        count(status.pods, "pod")
    );
    if !throttled.is_empty() {
        text = format!("{text}; {} throttled", throttled.len());
    }
    if status
        .scheduling
        .as_ref()
        .is_some_and(|state| !state.schedulable)
    {
        text += "; new work is not allowed";
    }
    text
}
