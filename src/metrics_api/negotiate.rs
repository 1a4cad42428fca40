//! Content negotiation by the `Accept` header.

use std::cmp::Reverse;

/// A form of objects and lists, always as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The objects themselves.
    Plain,
    /// A `Table` of `meta.k8s.io`, of this version.
    Table(&'static str),
    /// Only the metadata of objects.
    Metadata,
}

/// One clause of an `Accept` header.
struct Clause<'a> {
    media: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
}

impl<'a> Clause<'a> {
    fn of(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let parameters = parts.filter_map(|part| part.split_once('=')).collect();
        Self { media, parameters }
    }

    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.parameters.iter().find(|(name, _)| *name == key);
        found.map(|(_, value)| *value)
    }

    /// The weight `q`, in thousandths.
    fn weight(&self) -> u32 {
        let weight = self.get("q").and_then(|text| text.parse::<f64>().ok());
        let thousandths = weight.unwrap_or(1.0).clamp(0.0, 1.0) * 1000.0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 1000"
        )]
        let thousandths = thousandths as u32;
        thousandths
    }

    fn is_json(&self) -> bool {
        matches!(self.media, "application/json" | "application/*" | "*/*")
    }

    fn form(&self) -> Option<Form> {
        let meta = self.get("g") == Some("meta.k8s.io");
        match (self.get("as"), self.get("v")) {
            _ if !self.is_json() => None,
            (None, _) => Some(Form::Plain),
            (Some("Table"), Some("v1")) if meta => Some(Form::Table("meta.k8s.io/v1")),
            (Some("Table"), Some("v1beta1")) if meta => Some(Form::Table("meta.k8s.io/v1beta1")),
            (Some("PartialObjectMetadata" | "PartialObjectMetadataList"), Some("v1")) if meta => {
                Some(Form::Metadata)
            }
            _ => None,
        }
    }
}

/// The clauses by descending weight. Without a header, anything is accepted.
fn clauses(accept: &str) -> Vec<Clause<'_>> {
    let accept = if accept.trim().is_empty() {
        "*/*"
    } else {
        accept
    };
    let mut clauses: Vec<Clause<'_>> = accept.split(',').map(Clause::of).collect();
    clauses.retain(|clause| clause.weight() > 0);
    clauses.sort_by_key(|clause| Reverse(clause.weight()));
    clauses
}

/// The preferred form among those that we support. `None`: there is none, e.g. only protobuf.
pub fn form(accept: &str) -> Option<Form> {
    clauses(accept).iter().find_map(Clause::form)
}

/// Whether plain JSON is accepted.
pub fn accepts_json(accept: &str) -> bool {
    clauses(accept)
        .iter()
        .any(|clause| clause.is_json() && clause.get("as").is_none())
}

/// Whether aggregated discovery is preferred to the unaggregated form.
pub fn aggregated(accept: &str) -> bool {
    let wanted = clauses(accept).iter().find_map(|clause| {
        let aggregated = clause.get("as") == Some("APIGroupDiscoveryList")
            && clause.get("g") == Some("apidiscovery.k8s.io")
            && clause.get("v") == Some("v2");
        (clause.is_json() && (aggregated || clause.get("as").is_none())).then_some(aggregated)
    });
    wanted == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_supported_form_is_chosen() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(form(kubectl), Some(Form::Table("meta.k8s.io/v1")));
        let old = "application/json;as=Table;v=v1beta1;g=meta.k8s.io, application/json";
        assert_eq!(form(old), Some(Form::Table("meta.k8s.io/v1beta1")));
        let informer = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        assert_eq!(form(informer), Some(Form::Metadata));
        for json in [
            "",
            "*/*",
            "application/json",
            "application/vnd.kubernetes.protobuf,application/json",
            "application/json;q=0.5, application/yaml",
        ] {
            assert_eq!(form(json), Some(Form::Plain), "{json}");
        }
        let preferred = "application/json;q=0.1,application/json;as=Table;v=v1;g=meta.k8s.io;q=0.9";
        assert_eq!(form(preferred), Some(Form::Table("meta.k8s.io/v1")));
    }

    #[test]
    fn only_json_is_supported() {
        for accept in [
            "application/vnd.kubernetes.protobuf",
            "application/yaml",
            "application/cbor",
            "application/json;q=0",
            "application/json;as=Table;v=v2;g=meta.k8s.io",
        ] {
            assert_eq!(form(accept), None, "{accept}");
        }
        assert!(accepts_json("text/html, */*;q=0.1"));
        assert!(!accepts_json(
            "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
        ));
    }

    #[test]
    fn discovery_is_aggregated_for_clients_that_support_it() {
        let aggregator = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json";
        assert!(aggregated(aggregator));
        assert!(!aggregated("application/json"));
        assert!(!aggregated(
            "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json"
        ));
        assert!(!aggregated(""));
    }
}
