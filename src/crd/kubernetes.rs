//! Versions of Kubernetes, and the definitions that each accepts.

use std::fmt;
use std::str::FromStr;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::version::Info;
use serde_json::{Value, json};

use super::schema::{definitions, edit};

/// The major and minor version of Kubernetes, such as 1.34.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubernetesVersion(pub u64, pub u64);

impl KubernetesVersion {
    /// The oldest supported version.
    pub const OLDEST: Self = Self(1, 33);
    /// From this version on, API servers use the `maxLength` of an int-or-string when they estimate the cost of a CEL rule.
    /// Older ones assume a string of 3 MB, and reject every rule on one in a list of 64.
    const USES_MAX_LENGTH: Self = Self(1, 34);

    /// From the version info of an API server.
    pub fn of(info: &Info) -> Option<Self> {
        Self::from_numbers(&info.major, &info.minor)
    }

    /// From the numbers of `/version`; the minor number may have a suffix: `34+`.
    pub fn from_numbers(major: &str, minor: &str) -> Option<Self> {
        let minor = minor.trim_end_matches(|it: char| !it.is_ascii_digit());
        Some(Self(major.parse().ok()?, minor.parse().ok()?))
    }

    /// The definitions for API servers of this version: those of [`definitions()`]; before 1.34 with simpler checks of
    /// quantities, which do not compare `restoreValue` with `value` where one of them is a string (the controller does).
    pub fn definitions(self) -> [CustomResourceDefinition; 4] {
        let [action, mut node, pod, watermark] = definitions();
        if self < Self::USES_MAX_LENGTH {
            edit(&mut node, simplify_quantity_checks);
        }
        [action, node, pod, watermark]
    }

    /// The command that installs or updates the definitions.
    pub fn install_command(self) -> String {
        let choice = if self < Self::USES_MAX_LENGTH {
            format!(" --kubernetes {self}")
        } else {
            String::new()
        };
        format!("plimsoll crds{choice} | kubectl apply --server-side --force-conflicts -f -")
    }
}

/// The newest version: the default for a cluster whose version is not known.
impl Default for KubernetesVersion {
    fn default() -> Self {
        Self(u64::MAX, 0)
    }
}

impl fmt::Display for KubernetesVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// From `1.33`, `v1.33.4` or `1.33.4-gke.100`.
impl FromStr for KubernetesVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.strip_prefix('v').unwrap_or(text).split_once('.');
        parts
            .and_then(|(major, rest)| Self::from_numbers(major, rest.split('.').next()?))
            .ok_or_else(|| {
                format!("{text:?} is not a version of Kubernetes; write for example 1.33")
            })
    }
}

/// Patterns of a quantity above 0, and of one of 0 or more.
const ABOVE_0: &str = "^[+]?([0-9]*[1-9][0-9]*[.]?[0-9]*|[0-9]*[.][0-9]*[1-9][0-9]*)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]+)?$";
const FROM_0: &str = "^[+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]+)?$";

const COMPARE_NUMBERS: &str = "!has(self.restoreValue) || type(self.restoreValue) != int || \
     type(self.metricRule.value) != int || int(self.restoreValue) <= int(self.metricRule.value)";

/// Replaces the CEL rules on quantities by minimums and patterns, and compares only integers.
fn simplify_quantity_checks(schema: &mut Value) {
    let rule = &mut schema["properties"]["spec"]["properties"]["rules"]["items"];
    let properties = &mut rule["properties"];
    limit(
        &mut properties["metricRule"]["properties"]["value"],
        1,
        ABOVE_0,
    );
    limit(&mut properties["restoreValue"], 0, FROM_0);
    let rules = rule["x-kubernetes-validations"].as_array_mut();
    for rule in rules.into_iter().flatten() {
        if rule["fieldPath"] == ".restoreValue" {
            rule["rule"] = json!(COMPARE_NUMBERS);
        }
    }
}

fn limit(schema: &mut Value, minimum: u8, pattern: &str) {
    let Some(fields) = schema.as_object_mut() else {
        return;
    };
    fields.remove("x-kubernetes-validations");
    fields.insert("minimum".to_owned(), json!(minimum));
    fields.insert("pattern".to_owned(), json!(pattern));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn all_usual_forms_of_a_version_are_parsed() {
        for text in ["1.33", "v1.33.4", "1.33.4-gke.100", "1.33+"] {
            assert_eq!(text.parse(), Ok(KubernetesVersion(1, 33)), "{text}");
        }
        for text in ["", "1", "1.", "new", "1.x.3", "-1.33"] {
            let error = text.parse::<KubernetesVersion>().unwrap_err();
            assert!(error.contains("for example 1.33"), "{text}: {error}");
        }
        assert!(KubernetesVersion(1, 9) < KubernetesVersion(1, 33));
    }

    #[test]
    fn only_rules_on_quantities_are_replaced_before_1_34() {
        let text =
            |version: KubernetesVersion| serde_json::to_string(&version.definitions()).unwrap();
        let (old, new) = (
            text(KubernetesVersion(1, 33)),
            text(KubernetesVersion(1, 34)),
        );
        assert_eq!(new, serde_json::to_string(&definitions()).unwrap());
        assert_eq!(new, text(KubernetesVersion::default()));
        assert!(new.matches("quantity(string(self").count() > 0);
        assert_eq!(old.matches("quantity(string(self").count(), 0);
        let rules = |text: &str| text.matches("\"rule\"").count();
        assert_eq!(rules(&new) - rules(&old), 2);
    }

    #[test]
    fn the_command_names_only_versions_with_their_own_definitions() {
        let old = KubernetesVersion(1, 33).install_command();
        assert!(
            old.starts_with("plimsoll crds --kubernetes 1.33 | kubectl apply"),
            "{old}"
        );
        for version in [KubernetesVersion(1, 34), KubernetesVersion::default()] {
            assert!(
                version
                    .install_command()
                    .starts_with("plimsoll crds | kubectl apply")
            );
        }
    }
}
