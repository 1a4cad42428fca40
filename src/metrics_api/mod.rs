//! `metrics.plimsoll.dev/v1alpha1`: the `NodeMetrics` of all nodes, served from memory as an aggregated API.
//!
//! Every replica answers what is always the same (discovery, `OpenAPI`, health); objects come from the replica that
//! leads, to which the others pass requests on. [`store::Store`] and all that shapes questions and answers is pure.

pub mod authn;
mod authorities;
mod authz;
mod certificates;
pub mod compose;
pub mod data;
mod discovery;
mod documents;
pub mod encode;
mod evict;
mod feed;
mod forward;
pub(crate) mod front_proxy;
mod keeper;
mod listener;
pub mod negotiate;
mod openapi;
pub mod options;
mod patience;
mod readers;
mod readiness;
mod relay;
pub mod reports;
mod server;
mod serving;
mod status;
pub mod store;
pub mod table;
mod under_way;
mod watch;

use std::net::SocketAddr;

use jiff::Timestamp;

pub use feed::Feed;
pub use keeper::{CertificatePlace, Place, ReportPlace, TlsFiles};
pub use serving::{Serving, StartError, start};
pub use status::Refusal;

/// How it is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where; `None`: agents are served alone, at the address of reports.
    pub listen: Option<SocketAddr>,
    /// Its Service and Secret, and those of reports.
    pub place: Place,
    /// How agents' reports are taken; `None`: not at all.
    pub reports: Option<reports::Options>,
}

/// Who is told how it goes, and knows how the rest of the replica goes.
pub trait Observer: Send + Sync {
    /// A request was answered with this code: `get`, `list`, `watch`, `discovery`, `health`, `eviction`, `relay` or `other`.
    fn answered(&self, what: &'static str, code: u16);
    /// Whether there is a certificate to serve with, or why not.
    fn certified(&self, outcome: Result<(), &str>);
    /// All was looked at: until when the certificate is good that is served, and whether nothing is wrong.
    fn kept(&self, ends: Option<Timestamp>, ok: bool);
    /// Whether it is known which API servers to believe, or why not.
    fn believes(&self, outcome: Result<(), &str>);
    /// So many bytes are there for answers under way alone.
    fn pinned(&self, bytes: usize) {
        let _ = bytes;
    }
    /// A connection was cut: `too_many_new`, `too_slow`, or `pinned`.
    fn cut(&self, reason: &'static str) {
        let _ = reason;
    }
    /// What this replica lacks to lead at once; `Ok`: nothing.
    fn lacks(&self) -> Result<(), String>;
}
