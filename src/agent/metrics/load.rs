//! Metrics of the node's load and its busiest pods, from the last report.

use std::sync::atomic::AtomicU64;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::crd::NodeMetricStatus;
use crate::crd::node_metric::{
    Amounts, Load, PeakStats, PodUsage, Pressure, ResourceWindows, WindowStats,
};
use crate::engine::metric::CustomMetric;
use crate::engine::quantity;
use crate::engine::window::CustomWindow;
use crate::serve::with_one_series;

type Float = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct PartLabels {
    part: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct TermLabels {
    /// `cpu`, `memory`, `pressure`, or `worst`: the highest of them.
    term: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct ResourceLabels {
    resource: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct PressureLabels {
    resource: &'static str,
    /// `some` or `full`.
    tasks: &'static str,
    window: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct StatLabels {
    resource: &'static str,
    window: &'static str,
    stat: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct WindowLabels {
    resource: &'static str,
    window: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct PodLabels {
    namespace: String,
    pod: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct PodStallLabels {
    namespace: String,
    pod: String,
    resource: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct StallLabels {
    resource: &'static str,
    stat: &'static str,
}

/// Gauges of the load.
#[derive(Debug, Default)]
pub struct LoadMetrics {
    cpu: Family<PartLabels, Float>,
    memory: Family<PartLabels, Float>,
    cpu_capacity: Float,
    memory_capacity: Float,
    pressure: Family<PressureLabels, Float>,
    terms: Family<TermLabels, Float>,
    expected: Family<ResourceLabels, Float>,
    line: Family<ResourceLabels, Float>,
    protected: Family<StallLabels, Float>,
    stats: Family<StatLabels, Float>,
    coverage: Family<WindowLabels, Float>,
    /// In the order of [`WINDOWS`].
    windows: [Float; 6],
    /// The windows of the node's settings.
    custom: Vec<Custom>,
    pod_cpu: Family<PodLabels, Float>,
    pod_memory: Family<PodLabels, Float>,
    pod_stalled: Family<PodStallLabels, Float>,
}

#[derive(Debug)]
struct Custom {
    name: String,
    help: String,
    gauge: Float,
}

/// The windows that load-aware schedulers read, under the names used in rules.
const WINDOWS: [(&str, &str); 6] = [
    (
        "cpu_usage_avg_5m",
        "CPU use in percent of the node's CPUs, average of the last 5 minutes",
    ),
    (
        "cpu_usage_max_avg_1h",
        "CPU use in percent of the node's CPUs, highest average of any 5 minutes in the last hour",
    ),
    (
        "cpu_usage_max_avg_1d",
        "CPU use in percent of the node's CPUs, highest average of any 5 minutes in the last day",
    ),
    (
        "mem_usage_avg_5m",
        "Memory use in percent of the node's memory, average of the last 5 minutes",
    ),
    (
        "mem_usage_max_avg_1h",
        "Memory use in percent of the node's memory, highest average of any 5 minutes in the last hour",
    ),
    (
        "mem_usage_max_avg_1d",
        "Memory use in percent of the node's memory, highest average of any 5 minutes in the last day",
    ),
];

impl LoadMetrics {
    /// Gauges without values, among them one for each of the `windows`.
    pub fn new(windows: &[CustomWindow]) -> Self {
        let custom = windows.iter().map(|window| {
            let CustomMetric {
                name,
                source,
                statistic,
            } = &*window.metric;
            Custom {
                name: name.to_string(),
                help: format!("{source} in {}, {statistic}", window.metric.unit()),
                gauge: Float::default(),
            }
        });
        Self {
            custom: custom.collect(),
            ..Self::default()
        }
    }

    /// Registers the metrics; those of the windows have no prefix.
    pub fn register(&self, registry: &mut Registry, bare: &mut Registry) {
        let cores = || Unit::Other("cores".to_owned());
        let help = "CPU in use since the last report, by the node, its pods, and the rest (system)";
        registry.register_with_unit("node_cpu_usage", help, cores(), self.cpu.clone());
        let help = "Memory in use: by the node (MemTotal less Hugetlb and MemAvailable), its pods (page cache included), and the rest";
        registry.register_with_unit("node_memory_usage", help, Unit::Bytes, self.memory.clone());
        let help = "CPUs online";
        registry.register_with_unit(
            "node_cpu_capacity",
            help,
            cores(),
            self.cpu_capacity.clone(),
        );
        let help = "Memory of the machine";
        let capacity = self.memory_capacity.clone();
        registry.register_with_unit("node_memory_capacity", help, Unit::Bytes, capacity);
        let help = "How near the node is to where its rules act, which is at 100 (the load line), by cpu, memory, pressure and the highest of them (worst)";
        registry.register_with_unit("load", help, percent(), self.terms.clone());
        let help =
            "What the node's pods and its system are expected to use, of the node's capacity";
        let expected = self.expected.clone();
        registry.register_with_unit("expected_usage", help, percent(), expected);
        let help = "The lowest threshold of an enforced rule over the resource, of the node's capacity; 90 without one";
        registry.register_with_unit("load_line", help, percent(), self.line.clone());
        let help = "Time in which some, or all (full), tasks waited for the resource, over 10, 60 and 300 s";
        registry.register_with_unit("node_pressure", help, percent(), self.pressure.clone());
        let help = "Time in which pods that no rule's action may touch waited for the resource, since the last report (cgroup v2)";
        let protected = self.protected.clone();
        registry.register_with_unit("node_protected_stalled", help, percent(), protected);
        let help = "The node's use over longer times, percent of its capacity: avg, stddev, p50, p90, p95, p99, max of 3 s means";
        registry.register_with_unit("node_usage", help, percent(), self.stats.clone());
        let help = "Share of the window for which there are samples; below 0.5 it has no figures";
        registry.register_with_unit(
            "node_window_coverage",
            help,
            Unit::Other("ratio".to_owned()),
            self.coverage.clone(),
        );
        for ((name, help), gauge) in WINDOWS.iter().zip(&self.windows) {
            bare.register(*name, format!("{help}; NaN while not known"), gauge.clone());
        }
        for Custom { name, help, gauge } in &self.custom {
            bare.register(name, format!("{help}; NaN while not known"), gauge.clone());
        }
    }

    /// Registers the metrics of the ten busiest pods.
    pub fn register_pods(&self, registry: &mut Registry) {
        let cores = Unit::Other("cores".to_owned());
        let help = "CPU in use since the last report, of the node's ten busiest pods";
        registry.register_with_unit("pod_cpu_usage", help, cores, self.pod_cpu.clone());
        let help = "Memory in use, page cache included, of the same pods";
        registry.register_with_unit(
            "pod_memory_usage",
            help,
            Unit::Bytes,
            self.pod_memory.clone(),
        );
        let help = "Time in which some thread of the pod waited for the resource, over 10 s, of the same pods (cgroup v2)";
        registry.register_with_unit("pod_stalled", help, percent(), self.pod_stalled.clone());
    }

    /// One series of each, for the documentation.
    pub fn example(&self) {
        with_one_series(&self.cpu);
        with_one_series(&self.memory);
        with_one_series(&self.pressure);
        with_one_series(&self.terms);
        with_one_series(&self.expected);
        with_one_series(&self.line);
        with_one_series(&self.protected);
        with_one_series(&self.stats);
        with_one_series(&self.coverage);
        with_one_series(&self.pod_cpu);
        with_one_series(&self.pod_memory);
        with_one_series(&self.pod_stalled);
    }

    /// Sets the values of a report. Unknown values have no series.
    pub fn refresh(&self, status: &NodeMetricStatus) {
        let usage = &status.usage;
        self.cpu.clear();
        self.memory.clear();
        for (part, amounts) in [
            ("node", &usage.node),
            ("pods", &usage.pods),
            ("system", &usage.system),
        ] {
            self.part(part, amounts);
        }
        let capacity = &status.capacity;
        self.cpu_capacity
            .set(number(capacity.cpu.as_ref()).unwrap_or(f64::NAN));
        self.memory_capacity
            .set(number(capacity.memory.as_ref()).unwrap_or(f64::NAN));
        self.pressure.clear();
        let pressure = &status.pressure;
        for (resource, pressure) in [
            ("cpu", &pressure.cpu),
            ("memory", &pressure.memory),
            ("io", &pressure.io),
        ] {
            if let Some(pressure) = pressure {
                self.pressure(resource, pressure);
            }
        }
        self.load(status.load.as_ref());
        self.protected.clear();
        let protected = &status.protected;
        for (resource, stat, value) in [
            ("cpu", "p95", protected.cpu_delay_p95),
            ("cpu", "max", protected.cpu_delay_max),
            ("memory", "max", protected.memory_stall_max),
            ("io", "max", protected.io_stall_max),
        ] {
            if let Some(value) = value {
                let labels = StallLabels { resource, stat };
                self.protected.get_or_create(&labels).set(value);
            }
        }
        self.stats.clear();
        self.coverage.clear();
        let windows = [
            ("cpu", &status.windows.cpu),
            ("memory", &status.windows.memory),
        ];
        for ((resource, windows), gauges) in windows.into_iter().zip(self.windows.chunks(3)) {
            if let Some(windows) = windows {
                self.windows(resource, windows, gauges);
            }
        }
        for Custom { name, gauge, .. } in &self.custom {
            let value = status.windows.custom.get(name);
            gauge.set(value.copied().unwrap_or(f64::NAN));
        }
        self.pod_cpu.clear();
        self.pod_memory.clear();
        self.pod_stalled.clear();
        status.top_pods.iter().for_each(|pod| self.pod(pod));
    }

    fn load(&self, load: Option<&Load>) {
        self.terms.clear();
        self.expected.clear();
        self.line.clear();
        let Some(load) = load else { return };
        let set = |term, percent| {
            self.terms.get_or_create(&TermLabels { term }).set(percent);
        };
        set("worst", load.percent);
        if let Some(pressure) = &load.pressure {
            set("pressure", pressure.percent);
        }
        for (resource, of) in [("cpu", &load.cpu), ("memory", &load.memory)] {
            set(resource, of.percent);
            let labels = ResourceLabels { resource };
            self.expected.get_or_create(&labels).set(of.expected);
            self.line.get_or_create(&labels).set(of.line);
        }
    }

    fn part(&self, part: &'static str, amounts: &Amounts) {
        for (family, amount) in [(&self.cpu, &amounts.cpu), (&self.memory, &amounts.memory)] {
            if let Some(amount) = number(amount.as_ref()) {
                family.get_or_create(&PartLabels { part }).set(amount);
            }
        }
    }

    fn pressure(&self, resource: &'static str, pressure: &Pressure) {
        for (tasks, stalled) in [("some", Some(pressure.some)), ("full", pressure.full)] {
            let Some(stalled) = stalled else { continue };
            for (window, value) in [
                ("10s", stalled.avg10),
                ("60s", stalled.avg60),
                ("300s", stalled.avg300),
            ] {
                let labels = PressureLabels {
                    resource,
                    tasks,
                    window,
                };
                self.pressure.get_or_create(&labels).set(value);
            }
        }
    }

    fn windows(&self, resource: &'static str, windows: &ResourceWindows, bare: &[Float]) {
        for (window, stats) in [
            ("5m", windows.last5m),
            ("30m", windows.last30m),
            ("1h", windows.last1h),
        ] {
            if let Some(stats) = stats {
                self.window(resource, window, &stats);
            }
        }
        let peak = |peak: Option<PeakStats>| peak.and_then(|peak| peak.value);
        let values = [
            windows.last5m.and_then(|stats| stats.avg),
            peak(windows.max_avg1h),
            peak(windows.max_avg1d),
        ];
        for (gauge, value) in bare.iter().zip(values) {
            gauge.set(value.unwrap_or(f64::NAN));
        }
        if let Some(day) = windows.max_avg1d {
            let labels = WindowLabels {
                resource,
                window: "1d",
            };
            self.coverage.get_or_create(&labels).set(day.coverage);
        }
    }

    fn window(&self, resource: &'static str, window: &'static str, stats: &WindowStats) {
        let labels = WindowLabels { resource, window };
        self.coverage.get_or_create(&labels).set(stats.coverage);
        for (stat, value) in [
            ("avg", stats.avg),
            ("p50", stats.p50),
            ("p90", stats.p90),
            ("p95", stats.p95),
            ("stddev", stats.stddev),
            ("p99", stats.p99),
            ("max", stats.max),
        ] {
            if let Some(value) = value {
                let labels = StatLabels {
                    resource,
                    window,
                    stat,
                };
                self.stats.get_or_create(&labels).set(value);
            }
        }
    }

    fn pod(&self, usage: &PodUsage) {
        let labels = PodLabels {
            namespace: usage.namespace.clone(),
            pod: usage.name.clone(),
        };
        for (family, amount) in [
            (&self.pod_cpu, &usage.cpu),
            (&self.pod_memory, &usage.memory),
        ] {
            if let Some(amount) = number(amount.as_ref()) {
                family.get_or_create(&labels).set(amount);
            }
        }
        for (resource, percent) in [
            ("cpu", usage.cpu_delay),
            ("memory", usage.memory_pressure),
            ("io", usage.io_pressure),
        ] {
            if let Some(percent) = percent {
                let labels = PodStallLabels {
                    namespace: usage.namespace.clone(),
                    pod: usage.name.clone(),
                    resource,
                };
                self.pod_stalled.get_or_create(&labels).set(percent);
            }
        }
    }
}

/// The unit percent, which Prometheus does not define.
pub fn percent() -> Unit {
    Unit::Other("percent".to_owned())
}

fn number(amount: Option<&Quantity>) -> Option<f64> {
    let amount: quantity::Quantity = amount?.0.parse().ok()?;
    Some(amount.as_f64())
}
