//! `Ready`, `Contested`, `Degraded` and `Stopped` of a `NodeWatermark`.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::crd::emergency_stop;
use crate::crd::node_watermark::condition::{CONTESTED, DEGRADED, NONE_JUDGED, READY, STOPPED};
use crate::crd::node_watermark::stopped::{RELEASED, RELEASING};
use crate::engine::RuleReport;
use crate::engine::plan::Unknown;
use crate::node::machine::wording::unknown_reason;

/// The longest message that an API server takes is 32 KiB; nobody reads that.
const LONGEST: usize = 1024;

/// What speaks for and against all being well. Each list is empty where nothing is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Why the spec is not kept (any more).
    pub unready: Option<Unready>,
    /// Which of the rules that are kept are judged.
    pub rules: Judged,
    /// What somebody else keeps undoing.
    pub contested: Vec<String>,
    /// What can't be handled, each with one word for it.
    pub degraded: Vec<(&'static str, String)>,
    /// Everything is stopped.
    pub stopped: Option<Stopped>,
}

/// How many rules there are, and those that have no usable sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    rules: usize,
    /// Each with the reason, in words.
    unjudged: Vec<String>,
    /// All of that passes by itself, as after a start.
    passing: bool,
}

impl Judged {
    /// By the last evaluation.
    pub fn of(reports: &[RuleReport]) -> Self {
        let passes = |why: &Unknown| matches!(why, Unknown::Rebased | Unknown::Sparse);
        let unknown = || reports.iter().filter_map(|it| Some((it, it.unknown?)));
        let words = |(report, why): (&RuleReport, Unknown)| {
            format!("{} ({})", report.id, unknown_reason(why))
        };
        Self {
            rules: reports.len(),
            unjudged: unknown().map(words).collect(),
            passing: unknown().all(|(_, why)| passes(&why)),
        }
    }

    /// Status, reason and message of `Ready`.
    fn condition(&self) -> (bool, &'static str, String) {
        let (rules, unjudged) = (self.rules, self.unjudged.len());
        let named = self.unjudged.join(", ");
        let message = match (rules, unjudged) {
            (0, _) => "no rule is for this node".to_owned(),
            (_, 0) => "every rule is judged".to_owned(),
            _ if rules == unjudged => format!("no rule is judged: {named}"),
            _ => format!(
                "{} of {rules} rules are judged; not judged: {named}",
                rules - unjudged
            ),
        };
        if rules > 0 && rules == unjudged && !self.passing {
            (false, NONE_JUDGED, message)
        } else {
            (true, "RulesKept", message)
        }
    }
}

/// How far an emergency stop has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stopped {
    /// Why; empty where nobody said.
    pub reason: String,
    /// What is not given back yet, in words.
    pub left: Vec<String>,
}

impl Stopped {
    /// The reason of the condition, and its message.
    fn condition(&self) -> (&'static str, String) {
        let words = emergency_stop::words(&self.reason);
        match self.left.as_slice() {
            [] => (RELEASED, format!("{words}; nothing is in force")),
            left => {
                let left = left.join(", ");
                (RELEASING, format!("{words}; being given back: {left}"))
            }
        }
    }
}

/// Why a spec is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unready {
    /// No rule has been judged yet.
    Starting,
    /// The last rules that were understood are kept instead.
    Held(String),
    /// The agent has ended and undone everything; in words why.
    Ended(String),
    /// Everything is stopped.
    Stopped,
}

