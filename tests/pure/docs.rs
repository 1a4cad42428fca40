//! The documentation matches the code, the chart and the examples.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::chart_support::document::document;
use crate::chart_support::{NAMESPACE, file, rendered_with_hooks};
use plimsoll::engine::metric::Metric;
use plimsoll::engine::window::CustomWindow;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// Metric names in the first column of the table in docs/semantics.md.
fn documented() -> Vec<String> {
    let text = read("docs/semantics.md");
    first_column(text.split("## Metrics").nth(1).unwrap())
}

/// Words in back quotes in the first column of tables.
fn first_column(text: &str) -> Vec<String> {
    let first_cells = text
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split('|').next());
    first_cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned))
        .collect()
}

#[test]
fn every_metric_is_documented() {
    let documented = documented();
    let family = |name: &str| {
        (name.contains("_pressure_")
            && documented
                .iter()
                .any(|d| d == "{cpu,memory,io}_pressure_{some,full}_avg{10,60,300}"))
            || (name.starts_with("mem_") && documented.iter().any(|d| d == "mem_..."))
    };
    for name in Metric::names() {
        assert!(
            documented.contains(&name) || family(&name),
            "docs/semantics.md lacks {name}"
        );
    }
}

/// The chart refuses what `--windows` refuses.
#[test]
fn the_chart_knows_the_sources_of_windows() {
    let schema = read("charts/plimsoll/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    let listed = |definition: &str| -> BTreeSet<String> {
        let names = schema["definitions"][definition]["enum"].as_array();
        let names = names.unwrap().iter().filter_map(|name| name.as_str());
        names.map(str::to_owned).collect()
    };
    let may_be_source = |name: &String| {
        let metric = Metric::parse(name).unwrap();
        CustomWindow::refusal(&metric).is_none()
    };
    let (sources, others) = Metric::names().into_iter().partition(may_be_source);
    assert_eq!(listed("nodeMetric"), sources);
    assert_eq!(listed("otherMetric"), others);
}

/// Quoted words in CamelCase with two or more capitals, as event reasons are.
fn reasons(text: &str) -> BTreeSet<String> {
    let is_reason = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_alphabetic())
            && word.chars().skip(1).any(|c| c.is_ascii_uppercase())
    };
    let words = text.split(['"', '`']).filter(is_reason);
    words.map(str::to_owned).collect()
}

/// A section of docs/events.md.
fn section(heading: &str) -> String {
    let page = read("docs/events.md");
    let (_, rest) = page.split_once(&format!("\n## {heading}\n")).unwrap();
    rest.split("\n## ").next().unwrap().to_owned()
}

/// A source file without its unit tests.
fn source(path: &str) -> String {
    read(path)
        .split("#[cfg(test)]\nmod ")
        .next()
        .unwrap()
        .to_owned()
}

#[test]
fn every_event_reason_is_documented() {
    let agent = ["src/agent/report/events.rs"];
    let controller = [
        "src/reconcilers/reconciler.rs",
        "src/reconcilers/plan/cap.rs",
        "src/reconcilers/plan/rollouts.rs",
        "src/reconcilers/plan/liveness/messages.rs",
    ];
    let others = [
        "NodeQOS",
        "NodeWatermark",
        "NodeWatermarks",
        "PodQOS",
        "NoSchedule",
        "PreferNoSchedule",
    ];
    for (heading, sources) in [
        ("Of a node, by its agent", &agent[..]),
        ("By the controller", &controller[..]),
    ] {
        let documented: BTreeSet<String> = first_column(&section(heading)).into_iter().collect();
        let in_code = sources.iter().flat_map(|path| reasons(&source(path)));
        let in_code: BTreeSet<String> = in_code
            .filter(|word| !others.contains(&word.as_str()))
            .collect();
        assert_eq!(documented, in_code, "{heading}");
    }
}

/// Capitalized words between these quotes, as condition types and reasons are.
fn names(text: &str, quote: char) -> BTreeSet<String> {
    let is_name = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_alphabetic())
            && !["True", "False", "Unknown"].contains(word)
    };
    let quoted = text.split(quote).skip(1).step_by(2).filter(is_name);
    quoted.map(str::to_owned).collect()
}

/// The body of a module or enum.
fn body(path: &str, head: &str) -> String {
    let text = source(path);
    let (_, rest) = text.split_once(&format!("{head} {{\n")).unwrap();
    rest.split("\n}\n").next().unwrap().to_owned()
}

