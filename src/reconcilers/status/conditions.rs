//! Conditions of the policy kinds, derived from findings. Pure.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::crd::kstatus::{RECONCILING, STALLED};
use crate::crd::words::truncated;
use crate::crd::{Finding, Kind, Reason, Severity};

/// Longer messages are truncated.
const MAX_MESSAGE_BYTES: usize = 1024;

/// A condition without its transition time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionState {
    /// `type`.
    pub kind: &'static str,
    /// `status`: True or False.
    pub holds: bool,
    /// CamelCase reason.
    pub reason: String,
    /// Human-readable message.
    pub message: String,
}

/// The conditions of an object with these findings.
pub fn claims(kind: Kind, findings: &BTreeSet<Finding>) -> Vec<ConditionState> {
    let refused = |reason| matches!(reason, Reason::Invalid | Reason::DuplicateName);
    let mut claims = vec![claim("Accepted", findings, |f| refused(f.reason))];
    if kind == Kind::NodeQos {
        let unknown = |f: &Finding| f.reason == Reason::UnknownAction;
        claims.push(claim("ActionsResolved", findings, unknown));
    }
    let mut fields = claim("FieldsNotEnforced", findings, |f| {
        f.reason == Reason::FieldsNotEnforced
    });
    if !fields.holds {
        fields.holds = true;
        claims.push(fields);
    }
    let error = |f: &Finding| f.severity == Severity::Error;
    let mut ready = claim("Ready", findings, error);
    if ready.holds {
        let warnings = claim("Ready", findings, |f| f.reason != Reason::FieldsNotEnforced);
        ready.message = warnings.message;
    }
    if !ready.holds {
        claims.push(ConditionState {
            kind: STALLED,
            holds: true,
            ..ready.clone()
        });
    }
    claims.push(ready);
    claims
}

/// The condition of kstatus for a rollout with this claim: it goes on by itself, or not before someone acts. `None`: the policy
/// is stalled for another reason.
pub fn progress(
    claims: &[ConditionState],
    rollout: &ConditionState,
    stopped: bool,
) -> Option<ConditionState> {
    let kind = if stopped { STALLED } else { RECONCILING };
    let is_stalled = claims.iter().any(|claim| claim.kind == STALLED);
    (!is_stalled).then(|| ConditionState {
        kind,
        holds: true,
        ..rollout.clone()
    })
}

/// True unless a finding matches.
fn claim(
    kind: &'static str,
    findings: &BTreeSet<Finding>,
    matches: impl Fn(&Finding) -> bool,
) -> ConditionState {
    let found: Vec<&Finding> = findings.iter().filter(|finding| matches(finding)).collect();
    let describe = |finding: &&Finding| {
        if finding.path.is_empty() {
            finding.message.clone()
        } else {
            format!("{}: {}", finding.path, finding.message)
        }
    };
    let message: Vec<String> = found.iter().map(describe).collect();
    ConditionState {
        kind,
        holds: found.is_empty(),
        reason: found
            .first()
            .map_or_else(|| kind.to_owned(), |first| first.reason.to_string()),
        message: truncated(message.join("; "), MAX_MESSAGE_BYTES),
    }
}

/// The conditions to write. A condition whose status is unchanged keeps its transition time.
pub fn conditions(
    before: &Value,
    claims: Vec<ConditionState>,
    generation: i64,
    now: &str,
) -> Vec<Value> {
    let since = |kind: &str, status: &str| {
        let before = before.as_array().into_iter().flatten();
        let mut same = before.filter(|old| old["type"] == kind && old["status"] == status);
        same.next()
            .and_then(|old| old["lastTransitionTime"].as_str())
            .unwrap_or(now)
            .to_owned()
    };
    let condition = |claim: ConditionState| {
        let status = if claim.holds { "True" } else { "False" };
        json!({
            "type": claim.kind,
            "status": status,
            "reason": claim.reason,
            "message": claim.message,
            "observedGeneration": generation,
            "lastTransitionTime": since(claim.kind, status),
        })
    };
    let mut conditions: Vec<Value> = claims.into_iter().map(condition).collect();
    conditions.sort_by(|a, b| a["type"].as_str().cmp(&b["type"].as_str()));
    conditions
}
