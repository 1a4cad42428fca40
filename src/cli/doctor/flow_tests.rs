use super::*;

const MISSING: [&str; 2] = [
    "flow control",
    "no FlowSchema with a PriorityLevelConfiguration",
];

fn schemas_but(change: impl FnOnce(&mut Vec<Value>)) -> impl FnOnce(&mut ClusterSnapshot) {
    |snapshot| {
        let mut schemas = FLOW.map(flow_schema).to_vec();
        change(&mut schemas);
        snapshot.flow_schemas = of(schemas);
    }
}

#[test]
fn missing_or_unbound_flow_schemas_are_reported() {
    for (index, name) in FLOW.iter().enumerate() {
        let incomplete = schemas_but(|schemas| drop(schemas.remove(index)));
        assert_finding(incomplete, &[MISSING[0], MISSING[1], &format!(": {name};")]);
        let levels = FLOW.iter().filter(|it| *it != name);
        let levels = of(levels.map(|name| level(name)).collect());
        assert_finding(|it| it.priority_levels = levels, &[&format!(": {name};")]);
    }
    let elsewhere = schemas_but(|schemas| {
        schemas[1]["spec"]["priorityLevelConfiguration"]["name"] = "agent".into();
    });
    assert_finding(elsewhere, &[": agent-leases;"]);
    let unread = |it: &mut ClusterSnapshot| it.flow_schemas = refused(403);
    assert_finding(unread, &["flow schemas could not be read"]);
}

#[test]
fn an_installation_without_flow_control_is_noted() {
    let mut snapshot = healthy_snapshot();
    (snapshot.flow_schemas, snapshot.priority_levels) = (of(Vec::new()), of(Vec::new()));
    assert_eq!(findings(&snapshot), []);
    let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
    assert!(
        texts.len() == 1 && texts[0].contains("flowControl.enabled=false"),
        "{texts:?}"
    );
    assert_eq!(notes(&healthy_snapshot()), []);
}
