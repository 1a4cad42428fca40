//! Error responses: a `Status` of `meta/v1`.

use serde_json::{Value, json};

use crate::crd::node_metric::{GROUP, PLURAL};

use super::in_flight::MAX_PER_USER;
use super::store::{Unavailable, Version};

/// Why there is no data without a leader.
const NOT_LEADING: &str = "the leading replica is not known yet, can't be reached, or has not received most agents' reports yet: \
                           a leader is elected within 10 s, and has the reports within 20 s after all replicas have started";

/// An error response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorResponse {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason.
    pub reason: &'static str,
    /// Message for humans.
    pub message: String,
    /// Retry delay in seconds.
    pub retry_after: Option<u32>,
    /// Name of the object.
    name: Option<String>,
    /// Machine-readable cause.
    cause: Option<(&'static str, &'static str)>,
}

impl ErrorResponse {
    /// A refusal without further details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            retry_after: None,
            name: None,
            cause: None,
        }
    }

    /// Adds a retry delay in seconds.
    #[must_use]
    pub fn after(self, seconds: u32) -> Self {
        Self {
            retry_after: Some(seconds),
            ..self
        }
    }

    /// The user has reached the limit of lists and watches.
    pub fn too_many_in_flight(user: &str) -> Self {
        let message = format!(
            "User {user:?} has {MAX_PER_USER} lists and watches of {PLURAL} in progress: close some, or wait"
        );
        Self::new(429, "TooManyRequests", message).after(5)
    }

    /// The request is invalid.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// A parameter conflicts with others. Clients fall back to another way.
    pub fn invalid(what: &str) -> Self {
        Self::new(
            422,
            "Invalid",
            format!("ListOptions.meta.k8s.io \"\" is invalid: {what}"),
        )
    }

    /// The client is not authenticated.
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// The user lacks the right.
    pub fn forbidden(user: &str, verb: &str, name: Option<&str>, why: Option<&str>) -> Self {
        let named = name.map_or_else(String::new, |name| format!(" \"{name}\""));
        let mut message = format!(
            "{PLURAL}.{GROUP}{named} is forbidden: User \"{user}\" cannot {verb} resource \"{PLURAL}\" in API group \
             \"{GROUP}\" at the cluster scope"
        );
        if let Some(why) = why {
            message = format!("{message}: {why}");
        }
        Self {
            name: name.map(str::to_owned),
            ..Self::new(403, "Forbidden", message)
        }
    }

    /// The object does not exist.
    pub fn no_object(name: &str) -> Self {
        let message = format!("{PLURAL}.{GROUP} \"{name}\" not found");
        Self {
            name: Some(name.to_owned()),
            ..Self::new(404, "NotFound", message)
        }
    }

    /// The path does not exist.
    pub fn no_path() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    /// The API is read-only.
    pub fn method() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "nodemetrics are read-only: only get, list and watch are served",
        )
    }

    /// The client accepts no supported media type.
    pub fn not_acceptable() -> Self {
        Self::new(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json",
        )
    }

    /// The requested version is too old.
    pub fn expired() -> Self {
        Self::new(410, "Expired", "too old resource version: list again")
    }

    /// The requested version is in the future.
    pub fn too_large(now: Version) -> Self {
        Self {
            cause: Some(("ResourceVersionTooLarge", "Too large resource version")),
            ..Self::new(
                504,
                "Timeout",
                format!("Timeout: Too large resource version; current: {now}"),
            )
            .after(1)
        }
    }

    /// This replica does not lead, or there is no leader.
    pub fn not_leading() -> Self {
        Self::new(503, "ServiceUnavailable", NOT_LEADING).after(1)
    }

    /// Whether it is [`Self::not_leading`].
    pub fn is_not_leading(&self) -> bool {
        self.message == NOT_LEADING
    }

    /// The API server did not answer a review.
    pub fn unknown(what: &str) -> Self {
        Self::new(
            503,
            "ServiceUnavailable",
            format!("failed to ask the API server {what}"),
        )
        .after(1)
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        });
        let mut details = json!({"group": GROUP, "kind": PLURAL});
        if let Some(name) = &self.name {
            details["name"] = json!(name);
        }
        if let Some(seconds) = self.retry_after {
            details["retryAfterSeconds"] = json!(seconds);
        }
        if let Some((reason, message)) = self.cause {
            details["causes"] = json!([{"reason": reason, "message": message}]);
        }
        status["details"] = details;
        status
    }
}

impl From<Unavailable> for ErrorResponse {
    fn from(why: Unavailable) -> Self {
        match why {
            Unavailable::NotLeading => Self::not_leading(),
            Unavailable::Expired => Self::expired(),
            Unavailable::Future(now) => Self::too_large(now),
        }
    }
}
