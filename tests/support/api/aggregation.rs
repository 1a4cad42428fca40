//! An API server with the aggregation layer, and the objects by which it reaches a test's servers.
#![allow(dead_code, reason = "each test uses its part")]

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use serde_json::{Value, json};

use super::{ControlPlane, now};

pub const GROUP_VERSION: &str = "/apis/metrics.plimsoll.dev/v1alpha1";
pub const NODE_METRICS: &str = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics";

/// The front-proxy CA and client certificate of the API server.
pub struct FrontProxy {
    pub authority: String,
    pub authority_key: String,
    pub certificate: String,
    pub key: String,
}

/// The parameters of an authority of this name.
fn authority(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
}

const AUTHORITY: &str = "front-proxy-ca";

impl FrontProxy {
    fn make() -> Self {
        let key = KeyPair::generate().unwrap();
        let own = Self {
            authority: authority(AUTHORITY).self_signed(&key).unwrap().pem(),
            authority_key: key.serialize_pem(),
            certificate: String::new(),
            key: String::new(),
        };
        let (certificate, key) = own.issue("front-proxy-client");
        Self {
            certificate,
            key,
            ..own
        }
    }

    /// Issues a client certificate of this CA with its key.
    pub fn issue(&self, name: &str) -> (String, String) {
        let issuer = Issuer::new(
            authority(AUTHORITY),
            KeyPair::from_pem(&self.authority_key).unwrap(),
        );
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// An unknown CA with the same subject.
    pub fn forged() -> Self {
        Self::make()
    }

    /// That of the API server in this directory.
    pub fn of(dir: &Path) -> Self {
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        Self {
            authority: read("front-proxy-ca.crt"),
            authority_key: read("front-proxy-ca.key"),
            certificate: read("front-proxy.crt"),
            key: read("front-proxy.key"),
        }
    }
}

/// Flags of the API server; keys are created the first time.
pub fn flags(dir: &Path) -> Vec<String> {
    let path = |name: &str| dir.join(name).display().to_string();
    if !dir.join("front-proxy-ca.crt").exists() {
        let proxy = FrontProxy::make();
        for (name, text) in [
            ("front-proxy-ca.crt", &proxy.authority),
            ("front-proxy-ca.key", &proxy.authority_key),
            ("front-proxy.crt", &proxy.certificate),
            ("front-proxy.key", &proxy.key),
        ] {
            fs::write(dir.join(name), text).unwrap();
        }
    }
    vec![
        format!(
            "--requestheader-client-ca-file={}",
            path("front-proxy-ca.crt")
        ),
        format!("--proxy-client-cert-file={}", path("front-proxy.crt")),
        format!("--proxy-client-key-file={}", path("front-proxy.key")),
        "--requestheader-allowed-names=front-proxy-client".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        // There is no kube-proxy: dial endpoints.
        "--enable-aggregator-routing=true".to_owned(),
    ]
}

/// A control plane whose aggregation layer reaches controllers at these ports. Prints a message and returns `None` if
/// this machine can't run it.
pub fn plane(ports: &[u16]) -> Option<ControlPlane> {
    let plane = ControlPlane::start().filter(ControlPlane::is_own)?;
    let Some(address) = address() else {
        eprintln!(
            "NOT TESTED: this machine has no address but loopback ones, which no endpoint may have"
        );
        return None;
    };
    plane.apply(&objects("default", "plimsoll-metrics", address, ports));
    Some(plane)
}

/// Waits until the API server passes requests for this path on, and they are answered.
pub fn until_served(plane: &ControlPlane, path: &str) {
    until(plane, |plane| plane.get_raw(path).is_ok());
}

/// Waits until `NodeMetrics` are served, and clients such as kubectl find them.
pub fn until_discovered(plane: &ControlPlane) {
    until(plane, |plane| {
        plane.get_raw(NODE_METRICS).is_ok() && plane.discovers("nodemetrics")
    });
}

fn until(plane: &ControlPlane, is_served: impl Fn(&ControlPlane) -> bool) {
    let service = "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.metrics.plimsoll.dev";
    plane.until("the API is served", Duration::from_mins(2), |plane| {
        let is_served = is_served(plane);
        if !is_served {
            // An API server that found no replica retries after a minute, or when the APIService changes.
            let changed = json!({"metadata": {"annotations": {"looked": format!("{:?}", now())}}});
            plane.merge_patch(service, &changed);
        }
        is_served
    });
}

/// A non-loopback address of this machine, as endpoints require. Nothing is sent.
pub fn address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// The Service with endpoints at these ports of this machine, and the `APIService`.
pub fn objects(namespace: &str, service: &str, address: IpAddr, ports: &[u16]) -> Vec<Value> {
    let mut objects = vec![
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": service, "namespace": namespace},
            "spec": {"ports": [{"name": "https", "port": 443}]},
        }),
        json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": "v1alpha1.metrics.plimsoll.dev"},
            "spec": {
                "group": "metrics.plimsoll.dev", "version": "v1alpha1",
                "groupPriorityMinimum": 100, "versionPriority": 100,
                "service": {"name": service, "namespace": namespace, "port": 443},
            },
        }),
    ];
    objects.extend(
        ports
            .iter()
            .map(|port| slice(namespace, service, address, *port)),
    );
    // API servers before 1.34 use Endpoints.
    let subset = |port: &u16| {
        json!({
            "addresses": [{"ip": address.to_string()}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        })
    };
    objects.push(json!({
        "apiVersion": "v1", "kind": "Endpoints",
        "metadata": {"name": service, "namespace": namespace},
        "subsets": ports.iter().map(subset).collect::<Vec<_>>(),
    }));
    objects
}

fn slice(namespace: &str, service: &str, address: IpAddr, port: u16) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-{port}"), "namespace": namespace,
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [address.to_string()], "conditions": {"ready": true}}],
    })
}
