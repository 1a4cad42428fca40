//! `plimsoll check` reports the field and the fix of every mistake, and a mistake does not affect other objects.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::bad_input::{Case, GOOD, cases};
use plimsoll::crd::{Objects, compile, manifest};
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::units::Bytes;
use serde_json::Value;

fn check(text: &str, args: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["check", "-", "--node-cpus", "16", "--node-memory", "64Gi"])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A huge file may be rejected before its end is read.
    let _ = stdin.write_all(text.as_bytes());
    drop(stdin);
    child.wait_with_output().unwrap()
}

fn findings(text: &str) -> (Option<i32>, Vec<Value>) {
    let output = check(text, &["--output", "json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap().clone();
    (output.status.code(), findings)
}

#[test]
fn yaml_has_what_json_has() {
    let text = "apiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: a}\nspec: {rules: [{name: yes}]}\n";
    let json = check(text, &["-o", "json"]);
    let yaml = check(text, &["-o", "yaml"]);
    assert_eq!(json.status.code(), yaml.status.code());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(!json["findings"].as_array().unwrap().is_empty());
    let yaml = String::from_utf8(yaml.stdout).unwrap();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), json);
}

fn is(finding: &Value, path: &str, part: &str) -> bool {
    finding["path"] == path && finding["message"].as_str().unwrap().contains(part)
}

fn facts() -> NodeFacts {
    NodeFacts {
        cpus: 16,
        memory: Bytes(64 << 30),
        ..NodeFacts::default()
    }
}

