//! Renders the Helm chart, and reads the permissions that it grants.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

pub mod document;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// The verbs of the Kubernetes API that are HTTP requests.
pub const VERBS: [&str; 8] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
];

/// The namespace of the installation.
pub const NAMESPACE: &str = "plimsoll";

/// A file of the repository.
pub fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The chart with default values, as YAML.
pub fn rendered(helm: &Path, namespace: &str) -> String {
    rendered_from(helm, namespace, &file(CHART), &[])
}

/// The chart, with more arguments for `helm template`.
pub fn rendered_with(helm: &Path, namespace: &str, args: &[&str]) -> String {
    rendered_from(helm, namespace, &file(CHART), args)
}

const CHART: &str = "charts/plimsoll";

fn rendered_from(helm: &Path, namespace: &str, chart: &Path, args: &[&str]) -> String {
    let output = Command::new(helm)
        .args(["template", "plimsoll", "--namespace", namespace])
        // The tests' administrator creates the tokens that kubelets would.
        .arg("--set=tokens.creators={admin}")
        .arg(chart)
        .args(args)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The chart with the objects of `helm test` and `helm uninstall`. The chart omits them without a cluster, so a copy without
/// that condition is rendered.
pub fn rendered_with_hooks(helm: &Path, namespace: &str) -> String {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(&file(CHART), copy.path());
    for name in ["test", "uninstall"] {
        let path = copy.path().join(format!("templates/{name}.yaml"));
        let text = std::fs::read_to_string(&path).unwrap();
        let condition = r#"if include "plimsoll.asksCluster" ."#;
        assert!(text.contains(condition), "{name}");
        std::fs::write(path, text.replace(condition, "if true")).unwrap();
    }
    rendered_from(helm, namespace, copy.path(), &[])
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The objects of a rendered chart: each with its text.
pub fn objects(rendered: &str) -> Vec<(Value, &str)> {
    let documents = rendered.split("\n---\n");
    let read = |text| -> (Value, &str) { (serde_saphyr::from_str(text).unwrap(), text) };
    documents
        .map(read)
        .filter(|(it, _)| it.is_object())
        .collect()
}

/// Verbs on one resource, for one actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permission {
    /// Name of a `ServiceAccount`, or a description of the users.
    pub actor: String,
    /// `None` for the whole cluster.
    pub namespace: Option<String>,
    pub group: String,
    /// Resource with its subresource, or a non-resource URL.
    pub resource: String,
    /// Empty for any name.
    pub names: Vec<String>,
    pub verbs: Vec<String>,
    pub why: String,
}

impl Permission {
    /// Whether it allows this.
    pub fn allows(&self, asked: &ReceivedRequest<'_>) -> bool {
        let named = self.names.is_empty() || self.names.iter().any(|name| name == asked.name);
        let here = self.namespace.as_deref();
        let here = here.is_none_or(|namespace| namespace == asked.namespace);
        let what = self.group == asked.group && self.resource == asked.resource;
        named && here && what && self.verbs.iter().any(|verb| verb == asked.verb)
    }
}

/// A request, for authorization.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedRequest<'a> {
    pub namespace: &'a str,
    pub group: &'a str,
    pub resource: &'a str,
    pub name: &'a str,
    pub verb: &'a str,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

/// The reason of each rule: the comment above it, else the one above the role.
fn reasons(role: &str) -> Vec<String> {
    let head = role.lines().take_while(|line| line.starts_with('#'));
    let head = head.filter_map(|line| line.strip_prefix("# "));
    let head: Vec<_> = head.filter(|line| !line.starts_with("Source:")).collect();
    let head = head.join(" ");
    let mut reasons = Vec::new();
    let mut above = String::new();
    for line in role.lines() {
        match line.strip_prefix("# ") {
            Some(words) => words.clone_into(&mut above),
            None if line.starts_with("- apiGroups") || line.starts_with("- nonResource") => {
                let why = std::mem::take(&mut above);
                reasons.push(if why.is_empty() { head.clone() } else { why });
            }
            None => above.clear(),
        }
    }
    reasons
}

/// The subjects bound to a role, with the namespace of the binding.
fn bound<'a>(
    objects: &'a [(Value, &str)],
    kind: &'a str,
    name: &'a str,
) -> impl Iterator<Item = (String, Option<String>)> + 'a {
    let bindings = objects.iter().map(|(object, _)| object);
    let bindings = bindings
        .filter(move |it| it["roleRef"]["kind"] == kind && it["roleRef"]["name"] == name)
        .filter(move |it| it["kind"] == format!("{kind}Binding"));
    bindings.flat_map(|binding| {
        let namespace = binding["metadata"]["namespace"].as_str().map(str::to_owned);
        let subjects = binding["subjects"].as_array().into_iter().flatten();
        subjects.map(move |subject| (text(&subject["name"]), namespace.clone()))
    })
}

/// Everything that the chart permits.
pub fn permissions(rendered: &str) -> Vec<Permission> {
    let objects = objects(rendered);
    let mut found = Vec::new();
    for (role, text_of) in &objects {
        let kind = text(&role["kind"]);
        if kind != "Role" && kind != "ClusterRole" {
            continue;
        }
        let name = text(&role["metadata"]["name"]);
        let namespace_of = &role["metadata"]["namespace"];
        let mut actors: Vec<_> = bound(&objects, &kind, &name)
            .filter(|(_, namespace)| {
                namespace_of.is_null() || namespace.as_deref() == namespace_of.as_str()
            })
            .collect();
        if role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true" {
            actors.push(("users with the role view, edit or admin".to_owned(), None));
        }
        assert!(!actors.is_empty(), "no subject is bound to {kind} {name}");
        let rules = role["rules"].as_array().unwrap();
        let reasons = reasons(text_of);
        assert_eq!(reasons.len(), rules.len(), "{text_of}");
        for (rule, why) in rules.iter().zip(reasons) {
            assert!(
                !why.is_empty(),
                "add a comment with the reason above the rule of {kind} {name}: {rule}"
            );
            for (actor, namespace) in &actors {
                found.extend(granted(rule, actor, namespace.as_deref(), &why));
            }
        }
    }
    found
}

fn granted(rule: &Value, actor: &str, namespace: Option<&str>, why: &str) -> Vec<Permission> {
    let groups = texts(&rule["apiGroups"]);
    let resources = texts(&rule["resources"]).into_iter();
    let resources = resources.flat_map(|resource| {
        let of = |group: &String| (group.clone(), resource.clone());
        groups.iter().map(of).collect::<Vec<_>>()
    });
    let paths = texts(&rule["nonResourceURLs"]).into_iter();
    let paths = paths.map(|path| (String::new(), path));
    let permission = |(group, resource)| Permission {
        actor: actor.to_owned(),
        namespace: namespace.map(str::to_owned),
        group,
        resource,
        names: texts(&rule["resourceNames"]),
        verbs: texts(&rule["verbs"]),
        why: why.to_owned(),
    };
    resources.chain(paths).map(permission).collect()
}

/// A `SelfSubjectAccessReview`.
pub fn access_review(asked: &ReceivedRequest<'_>) -> Value {
    let (resource, subresource) = asked
        .resource
        .split_once('/')
        .unwrap_or((asked.resource, ""));
    json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {
            "namespace": asked.namespace, "group": asked.group, "resource": resource,
            "subresource": subresource, "name": asked.name, "verb": asked.verb,
        }},
    })
}
