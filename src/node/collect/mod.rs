//! Reads the node's files into an engine sample.

mod container;
mod insecure_tls;
mod node;
mod pod;
pub mod probe;
pub mod proc;
pub mod prometheus;
mod refill;
mod sampler;
pub(crate) mod waits;

pub use probe::Prober;
pub use sampler::{SampledPod, Sampler};
