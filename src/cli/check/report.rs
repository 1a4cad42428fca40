//! The report of `plimsoll check`: findings with their position.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::sentence;
use super::sources::{Source, Sources};
use crate::crd::duration::format_duration;
use crate::crd::manifest::{Location, ManifestObject, Position, Positions};
use crate::crd::{
    Finding, GROUP, Kind, ObjectRef, Objects, Reason, Severity, advice, compile,
    strategies_left_out, uses_idle_class,
};
use crate::engine::policy::{NodeFacts, PolicySet, Rule, RuleId, Strategy};
use crate::messages::count;

/// For policies that put pods into the idle class.
const IDLE_NOTE: &str = "note: the idle class protects beside up to about 5 busy batch pods per CPU, since each adds its CPU weight; BestEffort batch \
pods are held for any number. With kubelets of Kubernetes 1.36 or later pods get the lowest CPU weight instead (up to 1 or 2 per CPU) and, from rules, \
quotas at once, because these kubelets would reject new pods; with --feature-gates=InPlacePodLevelResourcesVerticalScaling=false they have the idle class";

/// All findings, with totals.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct Report<'a> {
    findings: Vec<Located<'a>>,
    /// What would protect better.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<Located<'a>>,
    files: usize,
    objects: usize,
    skipped: usize,
    errors: usize,
    warnings: usize,
    /// What depends on the nodes and cannot be checked here.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
    /// The rules that evict.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    evictions: Vec<EarliestEviction>,
    /// What is in force.
    #[serde(skip)]
    policy: PolicySet,
    /// The `NodeQOS` that select nodes.
    #[serde(skip)]
    selective: BTreeSet<String>,
    #[serde(skip)]
    unreadable: usize,
    /// An object that is probably a policy could not be read as one.
    #[serde(skip)]
    misread: bool,
    #[serde(skip)]
    locations: BTreeSet<ObjectRef>,
}

/// When a rule evicts first.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EarliestEviction {
    rule: RuleId,
    strategy: Strategy,
    /// Evaluations after the one at which it is breached, if the breach lasts.
    evaluations: u32,
    /// Where memory is about to run out, it evicts before.
    #[serde(skip)]
    is_urgent: bool,
}

impl EarliestEviction {
    fn of(rule: &Rule) -> Option<Self> {
        Some(Self {
            rule: rule.id.clone(),
            strategy: rule.strategy,
            evaluations: rule.evaluations_to_eviction()?,
            is_urgent: rule.may_be_urgent(),
        })
    }

    fn note(&self, period: Duration) -> String {
        let verb = match self.strategy {
            Strategy::Enforce => "evicts",
            Strategy::Preview => "would evict",
        };
        let rule = &self.rule;
        if self.evaluations == 0 {
            return format!("note: {rule} {verb} as soon as it is breached");
        }
        let after = format_duration(period.saturating_mul(self.evaluations));
        let urgent = if self.is_urgent {
            ", or at once where memory is about to run out"
        } else {
            ""
        };
        format!(
            "note: {rule} {verb} {after} after its breach at the earliest, if its milder steps do not help{urgent}"
        )
    }
}

/// A finding with its position.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Located<'a> {
    file: &'a str,
    #[serde(flatten)]
    position: Position,
    #[serde(flatten)]
    object: ObjectRef,
    path: String,
    severity: Severity,
    reason: Reason,
    message: String,
}

