//! The engine is pure: it uses no I/O, clock, thread, randomness or other crate layer.

use std::path::{Path, PathBuf};

const FORBIDDEN: [&str; 16] = [
    "tokio",
    "kube::",
    "std::fs",
    "std::net",
    "std::env",
    "std::thread",
    "std::process",
    "Instant",
    "SystemTime",
    "Timestamp::now",
    "Zoned::now",
    // The time zones of the machine.
    "TimeZone::get",
    "TimeZone::system",
    "rand::",
    "crate::clock",
    "crate::crd",
];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn the_engine_has_no_side_effects() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine");
    let mut files = Vec::new();
    sources(&dir, &mut files);
    assert!(files.len() > 20, "the engine's files were not found");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let code = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        for (number, line) in code.enumerate() {
            for name in FORBIDDEN {
                assert!(
                    !line.contains(name),
                    "{} mentions {name} (code line {number}): {line}",
                    file.display()
                );
            }
            let ours = line.contains("use crate::") && !line.contains("crate::engine");
            assert!(
                !ours,
                "{} imports from another layer: {line}",
                file.display()
            );
        }
    }
}
