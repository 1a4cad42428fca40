//! Evaluates the rules of one node on live values: the first round of the engine. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::reasons::{FirstRound, kinds};
use super::report::{
    LoadLines, NodePreview, PodPreview, RulePreview, ThresholdComparison, ValueSource,
};
use super::standing::StandingPreview;
use super::summary::{BEFORE, PERIOD, Samples, Size, uses};
use super::{KubeletSummary, PodSubject, ReportedWatermark};
use crate::engine::load::load_lines;
use crate::engine::metric::{InterfaceRate, Metric, Resource};
use crate::engine::plan::{Plan, PlanChange};
use crate::engine::pod::Pod;
use crate::engine::policy::{NodeFacts, PodPolicy, PolicySet, Rule};
use crate::engine::sample::PodSample;
use crate::engine::units::MilliCpu;
use crate::engine::weight_share::CpuWeights;
use crate::engine::{Engine, EngineState, RuleReport, compare_victims};
use crate::messages::unknown_reason;

/// Values to use instead of live ones, by metric name.
pub type ValueOverrides = BTreeMap<String, f64>;

/// Everything that the preview of one node depends on.
#[derive(Clone, Copy, Debug)]
pub struct NodeInput<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Labels and size of the node.
    pub facts: &'a NodeFacts,
    /// Compiled policies of the node.
    pub policy: &'a PolicySet,
    /// Pods of the node.
    pub subjects: &'a [PodSubject],
    /// The kubelet's summary, or why there is none.
    pub summary: Result<&'a KubeletSummary, &'a str>,
    /// An earlier summary, for rates.
    pub earlier: Option<&'a KubeletSummary>,
    /// The agent's last status.
    pub agent_status: Option<&'a ReportedWatermark>,
    /// Values given by `--value`.
    pub overrides: &'a ValueOverrides,
    /// Time between two evaluations of the agent.
    pub evaluation_period: Duration,
    /// Current wall-clock time.
    pub now: Timestamp,
}

/// What the rules would do on a node in their first round, as if each had been over its threshold for long enough.
pub fn evaluate(input: &NodeInput<'_>) -> NodePreview {
    let size = Size {
        cpus: input.facts.cpus,
        memory: input.facts.memory,
    };
    let samples = Samples::of(size, input.earlier, input.summary.ok(), input.subjects);
    let sources = input.sources();
    let (engine, plan) = input.run_engine(&samples, &sources);
    let reports = engine
        .reports()
        .map(|report| (report.id.clone(), report))
        .collect::<BTreeMap<_, _>>();
    let evaluation = Evaluation {
        input,
        samples: &samples,
        engine: &engine,
        plan: &plan,
    };
    let rules = input.policy.rules.iter().zip(sources);
    let rules = rules
        .filter_map(|(rule, source)| Some(evaluation.rule(rule, source, reports.get(&rule.id)?)));
    let [cpu, memory] = load_lines(
        &input.policy.rules,
        MilliCpu(u64::from(size.cpus) * 1000),
        size.memory,
        input.now,
    );
    // A node's objects do not say how its kernel weighs cgroups; kubelets refuse cgroup v1 by default from 1.35 on.
    let share = engine.batch_weight_share(CpuWeights::V2);
    NodePreview {
        node: input.node.to_owned(),
        rules: rules.collect(),
        standing: input.standing(),
        load_lines: LoadLines {
            cpu: cpu.into(),
            memory: memory.into(),
        },
        batch_weight_share: share.map(|share| share.percent),
        most_exposed: share.map(|share| share.pod.full_name().to_string()),
        kubelet_error: input
            .summary
            .err()
            .filter(|_| !input.policy.rules.is_empty())
            .map(str::to_owned),
    }
}

