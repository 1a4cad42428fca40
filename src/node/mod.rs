//! The node side: reads the kernel's files, and writes cgroup files in a way that can be restored.

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
