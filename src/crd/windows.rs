//! The file of `--windows`: windows over metrics of the node, for rules, reports and `/metrics`.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use jiff::SignedDuration;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::common::LabelSelector;
use super::compile::rule::http_probe;
use super::manifest::ManifestError;
use super::node_qos::HttpGet;
use super::path::at_index;
use super::schema::{inlined_schema, tidy};
use super::settings_file::{self, Errors};
use super::validate::Definition;
use super::words::{self, quoted};
use crate::engine::metric::{CustomMetric, Metric};
use crate::engine::window::{CustomWindow, Statistic};

/// A value is renewed at least this long after the last time: agents do not report more often.
const MIN_PERIOD: Duration = Duration::from_secs(10);
/// The names of the agent's own metrics start with this.
const OWN_PREFIX: &str = "plimsoll_";

/// The windows of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
pub struct WindowSettings {
    /// The windows, at most 16, each with a unique name.
    #[schemars(length(max = 16))]
    pub metrics: Vec<WindowEntry>,
}

/// A window over a metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowEntry {
    /// The name of the window in rules, reports and `/metrics`, for example `gpu_usage_avg_5m`.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z_][A-Za-z0-9_]*$')")
            .message("name is not a metric name; write letters, digits and '_', for example name: gpu_usage_avg_5m"),
    )]
    pub name: String,
    /// A metric of the node, or a series of `httpGet`. Of several series, the largest counts at each moment.
    #[schemars(length(min = 1, max = 200))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z_:][A-Za-z0-9_:]*$')")
            .message("source is not a metric name; write for example source: disk_utilization"),
    )]
    pub source: String,
    /// How the source is summarized, and over which time: `avg`, `stddev`, `p50`, `p90`, `p95` or `p99`, and `1m`, `5m`, `30m`,
    /// `1h` or `1d`, for example `avg_5m`; or `max_avg_1h`, `max_avg_1d`: the highest average of any 5 minutes.
    #[schemars(length(max = 32))]
    pub window: String,
    /// How often the value is renewed in reports and `/metrics`, from `10s` to the length of the window. Rules always use the
    /// current value. Defaults to `10s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), extend("default" = "10s"))]
    pub period: Option<String>,
    /// The selector over the labels of the series of the source. Defaults to all series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// The exporter that serves the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_get: Option<HttpGet>,
}

static DEFINITION: LazyLock<Definition> = LazyLock::new(|| {
    let mut schema = inlined_schema::<WindowSettings>();
    tidy(&mut schema);
    Definition::new(schema)
});

/// Reads the text of a file. An empty file has no windows.
///
/// # Errors
/// All that is wrong, by line.
pub fn read(text: &str) -> Result<Vec<CustomWindow>, Vec<ManifestError>> {
    let second = "write all windows into the list of the first";
    let windows = settings_file::read(text, &DEFINITION, second, compile)?;
    Ok(windows.unwrap_or_default())
}

fn compile(settings: &WindowSettings, errors: &mut Errors) -> Vec<CustomWindow> {
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    let mut windows = Vec::new();
    for (index, entry) in settings.metrics.iter().enumerate() {
        let path = at_index("metrics", index);
        let field = |name: &str| format!("{path}.{name}");
        if let Some(problem) = name_problem(&entry.name) {
            errors.push(field("name"), problem);
        }
        if let Some(first) = names.insert(&entry.name, index) {
            let message = format!(
                "{} is already the name of metrics[{first}]; choose another",
                quoted(&entry.name)
            );
            errors.push(field("name"), message);
        }
        let source = source(entry).map_err(|problem| errors.push(field("source"), problem));
        let statistic = statistic(entry).map_err(|problem| errors.push(field("window"), problem));
        let (Ok(source), Ok(statistic)) = (source, statistic) else {
            continue;
        };
        if let Some((name, problem)) = extra_field(entry, &source) {
            errors.push(field(name), problem);
        }
        match period(entry, statistic) {
            Err(problem) => errors.push(field("period"), problem),
            Ok(period) => windows.push(CustomWindow {
                metric: Arc::new(CustomMetric {
                    name: entry.name.as_str().into(),
                    source,
                    statistic,
                }),
                series: entry.selector.as_ref().map(LabelSelector::compile),
                probe: entry
                    .http_get
                    .as_ref()
                    .and_then(|get| http_probe(get, None)),
                period,
            }),
        }
    }
    windows
}

fn name_problem(name: &str) -> Option<String> {
    if Metric::parse(name).is_some() {
        return Some(format!(
            "{} is a metric of every node already; remove the window, or choose another name",
            quoted(name)
        ));
    }
    name.starts_with(OWN_PREFIX).then(|| {
        format!(
            "{} starts like the names of the agent's own metrics, {OWN_PREFIX}; choose another",
            quoted(name)
        )
    })
}

/// A name of both a metric of the node and a series of the exporter means that of the node.
fn source(entry: &WindowEntry) -> Result<Metric, String> {
    let name = entry.source.as_str();
    let Some(metric) = Metric::parse(name) else {
        if entry.http_get.is_some() {
            return Ok(Metric::Probe(name.into()));
        }
        let names = Metric::names();
        let near = words::nearest(name, names.iter().map(String::as_str));
        let fix = near.map_or_else(
            || "write for example disk_utilization.".to_owned(),
            |near| format!("did you mean {near}?"),
        );
        return Err(format!(
            "{} is not a known metric; {fix} Or add httpGet to read it from an exporter",
            quoted(name)
        ));
    };
    match CustomWindow::refusal(&metric) {
        Some(why) => Err(format!("{} {why}; name another source", quoted(name))),
        None => Ok(metric),
    }
}

fn statistic(entry: &WindowEntry) -> Result<Statistic, String> {
    Statistic::parse(&entry.window).ok_or_else(|| {
        let names: Vec<String> = Statistic::all().map(|it| it.to_string()).collect();
        let near = words::nearest(&entry.window, names.iter().map(String::as_str));
        let near = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
        format!(
            "window is {}; write avg, stddev, p50, p90, p95 or p99 and 1m, 5m, 30m, 1h or 1d, such as avg_5m, or max_avg_1h or \
             max_avg_1d{near}",
            quoted(&entry.window)
        )
    })
}

/// A field that has no effect with this source.
fn extra_field(entry: &WindowEntry, source: &Metric) -> Option<(&'static str, String)> {
    let name = quoted(&entry.source);
    if entry.http_get.is_some() && !matches!(source, Metric::Probe(_)) {
        let problem = format!("{name} is measured on the node itself; remove httpGet");
        return Some(("httpGet", problem));
    }
    let has_labels = matches!(
        source,
        Metric::Probe(_) | Metric::Disk(_) | Metric::Interface(_)
    );
    let problem = || format!("{name} has one series without labels; remove selector");
    (entry.selector.is_some() && !has_labels).then(|| ("selector", problem()))
}

fn period(entry: &WindowEntry, statistic: Statistic) -> Result<Duration, String> {
    let Some(text) = &entry.period else {
        return Ok(MIN_PERIOD);
    };
    let max = statistic.length();
    let parsed: Option<SignedDuration> = text.parse().ok();
    let period = parsed.and_then(|period| Duration::try_from(period).ok());
    period
        .filter(|period| (MIN_PERIOD..=max).contains(period))
        .ok_or_else(|| {
            let max = SignedDuration::try_from(max).unwrap_or_default();
            format!(
                "period is {}; write a time from 10s to the {max:#} of the window, such as 1m",
                quoted(text)
            )
        })
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
