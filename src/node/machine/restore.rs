//! Restores everything, using only the journal.

use std::path::Path;

use super::MachineError;
use super::enforce::{Actuators, Effect};
use super::engine_store::ENGINE_FILE;
use super::state_dir;
use crate::engine::time::BootTime;
use crate::messages::event::{Event, NoticeKind};
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::Hierarchy;
use crate::node::journal::Journal;

/// The result of a restore.
#[derive(Debug)]
pub struct Restored {
    /// The events, in order; the last is [`NoticeKind::Restored`].
    pub events: Vec<Event>,
    /// Number of pods that could not be restored: try again.
    pub left: usize,
}

/// Restores everything that an earlier process left in force in cgroups, using only the journal, and removes the
/// saved rule states and the files named in `besides`.
///
/// # Errors
/// If a process still uses the state directory, or the journal is damaged; nothing was changed then.
pub fn restore(
    state_dir: &Path,
    hierarchy: Hierarchy,
    besides: &[&str],
    now: BootTime,
) -> Result<Restored, MachineError> {
    let (mut actuators, recovered) = Actuators::open(state_dir, hierarchy, now)?;
    let mut effects: Vec<Effect> = recovered.outcomes.into_iter().map(Effect::from).collect();
    actuators.restore_all(now, &mut effects);
    let left = actuators.throttled_pods().count();
    let files = effects.len();
    let mut events: Vec<Event> = effects.into_iter().map(|it| event(now, it)).collect();
    // Nothing in these files is in force any more.
    for file in [&ENGINE_FILE].into_iter().chain(besides) {
        if let Err(error) = state_dir::remove(&state_dir.join(file)) {
            let reason = error.to_string();
            events.push(Event::notice(now, NoticeKind::StateNotWritten { reason }));
        }
    }
    events.push(Event::notice(now, NoticeKind::Restored { files, left }));
    Ok(Restored { events, left })
}

/// Restores the throttles of an earlier process whose deadline has passed, and returns the events. Used while no
/// machine is running; other throttles stay.
///
/// # Errors
/// See [`restore`].
pub fn restore_expired(
    state_dir: &Path,
    hierarchy: Hierarchy,
    now: BootTime,
) -> Result<Vec<Event>, MachineError> {
    let journal = Journal::new(state_dir).map_err(OpenError::from)?;
    let records = journal.load().map_err(OpenError::from)?;
    if records.iter().all(|record| record.deadline > now) {
        return Ok(Vec::new());
    }
    let (_, recovered) = Actuators::open(state_dir, hierarchy, now)?;
    let outcomes = recovered.outcomes.into_iter();
    Ok(outcomes.map(|it| event(now, it.into())).collect())
}

/// Pod names are not known here, so the UID is used.
fn event(now: BootTime, effect: Effect) -> Event {
    let pod = effect.pod.as_ref().map(ToString::to_string);
    Event::notice(now, effect.into_notice(pod))
}