#[test]
fn every_condition_and_its_reasons_are_documented() {
    let reported = source("src/agent/report/status.rs");
    let degraded = reported.split("degraded.push(").skip(1);
    let degraded: String = degraded
        .map(|rest| rest.split(',').next().unwrap())
        .collect();
    let kinds = "src/crd/node_watermark/status.rs";
    let watermark = [
        source("src/agent/report/conditions.rs"),
        source("src/crd/kstatus.rs"),
        degraded,
        body(kinds, "pub mod condition"),
        body(kinds, "pub mod stopped"),
        body("src/node/machine/ineffective.rs", "pub mod reason"),
    ];
    let variants = body("src/crd/finding.rs", "pub enum Reason");
    let variants = variants.split("// Notes").next().unwrap();
    let variants = variants
        .lines()
        .map(|line| line.trim().trim_end_matches(','));
    let variants = variants.filter(|line| !line.starts_with("//"));
    let policies = [
        source("src/reconcilers/status/conditions.rs"),
        source("src/crd/kstatus.rs"),
        source("src/reconcilers/status/policies.rs"),
        source("src/reconcilers/plan/progress.rs"),
        variants.flat_map(|name| ["\"", name, "\""]).collect(),
    ];
    let node_metric = [body("src/crd/node_metric.rs", "pub mod condition")];
    let node = [source("src/cluster/taint.rs")];
    for (heading, sources) in [
        ("Conditions of a NodeWatermark", &watermark[..]),
        (
            "Conditions of NodeQOS, PodQOS and AvoidanceAction",
            &policies[..],
        ),
        ("Condition of a NodeMetric", &node_metric[..]),
        ("Condition of a Node", &node[..]),
    ] {
        let in_code: BTreeSet<String> = sources.iter().flat_map(|text| names(text, '"')).collect();
        assert_eq!(names(&section(heading), '`'), in_code, "{heading}");
    }
}

#[test]
fn every_documented_metric_exists() {
    let families = [
        "{cpu,memory,io}_pressure_{some,full}_avg{10,60,300}",
        "mem_...",
    ];
    for name in documented() {
        let exists = Metric::parse(&name).is_some() || families.contains(&name.as_str());
        assert!(exists, "docs/semantics.md names {name}");
    }
}

#[test]
fn the_metrics_page_is_up_to_date() {
    assert!(
        read("docs/metrics.md") == plimsoll::cli::metrics::document(),
        "run: plimsoll metrics > docs/metrics.md"
    );
}

#[test]
fn every_metric_has_help_and_bounded_labels() {
    // A label with unbounded values would fill a Prometheus.
    let bounded = [
        "rule",
        "metric",
        "strategy",
        "state",
        "effect",
        "outcome",
        "kind",
        "verb",
        "code",
        "page",
        "result",
        "action",
        "reason",
        "part",
        "resource",
        "tasks",
        "term",
        "window",
        "stat",
        "namespace",
        "pod",
        "object",
        "page",
        "phase",
    ];
    let document = plimsoll::cli::metrics::document();
    let rows: Vec<Vec<&str>> = document
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 40, "{document}");
    for row in rows {
        let [_, name, kind, labels, help, _] = row[..] else {
            panic!("{row:?}");
        };
        assert!(["gauge", "counter", "histogram"].contains(&kind), "{name}");
        assert!(help.len() > 3, "{name} has no help");
        for label in labels.split('`').skip(1).step_by(2) {
            assert!(bounded.contains(&label), "{name} has the label {label}");
        }
    }
}

/// Our metric names in a text, without the suffix of histogram series.
fn metrics_in(text: &str) -> Vec<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let ours = |word: &&str| {
        [
            "plimsoll_agent_",
            "plimsoll_controller_",
            "cpu_usage_",
            "mem_usage_",
        ]
        .iter()
        .any(|prefix| word.starts_with(prefix))
    };
    words
        .filter(ours)
        .map(|word| word.strip_suffix("_bucket").unwrap_or(word))
        .collect()
}

#[test]
fn alerts_and_dashboard_use_existing_metrics() {
    let document = plimsoll::cli::metrics::document();
    for file in ["alerts.yaml", "dashboard.json"] {
        let text = read(&format!("charts/plimsoll/files/{file}"));
        let used = metrics_in(&text);
        assert!(used.len() > 15, "{used:?}");
        for metric in used {
            assert!(
                document.contains(&format!("| `{metric}` |")),
                "{file} uses {metric}"
            );
        }
    }
}

