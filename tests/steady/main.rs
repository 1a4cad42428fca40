//! Steady state allocates nothing and opens nothing.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/collect/mod.rs"]
mod collect_support;
#[path = "../support/engine/mod.rs"]
mod engine_support;
#[path = "../support/run/mod.rs"]
mod run_support;

mod engine;
mod machine;
mod sampler;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by each test that opens files: [`sampler`] sets the limit of open files of the whole process to zero meanwhile.
fn files() -> MutexGuard<'static, ()> {
    static FILES: Mutex<()> = Mutex::new(());
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}
