//! A machine without Kubernetes: a file says whether new work is allowed, and pods are evicted by signals.

use std::sync::Arc;
use std::time::Duration;

use super::scheduling::{SchedulingFile, SchedulingState};
use crate::clock;
use crate::crd::duration::format_duration;
use crate::engine::plan::{Evict, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::policy::PolicySet;
use crate::engine::time::BootTime;
use crate::messages::event::NoticeKind;
use crate::node::actuate::evict::{CgroupEvictor, EvictError, EvictOutcome, StartedEviction};
use crate::node::machine::backend::Backend;
use crate::node::machine::enforce::Effect;
use crate::node::machine::workload::Workload;
use crate::node::machine::{self, MachineError, MachineSettings};

/// Retry interval for a pod whose processes could not be signalled.
const EVICTION_RETRY_INTERVAL: Duration = Duration::from_mins(1);

/// The machine of `plimsoll run`.
pub type Machine = machine::Machine<Host>;

/// Opens it.
///
/// # Errors
/// Those of [`machine::Machine::open`].
pub fn open(
    settings: MachineSettings,
    policy: Arc<PolicySet>,
    workloads: Vec<Workload>,
    now: BootTime,
) -> Result<Machine, MachineError> {
    let (state_dir, hierarchy) = (settings.state_dir.clone(), settings.hierarchy.clone());
    let host = |writer: &_| Host {
        scheduling: SchedulingFile::open(&state_dir, writer),
        evictor: CgroupEvictor::new(hierarchy),
    };
    Machine::open(settings, host, policy, workloads, now)
}

/// The scheduling file and the evictor.
#[derive(Debug)]
pub struct Host {
    scheduling: SchedulingFile,
    evictor: CgroupEvictor,
}

impl Host {
    /// Whether new work may be started; `None` before the first full evaluation.
    pub const fn scheduling(&self) -> Option<&SchedulingState> {
        self.scheduling.current()
    }
}

impl Backend for Host {
    type Pending = StartedEviction;

    fn set_scheduling(&mut self, wanted: &Scheduling, _now: BootTime, effects: &mut Vec<Effect>) {
        if let Err(error) = self.scheduling.update(wanted, clock::wall_time()) {
            let reason = error.to_string();
            effects.push(Effect::notice(NoticeKind::StateNotWritten { reason }));
        }
    }

    fn evict(
        &mut self,
        evict: &Evict,
        workload: &Workload,
        now: BootTime,
        effects: &mut Vec<Effect>,
    ) {
        let uid = &evict.uid;
        let started = self.evictor.start(uid, &workload.cgroup, evict.grace, now);
        effects.push(match started {
            Ok(()) => Effect::evicting(uid, "its processes were sent SIGTERM"),
            Err(EvictError::Gone(_)) => Effect::gone(uid, "it is gone"),
            Err(error) => Effect::refused(uid, now + EVICTION_RETRY_INTERVAL, error.to_string()),
        });
    }

    fn poll(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        effects.extend(self.evictor.tick(now).into_iter().map(effect));
    }

    fn evicting(&self) -> impl Iterator<Item = &PodUid> {
        self.evictor.pending().map(|pending| &pending.uid)
    }

    fn pending(&self) -> Vec<StartedEviction> {
        self.evictor.pending().cloned().collect()
    }

    fn resume(&mut self, pending: Vec<StartedEviction>) {
        self.evictor.resume(pending);
    }
}

fn effect(outcome: EvictOutcome) -> Effect {
    match outcome {
        EvictOutcome::Exited { uid, after } => Effect::gone(
            &uid,
            format!("its processes exited after {}", format_duration(after)),
        ),
        EvictOutcome::Killed { uid, after } => Effect::gone(
            &uid,
            format!("it was killed after {}", format_duration(after)),
        ),
        EvictOutcome::Failed { uid, error } => Effect::evicting(&uid, error.to_string()),
    }
}
