//! What schedulers and the descheduler ask the controller, over plain HTTP: the extender of kube-scheduler, the page of load-watcher
//! for Trimaran's plugins, three queries in the format of Prometheus, and single values of nodes.
//!
//! Every replica answers from the reports that it receives, and what it polls. A report that is too old counts as none; a node without one gets
//! the median of the others, so that it is neither preferred nor starved.

pub mod extender;
mod extender_requests;
mod load_watcher;
mod metrics;
mod policy_file;
mod prometheus;
pub mod query;
mod server;
mod values;

pub use metrics::SchedulerApiMetrics;
pub use policy_file::{PolicyFile, PolicyFileError};
pub use server::{Options, StartError, start};
