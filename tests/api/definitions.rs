//! Compares our validation and defaults with the code of the API server itself (`tests/apiserver`, Go), on the same
//! definitions and manifests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use crate::bad_input::variants::variants;
use crate::bad_input::{Case, GOOD, cases};
use plimsoll::crd::validate::validate;
use plimsoll::crd::{Kind, Objects, compile, definitions, manifest};
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::quantity::Quantity;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The reference program for each version, built once; `None`, with a message, if Go is not installed.
static REFERENCE: LazyLock<Option<PathBuf>> = LazyLock::new(|| reference("go.mod"));
static REFERENCE_1_33: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| reference("kubernetes-1.33.mod"));

fn reference(modules: &str) -> Option<PathBuf> {
    if Command::new("go").arg("version").output().is_err() {
        eprintln!("skipped: `go` is not installed, so the code of the API server cannot be built");
        return None;
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("apiserver-{modules}"));
    let output = Command::new("nice")
        .args(["go", "build", "-ldflags=-s -w", "-modfile", modules, "-o"])
        .arg(&program)
        .arg(".")
        .current_dir(root().join("tests/apiserver"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "failed to build tests/apiserver: {errors}"
    );
    Some(program)
}

/// Runs the reference on these files; `None` if it is not available.
fn run_reference(files: &[PathBuf]) -> Option<Value> {
    let program = REFERENCE.as_ref()?;
    Some(run_program(program, &root().join("crds"), files))
}

fn run_program(program: &Path, definitions: &Path, files: &[PathBuf]) -> Value {
    let output = Command::new(program)
        .arg(definitions)
        .args(files)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn policies() -> Vec<PathBuf> {
    let directories = [
        "examples/ensurance",
        "tests/guide",
        "charts/plimsoll/files/policies",
    ]
    .map(|directory| root().join(directory));
    let entries = directories
        .iter()
        .flat_map(|directory| std::fs::read_dir(directory).unwrap());
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    files
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn the_api_server_accepts_the_definitions() {
    let Some(answer) = run_reference(&[]) else {
        return;
    };
    let definitions = array(&answer["definitions"]);
    assert_eq!(definitions.len(), 4);
    for definition in definitions {
        assert_eq!(
            array(&definition["errors"]),
            &[] as &[Value],
            "{}",
            definition["file"]
        );
    }
}

#[test]
fn the_api_server_sets_the_same_defaults_in_every_example() {
    let files = policies();
    let Some(answer) = run_reference(&files) else {
        return;
    };
    for (file, theirs) in files.iter().zip(array(&answer["manifests"])) {
        let ours = manifest::read(&std::fs::read_to_string(file).unwrap());
        let theirs = array(&theirs["documents"]);
        assert_eq!(ours.objects.len(), theirs.len(), "{}", file.display());
        for (ours, theirs) in ours.objects.iter().zip(theirs) {
            let validation = validate(Kind::of(&ours.value).unwrap(), &ours.value);
            assert_eq!(validation.problems, [], "{}", file.display());
            assert_eq!(theirs["accepted"], true, "{}: {theirs:#}", file.display());
            assert_eq!(validation.object, theirs["defaulted"], "{}", file.display());
        }
        let raw = ours.objects.iter().map(|object| object.value.clone());
        let defaulted = theirs.iter().map(|document| document["defaulted"].clone());
        let node = NodeFacts::default();
        assert_eq!(
            compile(&Objects::from_values(raw), &node),
            compile(&Objects::from_values(defaulted), &node),
            "{}: compilation resolves the same defaults",
            file.display()
        );
    }
}

/// The rejected fields of a document, as normalized paths; empty if it is accepted.
type Rejected = BTreeSet<String>;

fn rejected(paths: impl Iterator<Item = String>) -> Rejected {
    let normalize = |path: String| {
        let path = path.replace(['[', ']'], ".").replace("..", ".");
        // The API server decodes metadata as a whole, and reports only the whole if it fails.
        let path = if path.starts_with("metadata") {
            "metadata"
        } else {
            &path
        };
        path.trim_matches('.').to_owned()
    };
    // "some validation rules were not checked because the object was invalid"
    let is_note = |path: &String| path.is_empty() || path == "<nil>";
    paths.map(normalize).filter(|path| !is_note(path)).collect()
}

fn ours(object: &Value) -> Rejected {
    let validation = validate(Kind::of(object).unwrap(), object);
    rejected(validation.problems.into_iter().map(|problem| problem.path))
}

fn theirs(document: &Value) -> Rejected {
    let errors = array(&document["errors"]).iter();
    let rejected = rejected(errors.map(|error| error["field"].as_str().unwrap().to_owned()));
    assert_eq!(
        document["accepted"] == true,
        rejected.is_empty(),
        "{document:#}"
    );
    rejected
}

/// Whether both reject the same fields. If a value has the wrong type, the API server may also reject its fields.
fn agree(ours: &Rejected, theirs: &Rejected) -> bool {
    let within = |path: &String| {
        ours.iter()
            .any(|outer| path.starts_with(&format!("{outer}.")))
    };
    ours.is_subset(theirs) && theirs.difference(ours).all(within)
}

/// The cases of invalid input, each in a file with valid objects after it.
fn bad_files(dir: &Path) -> (Vec<Case>, Vec<PathBuf>) {
    let cases: Vec<_> = cases()
        .into_iter()
        .filter(|case| !["alias bomb", "5 MB in one object"].contains(&case.name))
        .collect();
    let files: Vec<PathBuf> = (0..cases.len())
        .map(|index| dir.join(format!("{index:03}.yaml")))
        .collect();
    for (case, file) in cases.iter().zip(&files) {
        std::fs::write(file, case.text.clone() + GOOD).unwrap();
    }
    (cases, files)
}

#[test]
fn the_api_server_rejects_the_same_fields() {
    let dir = tempfile::tempdir().unwrap();
    let (cases, files) = bad_files(dir.path());
    let Some(answer) = run_reference(&files) else {
        return;
    };
    let mut wrong = Vec::new();
    for (case, answer) in cases.iter().zip(array(&answer["manifests"])) {
        let documents = array(&answer["documents"]);
        let rejected = documents
            .iter()
            .any(|document| !array(&document["errors"]).is_empty());
        if rejected != case.rejected {
            wrong.push(format!(
                "{}: rejected by the API server: {rejected}: {documents:#?}",
                case.name
            ));
            continue;
        }
        let read = manifest::read(&(case.text.clone() + GOOD)).objects;
        let known = documents
            .iter()
            .filter(|document| document["known"] == true);
        let our_objects = read
            .iter()
            .filter(|object| Kind::of(&object.value).is_some());
        for (object, document) in our_objects.zip(known) {
            let (ours, theirs) = (ours(&object.value), theirs(document));
            if !agree(&ours, &theirs) {
                wrong.push(format!("{}: ours {ours:?}, theirs {theirs:?}", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "builds a second version of Kubernetes: make versions"]
fn an_api_server_1_33_validates_with_its_definitions() {
    let Some(program) = REFERENCE_1_33.as_ref() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let definitions = dir.path().join("definitions");
    let written = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["crds", "--kubernetes=1.33", "--output-dir"])
        .arg(&definitions)
        .output()
        .unwrap();
    assert!(written.status.success(), "{written:?}");
    let (cases, bad) = bad_files(dir.path());
    let good = policies();
    let answer = run_program(program, &definitions, &[&bad[..], &good[..]].concat());
    for definition in array(&answer["definitions"]) {
        let file = &definition["file"];
        assert_eq!(array(&definition["errors"]), &[] as &[Value], "{file}");
    }
    let (rejected, accepted) = array(&answer["manifests"]).split_at(bad.len());
    for answer in accepted {
        for document in array(&answer["documents"]) {
            assert_eq!(document["accepted"], true, "{document:#}");
        }
    }
    for (case, answer) in cases.iter().zip(rejected) {
        let documents = array(&answer["documents"]);
        let is_rejected = documents.iter().any(|it| !array(&it["errors"]).is_empty());
        assert_eq!(is_rejected, case.rejected, "{}: {answer:#}", case.name);
    }
    // The definitions for newer versions exceed its CEL cost budget.
    let answer = run_program(program, &root().join("crds"), &[]);
    let errors = array(&answer["definitions"])
        .iter()
        .flat_map(|it| array(&it["errors"]));
    let costs = errors.filter(|it| it.to_string().contains("exceeds budget"));
    assert!(costs.count() > 0, "{answer:#}");
}

/// Values of every type, including many that are almost valid.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2i64..130).prop_map(Value::from),
        prop_oneof![Just(i64::from(i32::MAX)), Just(1 << 31), Just(i64::MAX), Just(65_536)].prop_map(Value::from),
        prop_oneof![Just(0.5), Just(2.0), Just(1e19), Just(-1.5)].prop_map(Value::from),
        "(0|4000|-1|0\\.5|500m|5Gi|1e3|1e1\\.5|1Kb|NaN|80%| 1|\\+1|1\\.|\\.5|1e400|10E)".prop_map(Value::from),
        "(None|Preview|In|NotIn|Exists|DoesNotExist|QOSClass|Priority|Namespace|BestEffort|NoSchedule|HTTP)".prop_map(Value::from),
        "(a|cpu-usage|cpu_usage|Cpu|-a|a b|a.b/c|cpu_total_usage|/metrics|metrics|kube-system|-100--1|5-3|-1--100|)".prop_map(Value::from),
        "[ -~]{0,8}|é{60,66}|x{60,70}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 4, |inner| {
        let field = prop_oneof![
            Just("matchLabels"),
            Just("matchExpressions"),
            Just("key"),
            Just("values"),
            Just("operator"),
            Just("a")
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(field.prop_map(str::to_owned), inner, 0..4)
                .prop_map(|fields| fields.into_iter().collect::<Value>()),
        ]
    })
}

/// The JSON pointers of all values in a value.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                pointers(value, &format!("{at}/{}", name.replace('/', "~1")), found);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                pointers(item, &format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
}

/// A valid object of each kind with every field.
fn full_objects() -> Vec<Value> {
    let full = std::fs::read_to_string(root().join("tests/support/bad_input/full.yaml")).unwrap();
    let manifest = manifest::read(&full);
    assert_eq!(manifest.parse_errors, []);
    manifest
        .objects
        .into_iter()
        .map(|object| object.value)
        .collect()
}

/// The schema of a kind.
fn schema(kind: Kind) -> Value {
    let definitions = definitions().map(|definition| serde_json::to_value(definition).unwrap());
    let definition = definitions
        .iter()
        .find(|definition| definition["spec"]["names"]["kind"] == kind.name());
    definition.unwrap()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// Runs the reference once on all objects, and compares the rejected fields.
fn assert_agreement(objects: &[Value]) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("all.json");
    let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects});
    std::fs::write(&file, serde_json::to_string(&list).unwrap()).unwrap();
    let Some(answer) = run_reference(&[file]) else {
        return;
    };
    let documents = array(&answer["manifests"][0]["documents"]);
    assert_eq!(documents.len(), objects.len());
    let mut wrong = Vec::new();
    let mut rejected = 0;
    for (object, document) in objects.iter().zip(documents) {
        let (ours, mut theirs) = (ours(object), theirs(document));
        rejected += usize::from(!theirs.is_empty());
        // We leave out a missing field if one beside it has a similar name.
        for error in array(&document["errors"]) {
            let path = error["field"].as_str().unwrap();
            let path = path.replace('[', ".").replace(']', "");
            let (parent, _) = path.rsplit_once('.').unwrap_or_default();
            let beside = ours.iter().any(|it| it.starts_with(parent));
            if error["message"] == "Required value" && beside && !ours.contains(&path) {
                theirs.remove(&path);
            }
        }
        if !agree(&ours, &theirs) {
            wrong.push(format!(
                "ours {ours:?}, theirs {theirs:?}\n  {}\n  {}",
                document["errors"], object["spec"]
            ));
        }
    }
    println!("{} objects, {rejected} rejected", objects.len());
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        objects.len(),
        wrong.join("\n")
    );
    assert!(rejected > objects.len() / 2 && rejected < objects.len());
}

