use super::super::pod::QosClass;
use super::super::policy::Standing;
use super::super::selector::{Requirement, Selector};
use super::super::testing::{action, pod};
use super::*;

fn policy(
    labels: Option<Vec<Requirement>>,
    scopes: Vec<ScopeRequirement>,
    allowed: &[&str],
) -> PodPolicy {
    PodPolicy {
        name: "policy".to_owned(),
        labels: labels.map(|requirements| Selector { requirements }),
        scopes,
        allowed: allowed.iter().map(|entry| (*entry).to_owned()).collect(),
        standing: Standing::default(),
    }
}

fn everything(allowed: &[&str]) -> PodPolicy {
    policy(Some(Vec::new()), Vec::new(), allowed)
}

fn is(key: &str, value: &str) -> Requirement {
    Requirement::In(key.to_owned(), vec![value.to_owned()])
}

fn in_namespace(name: &str) -> ScopeRequirement {
    ScopeRequirement::Namespace(Membership::In(vec![name.to_owned()]))
}

#[test]
fn an_entry_allows_an_action_by_name_or_by_kind() {
    let table = [
        ("slow-down", true, true),
        ("Slow-Down", true, true),
        ("throttle", true, false),
        ("Throttle", true, false),
        ("evict", false, true),
        ("eviction", false, true),
        ("disablescheduling", false, false),
        ("another", false, false),
        ("slow", false, false),
    ];
    for (entry, throttle, evict) in table {
        let permit = Permit::of(&[everything(&[entry])], &pod("a"), &action("slow-down"));
        let expected = Permit {
            matched: true,
            throttle,
            evict,
        };
        assert_eq!(permit, expected, "{entry}");
    }
}

#[test]
fn a_keyword_allows_only_that_kind_even_if_an_action_has_that_name() {
    let permit = Permit::of(&[everything(&["throttle"])], &pod("a"), &action("throttle"));
    assert!(permit.throttle && !permit.evict);
    let permit = Permit::of(
        &[everything(&["disableScheduling"])],
        &pod("a"),
        &action("DisableScheduling"),
    );
    assert!(!permit.throttle && !permit.evict);
}

#[test]
fn the_permits_of_several_policies_are_combined() {
    let policies = [
        everything(&["throttle"]),
        everything(&["evict"]),
        policy(Some(vec![is("app", "other")]), Vec::new(), &["act"]),
    ];
    let permit = Permit::of(&policies, &pod("a"), &action("act"));
    assert!(permit.throttle && permit.evict);
    let permit = Permit::of(&policies[2..], &pod("a"), &action("act"));
    assert_eq!(permit, Permit::default(), "it does not match");
}

#[test]
fn a_policy_without_labels_and_scopes_matches_nothing() {
    assert!(!policy(None, Vec::new(), &["throttle"]).matches(&pod("a")));
    assert!(everything(&[]).matches(&pod("a")));
    let scoped = policy(None, vec![in_namespace("default")], &[]);
    assert!(scoped.matches(&pod("a")));
}

#[test]
fn labels_and_every_scope_must_match() {
    let mut batch = pod("a");
    batch.labels.insert("app".to_owned(), "batch".to_owned());
    let both = |scope| policy(Some(vec![is("app", "batch")]), vec![scope], &[]);
    assert!(both(in_namespace("default")).matches(&batch));
    assert!(!both(in_namespace("other")).matches(&batch));
    assert!(!both(in_namespace("default")).matches(&pod("b")));
}

#[test]
fn scopes_follow_their_operators() {
    let classes = |of: fn(Vec<QosClass>) -> Membership<QosClass>| {
        ScopeRequirement::Qos(of(vec![QosClass::BestEffort]))
    };
    let ranges =
        |ranges: &[(i32, i32)]| ScopeRequirement::Priority(Membership::In(ranges.to_vec()));
    let table = [
        (classes(Membership::In), true),
        (classes(Membership::NotIn), false),
        (ScopeRequirement::Qos(Membership::Exists), true),
        (ScopeRequirement::Qos(Membership::DoesNotExist), false),
        (
            ScopeRequirement::Qos(Membership::In(vec![QosClass::Guaranteed])),
            false,
        ),
        (
            ScopeRequirement::Qos(Membership::NotIn(vec![QosClass::Guaranteed])),
            true,
        ),
        (ranges(&[(-100, -1)]), false),
        (ranges(&[(0, 0)]), true),
        (ranges(&[(-5, 0)]), true),
        (ranges(&[(0, 7)]), true),
        (ranges(&[(1, 7), (-3, -1)]), false),
        (
            ScopeRequirement::Priority(Membership::NotIn(vec![(1, 7)])),
            true,
        ),
        (
            ScopeRequirement::Namespace(Membership::NotIn(vec!["default".to_owned()])),
            false,
        ),
        (
            ScopeRequirement::Namespace(Membership::NotIn(vec!["x".to_owned()])),
            true,
        ),
    ];
    for (scope, expected) in table {
        assert_eq!(scope.matches(&pod("a")), expected, "{scope:?}");
    }
}

#[test]
fn reserved_pods_are_matched_only_by_a_policy_that_names_them() {
    let unit = is(UNIT_LABEL, "batch.service");
    let wide = [
        everything(&[]),
        policy(
            None,
            vec![ScopeRequirement::Namespace(Membership::Exists)],
            &[],
        ),
        policy(
            None,
            vec![ScopeRequirement::Namespace(Membership::NotIn(vec![
                "x".to_owned(),
            ]))],
            &[],
        ),
    ];
    let by_namespace = policy(None, vec![in_namespace("default")], &[]);
    let by_unit = policy(Some(vec![unit]), Vec::new(), &[]);
    let mut reserved = pod("a");
    reserved
        .labels
        .insert(UNIT_LABEL.to_owned(), "batch.service".to_owned());
    for (kind, unit_matches) in [
        (Reserved::Namespace, false),
        (Reserved::NamespaceOrUnit, true),
    ] {
        reserved.reserved = Some(kind);
        assert!(wide.iter().all(|policy| !policy.matches(&reserved)));
        assert!(by_namespace.matches(&reserved));
        assert_eq!(by_unit.matches(&reserved), unit_matches);
    }
}
