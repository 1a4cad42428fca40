//! Pods with a load each, on real cgroups of this machine, and the latency that they measure: what the demo and the bench of
//! protection share.

pub mod cgroups;
pub mod latency;
pub mod load;
pub mod pod;
pub mod process;
