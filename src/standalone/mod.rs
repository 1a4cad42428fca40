//! `plimsoll run`: the engine on one machine without Kubernetes.
