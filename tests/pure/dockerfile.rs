//! The Dockerfile builds with the Rust of this package, and its image is used as the one of `make image` is.

use std::fs;
use std::path::Path;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn the_dockerfile_has_the_rust_version_of_the_package() {
    let image = concat!("rust:", env!("CARGO_PKG_RUST_VERSION"), "-");
    assert!(read("Dockerfile").contains(image), "no {image}");
}

#[test]
fn the_dockerfile_has_the_user_the_entry_point_and_the_labels_of_the_image() {
    let (dockerfile, script) = (read("Dockerfile"), read("scripts/image"));
    let label = |line: &str| {
        Some(
            line.split_once("org.opencontainers.")?
                .1
                .split_once('=')?
                .0
                .to_owned(),
        )
    };
    let labels = |text: &str| text.lines().filter_map(label).collect::<Vec<_>>();
    assert_eq!(labels(&dockerfile), labels(&script));
    assert_eq!(labels(&script).len(), 6);
    let same = ["FROM scratch", "USER ", "ENTRYPOINT "];
    let settings = |text: &str| {
        let settings = text
            .lines()
            .filter(|line| same.iter().any(|it| line.starts_with(it)));
        settings.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(settings(&dockerfile), settings(&script));
    for value in [
        concat!("description=\"", env!("CARGO_PKG_DESCRIPTION"), "\""),
        concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""),
    ] {
        assert!(dockerfile.contains(value), "no {value}");
    }
}
