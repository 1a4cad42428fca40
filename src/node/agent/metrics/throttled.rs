//! The pods that are throttled most, as Prometheus has them.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::load::percent;
use crate::ordered;
use crate::serve::with_one_series;

/// So many have series of their own.
const MOST: usize = 10;

/// A pod that is throttled. The derived order is that of how much, the most first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThrottledPod {
    /// What it may use, percent of what it used or was allowed before.
    pub percent: u8,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// The rule that it is for.
    pub rule: String,
}

impl ThrottledPod {
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
    /// Makes them known.
    pub fn register(&self, registry: &mut Registry) {
        let help = "What a throttled pod may use, percent of what it used or was allowed before; of the ten pods that are throttled most";
        registry.register_with_unit("throttled_pod_cpu", help, percent(), self.0.clone());
    }

    /// One series, for its labels.
    pub fn example(&self) {
        with_one_series(&self.0);
    }

    /// Takes what is in force: of a pod with several entries the one that leaves it least.
    pub fn refresh(&self, all: &[ThrottledPod]) {
        self.0.clear();
        for throttled in most(all.to_vec()) {
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

fn most(mut all: Vec<ThrottledPod>) -> Vec<ThrottledPod> {
    ordered::sort(&mut all);
    let mut most: Vec<ThrottledPod> = Vec::new();
    for one in all {
        if most.len() == MOST {
            break;
        }
        if !most.iter().any(|known| known.is_same_pod(&one)) {
            most.push(one);
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn throttled(percent: u8, pod: &str) -> ThrottledPod {
        let (namespace, rule) = ("shop".to_owned(), "q/cpu".to_owned());
        ThrottledPod {
            percent,
            namespace,
            pod: pod.to_owned(),
            rule,
        }
    }

    #[test]
    fn the_ten_that_are_throttled_most_are_told_each_once() {
        let containers = [throttled(90, "twice"), throttled(5, "twice")];
        let others = (10..40).map(|percent| throttled(percent, &format!("p{percent}")));
        let told = most(containers.into_iter().chain(others.rev()).collect());
        let percents: Vec<u8> = told.iter().map(|pod| pod.percent).collect();
        assert_eq!(percents, [5, 10, 11, 12, 13, 14, 15, 16, 17, 18]);
        assert_eq!(told.iter().filter(|pod| pod.pod == "twice").count(), 1);
    }
}
