//! `plimsoll run`: the engine on one machine without Kubernetes.

pub mod daemon;
pub mod discovery;
pub mod fingerprint;
pub mod host;
pub mod inputs;
pub mod manifest;
pub mod notify;
pub mod output;
pub mod pods;
pub mod policies;
pub mod replay_summary;
pub mod report;
pub mod scheduling;
pub mod setup;
pub mod sources;
pub mod status;
pub mod wake;
