//! Conditions of kstatus, whose rules Flux and Argo CD follow when they wait. Absent where there is nothing to say.

/// Nothing goes on before someone acts.
pub const STALLED: &str = "Stalled";
/// It goes on by itself.
pub const RECONCILING: &str = "Reconciling";
