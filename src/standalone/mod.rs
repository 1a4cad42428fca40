//! `plimsoll run`: the engine on one machine without Kubernetes.

pub mod daemon;
pub mod discovery;
mod enforce;
pub mod event;
pub mod fingerprint;
pub mod machine;
pub mod manifest;
pub mod notify;
pub mod output;
pub mod pods;
pub mod policies;
mod previews;
pub mod replayed;
pub mod report;
pub mod scheduling;
pub mod setup;
pub mod state_dir;
pub mod status;
mod troubles;
pub mod wake;
mod wording;
