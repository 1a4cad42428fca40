//! What the Preview rules would have in force now, put together from what they told.

use super::event::Decision;
use crate::engine::plan::{Change, RuleState};
use crate::engine::policy::RuleId;

/// The last word on each thing that a Preview rule would do.
#[derive(Debug, Default)]
pub struct Previews(Vec<Decision>);

impl Previews {
    /// Takes a decision in. What a rule would do is over when it is Normal and its steps are taken back.
    pub fn hear(&mut self, decision: &Decision) {
        let transition = &decision.transition;
        if !transition.would {
            return;
        }
        match &transition.change {
            Change::State {
                to: RuleState::Normal,
                ..
            } => self.0.retain(|known| {
                known.transition.rule != transition.rule
                    || matches!(known.transition.change, Change::Throttle { .. })
            }),
            Change::Throttle {
                to: 100,
                idle: false,
                ..
            }
            | Change::SchedulingEnabled => self.forget(decision),
            Change::Throttle { .. }
            | Change::Reclaim { .. }
            | Change::Evict { .. }
            | Change::SchedulingDisabled { .. } => {
                self.forget(decision);
                self.0.push(decision.clone());
            }
            _ => {}
        }
    }

    /// Forgets the rules that are gone.
    pub fn retain(&mut self, is_there: impl Fn(&RuleId) -> bool) {
        self.0.retain(|known| is_there(&known.transition.rule));
    }

    /// What would be in force now.
    pub fn current(&self) -> &[Decision] {
        &self.0
    }

    fn forget(&mut self, decision: &Decision) {
        let subject = subject(decision);
        self.0.retain(|known| self::subject(known) != subject);
    }
}

/// What a decision is about: a later one about the same replaces it.
fn subject(decision: &Decision) -> (&RuleId, &'static str, Option<&str>) {
    let kind = match &decision.transition.change {
        Change::Throttle { .. } => "throttle",
        Change::Reclaim { .. } => "reclaim",
        Change::Evict { .. } => "evict",
        _ => "scheduling",
    };
    let pod = decision.transition.change.pod();
    (&decision.transition.rule, kind, pod.map(|uid| &*uid.0))
}
