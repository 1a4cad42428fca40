use std::fmt::Write;

use serde_json::json;

use super::*;

fn one(text: &str) -> Value {
    let manifest = read(text);
    assert_eq!(manifest.parse_errors, [], "{text}");
    assert_eq!(manifest.objects.len(), 1, "{text}");
    manifest.objects[0].value.clone()
}

fn parse_error(text: &str) -> (usize, String) {
    let manifest = read(text);
    assert_eq!(manifest.parse_errors.len(), 1, "{text}: {manifest:?}");
    (
        manifest.parse_errors[0].position.line,
        manifest.parse_errors[0].message.clone(),
    )
}

#[test]
fn scalars_are_resolved_as_by_kubectl() {
    let value = one(
        "a: 010\nb: yes\nc: \"yes\"\nd: 1e3\ne: 2.5\nf: ~\ng: 0x1F\nh: 1_000\ni: 5Gi\nj: 08\nk: -0b11\nl: !!str 5\nm: 1.\nnn: +7\no: 0.5m\np: .5\nq: 2.0\nr: on\ns: .m\n1: x\ntrue: word\n",
    );
    assert_eq!(
        value,
        json!({
            "a": 8, "b": true, "c": "yes", "d": 1000, "e": 2.5, "f": null, "g": 31, "h": 1000, "i": "5Gi", "j": 8,
            "k": -3, "l": "5", "m": 1, "nn": 7, "o": "0.5m", "p": 0.5, "q": 2, "r": true, "s": ".m", "1": "x", "true": "word",
        })
    );
}

#[test]
fn every_value_has_its_position() {
    let text =
        "# one\nkind: A\nspec:\n  rules:\n  - name: x\n    labels: {a.b/c: d}\n  -\n    name: y\n";
    let manifest = read(text);
    let positions = &manifest.objects[0].positions;
    for (path, line, column) in [
        ("kind", 2, 1),
        ("spec", 3, 1),
        ("spec.rules", 4, 3),
        ("spec.rules[0].name", 5, 5),
        ("spec.rules[0].labels", 6, 5),
        ("spec.rules[0].labels[a.b/c]", 6, 14),
        ("spec.rules[0].missing", 5, 5),
        ("spec.rules[1].name", 8, 5),
        ("nowhere", 2, 1),
    ] {
        assert_eq!(positions.of(path), Position { line, column }, "{path}");
    }
}

#[test]
fn documents_are_separate_and_lines_count_from_the_file_start() {
    let text = "---\na: 1\n--- # two\nb: [\n---\n\n---\nc: 3\n...\n---\n{\"d\": 4}\n";
    let manifest = read(text);
    let values: Vec<_> = manifest
        .objects
        .iter()
        .map(|object| &object.value)
        .collect();
    assert_eq!(
        values,
        [&json!({"a": 1}), &json!({"c": 3}), &json!({"d": 4})]
    );
    assert_eq!(manifest.parse_errors.len(), 1);
    assert!(
        (4..=5).contains(&manifest.parse_errors[0].position.line),
        "{:?}",
        manifest.parse_errors
    );
    assert_eq!(manifest.objects[1].positions.of("c").line, 8);
    assert_eq!(manifest.objects[2].positions.of("d").line, 11);
}

#[test]
fn items_of_a_list_are_separate_objects() {
    let manifest = read("apiVersion: v1\nkind: List\nitems:\n- kind: A\n- kind: B\n");
    let values: Vec<_> = manifest
        .objects
        .iter()
        .map(|object| &object.value)
        .collect();
    assert_eq!(values, [&json!({"kind": "A"}), &json!({"kind": "B"})]);
    assert_eq!(manifest.objects[1].positions.of("kind").line, 5);
}

#[test]
fn anchors_aliases_and_merges_are_expanded() {
    let value = one(
        "base: &b {x: 1, z: 2}\nsame: *b\nmerged:\n  <<: *b\n  z: 3\nboth:\n  <<: [*b, {w: 4}]\n",
    );
    assert_eq!(value["same"], json!({"x": 1, "z": 2}));
    assert_eq!(value["merged"], json!({"x": 1, "z": 3}));
    assert_eq!(value["both"], json!({"x": 1, "z": 2, "w": 4}));
}

#[test]
fn an_alias_bomb_is_rejected() {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..60 {
        let before = level - 1;
        let _ = writeln!(
            text,
            "a{level}: &a{level} [*a{before}, *a{before}, *a{before}, *a{before}]"
        );
    }
    let (_, message) = parse_error(&text);
    assert!(message.contains("split it"), "{message}");
}

