//! Reading the node: files in, an engine sample out.

mod container;
mod node;
mod pod;
pub mod proc;
mod refill;
mod sampler;

pub use sampler::Sampler;
