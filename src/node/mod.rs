//! The node side: reading the kernel, and writing to it with a way back.

pub mod actuate;
pub mod agent;
pub mod cgroup;
pub mod clock;
pub mod collect;
pub mod direct_report;
pub mod heartbeat;
pub mod journal;
pub mod machine;
pub mod report;
