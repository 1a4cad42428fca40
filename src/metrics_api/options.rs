//! Query parameters of the Kubernetes API conventions.

pub(crate) mod selector;

use std::time::Duration;

use crate::engine::selector::Selector;

use super::status::ErrorResponse;
use super::store::{Freshness, StoredObject, Version};

/// Selection of objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// By labels.
    pub labels: Selector,
    /// By name: equal (`true`) or not equal.
    pub names: Vec<(String, bool)>,
}

impl Filter {
    /// Whether it selects the object.
    pub fn matches(&self, object: &StoredObject) -> bool {
        let named = self
            .names
            .iter()
            .all(|(name, is)| (**name == *object.name) == *is);
        named && self.labels.matches(&*object.content.labels)
    }

    /// The single name that it can select, if it has one.
    pub fn only(&self) -> Option<&str> {
        let found = self.names.iter().find(|(_, is)| *is);
        found.map(|(name, _)| name.as_str())
    }

    /// Whether it selects all objects.
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }
}

/// A `continue` token: where the next page of a list starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContinueToken {
    /// Version of the list.
    pub version: Version,
    /// Last name of the previous page.
    pub start: String,
}

impl ContinueToken {
    /// The encoded token.
    pub fn text(&self) -> String {
        format!("{}.{}", self.version, self.start)
    }

    fn read(text: &str) -> Option<Self> {
        let (version, start) = text.split_once('.')?;
        Some(Self {
            version: version.parse().ok()?,
            start: start.to_owned(),
        })
    }
}

/// What table rows include of their objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Include {
    /// Nothing.
    None,
    /// `PartialObjectMetadata`.
    #[default]
    Metadata,
    /// The whole object.
    Object,
}

/// Where a watch starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// With the current objects, at this version or newer.
    Initial(Option<Version>),
    /// With the next event.
    Now,
    /// After this version.
    Version(Version),
}

/// Options of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchOptions {
    /// From when.
    pub since: Since,
    /// Whether a bookmark marks the end of the initial objects.
    pub marks_initial: bool,
    /// Whether regular bookmarks are sent.
    pub bookmarks: bool,
    /// Duration. `None`: our choice.
    pub timeout: Option<Duration>,
}

/// Options of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    /// Required version.
    pub freshness: Freshness,
    /// Page size.
    pub limit: Option<usize>,
    /// Start of this page.
    pub token: Option<ContinueToken>,
}

/// List or watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListOrWatch {
    /// A list.
    List(List),
    /// A watch.
    Watch(WatchOptions),
}

/// All options of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// List or watch.
    pub operation: ListOrWatch,
    /// Which objects.
    pub filter: Filter,
    /// What table rows include.
    pub include: Include,
}

#[derive(Default)]
struct Raw {
    watch: bool,
    limit: Option<usize>,
    token: Option<String>,
    version: String,
    matching: Option<String>,
    initial: Option<bool>,
    bookmarks: bool,
    timeout: Option<u64>,
    filter: Filter,
    include: Include,
}

impl Options {
    /// Parses the query of a request.
    ///
    /// # Errors
    /// A parameter is invalid, or conflicts with another.
    pub fn of(query: &str) -> Result<Self, ErrorResponse> {
        let mut raw = Raw::default();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            raw.set(&key, &value)?;
        }
        let (filter, include) = (std::mem::take(&mut raw.filter), raw.include);
        let operation = if raw.watch {
            raw.watch().map(ListOrWatch::Watch)
        } else {
            raw.list().map(ListOrWatch::List)
        };
        Ok(Self {
            operation: operation?,
            filter,
            include,
        })
    }
}

