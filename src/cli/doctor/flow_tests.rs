use super::*;

const LACKING: [&str; 2] = [
    "flow control",
    "no FlowSchema with a PriorityLevelConfiguration",
];

fn schemas_but(change: impl FnOnce(&mut Vec<Value>)) -> impl FnOnce(&mut Seen) {
    |seen| {
        let mut schemas = FLOW.map(schema_of_flow).to_vec();
        change(&mut schemas);
        seen.flow[0] = of(schemas);
    }
}

#[test]
fn missing_or_unbound_flow_schemas_are_reported() {
    for (place, name) in FLOW.iter().enumerate() {
        let lacks = schemas_but(|schemas| drop(schemas.remove(place)));
        says(lacks, &[LACKING[0], LACKING[1], &format!(": {name};")]);
        let levels = FLOW.iter().filter(|it| *it != name);
        let levels = of(levels.map(|name| level(name)).collect());
        says(|it| it.flow[1] = levels, &[&format!(": {name};")]);
    }
    let elsewhere = schemas_but(|schemas| {
        schemas[1]["spec"]["priorityLevelConfiguration"]["name"] = "agent".into();
    });
    says(elsewhere, &[": agent-leases;"]);
    let unread = |it: &mut Seen| it.flow[0] = refused(403);
    says(unread, &["flow schemas could not be read"]);
}

#[test]
fn an_installation_without_flow_control_is_noted() {
    let mut seen = well();
    seen.flow = [of(Vec::new()), of(Vec::new())];
    assert_eq!(findings(&seen), []);
    let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
    assert!(
        said.len() == 1 && said[0].contains("flowControl.enabled=false"),
        "{said:?}"
    );
    assert_eq!(notes(&well()), []);
}
