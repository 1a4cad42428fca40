//! The progress of a rollout, in words.

use serde_json::Value;

use super::rollout::{Rollout, RolloutPhase};
use crate::crd::duration::format_duration;

/// The condition about a rollout.
pub const ROLLED_OUT: &str = "RolledOut";
/// Its reason if the rollout was stopped.
const STOPPED: &str = "CanariesAct";
/// Canaries to name in a message.
const MAX_NAMED: usize = 3;

/// The reason of the condition `RolledOut`; `None` when the rollout is done.
pub const fn reason(rollout: &Rollout) -> Option<&'static str> {
    Some(match rollout.phase() {
        RolloutPhase::Stopped { .. } => STOPPED,
        RolloutPhase::Done => return None,
        RolloutPhase::Progressing { .. } => "Progressing",
        RolloutPhase::Canaries { stuck: 1.., .. } => "NoCanary",
        RolloutPhase::Canaries { .. } | RolloutPhase::Watching { .. } => "Canaries",
    })
}

/// The column of `kubectl get`: `Canaries, 40s left`.
pub fn column(rollout: &Rollout) -> Option<String> {
    let reason = reason(rollout)?;
    Some(rollout.remaining().map_or_else(
        || reason.to_owned(),
        |left| format!("{reason}, {} left", format_duration(left)),
    ))
}

/// The progress of a rollout, as a message.
pub fn message(rollout: &Rollout) -> String {
    let canaries = canaries(rollout);
    let size = rollout.size();
    match rollout.phase() {
        RolloutPhase::Canaries { stuck, .. } if stuck > 0 && stuck < size => format!(
            "the edit waits for a canary among {stuck} of its {size} nodes: none of these is Ready with an agent that \
             enforces its rules; check why agents do not run there, or, to send the edit to all nodes without canaries, \
             annotate the object with plimsoll.dev/rollout=immediate"
        ),
        RolloutPhase::Canaries { stuck: 1.., .. } => format!(
            "the edit waits for a canary: none of its {size} nodes is Ready with an agent that enforces its \
             rules; check why agents do not run there, or, to send the edit to all nodes without canaries, annotate the \
             object with plimsoll.dev/rollout=immediate"
        ),
        RolloutPhase::Canaries { .. } | RolloutPhase::Watching { .. } => {
            let left = rollout.remaining().map(format_duration).unwrap_or_default();
            let from = match rollout.phase() {
                RolloutPhase::Watching { .. } => "more",
                _ => "after they enforce it",
            };
            format!(
                "the edit is tried on {canaries} first, for {left} {from}; to skip that, annotate the object with \
                 plimsoll.dev/rollout=immediate"
            )
        }
        RolloutPhase::Progressing { .. } => format!("the edit is going to {size} nodes"),
        RolloutPhase::Stopped { acting } => {
            let acting = if acting == 0 {
                "too many".to_owned()
            } else {
                acting.to_string()
            };
            format!(
                "the edit stopped at {canaries}: the policy has started to act on {acting} of them; edit the object \
                 again, or annotate it with plimsoll.dev/rollout=immediate to continue"
            )
        }
        RolloutPhase::Done => format!("all {size} nodes may have the edit"),
    }
}

/// `1 of 20 nodes (node07)`.
fn canaries(rollout: &Rollout) -> String {
    let names: Vec<&str> = rollout.canaries().iter().map(String::as_str).collect();
    let of = format!("{} of {} nodes", names.len(), rollout.size());
    match &names[..] {
        few if few.len() <= MAX_NAMED => format!("{of} ({})", few.join(", ")),
        _ => of,
    }
}

/// Whether the last leader stopped the rollout of this generation.
pub fn stopped_before(status: Option<&Value>, generation: i64) -> bool {
    let conditions = status.and_then(|status| status["conditions"].as_array());
    conditions.into_iter().flatten().any(|condition| {
        condition["type"] == ROLLED_OUT
            && condition["reason"] == STOPPED
            && condition["observedGeneration"] == generation
    })
}
