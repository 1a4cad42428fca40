//! Whom to ask about each node, from the `EndpointSlice`s of the polled Services. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde_json::Value;

use crate::cluster::watch::Change;
use crate::crd::polling::PolledService;

/// Most endpoints that are kept of one slice: the API allows 1000.
const MAX_ENDPOINTS: usize = 1000;

/// An endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    address: SocketAddr,
    /// `nodeName`; `None`: that of the Node with this address.
    node: Option<Arc<str>>,
}

/// Where a node is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollTarget {
    /// Address of the page.
    pub address: SocketAddr,
    /// Index of the Service in the settings.
    pub service: usize,
}

/// The slices of one Service.
#[derive(Debug, Default)]
struct Slices {
    known: BTreeMap<String, Vec<Endpoint>>,
    /// During a new list: the slices listed so far. The known ones stay valid until it is complete.
    listed: Option<BTreeMap<String, Vec<Endpoint>>>,
}

/// The endpoints of all polled Services.
#[derive(Debug)]
pub struct PollTargets {
    services: Vec<(PolledService, Slices)>,
}

impl PollTargets {
    /// No endpoints yet.
    pub fn new(services: &[PolledService]) -> Self {
        let services = services.iter().cloned();
        Self {
            services: services.map(|it| (it, Slices::default())).collect(),
        }
    }

    /// Handles a watch event of the slices of a Service; a failure changes nothing.
    pub fn apply(&mut self, service: usize, change: Change) {
        let Some((settings, slices)) = self.services.get_mut(service) else {
            return;
        };
        let current = slices.listed.as_mut().unwrap_or(&mut slices.known);
        match change {
            Change::Apply(name, slice) => {
                current.insert(name, endpoints(&slice, settings.port.as_deref()));
            }
            Change::Delete(name) => {
                current.remove(&name);
            }
            Change::Restarted => slices.listed = Some(BTreeMap::new()),
            Change::Complete => slices.known = slices.listed.take().unwrap_or_default(),
            Change::Failed(_) => {}
        }
    }

    /// Where each node is asked: one endpoint each, the first by Service and address. `node_at` finds the Node with an address.
    /// Also returns the number of endpoints of no Node.
    pub fn by_node(
        &self,
        node_at: impl Fn(IpAddr) -> Option<Arc<str>>,
    ) -> (BTreeMap<Arc<str>, PollTarget>, usize) {
        let mut targets: BTreeMap<Arc<str>, PollTarget> = BTreeMap::new();
        let mut without_node = 0;
        for (service, (_, slices)) in self.services.iter().enumerate() {
            let endpoints = slices.known.values().flatten();
            for Endpoint { address, node } in endpoints {
                let Some(node) = node.clone().or_else(|| node_at(address.ip())) else {
                    without_node += 1;
                    continue;
                };
                let target = PollTarget {
                    address: *address,
                    service,
                };
                let first = targets.entry(node).or_insert(target);
                if first.service == service {
                    first.address = first.address.min(*address);
                }
            }
        }
        (targets, without_node)
    }
}