impl<'a> Located<'a> {
    fn of(finding: &Finding, (file, positions): (&'a str, &Positions)) -> Self {
        Self {
            file,
            position: positions.of(&finding.path),
            object: finding.object.clone(),
            path: finding.path.clone(),
            severity: finding.severity,
            reason: finding.reason,
            message: finding.message.clone(),
        }
    }
}

/// Files and positions of the objects of each name.
type Locations<'a> = BTreeMap<ObjectRef, Vec<(&'a str, &'a Positions)>>;

impl<'a> Report<'a> {
    /// Reports on the objects in `sources`, checked together with those in `others`.
    pub(in crate::cli) fn new(
        sources: &'a Sources,
        others: Vec<Value>,
        node: &NodeFacts,
        by_labels: bool,
    ) -> Self {
        let mut report = Self {
            files: sources.files.len(),
            unreadable: sources.unreadable.len(),
            ..Self::default()
        };
        let mut locations = Locations::new();
        for source in &sources.files {
            report.add_parse_errors(source);
            for object in &source.manifest.objects {
                report.add_object(source, object, &mut locations);
            }
        }
        let values = sources.files.iter().flat_map(|source| {
            let objects = source.manifest.objects.iter();
            objects.map(|object| object.value.clone())
        });
        let mut objects = Objects::from_values(values.chain(others));
        let notes = advice(&objects);
        report.note = uses_idle_class(&objects).then_some(IDLE_NOTE);
        let selectors = objects.node_selectors();
        let selective = selectors.filter(|(_, selector)| selector.is_some());
        report.selective = selective.map(|(name, _)| name.to_owned()).collect();
        if !by_labels {
            objects = objects.for_every_node();
        }
        let compiled = compile(&objects, node);
        report.add_all_together(&compiled.findings, &locations);
        for note in &notes {
            if let Some(location) = locations.get(&note.object).and_then(|it| it.first()) {
                report.notes.push(Located::of(note, *location));
            }
        }
        let rules = compiled.policy.rules.iter();
        report.evictions = rules.filter_map(EarliestEviction::of).collect();
        report.policy = compiled.policy;
        report.locations = locations.into_keys().collect();
        report.finish(sources);
        report
    }

    pub(in crate::cli) const fn errors(&self) -> usize {
        self.errors
    }

    pub(in crate::cli) const fn warnings(&self) -> usize {
        self.warnings
    }

    /// Whether the sources have no policy, not even an invalid one.
    pub(in crate::cli) const fn has_no_policy(&self) -> bool {
        self.objects == 0 && self.errors == 0
    }

    /// Whether an API server would reject some object.
    pub(in crate::cli) fn is_rejected(&self) -> bool {
        let rejected =
            |found: &Located<'_>| matches!(found.reason, Reason::Invalid | Reason::DuplicateName);
        self.findings.iter().any(rejected)
    }

    /// Whether the sources have this object.
    pub(in crate::cli) fn is_about(&self, object: &ObjectRef) -> bool {
        self.locations.contains(object)
    }

    /// One line per finding.
    pub(in crate::cli) fn lines(&self) -> impl Iterator<Item = String> {
        self.findings.iter().map(ToString::to_string)
    }

    /// One line for each note on what would protect better.
    pub(in crate::cli) fn advice(&self) -> impl Iterator<Item = String> {
        self.notes.iter().map(ToString::to_string)
    }

    fn add_parse_errors(&mut self, source: &'a Source) {
        for parse_error in &source.manifest.parse_errors {
            self.findings.push(Located {
                file: &source.name,
                position: parse_error.position,
                object: ObjectRef::default(),
                path: parse_error.path.clone(),
                severity: Severity::Error,
                reason: Reason::Invalid,
                message: parse_error.message.clone(),
            });
        }
    }

    /// Findings of a single object.
    fn add_object(
        &mut self,
        source: &'a Source,
        object: &'a ManifestObject,
        locations: &mut Locations<'a>,
    ) {
        let Some(kind) = Kind::of(&object.value) else {
            return self.add_other(source, object);
        };
        self.objects += 1;
        let reference = ObjectRef {
            kind: kind.name().to_owned(),
            name: text(object, "/metadata/name").to_owned(),
        };
        let location = (source.name.as_str(), &object.positions);
        locations.entry(reference).or_default().push(location);
        if kind == Kind::NodeQos {
            let notes = strategies_left_out(&object.value).into_iter();
            self.notes
                .extend(notes.map(|note| Located::of(&note, location)));
        }
        for finding in Objects::from_values([object.value.clone()]).findings() {
            self.add(finding, location);
        }
    }

    /// Skips objects of other kinds, and reports those that look like a misspelled policy.
    fn add_other(&mut self, source: &'a Source, object: &'a ManifestObject) {
        let kind = text(object, "/kind");
        let version = text(object, "/apiVersion");
        let names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        let message = if version.is_empty() || kind.is_empty() {
            "apiVersion or kind is missing; a policy starts with apiVersion: ensurance.crane.io/v1alpha1 and kind: NodeQOS"
                .to_owned()
        } else if version.split('/').next() == Some(GROUP) || names.contains(&kind) {
            Kind::unknown(kind, version)
        } else {
            self.skipped += 1;
            return;
        };
        let finding = Finding {
            object: ObjectRef {
                kind: kind.to_owned(),
                name: text(object, "/metadata/name").to_owned(),
            },
            path: "kind".to_owned(),
            severity: Severity::Error,
            reason: Reason::Invalid,
            message,
            follows: false,
        };
        self.misread = true;
        self.add(&finding, (&source.name, &object.positions));
    }

