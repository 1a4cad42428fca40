//! Imports between layers go one way, and source files stay short.

use std::fs;
use std::path::{Path, PathBuf};

/// Each layer with the layers that it may import.
const LAYERS: [(&str, &[&str]); 16] = [
    ("engine", &[]),
    ("crd", &["engine"]),
    ("cluster", &["engine", "crd"]),
    ("serve", &["engine"]),
    ("trace", &["engine", "crd"]),
    ("node", &["engine", "crd"]),
    ("agent", &["engine", "crd", "cluster", "serve", "node"]),
    ("evictions", &["engine", "crd", "cluster", "serve"]),
    (
        "metrics_api",
        &["engine", "crd", "cluster", "serve", "evictions"],
    ),
    (
        "reconcilers",
        &[
            "engine",
            "crd",
            "cluster",
            "serve",
            "evictions",
            "metrics_api",
        ],
    ),
    ("preview", &["engine", "crd", "cluster", "node"]),
    ("standalone", &["engine", "crd", "node", "trace"]),
    ("scene", &["engine", "node"]),
    (
        "demo",
        &["engine", "crd", "node", "trace", "standalone", "scene"],
    ),
    (
        "cli",
        &[
            "engine",
            "crd",
            "cluster",
            "serve",
            "node",
            "agent",
            "preview",
            "evictions",
            "metrics_api",
            "reconcilers",
            "trace",
            "standalone",
            "scene",
            "demo",
        ],
    ),
    (
        "fuzz",
        &["engine", "crd", "node", "agent", "metrics_api", "trace"],
    ),
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

#[test]
fn imports_go_one_way() {
    let mut violations = Vec::new();
    for (layer, allowed) in LAYERS {
        for path in sources(&source_root().join(layer)) {
            let text = fs::read_to_string(&path).unwrap();
            for (other, _) in LAYERS {
                let named = text.contains(&format!("crate::{other}::"))
                    || text.contains(&format!("crate::{other};"));
                let documented_only = text
                    .lines()
                    .filter(|line| line.contains(&format!("crate::{other}")))
                    .all(|line| line.trim_start().starts_with("//"));
                if named && !documented_only && other != layer && !allowed.contains(&other) {
                    violations.push(format!("{} imports {other}", path.display()));
                }
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