impl NodeInput<'_> {
    /// The source of each rule's value.
    fn sources(&self) -> Vec<ValueSource> {
        self.policy
            .rules
            .iter()
            .map(|rule| self.source(rule))
            .collect()
    }

    fn source(&self, rule: &Rule) -> ValueSource {
        if let Some(value) = self.overrides.get(&rule.metric.to_string()) {
            return ValueSource::Given { value: *value };
        }
        if let Some((value, age)) = self
            .agent_status
            .and_then(|agent_status| agent_status.value(rule, self.now))
        {
            return ValueSource::Agent { value, age };
        }
        match self.summary {
            Ok(_) => match unavailable_reason(&rule.metric, self.earlier.is_some()) {
                None => ValueSource::Kubelet,
                Some(why) => ValueSource::Unavailable {
                    why: why.to_owned(),
                },
            },
            Err(why) => ValueSource::Unavailable {
                why: why.to_owned(),
            },
        }
    }

    /// What each `PodQOS` does to its pods at all times.
    fn standing(&self) -> Vec<StandingPreview> {
        let acting = self.policy.pods.iter().filter(|it| it.standing.acts());
        let of = |policy: &PodPolicy| {
            let names = |gets: &dyn Fn(&Pod) -> bool| {
                let pods = self.subjects.iter().map(|subject| &subject.pod);
                let matching = pods.filter(|pod| pod.running && policy.matches(pod) && gets(pod));
                let mut names: Vec<String> =
                    matching.map(|pod| pod.full_name().to_string()).collect();
                names.sort();
                names
            };
            let standing = policy.standing;
            StandingPreview {
                policy: policy.name.clone(),
                preview: standing.preview,
                idle: names(&|pod| standing.idle && !pod.protected && !pod.terminating),
                millicores: standing.burst,
                burst: names(&|_| standing.burst > MilliCpu::ZERO),
            }
        };
        acting.map(of).collect()
    }

    /// Runs two engine steps; rules start to act at the second.
    fn run_engine(&self, samples: &Samples, sources: &[ValueSource]) -> (Engine, Plan) {
        let mut engine = Engine::new();
        let mut plan = Plan::default();
        let rules = self.policy.rules.iter().map(without_threshold).collect();
        let pods = self.policy.pods.clone();
        engine.set_policy(Arc::new(PolicySet { rules, pods }));
        engine.set_pods(
            self.subjects
                .iter()
                .map(|subject| Arc::clone(&subject.pod))
                .collect(),
        );
        if let Some(agent_status) = self.agent_status {
            engine.adopt(
                BEFORE,
                &EngineState::default(),
                &agent_status.throttles(self.subjects),
            );
        }
        engine.step(BEFORE, &samples.before, &mut plan);
        for (rule, source) in self.policy.rules.iter().zip(sources) {
            match source {
                ValueSource::Given { value } | ValueSource::Agent { value, .. } => {
                    engine.assume(&rule.id, *value);
                }
                // NaN is never compared.
                ValueSource::Unavailable { .. } => engine.assume(&rule.id, f64::NAN),
                ValueSource::Kubelet => {}
            }
        }
        engine.step(BEFORE + PERIOD, &samples.now, &mut plan);
        (engine, plan)
    }
}

/// The rule without `avoidanceThreshold` and hours, so that two samples are enough at any time of day.
pub(super) fn without_threshold(rule: &Rule) -> Rule {
    Rule {
        avoidance_threshold: 1,
        active_during: Vec::new(),
        ..rule.clone()
    }
}

/// Why the kubelet has no value of the metric; `None` if it may have.
const fn unavailable_reason(metric: &Metric, twice: bool) -> Option<&'static str> {
    match metric {
        Metric::CpuUsage
        | Metric::CpuUtilization
        | Metric::MemoryUsage
        | Metric::MemoryUtilization
        | Metric::Pressure { .. } => None,
        Metric::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib) if twice => None,
        Metric::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib) => {
            Some("a rate needs two samples: use --sample 20s")
        }
        Metric::Interface(_) => {
            Some("the kubelet does not count packets, only the node's agent does")
        }
        Metric::Probe(_) => Some("only the node's agent runs the probe"),
        Metric::Window(..) | Metric::Custom(_) => {
            Some("only the node's agent measures it over such a long time")
        }
        Metric::ElasticCpuRequested => Some("it is not supported yet"),
        _ => Some("the kubelet does not report it, only the node's agent does"),
    }
}

/// The result of the engine run, with its input.
struct Evaluation<'a> {
    input: &'a NodeInput<'a>,
    samples: &'a Samples,
    engine: &'a Engine,
    plan: &'a Plan,
}

