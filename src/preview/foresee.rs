//! One node: its rules against its live values, and what the engine's first round would be. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

use super::reasons::{Round, kinds};
use super::report::{NodePreview, PodPreview, RulePreview, Source, Standing};
use super::summary::{BEFORE, Looks, PERIOD, Size, uses};
use super::{Kept, Subject, Summary};
use crate::engine::metric::{InterfaceRate, Metric, Resource};
use crate::engine::plan::{Change, Plan};
use crate::engine::policy::{NodeFacts, PolicySet, Rule};
use crate::engine::sample::PodSample;
use crate::engine::{Engine, EngineState, RuleReport, compare_victims};
use crate::node::machine::wording::unknown_reason;
use crate::ordered;

/// Values that stand for the live ones, by name of the metric.
pub type Given = BTreeMap<String, f64>;

/// What is known of a node.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// Its name.
    pub node: &'a str,
    /// Its size.
    pub facts: &'a NodeFacts,
    /// What it is to keep.
    pub policy: &'a PolicySet,
    /// Its pods.
    pub subjects: &'a [Subject],
    /// What its kubelet told, or why it did not.
    pub summary: Result<&'a Summary, &'a str>,
    /// What its kubelet told some time before.
    pub earlier: Option<&'a Summary>,
    /// What its agent said last.
    pub kept: Option<&'a Kept>,
    /// What if.
    pub given: &'a Given,
    /// Now, by the wall clock.
    pub now: Timestamp,
}

/// What the rules would do on a node, as their first round with every threshold met.
pub fn foresee(scene: &Scene<'_>) -> NodePreview {
    let size = Size {
        cpus: scene.facts.cpus,
        memory: scene.facts.memory,
    };
    let looks = Looks::of(size, scene.earlier, scene.summary.ok(), scene.subjects);
    let sources = scene.sources();
    let (engine, plan) = scene.play(&looks, &sources);
    let reports = ordered::map(engine.reports().map(|report| (report.id.clone(), report)));
    let outcome = Outcome {
        scene,
        looks: &looks,
        engine: &engine,
        plan: &plan,
    };
    let rules = scene.policy.rules.iter().zip(sources);
    let rules =
        rules.filter_map(|(rule, source)| Some(outcome.rule(rule, source, reports.get(&rule.id)?)));
    NodePreview {
        node: scene.node.to_owned(),
        rules: rules.collect(),
        silent: scene.summary.err().map(str::to_owned),
    }
}

impl Scene<'_> {
    /// Where the value of each rule comes from.
    fn sources(&self) -> Vec<Source> {
        self.policy
            .rules
            .iter()
            .map(|rule| self.source(rule))
            .collect()
    }

    fn source(&self, rule: &Rule) -> Source {
        if let Some(value) = self.given.get(&rule.metric.to_string()) {
            return Source::Given { value: *value };
        }
        if let Some((value, age)) = self.kept.and_then(|kept| kept.value(rule, self.now)) {
            return Source::Agent { value, age };
        }
        match self.summary {
            Ok(_) => match untold(&rule.metric, self.earlier.is_some()) {
                None => Source::Kubelet,
                Some(why) => Source::Nowhere {
                    why: why.to_owned(),
                },
            },
            Err(why) => Source::Nowhere {
                why: why.to_owned(),
            },
        }
    }

    /// Lets the engine look twice; thresholds are met by the second look.
    fn play(&self, looks: &Looks, sources: &[Source]) -> (Engine, Plan) {
        let mut engine = Engine::new();
        let mut plan = Plan::default();
        let rules = self.policy.rules.iter().map(at_once).collect();
        let pods = self.policy.pods.clone();
        engine.set_policy(Arc::new(PolicySet { rules, pods }));
        engine.set_pods(
            self.subjects
                .iter()
                .map(|subject| Arc::clone(&subject.pod))
                .collect(),
        );
        if let Some(kept) = self.kept {
            engine.adopt(&EngineState::default(), &kept.throttles(self.subjects));
        }
        engine.step(BEFORE, &looks.before, &mut plan);
        for (rule, source) in self.policy.rules.iter().zip(sources) {
            match source {
                Source::Given { value } | Source::Agent { value, .. } => {
                    engine.assume(&rule.id, *value);
                }
                // Not a number is never judged.
                Source::Nowhere { .. } => engine.assume(&rule.id, f64::NAN),
                Source::Kubelet => {}
            }
        }
        engine.step(BEFORE + PERIOD, &looks.now, &mut plan);
        (engine, plan)
    }
}

/// The rule as if its value had been there for long enough; all rules are judged by the same two looks.
pub(super) fn at_once(rule: &Rule) -> Rule {
    Rule {
        avoidance_threshold: 1,
        period: PERIOD,
        ..rule.clone()
    }
}

/// Why the kubelet does not tell of a metric; `None` where it may.
const fn untold(metric: &Metric, twice: bool) -> Option<&'static str> {
    match metric {
        Metric::CpuUsage
        | Metric::CpuUtilization
        | Metric::MemoryUsage
        | Metric::MemoryUtilization
        | Metric::Pressure { .. } => None,
        Metric::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib) if twice => None,
        Metric::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib) => {
            Some("a rate takes two looks: give --sample 20s")
        }
        Metric::Interface(_) => Some("the kubelet counts no packets, only the node's agent does"),
        Metric::Probe(_) => Some("only the node's agent asks the probe"),
        Metric::Window(..) => Some("only the node's agent keeps it over so long a time"),
        Metric::ElasticCpuRequested => Some("nobody keeps it yet"),
        _ => Some("the kubelet does not tell, only the node's agent"),
    }
}