impl Raw {
    fn set(&mut self, key: &str, value: &str) -> Result<(), ErrorResponse> {
        let bad = |what: &str| ErrorResponse::bad_request(format!("{key} {value:?} is not {what}"));
        match key {
            "watch" => self.watch = flag(value),
            "allowWatchBookmarks" => self.bookmarks = flag(value),
            "sendInitialEvents" => self.initial = Some(flag(value)),
            "limit" => {
                let limit: usize = value.parse().map_err(|_| bad("a number of objects"))?;
                self.limit = Some(limit).filter(|limit| *limit > 0);
            }
            "timeoutSeconds" => {
                let seconds = value.parse().map_err(|_| bad("a number of seconds"))?;
                self.timeout = Some(seconds);
            }
            "continue" => self.token = given(value),
            "resourceVersion" => value.clone_into(&mut self.version),
            "resourceVersionMatch" => self.matching = given(value),
            "labelSelector" => {
                self.filter.labels = selector::labels(value).map_err(ErrorResponse::bad_request)?;
            }
            "fieldSelector" => {
                self.filter.names = selector::names(value).map_err(ErrorResponse::bad_request)?;
            }
            "includeObject" => {
                let included = include(value);
                self.include = included.ok_or_else(|| bad("None, Metadata or Object"))?;
            }
            // Unknown parameters such as `pretty` are ignored, as API servers do.
            _ => {}
        }
        Ok(())
    }

    /// `None`: any version.
    fn version(&self) -> Result<Option<Version>, ErrorResponse> {
        if matches!(self.version.as_str(), "" | "0") {
            return Ok(None);
        }
        let version = self.version.parse().map(Some);
        version.map_err(|()| {
            ErrorResponse::bad_request(format!(
                "resourceVersion {:?} was not issued by this API",
                self.version
            ))
        })
    }

    fn list(self) -> Result<List, ErrorResponse> {
        if self.initial.is_some() {
            return Err(ErrorResponse::invalid(
                "sendInitialEvents is forbidden for list",
            ));
        }
        let version = self.version()?;
        let freshness = match (self.matching.as_deref(), version) {
            (Some(_), _) if self.token.is_some() => {
                return Err(ErrorResponse::invalid(
                    "resourceVersionMatch is forbidden when continue is provided",
                ));
            }
            (Some(_), _) if self.version.is_empty() => {
                return Err(ErrorResponse::invalid(
                    "resourceVersionMatch is forbidden unless resourceVersion is provided",
                ));
            }
            (Some("Exact"), None) => {
                return Err(ErrorResponse::invalid(
                    "resourceVersionMatch \"Exact\" is forbidden for resourceVersion \"0\"",
                ));
            }
            (Some("Exact"), Some(version)) => Freshness::Exact(version),
            (Some("NotOlderThan") | None, Some(version)) => Freshness::NotOlderThan(version),
            (Some("NotOlderThan") | None, None) => Freshness::Any,
            (Some(other), _) => return Err(unsupported(other)),
        };
        let token = self.token.as_deref().map(|token| {
            ContinueToken::read(token).ok_or_else(|| {
                ErrorResponse::bad_request(format!("continue {token:?} was not issued by this API"))
            })
        });
        Ok(List {
            freshness,
            limit: self.limit,
            token: token.transpose()?,
        })
    }

    fn watch(self) -> Result<WatchOptions, ErrorResponse> {
        let version = self.version()?;
        match (self.initial, self.matching.as_deref()) {
            (Some(_), None) => {
                return Err(ErrorResponse::invalid(
                    "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
                ));
            }
            (None, Some(_)) => {
                return Err(ErrorResponse::invalid(
                    "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
                ));
            }
            (Some(_), Some("NotOlderThan")) | (None, None) => {}
            (Some(_), Some(other)) => return Err(unsupported(other)),
        }
        let since = match (self.initial, version) {
            (Some(true), version) => Since::Initial(version),
            (_, Some(version)) => Since::Version(version),
            (Some(false), None) => Since::Now,
            (None, None) => Since::Initial(None),
        };
        Ok(WatchOptions {
            since,
            marks_initial: self.initial == Some(true),
            bookmarks: self.bookmarks,
            timeout: self
                .timeout
                .filter(|seconds| *seconds > 0)
                .map(Duration::from_secs),
        })
    }
}

fn unsupported(matching: &str) -> ErrorResponse {
    ErrorResponse::invalid(&format!(
        "resourceVersionMatch {matching:?} is not supported; use NotOlderThan, or Exact for a list"
    ))
}

fn given(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| value.to_owned())
}

fn flag(value: &str) -> bool {
    !matches!(value, "0" | "false" | "False" | "FALSE")
}

fn include(value: &str) -> Option<Include> {
    Some(match value {
        "None" => Include::None,
        "" | "Metadata" => Include::Metadata,
        "Object" => Include::Object,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