#[test]
fn every_mistake_is_reported_with_its_field_and_a_fix() {
    let mut wrong = Vec::new();
    for Case {
        name,
        text,
        expected,
        ..
    } in cases()
    {
        let (code, findings) = findings(&(text + GOOD));
        for (path, part) in expected {
            let found = findings.iter().any(|finding| {
                is(finding, path, part)
                    && finding["severity"] == "error"
                    && finding["line"].as_u64() > Some(0)
            });
            if !found || code != Some(1) {
                wrong.push(format!(
                    "{name}: {path}: {part}: exit {code:?}, {findings:#?}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The policies of examples/ensurance/throttle.yaml with one mistake give only the finding about it.
#[test]
fn one_mistake_is_one_finding() {
    const EXAMPLE: &str = include_str!("../../examples/ensurance/throttle.yaml");
    for (right, wrong, expected) in [
        ("- BestEffort", "- Besteffort", "did you mean BestEffort?"),
        ("operator: In", "operator: in", "did you mean In?"),
        ("operator: In", "operators: In", "did you mean operator?"),
        ("QOSClass", "QosClass", "did you mean QOSClass?"),
        (
            "    - throttle",
            "    - throtle",
            "there is no AvoidanceAction named \"throtle\"; did you mean throttle?",
        ),
        (
            "kind: AvoidanceAction",
            "kind: AvoidanceActions",
            "there is no kind AvoidanceActions in ensurance.crane.io/v1alpha1; did you mean AvoidanceAction?",
        ),
        ("kind: NodeQOS", "kind: NodeQoS", "did you mean NodeQOS?"),
        ("kind: PodQOS", "kind: PodQos", "did you mean PodQOS?"),
        ("metricRule:", "metricRules:", "did you mean metricRule?"),
        ("cpuThrottle:", "cputhrottle:", "did you mean cpuThrottle?"),
        ("metadata:", "metdata:", "did you mean metadata?"),
        ("name: throttle", "nam: throttle", "did you mean name?"),
        (
            "allowedActions:",
            "allowedAction:",
            "did you mean allowedActions?",
        ),
        (
            "value: 6000",
            "value: 80%",
            "for a percentage write name: cpu_total_utilization and value: 80",
        ),
        ("cpu_total_usage", "cpu", "did you mean cpu_total_usage?"),
    ] {
        let (code, findings) = findings(&EXAMPLE.replacen(right, wrong, 1));
        let [finding] = &findings[..] else {
            panic!("{wrong}: {findings:#?}")
        };
        let message = finding["message"].as_str().unwrap();
        assert!(message.contains(expected), "{wrong}: {message}");
        assert_eq!(finding["severity"], "error", "{wrong}");
        assert_eq!(code, Some(1), "{wrong}");
    }
}

#[test]
fn a_percentage_of_a_metric_in_percent_names_no_other_metric() {
    let text = GOOD.replace("value: 80", "value: 80%");
    let (_, findings) = findings(&text);
    let expected = "not \"80%\"; cpu_total_utilization is in percent: write 80";
    assert!(
        findings
            .iter()
            .any(|it| is(it, "spec.rules[0].metricRule.value", expected)),
        "{findings:#?}"
    );
}

#[test]
fn a_mistake_does_not_affect_other_objects() {
    for Case { name, text, .. } in cases() {
        for text in [text.clone() + GOOD, GOOD.to_owned() + &text] {
            let objects = manifest::read(&text)
                .objects
                .into_iter()
                .map(|object| object.value);
            let compiled = compile(&Objects::from_values(objects), &facts());
            let rule = compiled
                .policy
                .rules
                .iter()
                .find(|rule| &*rule.id.0 == "good/good_rule");
            assert!(rule.is_some(), "{name}: {:?}", compiled.findings);
            assert!(
                compiled
                    .policy
                    .pods
                    .iter()
                    .any(|pods| pods.name == "good-pods"),
                "{name}"
            );
        }
    }
}

/// Covers the cases whose mistake is only in rule 0: the rule after it stays in force.
#[test]
fn an_invalid_rule_does_not_affect_the_next() {
    let mut seen = 0;
    for Case {
        name,
        text,
        expected,
        ..
    } in cases()
    {
        let one_rule = expected
            .iter()
            .all(|(path, _)| path.starts_with("spec.rules[0]"));
        if !one_rule || !text.contains("name: other") || name.starts_with("value .") {
            continue;
        }
        seen += 1;
        let objects = manifest::read(&(text + GOOD))
            .objects
            .into_iter()
            .map(|object| object.value);
        let compiled = compile(&Objects::from_values(objects), &facts());
        let ids: Vec<_> = compiled
            .policy
            .rules
            .iter()
            .map(|rule| rule.id.to_string())
            .collect();
        assert!(
            ids.contains(&"bad/other".to_owned()),
            "{name}: {ids:?}, {:?}",
            compiled.findings
        );
    }
    assert!(seen > 30, "{seen}");
}

#[test]
fn a_quoted_fraction_is_accepted() {
    let text = "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: a}\nspec:\n  rules:\n  - {name: a, actionName: good-action, metricRule: {name: cpu_load_1_min, value: \"0.5\"}}\n";
    let (code, findings) = findings(&format!("{text}{GOOD}"));
    assert_eq!(findings, Vec::<Value>::new());
    assert_eq!(code, Some(0));
}

#[test]
fn an_empty_label_selector_is_accepted() {
    let (code, findings) = findings(GOOD);
    assert_eq!((code, findings), (Some(0), Vec::new()));
}

#[test]
fn anchors_and_lists_are_read_as_by_kubectl() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: &v ensurance.crane.io/v1alpha1\n  kind: AvoidanceAction\n  metadata: {name: a}\n  spec: &spec {coolDownSeconds: 5}\n- apiVersion: *v\n  kind: AvoidanceAction\n  metadata: {name: b}\n  spec:\n    <<: *spec\n    coolDownSecond: 6\n";
    let (code, findings) = findings(text);
    assert_eq!(code, Some(1));
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert!(is(
        &findings[0],
        "spec.coolDownSecond",
        "did you mean coolDownSeconds?"
    ));
    assert_eq!(findings[0]["line"], 13);
    assert_eq!(findings[0]["name"], "b");
}

#[test]
fn a_field_that_is_not_enforced_is_a_warning() {
    let text = "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: PodQOS\nmetadata: {name: a}\nspec:\n  allowedActions: [throttle]\n  labelSelector: {}\n  resourceQOS: {cpuQOS: {cpuPriority: 3}}\n";
    let (code, findings) = findings(text);
    assert_eq!(code, Some(1));
    let allowed = check(text, &["--allow-warnings"]);
    assert_eq!(allowed.status.code(), Some(0));
    assert_eq!(findings.len(), 1);
    assert_eq!(findings[0]["reason"], "FieldsNotEnforced");
    assert_eq!(findings[0]["severity"], "warning");
    assert_eq!(findings[0]["line"], 8);
    assert_eq!(findings[0]["column"], 26);
}

/// A policy that acts, with this strategy, avoidance threshold, action and `PodQOS` spec.
fn policy(strategy: &str, evaluations: u32, action: &str, pods: &str) -> String {
    let head = "apiVersion: ensurance.crane.io/v1alpha1";
    format!(
        "---\n{head}\nkind: AvoidanceAction\nmetadata: {{name: act}}\nspec: {action}\n---\n{head}\nkind: NodeQOS\nmetadata: {{name: node}}\n\
         spec:\n  rules:\n  - {{name: cpu, actionName: act, {strategy}avoidanceThreshold: {evaluations}, metricRule: {{name: \
         cpu_total_utilization, value: 80}}}}\n---\n{head}\nkind: PodQOS\nmetadata: {{name: p}}\nspec: {pods}\n"
    )
}

#[test]
fn notes_say_what_would_protect_better_and_change_no_exit_status() {
    let notes = |text: &str| -> Vec<String> {
        let output = check(text, &["--output", "json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["findings"], serde_json::json!([]), "{text}");
        assert_eq!(output.status.code(), Some(0));
        let notes = report["notes"].as_array().into_iter().flatten();
        let reason = |it: &Value| it["reason"].as_str().unwrap().to_owned();
        notes.map(reason).collect()
    };
    let labelled = "{allowedActions: [act], labelSelector: {matchLabels: {workload: batch}}}";
    let idle = "{throttle: {cpuThrottle: {idle: true}}}";
    let enforce = "strategy: Enforce, ";
    assert_eq!(
        notes(&policy("", 3, idle, labelled)),
        ["ActsOnAllNodes", "StrategyLeftOut"]
    );
    assert_eq!(
        notes(&policy(enforce, 3, idle, labelled)),
        ["ActsOnAllNodes"]
    );
    assert_eq!(
        notes(&policy("strategy: None, ", 3, idle, labelled)),
        ["ActsOnAllNodes"]
    );
    assert_eq!(
        notes(&policy("strategy: Preview, ", 3, idle, labelled)),
        [""; 0]
    );
    let selective = policy(enforce, 3, idle, labelled)
        .replace("  rules:", "  selector: {matchLabels: {pool: a}}\n  rules:");
    assert_eq!(notes(&selective), [""; 0]);
    let evicts = "{eviction: {}}";
    assert_eq!(
        notes(&policy(enforce, 1, evicts, labelled)),
        ["ActsOnAllNodes", "EvictsAtOnce"]
    );
    assert_eq!(
        notes(&policy(enforce, 3, evicts, labelled)),
        ["ActsOnAllNodes"]
    );
    let quotas = "{throttle: {cpuThrottle: {}}}";
    assert_eq!(
        notes(&policy(enforce, 3, quotas, labelled)),
        ["ProtectsLittle", "ActsOnAllNodes"]
    );
    let best_effort = "{allowedActions: [act], scopeSelector: {matchExpressions: [{scopeName: QOSClass, operator: In, values: [BestEffort]}]}}";
    assert_eq!(
        notes(&policy(enforce, 3, idle, best_effort)),
        ["ActsOnAllNodes", "ProtectsLittle"]
    );
}

#[test]
fn each_rule_has_a_sentence_after_the_notes() {
    let labelled = "{allowedActions: [act], labelSelector: {matchLabels: {workload: batch}}}";
    let idle = "{throttle: {cpuThrottle: {idle: true}}}";
    let output = check(&policy("strategy: Enforce, ", 3, idle, labelled), &[]);
    assert_eq!(output.stdout, b"");
    let summary = String::from_utf8(output.stderr).unwrap();
    assert!(
        summary.contains(": note: NodeQOS/node: spec: without a selector"),
        "{summary}"
    );
    assert!(
        summary.contains("node/cpu: on all nodes, after 20s in which cpu_total_utilization is above 80 percent: puts pods of PodQOS p into the idle class"),
        "{summary}"
    );
}

#[test]
fn text_output_has_one_line_per_finding() {
    let text = "apiVersion: ensurance.crane.io/v1alpha1\nkind: AvoidanceAction\nmetadata: {name: a}\nspec:\n  throttle:\n    cpuThrottle:\n      stepCPURatio: 0\n";
    let output = check(text, &[]);
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "<stdin>:7:7: error: AvoidanceAction/a: spec.throttle.cpuThrottle.stepCPURatio: stepCPURatio is 0, and must be \
         from 1 to 100; write for example 10\n"
    );
    let summary = String::from_utf8(output.stderr).unwrap();
    assert_eq!(summary, "1 error and 0 warnings in 1 policy object\n");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn policies_of_the_idle_class_say_how_many_batch_pods_it_holds() {
    let note = |text: &str| {
        let output = check(text, &["--output", "json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["note"].as_str().map(str::to_owned)
    };
    let action = include_str!("../../examples/ensurance/idle-class.yaml");
    let standing = include_str!("../../examples/ensurance/standing.yaml");
    let one_object = include_str!("../../examples/ensurance/one-object.yaml");
    for text in [action, standing, one_object] {
        let note = note(text).unwrap();
        assert!(
            note.contains("up to about 5 busy batch pods per CPU"),
            "{note}"
        );
        assert!(
            note.contains("BestEffort batch pods are held for any number"),
            "{note}"
        );
        assert!(
            note.contains("InPlacePodLevelResourcesVerticalScaling"),
            "{note}"
        );
    }
    let quotas = action.replace("idle: true", "idle: false");
    let normal = standing.replace("cpuPriority: 7", "cpuPriority: 0");
    for (text, original) in [(quotas, action), (normal, standing)] {
        assert_ne!(text, original);
        assert_eq!(note(&text), None);
    }
}

#[test]
fn severities_are_coloured_where_wanted_and_never_in_json() {
    let text = "apiVersion: ensurance.crane.io/v1alpha1\nkind: Nonsense\n";
    let escape = |output: &[u8]| output.contains(&0x1b);
    for (arguments, coloured) in [
        (&[][..], false),
        (&["--color", "always"], true),
        (&["--color=always", "-o", "json"], false),
        (&["--color=always", "-o", "yaml"], false),
        (&["--color", "never"], false),
    ] {
        let output = check(text, arguments);
        assert_eq!(escape(&output.stdout), coloured, "{arguments:?}");
    }
    let output = check(text, &["--color", "always"]);
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(
        found.starts_with("<stdin>:2:1: \u{1b}[1m\u{1b}[31merror:\u{1b}[0m Nonsense/: kind: "),
        "{found:?}"
    );
    let output = check("a: [", &["--color", "always", "no/such/file"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    let wanted = "plimsoll: \u{1b}[1m\u{1b}[31merror:\u{1b}[0m failed to read no/such/file";
    assert!(errors.contains(wanted), "{errors:?}");
}

#[test]
fn an_unreadable_file_is_exit_2_and_the_others_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("good.yaml"), GOOD).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["check", "no/such/file.yaml"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.contains("failed to read no/such/file.yaml"),
        "{errors}"
    );
    assert!(errors.contains("in 3 policy objects"), "{errors}");
}

#[test]
fn directories_are_read_recursively_and_other_kinds_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let hidden = dir.path().join("below/..data");
    std::fs::create_dir_all(&hidden).unwrap();
    std::fs::write(dir.path().join("below/good.yml"), GOOD).unwrap();
    std::fs::write(hidden.join("hidden.yaml"), "not: [read").unwrap();
    std::fs::write(dir.path().join("notes.txt"), "not: [read").unwrap();
    std::fs::write(
        dir.path().join("pod.yaml"),
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n",
    )
    .unwrap();
    std::fs::write(dir.path().join("latin1.yaml"), b"a: 1\nb: \xe9\n").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .arg("check")
        .arg(dir.path())
        .output()
        .unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(
        found.contains("latin1.yaml:2:4: error: is not UTF-8 text"),
        "{found}"
    );
    assert_eq!(found.lines().count(), 1, "{found}");
    let summary = String::from_utf8(output.stderr).unwrap();
    assert!(
        summary.contains("3 policy objects; 1 object of other kinds skipped"),
        "{summary}"
    );
}

#[test]
fn a_file_with_many_objects_is_accepted() {
    let (code, findings) = findings(&GOOD.repeat(300));
    assert_eq!((code, findings.len()), (Some(0), 0));
}

#[test]
fn input_without_policies_is_an_error() {
    for text in [
        "",
        "# later\n",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n",
    ] {
        let output = check(text, &[]);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            stderr.contains(
                "no policy found; a policy starts with apiVersion: ensurance.crane.io/v1alpha1"
            ),
            "{stderr}"
        );
        let allowed = check(text, &["--allow-warnings"]);
        assert_eq!(allowed.status.code(), Some(1), "{text}");
    }
}

#[test]
fn a_policy_with_a_misspelt_group_is_an_error() {
    let (code, findings) = findings(&GOOD.replace("crane.io", "crane.oi"));
    assert_eq!(code, Some(1));
    assert_eq!(findings.len(), 3, "{findings:?}");
    for finding in &findings {
        assert!(
            is(
                finding,
                "kind",
                "write apiVersion: ensurance.crane.io/v1alpha1"
            ),
            "{finding}"
        );
    }
}

#[test]
fn the_exit_status_reports_findings_with_closed_outputs() {
    let (reader, writer) = std::io::pipe().unwrap();
    let (errors, closed) = std::io::pipe().unwrap();
    drop((reader, errors));
    let status = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["check", "/dev/null"])
        .stdout(writer)
        .stderr(closed)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1), "a panic would be a signal or 101");
}

#[test]
fn a_closed_stdout_is_no_failure() {
    for args in [
        &["completions", "bash"][..],
        &["man", "run"],
        &["crds"],
        &["metrics"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
            .wait_with_output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {stderr}");
        assert_eq!(stderr, "", "{args:?}");
    }
}

#[test]
fn the_earliest_eviction_of_each_rule_is_said() {
    const POLICIES: &str = "\
{apiVersion: ensurance.crane.io/v1alpha1, kind: AvoidanceAction, metadata: {name: act},
  spec: {throttle: {cpuThrottle: {stepCPURatio: 10, minCPURatio: 10}}, eviction: {}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: q}, spec: {rules: [
  {name: load, actionName: act, metricRule: {name: cpu_load_1_min, value: 2}},
  {name: memory, actionName: act, strategy: Preview, metricRule: {name: memory_total_utilization, value: 80}}]}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: PodQOS, metadata: {name: all}, spec: {allowedActions: [act], labelSelector: {}}}
";
    for (args, after) in [
        (&[] as &[&str], "1m 50s"),
        (&["--evaluation-period", "1s"], "11s"),
    ] {
        let output = check(POLICIES, args);
        let text = String::from_utf8(output.stderr).unwrap();
        let load = format!(
            "note: q/load evicts {after} after its breach at the earliest, if its milder steps do not help\n"
        );
        assert!(text.contains(&load), "{text}");
        assert!(
            text.contains("note: q/memory would evict as soon as it is breached\n"),
            "{text}"
        );
    }
    let short = check(POLICIES, &["--evaluation-period", "99ms"]);
    assert_eq!(short.status.code(), Some(2));
    let text = String::from_utf8(short.stderr).unwrap();
    assert!(text.contains("the shortest period is 100ms"), "{text}");
}
