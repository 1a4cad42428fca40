//! The ready replicas of the controller, from the `EndpointSlice`s of their Service. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use crate::cluster::watch::Change;

/// At most this many replicas get reports; a controller has two or three.
const MAX_REPLICAS: usize = 8;

/// One ready replica: the UID of its Pod (else its address) and its address.
type Endpoint = (String, SocketAddr);

/// The known slices.
#[derive(Debug, Default)]
pub struct Endpoints {
    slices: BTreeMap<String, Vec<Endpoint>>,
    /// During a new list: the slices listed so far. The known ones stay valid until it is complete.
    listed: Option<BTreeMap<String, Vec<Endpoint>>>,
    complete: bool,
}

impl Endpoints {
    /// Handles a watch event; a failure changes nothing.
    pub fn apply(&mut self, change: Change) {
        let slices = self.listed.as_mut().unwrap_or(&mut self.slices);
        match change {
            Change::Apply(name, slice) => {
                slices.insert(name, ready(&slice));
            }
            Change::Delete(name) => {
                slices.remove(&name);
            }
            Change::Restarted => self.listed = Some(BTreeMap::new()),
            Change::Complete => {
                self.slices = self.listed.take().unwrap_or_default();
                self.complete = true;
            }
            Change::Failed(_) => {}
        }
    }

    /// The addresses of the ready replicas; `None`: not listed yet. A Pod with several addresses is one replica.
    pub fn replicas(&self) -> Option<BTreeSet<SocketAddr>> {
        let all: BTreeSet<&Endpoint> = self.slices.values().flatten().collect();
        let mut replicas = BTreeMap::new();
        for (pod, address) in all {
            replicas.entry(pod).or_insert(*address);
        }
        let replicas = replicas.into_values().take(MAX_REPLICAS).collect();
        self.complete.then_some(replicas)
    }
}

/// The ready endpoints of a slice. By the API an unset condition means ready.
fn ready(slice: &Value) -> Vec<Endpoint> {
    let port = slice["ports"][0]["port"].as_u64();
    let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else {
        return Vec::new();
    };
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    endpoints
        .filter(|endpoint| endpoint["conditions"]["ready"] != Value::Bool(false))
        .filter_map(|endpoint| {
            let address: IpAddr = endpoint["addresses"][0].as_str()?.parse().ok()?;
            let address = SocketAddr::new(address, port);
            let pod = endpoint["targetRef"]["uid"].as_str();
            Some((
                pod.map_or_else(|| address.to_string(), str::to_owned),
                address,
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(port: u16, endpoints: &[(&str, &str, Option<bool>)]) -> Value {
        let endpoints = endpoints.iter().map(|(pod, address, ready)| {
            json!({"addresses": [address], "conditions": {"ready": ready}, "targetRef": {"uid": pod}})
        });
        json!({"ports": [{"port": port}], "endpoints": endpoints.collect::<Vec<_>>()})
    }

    fn apply(name: &str, slice: Value) -> Change {
        Change::Apply(name.to_owned(), slice)
    }

    fn replicas(endpoints: &Endpoints) -> Vec<String> {
        let replicas = endpoints.replicas().unwrap_or_default();
        replicas.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_ready_endpoint_of_every_slice_is_a_replica() {
        let mut endpoints = Endpoints::default();
        assert_eq!(endpoints.replicas(), None);
        endpoints.apply(Change::Restarted);
        let two = [
            ("a", "10.0.0.1", Some(true)),
            ("b", "10.0.0.2", Some(false)),
        ];
        endpoints.apply(apply("s1", slice(8444, &two)));
        assert_eq!(endpoints.replicas(), None, "there may be more");
        endpoints.apply(apply("s2", slice(9, &[("c", "10.0.0.3", None)])));
        endpoints.apply(Change::Complete);
        assert_eq!(replicas(&endpoints), ["10.0.0.1:8444", "10.0.0.3:9"]);
        endpoints.apply(Change::Delete("s2".to_owned()));
        endpoints.apply(apply("s1", slice(8444, &[("b", "10.0.0.2", Some(true))])));
        assert_eq!(replicas(&endpoints), ["10.0.0.2:8444"]);
    }

    #[test]
    fn known_replicas_stay_during_a_new_list() {
        let mut endpoints = Endpoints::default();
        endpoints.apply(apply("s1", slice(1, &[("a", "10.0.0.1", None)])));
        endpoints.apply(Change::Complete);
        assert_eq!(
            endpoints.replicas(),
            Some(BTreeSet::new()),
            "there is no Service"
        );
        for change in [
            Change::Restarted,
            apply("s1", slice(1, &[("a", "10.0.0.1", None)])),
            Change::Complete,
            Change::Failed("away".to_owned()),
            Change::Restarted,
        ] {
            endpoints.apply(change);
        }
        assert_eq!(replicas(&endpoints), ["10.0.0.1:1"]);
        endpoints.apply(Change::Complete);
        assert_eq!(endpoints.replicas(), Some(BTreeSet::new()));
    }

    #[test]
    fn a_pod_with_two_addresses_is_one_replica() {
        let mut endpoints = Endpoints::default();
        endpoints.apply(Change::Restarted);
        endpoints.apply(apply("s4", slice(1, &[("a", "10.0.0.1", None)])));
        endpoints.apply(apply(
            "s6",
            slice(1, &[("a", "fd00::1", None), ("b", "fd00::2", None)]),
        ));
        endpoints.apply(apply("names", slice(1, &[("c", "example.com", None)])));
        endpoints.apply(apply("odd", json!({"endpoints": 7})));
        endpoints.apply(apply(
            "no port",
            json!({"ports": [{}], "endpoints": [{"addresses": ["10.0.0.9"]}]}),
        ));
        endpoints.apply(Change::Complete);
        assert_eq!(replicas(&endpoints), ["10.0.0.1:1", "[fd00::2]:1"]);
    }

    #[test]
    fn the_number_of_replicas_is_limited() {
        let mut endpoints = Endpoints::default();
        endpoints.apply(Change::Restarted);
        for number in 0..100 {
            let address = format!("10.0.0.{number}");
            endpoints.apply(apply(&address, slice(1, &[(&address, &address, None)])));
        }
        endpoints.apply(Change::Complete);
        assert_eq!(replicas(&endpoints).len(), MAX_REPLICAS);
    }
}
