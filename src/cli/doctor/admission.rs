//! Whether admission policies hold agents and controllers to what they should do, and whether the controller can evict for agents.

use serde_json::Value;

use super::finding::{Finding, finding, items, list};
use super::read::{Answer, Seen, accounts, arguments, items_in};
use super::trials::Verdict;

const ANEW: &str = "reinstall the chart with helm upgrade";
/// What follows where nothing holds them.
const THEN: &str = "with a stolen token of an agent or the controller, any node could be changed";
/// Where the controller listens for agents.
const LISTENS: &str = "--report-listen=";

/// The admission policies that the chart has for these accounts, and for what the controller is told to keep.
fn policies_wanted(seen: &Seen) -> Vec<String> {
    let has = |argument: &str| !arguments(&seen.deployments, argument).is_empty();
    let mut controllers = vec!["node", "token"];
    if has("--metrics-api-listen=") {
        controllers.push("api");
    }
    if has(LISTENS) {
        controllers.push("eviction");
    }
    let agents = vec!["node", "lease", "watermark", "event", "token"];
    let both = [
        (&seen.daemon_sets, agents),
        (&seen.deployments, controllers),
    ];
    let mut wanted = Vec::new();
    for (workloads, kinds) in both {
        for (_, account) in accounts(workloads) {
            wanted.extend(kinds.iter().map(|kind| format!("{account}-{kind}")));
        }
    }
    wanted
}

/// What holds agents to their own node, and the controller to what it does: a policy that is not in force refuses nobody.
pub(super) fn held(seen: &Seen) -> Vec<Finding> {
    let is_known = |answer: &Answer| !answer.as_ref().is_err_and(|error| !error.is_missing());
    if !seen.admission.iter().all(is_known) {
        return Vec::new();
    }
    let (sound, unsound): (Vec<_>, Vec<_>) = policies_wanted(seen)
        .into_iter()
        .partition(|name| is_bound(seen, name));
    let mut found = Vec::new();
    if !unsound.is_empty() {
        let what = format!("not in force: {}; {THEN}", names(&unsound));
        found.push(finding("admission policies", what, ANEW));
    }
    let through: Vec<String> = seen
        .trials
        .iter()
        .filter(|trial| sound.contains(&trial.policy))
        .filter(|trial| matches!(trial.verdict(), Verdict::LetThrough))
        .map(|trial| trial.policy.clone())
        .collect();
    if !through.is_empty() {
        let what = format!("installed, but reject nothing: {}; {THEN}", names(&through));
        let cure = "remove ValidatingAdmissionPolicy from --disable-admission-plugins of every kube-apiserver; if it is not there, \
                    reinstall the chart with helm upgrade";
        found.push(finding("admission policies", what, cure));
    }
    let cure = "a dry run as that ServiceAccount failed before the policy was evaluated: follow the message";
    found.extend(untried(seen, false, cure));
    found
}

/// Who asks may not try it: as `helm test`, whose account may impersonate nobody.
pub(super) fn not_tried(seen: &Seen) -> Option<Finding> {
    let cure = "run plimsoll doctor as a user who may impersonate the ServiceAccounts of the release, such as a cluster administrator";
    untried(seen, true, cure)
}

fn untried(seen: &Seen, for_lack_of_rights: bool, cure: &str) -> Option<Finding> {
    let wanted = policies_wanted(seen);
    let mut trials = seen.trials.iter();
    let (policy, why) = trials.find_map(|trial| match trial.verdict() {
        Verdict::Untried(why) if why.contains("impersonate") == for_lack_of_rights => {
            let counts = wanted.contains(&trial.policy) && is_bound(seen, &trial.policy);
            counts.then_some((&trial.policy, why))
        }
        _ => None,
    })?;
    let what = format!("the admission policy {policy} could not be tested: {why}");
    Some(finding("plimsoll doctor", what, cure))
}

fn names(policies: &[String]) -> String {
    list(policies.iter().map(String::as_str))
}

/// Whether a policy is there, and bound so that it refuses.
fn is_bound(seen: &Seen, name: &str) -> bool {
    let [policies, bindings] = &seen.admission;
    let is_strict =
        |it: &&Value| it["metadata"]["name"] == name && it["spec"]["failurePolicy"] != "Ignore";
    let denies = |it: &&Value| {
        let actions = items_in(it, "/spec/validationActions");
        it["spec"]["policyName"] == name && actions.iter().any(|action| *action == "Deny")
    };
    items(policies).iter().any(is_strict) && items(bindings).iter().any(denies)
}

/// No pod is evicted where the controller does not listen for agents; where they do not know where, one way to it is left.
pub(super) fn evictions(seen: &Seen) -> Vec<Finding> {
    let lacks = |workloads: &Answer, argument: &str| {
        !items(workloads).is_empty() && arguments(workloads, argument).is_empty()
    };
    let what = if lacks(&seen.deployments, LISTENS) {
        "the controller does not listen for agents (--report-listen), so no pod is evicted"
    } else if lacks(&seen.daemon_sets, "--report-service=") {
        "agents do not know where the controller listens (--report-service), and can request evictions only through the API server"
    } else {
        return Vec::new();
    };
    vec![finding("evictions", what, ANEW)]
}
