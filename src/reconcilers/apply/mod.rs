//! Carries out operations on the API server.

pub mod task_queue;
pub mod write;
