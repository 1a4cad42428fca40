//! Whether what holds agents and controllers to their due is in force: admission policies, the guard of evictions.

use serde_json::Value;

use super::finding::{Finding, finding, items, list};
use super::read::{Answer, Refused, Seen, accounts};

const ANEW: &str = "install the chart anew, with helm upgrade";

/// The admission policies that the chart has for these workloads' accounts.
fn policies_of(workloads: &Answer, kinds: &[&str]) -> Vec<String> {
    let accounts = accounts(workloads).into_iter();
    accounts
        .flat_map(|(_, account)| kinds.iter().map(move |kind| format!("{account}-{kind}")))
        .collect()
}

/// What holds agents to their own node, and the controller to what it does: a policy that is not in force refuses nobody.
pub(super) fn held(seen: &Seen) -> Vec<Finding> {
    let [
        Ok(_)
        | Err(Refused {
            code: Some(404), ..
        }),
        Ok(_)
        | Err(Refused {
            code: Some(404), ..
        }),
    ] = &seen.admission
    else {
        return Vec::new();
    };
    let [policies, bindings] = &seen.admission;
    let refuses = |name: &str| {
        let is_strict =
            |it: &&Value| it["metadata"]["name"] == name && it["spec"]["failurePolicy"] != "Ignore";
        let denies = |it: &&Value| {
            let mut actions = it["spec"]["validationActions"]
                .as_array()
                .into_iter()
                .flatten();
            it["spec"]["policyName"] == name && actions.any(|action| action == "Deny")
        };
        items(policies).iter().any(is_strict) && items(bindings).iter().any(denies)
    };
    let mut wanted = policies_of(&seen.daemon_sets, &["node", "lease", "watermark", "event"]);
    wanted.extend(policies_of(&seen.deployments, &["node"]));
    wanted.retain(|name| !refuses(name));
    if wanted.is_empty() {
        return Vec::new();
    }
    let what = format!(
        "not in force: {}; whoever has the token of an agent, or of the controller, may do to any node what they should do to none",
        list(wanted.iter().map(String::as_str))
    );
    let cure = "install the chart's policies anew, with helm upgrade; API servers must not disable ValidatingAdmissionPolicy";
    vec![finding("admission policies", what, cure)]
}

/// The names of the webhooks that the controller is told to keep.
fn webhooks_wanted(deployments: &Answer) -> Vec<&str> {
    let containers = |it| items_in(it, "/spec/template/spec/containers");
    let all = items(deployments).into_iter().flat_map(containers);
    all.flat_map(|container| items_in(container, "/args"))
        .filter_map(|argument| argument.as_str()?.strip_prefix("--eviction-webhook="))
        .collect()
}

fn items_in<'a>(value: &'a Value, path: &str) -> Vec<&'a Value> {
    let list = value.pointer(path).and_then(Value::as_array);
    list.into_iter().flatten().collect()
}

/// The webhook by which API servers ask whether an agent may evict.
pub(super) fn guard(seen: &Seen) -> Vec<Finding> {
    if seen
        .webhooks
        .as_ref()
        .is_err_and(|error| !error.is_missing())
    {
        return Vec::new();
    }
    let there = items(&seen.webhooks);
    let judge = |name: &str| {
        let about = format!("ValidatingWebhookConfiguration {name}");
        let found = there.iter().find(|it| it["metadata"]["name"] == name);
        let hooks = found.map_or_else(Vec::new, |it| items_in(it, "/webhooks"));
        if hooks.is_empty() {
            let what = "it is missing, so that agents evict without a budget, and a stolen token evicts anything";
            return Some(finding(about, what, ANEW));
        }
        if hooks.iter().any(|it| it["failurePolicy"] != "Fail") {
            let what = "its failurePolicy is not Fail, so that agents evict without a budget while the controller is away";
            return Some(finding(about, what, ANEW));
        }
        let is_trusted = |it: &&Value| {
            !it["clientConfig"]["caBundle"]
                .as_str()
                .unwrap_or_default()
                .is_empty()
        };
        if !hooks.iter().all(is_trusted) {
            let what = "it has no caBundle, so that API servers can't call it, and refuse every eviction by an agent";
            let cure = "the controller's leader writes it: kubectl logs of it says why it does not";
            return Some(finding(about, what, cure));
        }
        None
    };
    webhooks_wanted(&seen.deployments)
        .into_iter()
        .filter_map(judge)
        .collect()
}