#[test]
fn every_alert_has_a_runbook_entry_and_tests() {
    let alerts = read("charts/plimsoll/files/alerts.yaml");
    let alerts: Vec<&str> = alerts
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    assert!(alerts.len() > 10);
    let runbook = read("docs/runbook.md");
    let entries: Vec<&str> = runbook
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    assert_eq!(entries, alerts, "docs/runbook.md and alerts.yaml differ");
    let tests = read("tests/chart/alerts.test.yaml");
    for alert in alerts {
        let inactive = format!("alertname: {alert}, exp_alerts: []");
        let fires = format!("alertname: {alert}\n    exp_alerts:\n    - exp_labels:");
        assert!(tests.contains(&inactive), "no test has {alert} inactive");
        assert!(tests.contains(&fires), "no test has {alert} firing");
    }
}

/// The shell commands of a section (indented, or fenced as sh), without comments.
fn commands(page: &str, heading: &str) -> Vec<String> {
    let text = read(page);
    let lines = text
        .lines()
        .skip_while(|line| line.trim_start_matches(['#', ' ']) != heading);
    let mut fence = None;
    let mut commands = Vec::new();
    for line in lines.skip(1) {
        let command = match (line.strip_prefix("```"), fence) {
            (Some(kind), None) => {
                fence = Some(kind);
                continue;
            }
            (Some(_), Some(_)) => {
                fence = None;
                continue;
            }
            (None, Some("sh")) => line,
            (None, Some(_)) => continue,
            (None, None) if line.starts_with('#') => break,
            (None, None) => match line.strip_prefix("    ") {
                Some(command) => command,
                None => continue,
            },
        };
        let command = command.split("  #").next().unwrap_or_default();
        commands.push(command.trim_end().to_owned());
    }
    commands
}

#[test]
fn every_page_has_the_same_install_commands() {
    let guide = commands("docs/install.md", "Install");
    assert_eq!(guide.len(), 1, "{guide:?}");
    for (page, heading) in [
        ("README.md", "Use it on your cluster"),
        ("charts/plimsoll/README.md", "Plimsoll's Helm chart"),
    ] {
        let commands = commands(page, heading).into_iter();
        let normalized = commands.map(|command| command.replace("--namespace ", "-n "));
        let normalized: Vec<String> = normalized.collect();
        let has_guide = normalized.windows(guide.len()).any(|part| part == guide);
        assert!(
            has_guide,
            "{page} has {normalized:#?} instead of {guide:#?}"
        );
    }
}

/// All pages of documentation.
fn pages() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = ["docs", "docs/internals"]
        .into_iter()
        .flat_map(|directory| {
            let pages = fs::read_dir(root.join(directory)).unwrap();
            pages.map(move |page| format!("{directory}/{}", page.unwrap().file_name().display()))
        });
    let others = ["README.md", "CONTRIBUTING.md", "charts/plimsoll/README.md"].map(str::to_owned);
    let pages = pages.filter(|page| Path::new(page).extension().is_some_and(|end| end == "md"));
    pages.chain(others).collect()
}

#[test]
fn every_install_command_sets_the_image_repository() {
    let named = "--set image.repository=registry.example/plimsoll";
    // A values file can set it instead, if the page says so.
    let values = [
        "--reset-then-reuse-values",
        "--reuse-values",
        "--values",
        "-f ",
    ];
    let notes = "charts/plimsoll/templates/NOTES.txt".to_owned();
    let mut installs = 0;
    for file in pages().into_iter().chain([notes]) {
        let text = read(&file);
        for line in text.lines().map(str::trim_start) {
            let verbs = ["install", "upgrade", "template"].map(|verb| format!("helm {verb} "));
            if !verbs.iter().any(|verb| line.starts_with(verb)) {
                continue;
            }
            installs += 1;
            // A published chart has the image of its release.
            if line.contains(" oci://") {
                continue;
            }
            let has_values = values.iter().any(|option| line.contains(option));
            assert!(line.contains(named) || has_values, "{file}: {line}");
            assert!(
                !has_values || text.contains("the image repository"),
                "{file} does not say that the values set it"
            );
        }
    }
    assert!(installs > 5, "{installs}");
}