/// The conditions, from those before: the time of transition changes with the status alone.
pub fn conditions(
    health: &Health,
    generation: Option<i64>,
    before: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let make = |kind: &str, status: bool, reason: &str, message: String| {
        let status = if status { "True" } else { "False" };
        let same = |known: &&Condition| known.type_ == kind && known.status == status;
        let since = before.iter().find(same);
        Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: cut(message, LONGEST),
            observed_generation: generation,
            last_transition_time: since.map_or(Time(now), |it| it.last_transition_time.clone()),
        }
    };
    let ready = match &health.unready {
        None => {
            let (status, reason, message) = health.rules.condition();
            make(READY, status, reason, message)
        }
        Some(Unready::Starting) => {
            let message = "not every rule has been judged yet".to_owned();
            make(READY, false, "Starting", message)
        }
        Some(Unready::Held(why)) => make(READY, false, "LastRulesHeld", why.clone()),
        Some(Unready::Ended(why)) => make(READY, false, "AgentEnded", why.clone()),
        Some(Unready::Stopped) => {
            let message = "everything is stopped: no rule acts".to_owned();
            make(READY, false, "Stopped", message)
        }
    };
    let contested = match health.contested.as_slice() {
        [] => make(CONTESTED, false, "NotContested", String::new()),
        whom => make(CONTESTED, true, "UndoneByOthers", whom.join("; ")),
    };
    let degraded = match health.degraded.as_slice() {
        [] => make(DEGRADED, false, "AllInOrder", String::new()),
        [(reason, _), ..] => {
            let messages = health.degraded.iter().map(|(_, message)| message.as_str());
            let message = messages.collect::<Vec<_>>().join("; ");
            make(DEGRADED, true, reason, message)
        }
    };
    let stopped = health.stopped.as_ref().map(|stopped| {
        let (reason, message) = stopped.condition();
        make(STOPPED, true, reason, message)
    });
    [ready, contested, degraded]
        .into_iter()
        .chain(stopped)
        .collect()
}

/// At most so many bytes of it.
pub fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most.saturating_sub(3)).rev();
        let end = end.into_iter().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_transition_changes_with_the_status_alone() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let well = Health::default();
        let first = conditions(&well, Some(1), &[], at(100));
        let held = Health {
            unready: Some(Unready::Held("the spec is not understood".to_owned())),
            ..Health::default()
        };
        let second = conditions(&held, Some(2), &first, at(200));
        assert_eq!(second[0].status, "False");
        assert_eq!(second[0].reason, "LastRulesHeld");
        assert_eq!(second[0].last_transition_time.0, at(200));
        assert_eq!(second[2].last_transition_time.0, at(100));
        assert_eq!(second[2].observed_generation, Some(2));
        let third = conditions(&held, Some(2), &second, at(300));
        assert_eq!(third, second);
    }

    #[test]
    fn a_stop_is_shown_while_it_lasts_with_who_and_why_and_what_is_left() {
        let at = Timestamp::UNIX_EPOCH;
        let shown = |stopped: Option<Stopped>| {
            let health = Health {
                unready: stopped.as_ref().map(|_| Unready::Stopped),
                stopped,
                ..Health::default()
            };
            conditions(&health, None, &[], at)
        };
        assert!(shown(None).iter().all(|it| it.type_ != STOPPED));
        let releasing = Stopped {
            reason: "bad marks (by ann)".to_owned(),
            left: vec!["CPU of 2 pods".to_owned(), "our taint".to_owned()],
        };
        let conditions = shown(Some(releasing));
        assert_eq!(
            (conditions[0].status.as_str(), conditions[0].reason.as_str()),
            ("False", "Stopped")
        );
        let stopped = conditions.last().expect("a condition");
        assert_eq!(
            (stopped.type_.as_str(), stopped.status.as_str()),
            (STOPPED, "True")
        );
        assert_eq!(stopped.reason, RELEASING);
        let told = "stopped: bad marks (by ann); being given back: CPU of 2 pods, our taint";
        assert_eq!(stopped.message, told);
        let released = shown(Some(Stopped::default()));
        let stopped = released.last().expect("a condition");
        assert_eq!(stopped.reason, RELEASED);
        assert_eq!(stopped.message, "stopped; nothing is in force");
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        assert_eq!(cut("ä".repeat(10), 9), "äää...");
        assert_eq!(cut("short".to_owned(), 9), "short");
    }
}
