//! Imports between layers, and between the stages of the controller, go one way; source files stay short; a search for a
//! public type finds one definition.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each layer with the layers that it may import.
const LAYERS: [(&str, &[&str]); 20] = [
    ("engine", &[]),
    ("clock", &["engine"]),
    ("crd", &["engine"]),
    ("messages", &["engine", "crd"]),
    ("cluster", &["clock", "engine", "crd"]),
    ("serve", &["engine"]),
    ("trace", &["engine", "crd"]),
    ("node", &["clock", "engine", "crd", "messages"]),
    (
        "agent",
        &[
            "clock", "engine", "crd", "messages", "cluster", "serve", "node",
        ],
    ),
    ("evictions", &["clock", "engine", "crd", "cluster", "serve"]),
    (
        "metrics_api",
        &["clock", "engine", "crd", "cluster", "serve", "evictions"],
    ),
    (
        "scheduler_api",
        &["clock", "engine", "crd", "cluster", "serve", "metrics_api"],
    ),
    (
        "polling",
        &[
            "clock",
            "engine",
            "crd",
            "cluster",
            "serve",
            "node",
            "metrics_api",
        ],
    ),
    (
        "reconcilers",
        &[
            "clock",
            "engine",
            "crd",
            "cluster",
            "serve",
            "evictions",
            "metrics_api",
            "scheduler_api",
            "polling",
        ],
    ),
    ("preview", &["engine", "crd", "messages", "cluster"]),
    (
        "standalone",
        &["clock", "engine", "crd", "messages", "node", "trace"],
    ),
    ("scene", &["clock", "engine", "node"]),
    (
        "demo",
        &[
            "clock",
            "engine",
            "crd",
            "messages",
            "node",
            "trace",
            "standalone",
            "scene",
        ],
    ),
    (
        "cli",
        &[
            "clock",
            "engine",
            "crd",
            "messages",
            "cluster",
            "serve",
            "node",
            "agent",
            "preview",
            "evictions",
            "metrics_api",
            "scheduler_api",
            "polling",
            "reconcilers",
            "trace",
            "standalone",
            "scene",
            "demo",
        ],
    ),
    (
        "fuzz",
        &["clock", "engine", "crd", "node", "metrics_api", "trace"],
    ),
];

/// The files and directories of `src/reconcilers`: each may import those before it.
const STAGES: [&str; 10] = [
    "events",
    "retry",
    "observe",
    "compile",
    "plan",
    "apply",
    "status",
    "reconciler",
    "metrics",
    "run",
];

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

fn source_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The files of a directory, or the one file of a layer without a directory.
fn of_layer(layer: &str) -> Vec<PathBuf> {
    let file = source_root().join(layer).with_extension("rs");
    if file.exists() {
        vec![file]
    } else {
        sources(&source_root().join(layer))
    }
}

/// The modules that follow `parents` in the paths of a source file.
fn imports(path: &Path, parents: &[&str]) -> BTreeSet<String> {
    let text = fs::read_to_string(path).unwrap();
    let code = text.lines().filter(|it| !it.trim_start().starts_with("//"));
    let after = |line: &str| {
        let after = parents.iter().flat_map(|parent| line.split(parent).skip(1));
        let name = |rest: &str| {
            let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_');
            rest[..end.unwrap_or(rest.len())].to_owned()
        };
        after.map(name).collect::<Vec<_>>()
    };
    code.flat_map(after).collect()
}

#[test]
fn imports_go_one_way() {
    let mut violations = Vec::new();
    for (layer, allowed) in LAYERS {
        for path in of_layer(layer) {
            let imports = imports(&path, &["crate::"]);
            for (other, _) in LAYERS {
                if imports.contains(other) && other != layer && !allowed.contains(&other) {
                    violations.push(format!("{} imports {other}", path.display()));
                }
            }
        }
    }
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn a_stage_of_the_controller_imports_earlier_ones_only() {
    let root = source_root().join("reconcilers");
    let mut violations = Vec::new();
    for path in sources(&root) {
        let inside = path.strip_prefix(&root).unwrap().with_extension("");
        let stage = inside.iter().next().unwrap().to_str().unwrap();
        if stage == "mod" {
            continue;
        }
        let position = STAGES.iter().position(|it| *it == stage);
        let position = position.unwrap_or_else(|| panic!("add {stage} to STAGES"));
        let imports = imports(&path, &["crate::reconcilers::", "super::"]);
        for later in &STAGES[position + 1..] {
            if imports.contains(*later) {
                violations.push(format!("{} imports {later}", path.display()));
            }
        }
    }
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn every_source_directory_is_a_known_layer() {
    for entry in fs::read_dir(source_root()).unwrap().map(Result::unwrap) {
        if entry.path().is_dir() {
            let name = entry.file_name().into_string().unwrap();
            assert!(
                LAYERS.iter().any(|(layer, _)| *layer == name),
                "add src/{name} to LAYERS"
            );
        }
    }
}

#[test]
fn no_source_file_is_longer_than_650_lines() {
    for path in sources(&source_root()) {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(
            lines <= 650,
            "{} has {lines} lines: split it by concern",
            path.display()
        );
    }
}

/// Public types that may have the name of another: one for each module, or a field of an API beside what it is read into.
const SHARED_NAMES: [&str; 7] = [
    "Args",
    "CpuThrottle",
    "Options",
    "Pressure",
    "PressureLoad",
    "ResourceLoad",
    "StartError",
];

/// The name of the type that this line makes public.
fn public_type(line: &str) -> Option<&str> {
    let (visibility, item) = line.trim_start().split_once(' ')?;
    let (keyword, name) = item.split_once(' ')?;
    let defines_type = ["struct", "enum", "trait"].contains(&keyword);
    (visibility.starts_with("pub") && defines_type)
        .then(|| name.split(|c: char| !c.is_alphanumeric()).next())?
        .filter(|name| !name.is_empty()) // of a macro
}

#[test]
fn public_types_have_names_of_their_own() {
    let mut files: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for path in sources(&source_root()) {
        let text = fs::read_to_string(&path).unwrap();
        for name in text.lines().filter_map(public_type) {
            files.entry(name.to_owned()).or_default().push(path.clone());
        }
    }
    assert!(files.contains_key("Engine"), "no types found");
    files.retain(|name, files| files.len() > 1 && !SHARED_NAMES.contains(&name.as_str()));
    assert!(
        files.is_empty(),
        "rename, so that a search finds one: {files:#?}"
    );
}
