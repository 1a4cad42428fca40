//! `metrics.plimsoll.dev/v1alpha1`: the `NodeMetrics` of all nodes, served from memory as an aggregated API.
//!
//! Every replica answers static requests (discovery, `OpenAPI`, health). Objects come from the leader, to which the
//! other replicas forward requests. [`store::Store`] and all parsing and encoding is pure.

pub mod authn;
mod authorities;
mod authz;
mod certificate_manager;
mod certificates;
mod client_lag;
pub mod compose;
pub mod data;
mod discovery;
mod documents;
pub mod encode;
mod evict;
mod forward;
pub(crate) mod front_proxy;
mod in_flight;
mod listener;
pub mod loads;
pub mod negotiate;
mod openapi;
pub mod options;
mod readiness;
mod relay;
pub mod reports;
mod server;
mod serving;
mod start_error;
mod status;
pub mod store;
mod store_updater;
pub mod table;
mod watch;
mod write_timeout;

use std::net::SocketAddr;

use jiff::Timestamp;

pub use certificate_manager::{CertificateSource, ObjectNames, ReportEndpoint, TlsFiles};
pub use serving::{Serving, start};
pub use start_error::StartError;
pub use status::ErrorResponse;
pub use store_updater::StoreUpdater;

/// Settings of the API.
#[derive(Clone, Debug)]
pub struct Options {
    /// Listen address. `None`: the aggregated API is disabled, and agents are served at the address of reports.
    pub listen: Option<SocketAddr>,
    /// Names of the objects involved.
    pub names: ObjectNames,
    /// Settings of the report listener. `None`: disabled.
    pub reports: Option<reports::Options>,
}

/// Receives metrics and states from the API, and reports the readiness of the rest of the replica.
pub trait ApiObserver: Send + Sync {
    /// A request was answered with this code. `what` is `get`, `list`, `watch`, `discovery`, `health`, `eviction`,
    /// `relay` or `other`.
    fn answered(&self, what: &'static str, code: u16);
    /// Whether there is a certificate to serve with, or why not.
    fn certified(&self, outcome: Result<(), &str>);
    /// The certificates were reconciled: expiry of the one in use, and whether there was no error.
    fn certificates_reconciled(&self, ends: Option<Timestamp>, ok: bool);
    /// Whether the front-proxy configuration is loaded, or why not.
    fn front_proxy_loaded(&self, outcome: Result<(), &str>);
    /// Bytes held only by responses in progress.
    fn pinned(&self, bytes: usize) {
        let _ = bytes;
    }
    /// A connection was closed: `too_many_new`, `too_slow`, or `pinned`.
    fn cut(&self, reason: &'static str) {
        let _ = reason;
    }
    /// `Err`: what this replica lacks to be able to lead.
    fn ready(&self) -> Result<(), String>;
}
