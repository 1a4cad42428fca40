//! Metrics of the most throttled pods.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::load::percent;
use crate::serve::with_one_series;

/// At most this many pods have a series.
const MAX_PODS: usize = 10;

/// A throttled pod. The derived order is by strength, the most throttled first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThrottledSeries {
    /// Its CPU limit, in percent of what it used or was allowed before.
    pub percent: u8,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// The rule that throttles it.
    pub rule: String,
}

impl ThrottledSeries {
    fn is_same_pod(&self, other: &Self) -> bool {
        self.namespace == other.namespace && self.pod == other.pod
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct Labels {
    namespace: String,
    pod: String,
    rule: String,
}

/// Gauges of these pods.
#[derive(Debug, Default)]
pub struct Throttled(Family<Labels, Gauge>);

impl Throttled {
    /// Registers the metric.
    pub fn register(&self, registry: &mut Registry) {
        let help = "CPU limit of a throttled pod, in percent of what it used or was allowed before; the ten most throttled pods";
        registry.register_with_unit("throttled_pod_cpu", help, percent(), self.0.clone());
    }

    /// One series, for the documentation.
    pub fn example(&self) {
        with_one_series(&self.0);
    }

    /// Sets the current values: for a pod with several entries the lowest.
    pub fn refresh(&self, all: &[ThrottledSeries]) {
        self.0.clear();
        for throttled in most_throttled(all.to_vec()) {
            let labels = Labels {
                namespace: throttled.namespace,
                pod: throttled.pod,
                rule: throttled.rule,
            };
            let gauge = self.0.get_or_create(&labels);
            gauge.set(i64::from(throttled.percent));
        }
    }
}

fn most_throttled(mut all: Vec<ThrottledSeries>) -> Vec<ThrottledSeries> {
    all.sort();
    let mut chosen: Vec<ThrottledSeries> = Vec::new();
    for one in all {
        if chosen.len() == MAX_PODS {
            break;
        }
        if !chosen.iter().any(|known| known.is_same_pod(&one)) {
            chosen.push(one);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn throttled(percent: u8, pod: &str) -> ThrottledSeries {
        let (namespace, rule) = ("shop".to_owned(), "q/cpu".to_owned());
        ThrottledSeries {
            percent,
            namespace,
            pod: pod.to_owned(),
            rule,
        }
    }

    #[test]
    fn the_ten_most_throttled_pods_are_listed_once_each() {
        let containers = [throttled(90, "twice"), throttled(5, "twice")];
        let others = (10..40).map(|percent| throttled(percent, &format!("p{percent}")));
        let shown = most_throttled(containers.into_iter().chain(others.rev()).collect());
        let percents: Vec<u8> = shown.iter().map(|pod| pod.percent).collect();
        assert_eq!(percents, [5, 10, 11, 12, 13, 14, 15, 16, 17, 18]);
        assert_eq!(shown.iter().filter(|pod| pod.pod == "twice").count(), 1);
    }
}
