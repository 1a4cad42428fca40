//! The emergency stop: an annotation on a `ConfigMap` that every agent watches. While it is set, all agents restore what they
//! changed and take no action.
//!
//! It is a `ConfigMap` of its own in the namespace of the agents' Leases, so that the command that stops everything is the same
//! in every installation, and the right to write it includes no other right. The chart creates it outside its manifests:
//! an upgrade does not remove the annotation.

use std::collections::BTreeMap;

/// Name of the `ConfigMap`, in the namespace of the agents' Leases.
pub const OBJECT: &str = "plimsoll-stop";
/// While the object has this annotation with any value but `false`, everything is stopped. The value is the reason.
pub const ANNOTATION: &str = "plimsoll.dev/stop";
/// At most this many characters of the reason are shown.
const MAX_REASON: usize = 256;

/// The reason of the stop, from the annotations of the object; may be empty. `None`: nothing is stopped.
pub fn stop_reason(annotations: Option<&BTreeMap<String, String>>) -> Option<String> {
    let value = annotations?.get(ANNOTATION)?.trim();
    if value.eq_ignore_ascii_case("false") {
        return None;
    }
    let printable = value.chars().filter(|it| !it.is_control());
    Some(printable.take(MAX_REASON).collect())
}

/// The stop as text for messages.
pub fn stop_message(reason: &str) -> String {
    match reason {
        "" => "stopped".to_owned(),
        reason => format!("stopped: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(value: &str) -> Option<String> {
        let annotation = (ANNOTATION.to_owned(), value.to_owned());
        stop_reason(Some(&BTreeMap::from([annotation])))
    }

    #[test]
    fn any_value_but_false_stops() {
        for value in ["true", "", "no", "0", "nightly batch jobs starve"] {
            assert_eq!(order_of(value).as_deref(), Some(value));
        }
        for value in ["false", " False\n"] {
            assert_eq!(order_of(value), None, "{value:?}");
        }
        assert_eq!(stop_reason(None), None);
        assert_eq!(stop_reason(Some(&BTreeMap::new())), None);
    }

    #[test]
    fn control_characters_and_long_reasons_are_cut() {
        assert_eq!(order_of("a\nb\u{1b}[2Jc").as_deref(), Some("ab[2Jc"));
        let long = order_of(&"ä".repeat(300_000)).expect("stopped");
        assert_eq!(long.chars().count(), MAX_REASON);
        assert_eq!(stop_message(""), "stopped");
        assert_eq!(stop_message("why"), "stopped: why");
    }
}