#[test]
fn pages_name_the_registry_of_the_chart() {
    let values = read("charts/plimsoll/values.yaml");
    let repository = values
        .lines()
        .find_map(|line| line.strip_prefix("  repository: "))
        .unwrap();
    let (owner, _) = repository.rsplit_once('/').unwrap();
    let (registry, _) = owner.split_once('/').unwrap();
    let others = ["charts/plimsoll/Chart.yaml", "README.md"].map(str::to_owned);
    for file in pages().into_iter().chain(others) {
        for rest in read(&file).split(&format!("{registry}/")).skip(1) {
            let name = format!("{registry}/{rest}");
            let place: String = name.chars().take(owner.len() + 1).collect();
            assert_eq!(place, format!("{owner}/"), "{file}");
        }
    }
}

#[test]
fn every_relative_link_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for file in pages() {
        let text = read(&file);
        let directory = root.join(&file).parent().unwrap().to_owned();
        for target in text
            .split("](")
            .skip(1)
            .map(|rest| rest.split(')').next().unwrap())
        {
            let path = target.split('#').next().unwrap();
            let local = !path.is_empty() && !path.contains("://");
            assert!(
                !local || directory.join(path).exists(),
                "{file} links to {target}"
            );
        }
    }
}

const MATRIX: &str = "docs/permissions.md";

#[allow(clippy::disallowed_methods, reason = "settings of a test")]
fn setting(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// The rendered chart; `None`, with a message, if Helm is not installed.
fn chart() -> Option<String> {
    let bin = setting("PLIMSOLL_E2E_BIN").unwrap_or_else(|| file("target/e2e/bin"));
    let helm = bin.join("helm");
    if !helm.is_file() {
        let helm = helm.display();
        let text = format!("\nNOT TESTED: there is no {helm}: run `make cluster-build`\n");
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return None;
    }
    Some(rendered_with_hooks(&helm, NAMESPACE))
}

#[test]
fn the_permissions_page_is_up_to_date() {
    let Some(chart) = chart() else { return };
    let document = document(&chart);
    if setting("PLIMSOLL_GENERATE").is_some() {
        fs::write(file(MATRIX), document).unwrap();
        return;
    }
    assert!(
        fs::read_to_string(file(MATRIX)).unwrap() == document,
        "{MATRIX} is outdated: review what changed, then run `make generate`"
    );
}

#[test]
fn the_sample_audit_policy_matches_the_chart() {
    let text = read("examples/audit-policy.yaml");
    let policy: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(policy["apiVersion"], "audit.k8s.io/v1");
    assert_eq!(policy["kind"], "Policy");
    let permissions = read("docs/permissions.md");
    let words = |value: &serde_json::Value| -> Vec<String> {
        let words = value.as_array().into_iter().flatten();
        words.map(|it| it.as_str().unwrap().to_owned()).collect()
    };
    for rule in policy["rules"].as_array().unwrap() {
        let level = rule["level"].as_str().unwrap();
        assert!(["None", "Metadata", "Request"].contains(&level), "{level}");
        for user in words(&rule["users"]) {
            let account = user.rsplit(':').next().unwrap();
            assert!(
                user.starts_with("system:serviceaccount:plimsoll:"),
                "{user}"
            );
            assert!(permissions.contains(&format!("## {account}\n")), "{user}");
        }
        for namespace in words(&rule["namespaces"]) {
            assert!(
                permissions.contains(&format!("| {namespace} |")) || namespace.is_empty(),
                "{namespace}"
            );
        }
        // Only frequent writes of single accounts may be excluded.
        let all = ["users", "verbs", "resources"];
        assert!(
            level != "None" || all.iter().all(|field| !rule[*field].is_null()),
            "{rule}"
        );
    }
}

/// A newcomer pastes what the README shows: it is an example, which tests compile and apply.
#[test]
fn the_policy_of_the_readme_is_an_example() {
    let readme = read("README.md");
    let policy = readme.split("```yaml\n").nth(1).unwrap();
    let policy = policy.split("```").next().unwrap();
    let example = read("examples/ensurance/protect.yaml");
    assert_eq!(example.split_once("---\n").unwrap().1, policy);
}

/// The first screen: one command shows the product, one checks all of it, and CI runs that one.
#[test]
fn the_two_commands_of_the_readme_are_those_of_the_makefile_and_of_ci() {
    let readme = read("README.md");
    let first_screen: Vec<&str> = readme.lines().take(15).collect();
    let makefile = read("Makefile");
    for (command, target) in [("`make demo`", "\ndemo: "), ("`make test`", "\ntest: ")] {
        let named = first_screen.iter().any(|line| line.contains(command));
        assert!(named && makefile.contains(target), "{command}");
    }
    let ci = read(".ci/run");
    assert_eq!(ci.lines().last(), Some("exec make test"));
}