impl Evaluation<'_> {
    fn rule(&self, rule: &Rule, source: ValueSource, report: &RuleReport) -> RulePreview {
        let at_least = self.at_least(rule, &source);
        let state = state(rule, report.value, at_least);
        let over = matches!(
            state,
            ThresholdComparison::Over | ThresholdComparison::Perhaps
        );
        RulePreview {
            rule: rule.id.clone(),
            strategy: rule.strategy,
            action: rule.action.name.clone(),
            metric: rule.metric.to_string(),
            value: report.value,
            at_least,
            unknown: unknown(rule, &source, report),
            source,
            threshold: rule.threshold,
            restore_value: rule.restore_value,
            state,
            outside_hours: !rule.is_active(self.input.now),
            evaluations: rule.avoidance_threshold,
            period: self.input.evaluation_period,
            evaluations_to_eviction: rule.evaluations_to_eviction(),
            gap: Some(self.engine.gap(&rule.id)).filter(|gap| *gap > 0),
            scheduling: rule.action.scheduling.filter(|_| over),
            in_force: self.in_force(rule),
            pods: match report.value {
                Some(value) if over && kinds(rule).next().is_some() => self.pods(rule, value),
                _ => Vec::new(),
            },
        }
    }

    /// Lower bound of the value, in the metric's unit, if the kubelet only gives bounds.
    fn at_least(&self, rule: &Rule, source: &ValueSource) -> Option<f64> {
        let memory = self.input.summary.ok()?.min_memory().unwrap_or_default();
        match rule.metric {
            _ if *source != ValueSource::Kubelet => None,
            Metric::MemoryUsage => Some(memory.0 as f64),
            Metric::MemoryUtilization => {
                Some(memory.0 as f64 * 100.0 / self.input.facts.memory.0 as f64)
            }
            _ => None,
        }
    }

    /// Number of pods that the agent already throttles for the rule.
    fn in_force(&self, rule: &Rule) -> usize {
        let agent_status = self
            .input
            .agent_status
            .map(|agent_status| agent_status.throttles(self.input.subjects));
        let throttles = agent_status.unwrap_or_default();
        throttles
            .iter()
            .filter(|throttle| throttle.rule == rule.id)
            .count()
    }

    /// Every pod of the node in victim order, with what would be done to it, or why nothing would.
    fn pods(&self, rule: &Rule, value: f64) -> Vec<PodPreview> {
        let gap = self.engine.gap(&rule.id);
        let round = FirstRound::new(self.input, self.samples, self.plan, rule, value, gap);
        let by_memory = rule.metric.resource() == Some(Resource::Memory);
        let sample = |subject: &PodSubject| self.sample(subject);
        let used = |subject: &PodSubject| {
            let (cpu, memory) = sample(subject).map(uses).unwrap_or_default();
            if by_memory {
                memory.unwrap_or_default().0
            } else {
                cpu.unwrap_or_default().0
            }
        };
        let mut subjects: Vec<&PodSubject> = self.input.subjects.iter().collect();
        subjects.sort_by(|a, b| compare_victims((&a.pod, used(a)), (&b.pod, used(b))));
        let pods = subjects
            .into_iter()
            .map(|subject| self.pod(&round, subject));
        pods.collect()
    }

    fn sample(&self, subject: &PodSubject) -> Option<&PodSample> {
        let mut pods = self.samples.now.pods.iter();
        pods.find(|sample| sample.uid == subject.pod.uid)
    }

    fn pod(&self, round: &FirstRound<'_>, subject: &PodSubject) -> PodPreview {
        let pod = &subject.pod;
        let decided = self.plan.transitions.iter();
        let decided =
            decided.filter(|t| t.rule == round.rule.id && t.change.pod() == Some(&pod.uid));
        let would: Vec<PlanChange> = decided
            .map(|t| t.change.clone())
            .filter(|change| !matches!(change, PlanChange::Skipped { .. }))
            .collect();
        let mut policies = self.input.policy.pods.iter();
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

fn state(rule: &Rule, value: Option<f64>, at_least: Option<f64>) -> ThresholdComparison {
    match value {
        None => ThresholdComparison::Unknown,
        Some(value) if value > rule.threshold => match at_least {
            Some(least) if least <= rule.threshold => ThresholdComparison::Perhaps,
            _ => ThresholdComparison::Over,
        },
        Some(value) if value > rule.restore_value => ThresholdComparison::Between,
        Some(_) => ThresholdComparison::Under,
    }
}

/// Why there is no value.
fn unknown(rule: &Rule, source: &ValueSource, report: &RuleReport) -> Option<String> {
    let reason = report.unknown?;
    if let ValueSource::Unavailable { why } = source {
        return Some(why.clone());
    }
    Some(match rule.metric {
        Metric::Pressure { .. } => {
            "the kubelet reports no pressure: that needs cgroup v2 and Kubernetes 1.34".to_owned()
        }
        Metric::Interface(_) => {
            "the kubelet took no new sample in between: use a longer --sample".to_owned()
        }
        _ => unknown_reason(reason).to_owned(),
    })
}

#[cfg(test)]
#[path = "evaluate_tests.rs"]
mod tests;
