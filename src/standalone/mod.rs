//! `plimsoll run`: the engine on one machine without Kubernetes.

pub mod event;
pub mod fingerprint;
pub mod pods;
pub mod wake;
mod wording;
