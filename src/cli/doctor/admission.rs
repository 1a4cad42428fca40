//! Checks of admission policies, and of the arguments for evictions.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};

use super::dry_runs::DryRunVerdict;
use super::finding::{DoctorFinding, REINSTALL, finding, list};
use super::snapshot::{
    ClusterSnapshot, InstalledWorkload, Read, SnapshotError, accounts, arguments, items,
};

/// The consequence of a policy that is not in force.
const CONSEQUENCE: &str =
    "with a stolen token of an agent or the controller, any node could be changed";
/// The argument with the address where the controller listens for agents.
const REPORT_LISTEN: &str = "--report-listen=";

/// The chart's admission policies for the installed components.
fn wanted(snapshot: &ClusterSnapshot) -> Vec<String> {
    let has = |argument: &str| !arguments(&snapshot.deployments, argument).is_empty();
    let optional = [
        ("api", "--metrics-api-listen="),
        ("eviction", REPORT_LISTEN),
    ];
    let optional = optional.into_iter().filter(|(_, argument)| has(argument));
    let optional: Vec<&str> = optional.map(|(kind, _)| kind).collect();
    let controller = [&["node", "token"][..], &optional].concat();
    let agent = ["node", "lease", "watermark", "event", "token"];
    let mut wanted = Vec::new();
    for (_, account) in accounts(&snapshot.daemon_sets).into_keys() {
        wanted.extend(agent.iter().map(|kind| format!("{account}-{kind}")));
    }
    for (_, account) in accounts(&snapshot.deployments).into_keys() {
        wanted.extend(controller.iter().map(|kind| format!("{account}-{kind}")));
    }
    wanted
}

fn is_known(snapshot: &ClusterSnapshot) -> bool {
    let policies = snapshot.admission_policies.as_ref().err();
    let bindings = snapshot.admission_bindings.as_ref().err();
    let mut errors = policies.into_iter().chain(bindings);
    errors.all(SnapshotError::is_missing)
}

/// Whether a policy exists, fails closed, and has a binding that denies.
fn is_bound(snapshot: &ClusterSnapshot, name: &str) -> bool {
    let is_strict = |policy: &ValidatingAdmissionPolicy| {
        let spec = policy.spec.as_ref();
        let failure_policy = spec.and_then(|it| it.failure_policy.as_deref());
        policy.metadata.name.as_deref() == Some(name) && failure_policy != Some("Ignore")
    };
    let denies = |binding: &ValidatingAdmissionPolicyBinding| {
        let spec = binding.spec.clone().unwrap_or_default();
        let actions = spec.validation_actions.unwrap_or_default();
        spec.policy_name.as_deref() == Some(name) && actions.iter().any(|it| it == "Deny")
    };
    items(&snapshot.admission_policies).iter().any(is_strict)
        && items(&snapshot.admission_bindings).iter().any(denies)
}

/// Policies that are missing or not bound.
pub(super) fn unbound_policies(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let mut unbound = wanted(snapshot);
    unbound.retain(|name| !is_bound(snapshot, name));
    if !is_known(snapshot) || unbound.is_empty() {
        return None;
    }
    let what = format!("not in force: {}; {CONSEQUENCE}", list(unbound));
    Some(finding("admission policies", what, REINSTALL))
}

/// The verdicts on policies that are in force as far as can be read.
fn verdicts(snapshot: &ClusterSnapshot) -> Vec<(&str, DryRunVerdict<'_>)> {
    if !is_known(snapshot) {
        return Vec::new();
    }
    let wanted = wanted(snapshot);
    let runs = snapshot.dry_runs.iter();
    let runs = runs.filter(|it| wanted.contains(&it.policy) && is_bound(snapshot, &it.policy));
    runs.map(|it| (it.policy.as_str(), it.verdict())).collect()
}

/// Policies that allow what they should reject.
pub(super) fn ineffective_policies(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let verdicts = verdicts(snapshot).into_iter();
    let allowed = verdicts.filter(|(_, verdict)| *verdict == DryRunVerdict::Allowed);
    let allowed: Vec<&str> = allowed.map(|(policy, _)| policy).collect();
    if allowed.is_empty() {
        return None;
    }
    let what = format!(
        "installed, but reject nothing: {}; {CONSEQUENCE}",
        list(allowed)
    );
    let fix = "remove ValidatingAdmissionPolicy from --disable-admission-plugins of every kube-apiserver; if it is not there, \
                reinstall the chart with helm upgrade";
    Some(finding("admission policies", what, fix))
}

pub(super) fn untested_policies(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let fix = "a dry run as that ServiceAccount failed before the policy was evaluated: follow the message";
    untested(snapshot, false, fix)
}

/// A note: the user may not impersonate the accounts, as the one of `helm test`.
pub(super) fn not_permitted_to_test(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let fix = "run plimsoll doctor as a user who may impersonate the ServiceAccounts of the release, such as a cluster administrator";
    untested(snapshot, true, fix)
}

fn untested(
    snapshot: &ClusterSnapshot,
    for_lack_of_permission: bool,
    fix: &str,
) -> Option<DoctorFinding> {
    let mut verdicts = verdicts(snapshot).into_iter();
    verdicts.find_map(|(policy, verdict)| match verdict {
        DryRunVerdict::Failed(why) if why.contains("impersonate") == for_lack_of_permission => {
            let what = format!("the admission policy {policy} could not be tested: {why}");
            Some(finding("plimsoll doctor", what, fix))
        }
        _ => None,
    })
}

/// Evictions need the controller to listen; agents that do not know where use the API server.
pub(super) fn evictions(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    fn lacks_argument<W: InstalledWorkload>(workloads: &Read<Vec<W>>, argument: &str) -> bool {
        !items(workloads).is_empty() && arguments(workloads, argument).is_empty()
    }
    let what = if lacks_argument(&snapshot.deployments, REPORT_LISTEN) {
        "the controller does not listen for agents (--report-listen), so no pod is evicted"
    } else if lacks_argument(&snapshot.daemon_sets, "--report-service=") {
        "agents do not know where the controller listens (--report-service), and can request evictions only through the API server"
    } else {
        return None;
    };
    Some(finding("evictions", what, REINSTALL))
}
