use super::*;

const ACTION: &str = "AvoidanceAction";
const RULES: &str = "NodeQOS";

fn source(file: &str, kind: &str, name: &str, spec: &Value) -> PolicySource {
    let object = json!({
        "apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec,
    });
    PolicySource::new(Path::new(file), object)
}

fn action(cool_down: i32) -> PolicySource {
    let spec = json!({"coolDownSeconds": cool_down, "throttle": {"cpuThrottle": {}}});
    source("/p/action.yaml", ACTION, "act", &spec)
}

/// One rule for each threshold; a threshold of 0 is invalid.
fn rules(action: &str, thresholds: &[u32]) -> PolicySource {
    let rule = |threshold: &u32| {
        json!({"name": format!("r{threshold}"), "actionName": action,
               "metricRule": {"name": "cpu_load_1_min", "value": threshold}})
    };
    let rules: Vec<_> = thresholds.iter().map(rule).collect();
    source("/p/rules.yaml", RULES, "n", &json!({"rules": rules}))
}

fn merge_files(read: &[PolicySource], former: &[PolicySource], unparsed: &[&str]) -> Merged {
    let unparsed = unparsed.iter().map(PathBuf::from).collect();
    merge(read.to_vec(), former, &unparsed, &NodeFacts::default())
}

/// Ids of the rules in force, each with its cool-down.
fn in_force(merged: &Merged) -> Vec<(String, u64)> {
    let rules = merged.compiled.policy.rules.iter();
    rules
        .map(|rule| (rule.id.to_string(), rule.action.cool_down.as_secs()))
        .collect()
}

fn rule(id: &str, cool_down: u64) -> (String, u64) {
    (id.to_owned(), cool_down)
}

fn names(sources: &[PolicySource]) -> Vec<String> {
    let name = |source: &PolicySource| {
        source.object["metadata"]["name"]
            .as_str()
            .map(str::to_owned)
    };
    sources.iter().filter_map(name).collect()
}

#[test]
fn valid_objects_replace_the_former_ones() {
    let read = [action(5), rules("act", &[2])];
    let merged = merge_files(&read, &[action(60), rules("act", &[1])], &[]);
    assert_eq!(in_force(&merged), [rule("n/r2", 5)]);
    assert!(merged.refused.is_empty() && merged.hidden.is_empty());
    assert_eq!(
        merged.sources,
        [action(5).trimmed(), rules("act", &[2]).trimmed()]
    );
}

#[test]
fn an_invalid_edit_keeps_the_former_object_and_applies_the_others() {
    let former = [action(60), rules("act", &[1])];
    let merged = merge_files(&[action(5), rules("act", &[0])], &former, &[]);
    assert_eq!(in_force(&merged), [rule("n/r1", 5)]);
    assert!(merged.refused[0].path.contains("rules[0]"), "{merged:?}");
    assert_eq!(
        merged.sources,
        [action(5).trimmed(), rules("act", &[1]).trimmed()]
    );
}

#[test]
fn an_invalid_action_does_not_block_a_good_edit_of_its_rules() {
    let former = [action(60), rules("act", &[1])];
    let merged = merge_files(&[action(0), rules("act", &[2])], &former, &[]);
    assert_eq!(in_force(&merged), [rule("n/r2", 60)]);
    let about: Vec<_> = merged
        .refused
        .iter()
        .map(|it| it.object.to_string())
        .collect();
    assert_eq!(about, ["AvoidanceAction/act"]);
}

#[test]
fn a_rule_edited_to_name_no_action_stays_as_it_was() {
    let former = [action(60), rules("act", &[1])];
    let merged = merge_files(&[action(60), rules("atc", &[2])], &former, &[]);
    assert_eq!(in_force(&merged), [rule("n/r1", 60)]);
    assert_eq!(merged.refused[0].reason, Reason::UnknownAction);
}

#[test]
fn a_deleted_object_is_removed_with_all_that_depends_on_it() {
    let former = [action(60), rules("act", &[1])];
    assert_eq!(in_force(&merge_files(&[action(60)], &former, &[])), []);
    let merged = merge_files(&[rules("act", &[1])], &former, &[]);
    assert_eq!(in_force(&merged), []);
    assert!(merged.refused.is_empty(), "nothing was edited: {merged:?}");
    let findings = merged.compiled.findings.iter();
    assert!(
        findings
            .clone()
            .any(|it| it.reason == Reason::UnknownAction),
        "{merged:?}"
    );
}

#[test]
fn objects_that_may_be_in_an_unparsed_file_stay_in_force() {
    let former = [action(60), rules("act", &[1])];
    let merged = merge_files(&[action(5)], &former, &["/p/rules.yaml"]);
    assert_eq!(in_force(&merged), [rule("n/r1", 5)]);
    assert_eq!(merged.hidden[0].0.to_string(), "NodeQOS/n");
    let other = merge_files(&[action(5)], &former, &["/p/other.yaml"]);
    assert_eq!(in_force(&other), []);
    let directory = merge_files(&[], &former, &["/p"]);
    assert_eq!(in_force(&directory), [rule("n/r1", 60)]);
    assert_eq!(names(&directory.sources), ["act", "n"]);
    // An object that was moved to another file is read from there.
    let merged = merge_files(
        &[action(5), rules("act", &[2])],
        &former,
        &["/p/rules.yaml"],
    );
    assert_eq!(in_force(&merged), [rule("n/r2", 5)]);
}

#[test]
fn an_old_error_does_not_block_a_good_edit() {
    let former = [action(60), rules("act", &[0, 1])];
    let merged = merge_files(&[action(60), rules("act", &[0, 2])], &former, &[]);
    assert_eq!(in_force(&merged), [rule("n/r2", 60)]);
    let merged = merge_files(&[action(60), rules("act", &[0])], &former, &[]);
    assert_eq!(
        in_force(&merged),
        [],
        "the rule was deleted, and the error is old"
    );
}

#[test]
fn a_duplicate_name_does_not_replace_the_object_in_force() {
    let former = [action(60), rules("act", &[1])];
    let mut second = rules("act", &[2]);
    second.file = "/p/second.yaml".into();
    let read = [action(60), rules("act", &[1]), second];
    let merged = merge_files(&read, &former, &[]);
    assert_eq!(in_force(&merged), [rule("n/r1", 60)]);
    assert_eq!(merged.refused[0].reason, Reason::DuplicateName);
}

#[test]
fn an_invalid_new_object_has_no_fallback() {
    let merged = merge_files(&[action(0), rules("act", &[1])], &[], &[]);
    assert_eq!(in_force(&merged), []);
    assert_eq!(names(&merged.sources), ["n"]);
}

#[test]
fn rules_are_compiled_for_the_current_node() {
    let mut selecting = rules("act", &[1]);
    selecting.object["spec"]["selector"] = json!({"matchLabels": {"role": "batch"}});
    let former = [action(60), selecting];
    let unparsed = BTreeSet::from([PathBuf::from("/p/rules.yaml")]);
    let on = |role: &str| {
        let node = NodeFacts {
            labels: BTreeMap::from([("role".to_owned(), role.to_owned())]),
            ..NodeFacts::default()
        };
        in_force(&merge(vec![action(60)], &former, &unparsed, &node))
    };
    assert_eq!(on("batch"), [rule("n/r1", 60)]);
    assert_eq!(on("web"), []);
}