/// What came of it.
struct Outcome<'a> {
    scene: &'a Scene<'a>,
    looks: &'a Looks,
    engine: &'a Engine,
    plan: &'a Plan,
}

impl Outcome<'_> {
    fn rule(&self, rule: &Rule, source: Source, report: &RuleReport) -> RulePreview {
        let at_least = self.at_least(rule, &source);
        let standing = standing(rule, report.value, at_least);
        let over = matches!(standing, Standing::Over | Standing::Perhaps);
        RulePreview {
            rule: rule.id.clone(),
            strategy: rule.strategy,
            action: rule.action.name.clone(),
            metric: rule.metric.to_string(),
            value: report.value,
            at_least,
            unknown: unknown(rule, &source, report),
            source,
            mark: rule.watermark,
            restore: rule.restore,
            standing,
            evaluations: rule.avoidance_threshold,
            period: rule.period,
            gap: Some(self.engine.gap(&rule.id)).filter(|gap| *gap > 0),
            scheduling: rule.action.scheduling.filter(|_| over),
            in_force: self.in_force(rule),
            pods: match report.value {
                Some(value) if over && kinds(rule).next().is_some() => self.pods(rule, value),
                _ => Vec::new(),
            },
        }
    }

    /// The least that the kubelet's figure may stand for, in the metric's unit.
    fn at_least(&self, rule: &Rule, source: &Source) -> Option<f64> {
        let memory = self.scene.summary.ok()?.least_memory().unwrap_or_default();
        match rule.metric {
            _ if *source != Source::Kubelet => None,
            Metric::MemoryUsage => Some(memory.0 as f64),
            Metric::MemoryUtilization => {
                Some(memory.0 as f64 * 100.0 / self.scene.facts.memory.0 as f64)
            }
            _ => None,
        }
    }

    /// Pods that the agent has throttled for the rule already.
    fn in_force(&self, rule: &Rule) -> usize {
        let kept = self
            .scene
            .kept
            .map(|kept| kept.throttles(self.scene.subjects));
        let throttles = kept.unwrap_or_default();
        throttles
            .iter()
            .filter(|throttle| throttle.rule == rule.id)
            .count()
    }

    /// Every pod of the node in the order of victims, with what would be done to it or why not.
    fn pods(&self, rule: &Rule, value: f64) -> Vec<PodPreview> {
        let gap = self.engine.gap(&rule.id);
        let round = Round::new(self.scene, self.looks, self.plan, rule, value, gap);
        let by_memory = rule.metric.resource() == Some(Resource::Memory);
        let sample = |subject: &Subject| self.sample(subject);
        let used = |subject: &Subject| {
            let (cpu, memory) = sample(subject).map(uses).unwrap_or_default();
            if by_memory {
                memory.unwrap_or_default().0
            } else {
                cpu.unwrap_or_default().0
            }
        };
        let mut subjects: Vec<&Subject> = self.scene.subjects.iter().collect();
        ordered::sort_by(&mut subjects, |a, b| {
            compare_victims((&a.pod, used(a)), (&b.pod, used(b)))
        });
        let pods = subjects
            .into_iter()
            .map(|subject| self.pod(&round, subject));
        pods.collect()
    }

    fn sample(&self, subject: &Subject) -> Option<&PodSample> {
        let mut pods = self.looks.now.pods.iter();
        pods.find(|sample| sample.uid == subject.pod.uid)
    }

    fn pod(&self, round: &Round<'_>, subject: &Subject) -> PodPreview {
        let pod = &subject.pod;
        let decided = self.plan.transitions.iter();
        let decided =
            decided.filter(|t| t.rule == round.rule.id && t.change.pod() == Some(&pod.uid));
        let would: Vec<Change> = decided
            .map(|t| t.change.clone())
            .filter(|change| !matches!(change, Change::Spared { .. }))
            .collect();
        let mut policies = self.scene.policy.pods.iter();
        let (cpu, memory) = self.sample(subject).map(uses).unwrap_or_default();
        PodPreview {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            class: pod.qos,
            priority: pod.priority,
            matched: policies.any(|policy| policy.matches(pod)),
            cpu,
            memory,
            reasons: round.reasons(subject, &would),
            would,
        }
    }
}

fn standing(rule: &Rule, value: Option<f64>, at_least: Option<f64>) -> Standing {
    match value {
        None => Standing::Unknown,
        Some(value) if value > rule.watermark => match at_least {
            Some(least) if least <= rule.watermark => Standing::Perhaps,
            _ => Standing::Over,
        },
        Some(value) if value > rule.restore => Standing::Between,
        Some(_) => Standing::Under,
    }
}

/// Why there is no value.
fn unknown(rule: &Rule, source: &Source, report: &RuleReport) -> Option<String> {
    let reason = report.unknown?;
    if let Source::Nowhere { why } = source {
        return Some(why.clone());
    }
    Some(match rule.metric {
        Metric::Pressure { .. } => {
            "the kubelet tells of no pressure: it takes cgroup v2 and Kubernetes 1.34".to_owned()
        }
        Metric::Interface(_) => {
            "the kubelet did not look anew between the two answers: give a longer --sample"
                .to_owned()
        }
        _ => unknown_reason(reason).to_owned(),
    })
}

#[cfg(test)]
#[path = "foresee_tests.rs"]
mod tests;