#[test]
fn aliases_of_long_strings_are_rejected_within_bounded_memory() {
    let key = "k".repeat(1000);
    let text = "x".repeat(100_000);
    for long in [
        format!("a: &a \"{text}\"\nb: [{}]\n", "*a, ".repeat(10_000)),
        format!(
            "a: &a {{? {key}{key} : 1}}\nb: [{}]\n",
            "*a, ".repeat(100_000)
        ),
    ] {
        let memory = allocation_counter::measure(|| {
            let (line, message) = parse_error(&long);
            assert!(line <= 2 && message.contains("split it"), "{message}");
        });
        assert!(memory.bytes_max < 100 << 20, "{memory:?}");
    }
}

#[test]
fn merges_are_limited_before_they_take_memory() {
    let fields: Vec<String> = (0..5000).map(|i| format!("k{i}: 1")).collect();
    let fields = fields.join(", ");
    for maps in [
        "{<<: *a}, ".repeat(10_000),
        format!("{{<<: [{}]}}", "*a, ".repeat(100_000)),
    ] {
        let text = format!("a: &a {{{fields}}}\nb: [{maps}]\n");
        let memory = allocation_counter::measure(|| {
            let (_, message) = parse_error(&text);
            assert!(message.contains("split it"), "{message}");
        });
        assert!(memory.bytes_max < 100 << 20, "{memory:?}");
    }
}

#[test]
fn the_alias_limit_is_for_the_whole_file() {
    let bomb = "---\na: &a [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\n";
    let manifest = read(&bomb.repeat(1000));
    assert!((100..500).contains(&manifest.objects.len()));
    assert!(manifest.parse_errors[0].message.contains("split it"));
}

#[test]
fn deep_nesting_is_rejected() {
    for text in [
        format!("a: {}{}", "[".repeat(100), "]".repeat(100)),
        format!("a: {}{}", "[".repeat(100_000), "]".repeat(100_000)),
        "- ".repeat(50_000),
    ] {
        let (line, _) = parse_error(&text);
        assert_eq!(line, 1);
    }
}

#[test]
fn a_tab_in_the_indentation_is_reported() {
    let (line, message) = parse_error("a:\n\tb: 1\n");
    assert_eq!(line, 2);
    assert!(
        message.contains("tab") && message.contains("spaces"),
        "{message}"
    );
}

#[test]
fn errors_have_the_column_in_characters() {
    for (text, column) in [
        ("a: [1, 2", 4),
        ("äöü: {b: 1, b: 2}\n", 13),
        ("a: b: c\n", 5),
        ("a: &x {b: [.nan]}\n", 12),
        ("\u{feff}a: 1\na: 2\n", 1),
    ] {
        let found = &read(text).parse_errors[0];
        assert_eq!(found.position.column, column, "{text}: {found:?}");
    }
}

#[test]
fn a_duplicate_key_is_reported_with_both_lines() {
    let (line, message) = parse_error("a: 1\nb: 2\nc: 3\na: 4\n");
    assert_eq!(line, 4);
    assert!(
        message.contains("\"a\" is given twice (first 3 lines before)"),
        "{message}"
    );
}

#[test]
fn a_number_that_is_not_finite_is_reported_with_its_field() {
    let manifest = read("spec:\n  rules:\n  - value: .nan\n");
    assert_eq!(manifest.parse_errors[0].path, "spec.rules[0].value");
    assert_eq!(manifest.parse_errors[0].position.line, 3);
    assert!(manifest.parse_errors[0].message.contains("write a number"));
}

#[test]
fn a_huge_document_is_rejected_and_many_small_ones_are_read() {
    let huge = format!("a: \"{}\"\n", "x".repeat(5 * 1024 * 1024));
    let (_, message) = parse_error(&format!("{huge}---\nb: 1\n"));
    assert!(message.contains("split it"), "{message}");
    assert_eq!(read(&format!("{huge}---\nb: 1\n")).objects.len(), 1);
    let many = "---\na: 1\nb: [1, 2]\n".repeat(20_000);
    assert_eq!(read(&many).objects.len(), 20_000);
    assert_eq!(read(&"x".repeat(17 * 1024 * 1024)).parse_errors.len(), 1);
}

#[test]
fn a_scalar_or_list_is_an_error_and_an_empty_document_is_skipped() {
    assert_eq!(read(""), Manifest::default());
    assert_eq!(read("---\n# nothing\n---\n"), Manifest::default());
    assert!(parse_error("just words\n").1.contains("apiVersion"));
    assert!(parse_error("- a\n- b\n").1.contains("apiVersion"));
    assert!(
        parse_error("a: &x [*x]\n").1.contains("alias")
            || !parse_error("a: &x [*x]\n").1.is_empty()
    );
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*") {
        let _ = read(&text);
    }

    #[test]
    fn no_yaml_like_text_panics(text in "([a-c]: |- |\\[|\\]|\\{|\\}|&a |\\*a|\n|  |\t|---\n|\"|'|# |<<: |!!str |~|1|\\||>|\\?|, )*") {
        let manifest = read(&text);
        for object in &manifest.objects {
            let lines = text.lines().count().max(1);
            proptest::prop_assert!(object.positions.of("a.b[0]").line <= lines);
        }
    }
}