#[test]
fn every_limit_is_that_of_the_api_server() {
    let variants = |object: &Value| {
        let mut schema = schema(Kind::of(object).unwrap());
        schema["properties"]["metadata"]["properties"]["name"] =
            serde_json::json!({"maxLength": 253});
        variants(&schema, object)
            .into_iter()
            .filter(|object| Kind::of(object).is_some())
            .collect::<Vec<_>>()
    };
    let objects: Vec<Value> = full_objects().iter().flat_map(variants).collect();
    assert_agreement(&objects);
}

#[test]
fn random_values_are_validated_like_in_the_api_server() {
    let mut runner = TestRunner::deterministic();
    let full = full_objects();
    let mut objects = full.clone();
    for object in &full {
        let mut found = Vec::new();
        pointers(&object["spec"], "/spec", &mut found);
        for pointer in found {
            for _ in 0..8 {
                let mut changed = object.clone();
                *changed.pointer_mut(&pointer).unwrap() =
                    values().new_tree(&mut runner).unwrap().current();
                objects.push(changed);
            }
        }
    }
    assert_agreement(&objects);
}

#[test]
fn quantities_are_parsed_like_in_kubernetes() {
    let Some(program) = REFERENCE.as_ref() else {
        return;
    };
    let text = prop_oneof![
        "[-+]?[0-9]{1,20}(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|)",
        "[-+]?[0-9]{0,12}\\.[0-9]{0,14}(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|)",
        "[-+]?0?\\.?[0-9]{1,6}[eE][-+]?[0-9]{1,2}",
        "[-+]?[0-9.]{0,4}[a-zA-Z+-]{0,3}[0-9.]{0,2}",
        "[ -~]{0,6}",
    ];
    let mut runner = TestRunner::deterministic();
    let texts: Vec<String> = (0..5000)
        .map(|_| text.new_tree(&mut runner).unwrap().current())
        .collect();
    let mut child = Command::new(program)
        .arg("quantities")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    serde_json::to_writer(child.stdin.take().unwrap(), &texts).unwrap();
    let output = child.wait_with_output().unwrap();
    let theirs: Vec<Option<String>> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(theirs.len(), texts.len());
    let mut wrong = Vec::new();
    // The two differences that `engine::quantity` states.
    let max = i128::from(i64::MAX) * 1_000_000_000;
    let capped = |nanos: &String| {
        let bound = if nanos.starts_with('-') { -max } else { max };
        nanos
            .parse::<i128>()
            .unwrap_or(bound)
            .clamp(-max, max)
            .to_string()
    };
    for (text, theirs) in texts.iter().zip(&theirs) {
        let has_digit = text.bytes().any(|byte| byte.is_ascii_digit());
        let theirs = theirs.as_ref().filter(|_| has_digit).map(capped);
        let ours = text
            .parse::<Quantity>()
            .ok()
            .map(|quantity| quantity.nanos().to_string());
        if ours != theirs {
            wrong.push(format!("{text:?}: ours {ours:?}, theirs {theirs:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        texts.len(),
        wrong.join("\n")
    );
    assert!(theirs.iter().flatten().count() > 2000);
}
