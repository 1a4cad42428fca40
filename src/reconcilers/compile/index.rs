//! The index of the cluster: nodes with their compiled policies, and their `NodeWatermarks`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::catalog::{Affected, Catalog, Class, Key, selects};
use super::content::CompiledPolicy;
use super::label_filter::{LabelFilter, SelectorFilter};
use super::watermark::KnownWatermark;
use crate::cluster::nodes::zone;
use crate::crd::Kind;
use crate::engine::policy::NodeFacts;
use crate::engine::window::CustomWindow;
use crate::reconcilers::observe::wire::{LoadSigns, ObservedNode, Watermark};

pub struct IndexedNode {
    pub uid: String,
    pub facts: NodeFacts,
    label_filter: LabelFilter,
    pub class: Arc<Class>,
    /// Region and zone.
    pub zone: Arc<str>,
    /// Its condition Ready is True.
    pub ready: bool,
    /// It has our taint.
    pub tainted: bool,
    /// Our condition is True.
    pub interference_identified: bool,
    /// What schedulers see of its load.
    pub load: LoadSigns,
}

impl IndexedNode {
    /// Whether an object may affect the node.
    pub fn is_affected_by(&self, key: &Key) -> bool {
        match key.0 {
            Kind::PodQos => {
                let pods = &self.class.content.policy.pods;
                !self.class.selected.is_empty() || pods.iter().any(|it| it.name == key.1)
            }
            _ => self.class.is_selected_by(&key.1),
        }
    }
}

/// What changed about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeChange {
    /// Nothing that is used.
    Nothing,
    /// Readiness, our condition, or what schedulers see of its load.
    State,
    /// Our taint, and perhaps more of its state.
    Taint,
    /// It is new, or its policies may be others.
    Policies,
}

/// What changed about a `NodeWatermark`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatermarkChange {
    /// The spec, the whole object, or whether the agent reads quantities.
    pub spec: bool,
    /// The status.
    pub status: bool,
    /// Another writer edited the spec.
    pub edited: bool,
}

/// All policies, nodes and `NodeWatermarks`.
#[derive(Default)]
pub struct Index {
    pub catalog: Catalog,
    /// By name.
    pub nodes: BTreeMap<String, IndexedNode>,
    /// By the name of their node.
    pub watermarks: BTreeMap<String, KnownWatermark>,
}

impl Index {
    /// An empty index of nodes with these windows.
    pub fn new(windows: Option<Arc<[CustomWindow]>>) -> Self {
        Self {
            catalog: Catalog::new(windows),
            ..Self::default()
        }
    }

    pub fn apply_node(&mut self, name: &str, node: ObservedNode) -> NodeChange {
        let ObservedNode {
            uid,
            facts,
            ready,
            tainted,
            interference_identified,
            load,
        } = node;
        if let Some(known) = self.nodes.get_mut(name)
            && known.uid == uid
            && known.facts == facts
        {
            let change = if known.tainted != tainted {
                NodeChange::Taint
            } else if (known.ready, known.interference_identified, known.load)
                != (ready, interference_identified, load)
            {
                NodeChange::State
            } else {
                NodeChange::Nothing
            };
            (known.ready, known.tainted, known.interference_identified) =
                (ready, tainted, interference_identified);
            known.load = load;
            return change;
        }
        let (class, zone) = (self.catalog.class(&facts), Arc::from(zone(&facts.labels)));
        let label_filter = LabelFilter::of(&facts.labels);
        let node = IndexedNode {
            uid,
            facts,
            label_filter,
            class,
            zone,
            ready,
            tainted,
            interference_identified,
            load,
        };
        self.nodes.insert(name.to_owned(), node);
        NodeChange::Policies
    }

    /// Recompiles what an edit affects. Returns the nodes.
    pub fn recompile(&mut self, affected: &Affected) -> Vec<String> {
        let selectors = self.catalog.selectors_of(affected);
        let selectors = selectors
            .iter()
            .map(|it| (SelectorFilter::of(it.as_ref()), it));
        let selectors: Vec<_> = selectors.collect();
        let mut recompiled = Vec::new();
        for (name, node) in &mut self.nodes {
            let selected_now = selectors.iter().any(|(filter, selector)| {
                filter.may_match(node.label_filter) && selects(selector.as_ref(), &node.facts)
            });
            if !selected_now && !affected.affects(&node.class.selected) {
                continue;
            }
            node.class = self.catalog.class(&node.facts);
            recompiled.push(name.clone());
        }
        recompiled
    }

    /// Adds or changes a `NodeWatermark`, unless a newer one is known.
    pub fn apply_watermark(&mut self, name: &str, seen: &Watermark) -> WatermarkChange {
        let before = self.watermarks.get(name);
        if before.is_some_and(|before| before.is_newer_than(seen)) {
            return WatermarkChange::default();
        }
        self.apply_listed_watermark(name, seen)
    }

    /// Adds or changes a `NodeWatermark` from a full list. It may be older than the known one: the API server may be restored from a
    /// backup.
    pub fn apply_listed_watermark(&mut self, name: &str, seen: &Watermark) -> WatermarkChange {
        let before = self.watermarks.get(name);
        let known = KnownWatermark::of(seen, self.catalog.contents(), before);
        let change = WatermarkChange {
            spec: before.is_none_or(|before| before.needs_other_spec_than(&known)),
            status: before.is_none_or(|before| !before.has_same_status(&known)),
            edited: before.is_some_and(|before| before.was_edited(&known)),
        };
        self.watermarks.insert(name.to_owned(), known);
        change
    }

    /// The current and the desired content of a node; `None` if the current one is unknown.
    pub fn contents_of(&self, name: &str) -> Option<(&Arc<CompiledPolicy>, &Arc<CompiledPolicy>)> {
        let node = self.nodes.get(name)?;
        let current = self.watermarks.get(name)?.content_for(&node.uid)?;
        Some((current, &node.class.content))
    }

    /// The nodes that an object affects and that have a `NodeWatermark`.
    pub fn nodes_of(&self, key: &Key) -> Vec<String> {
        let nodes = self.nodes.iter();
        nodes
            .filter(|(name, node)| node.is_affected_by(key) && self.watermarks.contains_key(*name))
            .map(|(name, _)| name.clone())
            .collect()
    }
}
