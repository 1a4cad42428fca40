//! The kernel side of a node: reads its files, and writes cgroup files in a way that can be restored.

pub mod actuate;
pub mod cgroup;
pub mod collect;
pub mod journal;
pub mod machine;