/// The ready endpoints of a slice. By the API an unset condition means ready, and a port without a name has an empty one.
fn endpoints(slice: &Value, port: Option<&str>) -> Vec<Endpoint> {
    let mut ports = slice["ports"].as_array().into_iter().flatten();
    let port =
        ports.find(|it| port.is_none_or(|name| it["name"].as_str().unwrap_or_default() == name));
    let port = port.and_then(|port| u16::try_from(port["port"].as_u64()?).ok());
    let Some(port) = port else {
        return Vec::new();
    };
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    endpoints
        .filter(|endpoint| endpoint["conditions"]["ready"] != Value::Bool(false))
        .filter_map(|endpoint| {
            let address: IpAddr = endpoint["addresses"][0].as_str()?.parse().ok()?;
            let of_node = endpoint["targetRef"]["kind"] == "Node";
            let node = endpoint["nodeName"].as_str();
            let target = endpoint["targetRef"]["name"].as_str().filter(|_| of_node);
            Some(Endpoint {
                address: SocketAddr::new(address, port),
                node: node.or(target).map(Arc::from),
            })
        })
        .take(MAX_ENDPOINTS)
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::crd::polling;

    fn targets() -> PollTargets {
        let settings =
            "services: [{namespace: a, name: first}, {namespace: a, name: second, port: metrics}]";
        PollTargets::new(&polling::read(settings).unwrap().services)
    }

    fn slice(endpoints: &[(&str, Option<&str>)]) -> Value {
        let endpoints = endpoints.iter().map(|(address, node)| {
            json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}})
        });
        let ports = json!([{"name": "http", "port": 80}, {"name": "metrics", "port": 9100}]);
        json!({"ports": ports, "endpoints": endpoints.collect::<Vec<_>>()})
    }

    fn apply(name: &str, slice: Value) -> Change {
        Change::Apply(name.to_owned(), slice)
    }

    /// `node service address`.
    fn found(targets: &PollTargets) -> Vec<String> {
        let (found, _) = targets.by_node(|address| {
            (address == IpAddr::from([10, 0, 0, 9])).then(|| Arc::from("by-address"))
        });
        let all = found.iter();
        all.map(|(node, target)| format!("{node} {} {}", target.service, target.address))
            .collect()
    }

    #[test]
    fn a_node_has_one_endpoint_of_the_first_service_that_has_one() {
        let mut targets = targets();
        let two = [("10.0.0.2", Some("a")), ("10.0.0.1", Some("a"))];
        targets.apply(0, apply("s", slice(&two)));
        let other = [("10.1.0.1", Some("a")), ("10.1.0.2", Some("b"))];
        targets.apply(1, apply("s", slice(&other)));
        assert_eq!(found(&targets), ["a 0 10.0.0.1:80", "b 1 10.1.0.2:9100"]);
        targets.apply(0, Change::Delete("s".to_owned()));
        assert_eq!(found(&targets), ["a 1 10.1.0.1:9100", "b 1 10.1.0.2:9100"]);
    }

    #[test]
    fn an_endpoint_without_a_node_name_belongs_to_the_node_with_its_address() {
        let mut targets = targets();
        targets.apply(
            0,
            apply("s", slice(&[("10.0.0.9", None), ("10.0.0.8", None)])),
        );
        assert_eq!(found(&targets), ["by-address 0 10.0.0.9:80"]);
        assert_eq!(targets.by_node(|_| None).1, 2, "of no Node");
        let mut kubelet = slice(&[("10.0.0.8", None)]);
        kubelet["endpoints"][0]["targetRef"] = json!({"kind": "Node", "name": "n"});
        targets.apply(0, apply("s", kubelet));
        assert_eq!(found(&targets), ["n 0 10.0.0.8:80"]);
    }

    #[test]
    fn unready_endpoints_and_slices_without_the_port_are_left_out() {
        let mut targets = targets();
        let mut one = slice(&[("10.0.0.1", Some("a"))]);
        one["endpoints"][0]["conditions"]["ready"] = json!(false);
        targets.apply(0, apply("s", one.clone()));
        one["ports"] = json!([{"name": "http", "port": 80}]);
        one["endpoints"][0]["conditions"] = json!({});
        targets.apply(1, apply("s", one));
        targets.apply(1, apply("odd", json!({"ports": 7, "endpoints": "none"})));
        targets.apply(7, apply("s", json!({})));
        assert!(found(&targets).is_empty());
    }

    #[test]
    fn known_endpoints_stay_during_a_new_list() {
        let mut targets = targets();
        targets.apply(0, apply("s", slice(&[("10.0.0.1", Some("a"))])));
        targets.apply(0, Change::Restarted);
        targets.apply(0, apply("t", slice(&[("10.0.0.2", Some("b"))])));
        targets.apply(0, Change::Failed("gone".to_owned()));
        assert_eq!(found(&targets), ["a 0 10.0.0.1:80"]);
        targets.apply(0, Change::Complete);
        assert_eq!(found(&targets), ["b 0 10.0.0.2:80"]);
    }
}
