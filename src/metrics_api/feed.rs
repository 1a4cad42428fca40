//! What the controller sees of the cluster, on its way into the store.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::crd::NodeWatermarkStatus;

use super::compose::{NodeKnown, RulesKnown, compose, content};
use super::data::Data;

/// Takes what is known of nodes. A node that is there has an object, whatever is known of it.
pub struct Feed {
    data: Arc<Data>,
    nodes: BTreeMap<String, NodeKnown>,
    rules: BTreeMap<String, RulesKnown>,
    changed: bool,
}

impl Feed {
    /// Into this store.
    pub const fn new(data: Arc<Data>) -> Self {
        Self {
            data,
            nodes: BTreeMap::new(),
            rules: BTreeMap::new(),
            changed: false,
        }
    }

    /// A Node as it is now.
    pub fn node(&mut self, name: &str, node: NodeKnown) {
        if self.nodes.get(name) != Some(&node) {
            self.nodes.insert(name.to_owned(), node);
            self.tell(name);
        }
    }

    /// A Node is gone.
    pub fn node_gone(&mut self, name: &str) {
        if self.nodes.remove(name).is_some() {
            self.data.change(|store| store.delete(name));
            self.changed = true;
        }
    }

    /// The status of a `NodeWatermark` as it is now.
    pub fn watermark(&mut self, name: &str, status: &NodeWatermarkStatus) {
        let rules = RulesKnown::of(status);
        if self.rules.get(name) == rules.as_ref() {
            return;
        }
        match rules {
            Some(rules) => drop(self.rules.insert(name.to_owned(), rules)),
            None => drop(self.rules.remove(name)),
        }
        self.tell(name);
    }

    /// A `NodeWatermark` is gone.
    pub fn watermark_gone(&mut self, name: &str) {
        if self.rules.remove(name).is_some() {
            self.tell(name);
        }
    }

    fn tell(&mut self, name: &str) {
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        match content(compose(name, node, self.rules.get(name))) {
            Ok(content) => {
                self.data.change(|store| store.apply(name, content));
                self.changed = true;
            }
            Err(error) => tracing::error!(name, %error, "failed to write a NodeMetric as JSON"),
        }
    }

    /// The term in which this replica knows all and leads; `None`: it doesn't.
    pub fn lead(&mut self, epoch: Option<u64>) {
        let changed = self.data.change(|store| {
            let before = store.term();
            match epoch {
                Some(epoch) => store.lead(epoch),
                None => store.follow(),
            }
            before != store.term()
        });
        self.changed |= changed;
    }

    /// Lets watches see what changed.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.changed) {
            self.data.wake();
        }
    }
}