    /// Findings of objects together, but none that follows from another one, which may only be a warning by itself.
    fn add_all_together(&mut self, findings: &[Finding], locations: &Locations<'a>) {
        let misread = self.misread || locations.keys().any(|it| it.name.is_empty());
        let follows = |finding: &Finding| {
            // The missing object may be the one that could not be read.
            let missing = matches!(
                finding.reason,
                Reason::UnknownAction | Reason::ActionNotAllowed
            );
            finding.follows || misread && missing
        };
        let acts_on_nobody = |it: &Finding| it.reason == Reason::ActionNotAllowed && follows(it);
        let acts_on_nobody = findings.iter().any(acts_on_nobody);
        for finding in findings.iter().filter(|it| !follows(it)) {
            let mut finding = finding.clone();
            if acts_on_nobody && finding.reason == Reason::AllowsUnknownAction {
                finding.severity = Severity::Error;
            }
            self.add_together(&finding, locations);
        }
    }

    /// Findings of objects together. Those of single objects have been added with their own location.
    fn add_together(&mut self, finding: &Finding, locations: &Locations<'a>) {
        if finding.reason == Reason::Invalid {
            return;
        }
        let locations = locations
            .get(&finding.object)
            .map_or(&[][..], Vec::as_slice);
        let reported = if finding.reason == Reason::DuplicateName {
            locations
        } else {
            &locations[..locations.len().min(1)]
        };
        for location in reported {
            self.add(finding, *location);
        }
    }

    fn add(&mut self, finding: &Finding, location: (&'a str, &Positions)) {
        self.findings.push(Located::of(finding, location));
    }

    /// Sorts the findings by position, and counts them.
    fn finish(&mut self, sources: &Sources) {
        let order: BTreeMap<&str, usize> = sources
            .files
            .iter()
            .enumerate()
            .map(|(index, source)| (source.name.as_str(), index))
            .collect();
        let location = |found: &Located<'_>| {
            let file = order.get(found.file).copied();
            (file, found.position, found.severity)
        };
        self.findings.sort_by_key(location);
        self.notes.sort_by_key(location);
        let count = |severity| {
            let found = self.findings.iter();
            found.filter(|found| found.severity == severity).count()
        };
        (self.errors, self.warnings) = (count(Severity::Error), count(Severity::Warning));
    }

    /// What is no finding: what depends on the nodes, and when rules evict that are evaluated at this period.
    pub(in crate::cli) fn notes(&self, period: Duration) -> impl Iterator<Item = String> {
        let evictions = self.evictions.iter().map(move |it| it.note(period));
        self.note.map(str::to_owned).into_iter().chain(evictions)
    }

    /// What the policies do, in a sentence for each rule; none while something is wrong.
    pub(in crate::cli) fn sentences(&self, period: Duration) -> Vec<String> {
        if self.errors > 0 {
            return Vec::new();
        }
        sentence::all(&self.policy, &self.selective, period)
    }

    /// The totals, in a sentence.
    pub(in crate::cli) fn summary(&self) -> String {
        let besides = |number: usize, what: &str, became: &str| match number {
            0 => String::new(),
            number => format!("; {} {became}", count(number, what)),
        };
        format!(
            "{} and {} in {}{}{}",
            count(self.errors, "error"),
            count(self.warnings, "warning"),
            count(self.objects, "policy object"),
            besides(self.skipped, "object", "of other kinds skipped"),
            besides(self.unreadable, "path", "could not be read")
        )
    }
}

impl std::fmt::Display for Located<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let location = Location {
            file: self.file,
            position: self.position,
        };
        write!(f, "{location}: {}: ", self.severity)?;
        if !self.object.kind.is_empty() {
            write!(f, "{}: ", self.object)?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

fn text<'a>(object: &'a ManifestObject, pointer: &str) -> &'a str {
    let field = object.value.pointer(pointer);
    field.and_then(serde_json::Value::as_str).unwrap_or("")
}
