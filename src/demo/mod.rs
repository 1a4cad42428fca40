//! `plimsoll demo`: two kinds of pods, one overload, and what the policies do about it.
//!
//! ```text
//!  load (worker, burners) ── requests ──► latency ─┐
//!  node::machine ────────── samples ────► scene ───┼─► view ─► screen | plain | picture
//!                      └─── events ────────────────┘      └──► report
//! ```

pub mod access;
pub mod cast;
pub mod chronicle;
pub mod latency;
pub mod leftovers;
pub mod live;
pub mod load;
pub mod picture;
pub mod plain;
pub mod policy;
pub mod process;
pub mod recording;
pub mod replay;
pub mod report;
pub mod scene;
pub mod screen;
pub mod show;
pub mod stage;
pub mod story;
pub mod terminal;
pub mod view;

/// `1 CPU`, `2 CPUs`.
fn cpus(count: u32) -> String {
    match count {
        1 => "1 CPU".to_owned(),
        count => format!("{count} CPUs"),
    }
}
