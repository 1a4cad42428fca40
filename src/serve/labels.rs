//! Labels that several metric families share.

use prometheus_client::encoding::EncodeLabelSet;

/// Label of metric families that count by result.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct ResultLabels {
    /// The result as one word.
    pub result: &'static str,
}

/// Label of gauges by state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct StateLabels {
    /// The state as one word.
    pub state: &'static str,
}

/// Label of metric families that count by reason.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct ReasonLabels {
    /// The reason as one word.
    pub reason: &'static str,
}

/// Label of metric families by kind of object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct KindLabels {
    /// The kind.
    pub kind: &'static str,
}

/// Labels of requests to the API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct RequestLabels {
    /// As in the audit log: `get`, `list`, `watch`, `create`, `update`, `patch` or `delete`.
    pub verb: &'static str,
    /// The HTTP code of the answer; `none` where there was none.
    pub code: String,
}

impl RequestLabels {
    /// Of a request that was answered with this HTTP code, or not at all.
    pub fn new(verb: &'static str, code: Option<u16>) -> Self {
        let code = code.map_or_else(|| "none".to_owned(), |code| code.to_string());
        Self { verb, code }
    }
}
