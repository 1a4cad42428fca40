//! The emergency stop: one annotated object that every agent watches, by which a person makes all of them give back
//! what is in force and do nothing more.
//!
//! It is a `ConfigMap` of its own beside the agents' Leases, so that the line that stops everything is the same for every
//! installation and whoever may write it may write nothing else. The chart makes it once and has it in no manifest: whatever
//! applies or replaces those leaves the order alone.

use std::collections::BTreeMap;

/// Name of the `ConfigMap`, in the namespace of the agents' Leases.
pub const OBJECT: &str = "plimsoll-stop";
/// While the object bears it, whatever its value but `false`, everything is stopped. The value says why, and who did it.
pub const ANNOTATION: &str = "plimsoll.dev/stop";
/// So many characters of the value are shown.
const LONGEST: usize = 256;

/// Why everything is stopped, as the object's annotations say; empty where they give no reason. `None`: nothing is stopped.
pub fn order(annotations: Option<&BTreeMap<String, String>>) -> Option<String> {
    let value = annotations?.get(ANNOTATION)?.trim();
    if value.eq_ignore_ascii_case("false") {
        return None;
    }
    let shown = value.chars().filter(|it| !it.is_control());
    Some(shown.take(LONGEST).collect())
}

/// The order in words.
pub fn words(reason: &str) -> String {
    match reason {
        "" => "stopped".to_owned(),
        reason => format!("stopped: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(value: &str) -> Option<String> {
        let annotation = (ANNOTATION.to_owned(), value.to_owned());
        order(Some(&BTreeMap::from([annotation])))
    }

    #[test]
    fn the_annotation_stops_whatever_it_says_but_false() {
        for value in ["true", "", "no", "0", "nightly batch jobs starve"] {
            assert_eq!(said(value).as_deref(), Some(value));
        }
        for value in ["false", " False\n"] {
            assert_eq!(said(value), None, "{value:?}");
        }
        assert_eq!(order(None), None);
        assert_eq!(order(Some(&BTreeMap::new())), None);
    }

    #[test]
    fn of_a_reason_only_what_people_can_read_is_shown() {
        assert_eq!(said("a\nb\u{1b}[2Jc").as_deref(), Some("ab[2Jc"));
        let long = said(&"ä".repeat(300_000)).expect("stopped");
        assert_eq!(long.chars().count(), LONGEST);
        assert_eq!(words(""), "stopped");
        assert_eq!(words("why"), "stopped: why");
    }
}
