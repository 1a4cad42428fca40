//! The loop of `plimsoll run`: waits, ticks, tells.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::discovery::{self, Discovery};
use super::host::Machine;
use super::inputs::Inputs;
use super::notify::Notifier;
use super::output::Output;
use super::pods::Found;
use super::policies::Loaded;
use super::status::Status;
use super::wake::Wake;
use crate::engine::time::BootTime;
use crate::node::clock;
use crate::node::machine::event::{Event, News, PolicyProblem, Refusal};
use crate::node::machine::state_dir;
use crate::node::machine::wording::count;
use crate::trace::record::Recorder;

/// The status file is written anew this often while something is in force, besides every change.
const ACTING_STATUS: Duration = Duration::from_secs(5);
/// And this often while nothing is.
const QUIET_STATUS: Duration = Duration::from_secs(30);

/// The signals that the loop hears.
pub const SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// The loop and all that it needs.
#[derive(Debug)]
pub struct Daemon<W> {
    /// What is run.
    pub machine: Machine,
    /// What wakes it.
    pub wake: Wake,
    /// What looks for pods and edits.
    pub discovery: Discovery,
    /// Where events go.
    pub output: Output<W>,
    /// Where the trace goes.
    pub recorder: Option<Recorder>,
    /// Who is told that it is up.
    pub notifier: Notifier,
    /// When it ends by itself.
    pub end: Option<BootTime>,
    /// The status file.
    pub status_file: PathBuf,
    /// What is kept of the policies and pods for the next start.
    pub inputs: Inputs,
    /// What is known to be wrong with the policies.
    pub problems: Vec<PolicyProblem>,
    /// Those of the problems for which the last good version of something stays in force.
    pub kept: Vec<PolicyProblem>,
    /// The pods that cannot be looked after.
    pub refused: Vec<Refusal>,
    /// When the status file was written last; `None` before the first time.
    pub status_written: Option<BootTime>,
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Somebody at the keyboard, or the given time: put everything back.
    Restore(&'static str),
    /// The service manager: what is in force stays in force.
    Leave(&'static str),
}

/// Why the loop broke. What is in force stays so, and the journal knows it.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Waiting failed.
    #[error("failed to wait for the next sample: {0}")]
    Wait(#[source] io::Error),
    /// The thread that looks for pods has died.
    #[error("the thread that looks for pods and edits has ended: what is in force stays in force")]
    Discovery,
}

impl<W: Write> Daemon<W> {
    /// Runs until a signal or the given time ends it; true where everything that had to be put back was.
    ///
    /// # Errors
    /// Where the loop cannot go on.
    pub fn run(mut self) -> Result<bool, DaemonError> {
        self.first_tick();
        let ending = loop {
            let signal = self.wake.wait_until(self.deadline());
            if let Some(ending) = signal.map_err(DaemonError::Wait)?.and_then(ending_by) {
                break ending;
            }
            let now = clock::boot_time();
            if self.end.is_some_and(|end| now >= end) {
                break Ending::Restore("the time given with --for is over");
            }
            self.take_news(now);
            if now >= self.machine.next_tick() && self.tick().is_err() {
                break Ending::Restore("nobody reads the output any more");
            }
            self.notifier.alive(now);
            if !self.discovery.is_alive() {
                return Err(DaemonError::Discovery);
            }
        };
        self.finish(ending);
        let left = self.machine.throttled_pods();
        Ok(left == 0 || matches!(ending, Ending::Leave(_)))
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
        let others = self.problems.iter();
        let others = others.filter(|problem| !self.kept.contains(problem));
        let mut events: Vec<Event> = others
            .map(|problem| Event::notice(now, News::PolicyProblem(problem.clone())))
            .collect();
        if !self.kept.is_empty() {
            let findings = std::mem::take(&mut self.kept);
            events.push(Event::notice(now, News::PoliciesKept { findings }));
        }
        let refused = self.refused.clone();
        events.extend(
            refused
                .into_iter()
                .map(|refusal| refused_event(now, refusal)),
        );
        // Whoever reads the output finds out at the first regular tick that it is closed.
        let _first = self.tell(&events, now);
        let _first = self.tick();
        let started = News::Started {
            rules: self.machine.policy().rules.len(),
            pods: self.machine.pods().len(),
            adopted: self.machine.adopted(),
        };
        let _first = self.tell(&[Event::notice(now, started)], now);
        self.notifier.ready();
        self.notifier.alive(now);
        self.write_status(now);
    }

    fn tick(&mut self) -> io::Result<()> {
        // What a sample counts is divided by time: that of the reading, not of what was done before.
        let now = clock::boot_time();
        let events = self.machine.tick(now);
        let quiet = events.is_empty();
        let told = self.output.write(events, now, clock::wall_time());
        self.record(now);
        let acting = self.machine.is_acting();
        let interval = if acting { ACTING_STATUS } else { QUIET_STATUS };
        let stale = self
            .status_written
            .is_some_and(|written| now.since(written) >= interval);
        if !quiet || stale {
            self.write_status(now);
        }
        told
    }

    fn tell(&mut self, events: &[Event], now: BootTime) -> io::Result<()> {
        self.output.write(events, now, clock::wall_time())
    }

    fn record(&mut self, now: BootTime) {
        let Some(recorder) = &mut self.recorder else {
            return;
        };
        let plan = self.machine.plan();
        let told = if plan.evaluated {
            plan.transitions.as_slice()
        } else {
            &[]
        };
        if let Err(error) = recorder.tick(now, self.machine.sample(), told.iter()) {
            tracing::error!(%error, "the recording ends here");
            self.recorder = None;
        }
    }

    fn record_pods(&mut self) {
        let pods = self.machine.pods().values();
        let pods: Vec<_> = pods.map(|known| Arc::clone(&known.pod)).collect();
        if let Some(recorder) = &mut self.recorder
            && let Err(error) = recorder.pods(&pods)
        {
            tracing::error!(%error, "the recording ends here");
            self.recorder = None;
        }
    }

    fn take_news(&mut self, now: BootTime) {
        while let Some(news) = self.discovery.news() {
            let events = match news {
                discovery::News::Policies(loaded) => self.take_policies(loaded, now),
                discovery::News::Pods(found) => self.take_pods(found, now),
            };
            // A closed output is found out at the tick.
            let _told = self.tell(&events, now);
            self.write_status(now);
        }
    }

    fn take_policies(&mut self, loaded: Loaded, now: BootTime) -> Vec<Event> {
        let findings = loaded.new_errors(&self.problems);
        if !findings.is_empty() {
            return vec![Event::notice(now, News::PoliciesKept { findings })];
        }
        let rules = loaded.policy.rules.len();
        self.inputs.set_policies(loaded.sources);
        self.machine.set_policy(Arc::new(loaded.policy));
        let known: BTreeSet<_> = std::mem::replace(&mut self.problems, loaded.problems)
            .into_iter()
            .collect();
        let new = self
            .problems
            .iter()
            .filter(|problem| !known.contains(problem));
        let problems = new.map(|problem| News::PolicyProblem(problem.clone()));
        std::iter::once(News::PoliciesTaken { rules })
            .chain(problems)
            .map(|news| Event::notice(now, news))
            .collect()
    }

    fn take_pods(&mut self, found: Found, now: BootTime) -> Vec<Event> {
        let pods = found.workloads.len();
        self.inputs.set_pods(found.declared());
        self.machine.set_pods(found.workloads);
        self.record_pods();
        let known: BTreeSet<_> = std::mem::replace(&mut self.refused, found.refused)
            .into_iter()
            .collect();
        let new = self
            .refused
            .iter()
            .filter(|refusal| !known.contains(refusal));
        let refused = new.map(|refusal| refused_event(now, refusal.clone()));
        std::iter::once(Event::notice(now, News::PodsTaken { pods }))
            .chain(refused)
            .collect()
    }

    fn keep_inputs(&mut self, now: BootTime) {
        if let Some(error) = self.inputs.keep() {
            let reason = error.to_string();
            // A closed output is found out at the tick.
            let _told = self.tell(&[Event::notice(now, News::StateNotWritten { reason })], now);
        }
    }

    fn write_status(&mut self, now: BootTime) {
        self.status_written = Some(now);
        self.keep_inputs(now);
        let mut status = Status::of(&self.machine, now, clock::wall_time());
        status.problems.clone_from(&self.problems);
        status.refused.clone_from(&self.refused);
        if let Err(error) = state_dir::replace(&self.status_file, &status) {
            tracing::warn!(%error, "`plimsoll state` shows what was in force before");
        }
        self.notifier.status(in_short(&status));
    }

    fn finish(&mut self, ending: Ending) {
        self.notifier.stopping();
        let now = clock::boot_time();
        let (events, why) = match ending {
            Ending::Restore(why) => (self.machine.restore(now), why),
            Ending::Leave(why) => (self.machine.leave(now), why),
        };
        // Whether or not anybody still reads it, everything is done.
        let _told = self.output.write(events, now, clock::wall_time());
        let stopped = News::Stopped {
            why: why.to_owned(),
            left_throttled: self.machine.throttled_pods(),
        };
        let _told = self.tell(&[Event::notice(now, stopped)], now);
        self.write_status(now);
    }
}

const fn ending_by(signal: Signal) -> Option<Ending> {
    match signal {
        Signal::SIGINT => Some(Ending::Restore("interrupted")),
        Signal::SIGHUP => Some(Ending::Restore("the terminal was closed")),
        Signal::SIGTERM => Some(Ending::Leave("terminated")),
        _ => None,
    }
}

const fn refused_event(now: BootTime, refusal: Refusal) -> Event {
    Event::notice(now, News::PodRefused(refusal))
}

/// One line for the service manager.
fn in_short(status: &Status) -> String {
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
        text += "; new work is kept away";
    }
    text
}
