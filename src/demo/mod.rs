//! `plimsoll demo`: a service that needs more CPU than it requested beside batch pods, and what the policies do about it.
//!
//! ```text
//!  load (server, burners) ── requests ──► latency ─┐
//!  node::machine ────────── samples ────► usage ───┼─► view ─► terminal | plain
//!                      └─── events ─────► history ─┘      └──► report
//! ```

pub mod history;
pub mod leftovers;
pub mod live;
pub mod obstacle;
pub mod phase;
pub mod plain;
pub mod plot;
pub mod pods;
pub mod policy;
pub mod renderer;
pub mod report;
pub mod screen;
pub mod terminal;
pub mod usage;
pub mod view;

/// `1 CPU`, `2 CPUs`.
fn cpus(count: u32) -> String {
    match count {
        1 => "1 CPU".to_owned(),
        count => format!("{count} CPUs"),
    }
}
