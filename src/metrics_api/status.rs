//! What a request is refused with: a `Status` of `meta/v1`.

use serde_json::{Value, json};

use crate::crd::node_metric::{GROUP, PLURAL};

use super::store::{Unavailable, Version};
use super::under_way::MAX_OF_A_USER;

/// Why nobody answers who leads.
const NOT_LEADING: &str = "the replica that leads is not known yet, can't be reached, or is still to hear of most nodes: it is \
                           elected within 10 s, and after a start of all replicas hears of them within 20";

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP code.
    pub code: u16,
    /// The machine's word for it.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Seconds after which the request may do.
    pub retry_after: Option<u32>,
    /// The name of the object that it is about.
    name: Option<String>,
    /// A cause that clients look for.
    cause: Option<(&'static str, &'static str)>,
}

impl Refusal {
    /// One that the others don't describe.
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

    /// The same, to be tried again after so many seconds.
    #[must_use]
    pub fn after(self, seconds: u32) -> Self {
        Self {
            retry_after: Some(seconds),
            ..self
        }
    }

    /// This user has as many lists and watches under way as one may have.
    pub fn too_many_under_way(user: &str) -> Self {
        let message = format!(
            "User {user:?} has {MAX_OF_A_USER} lists and watches of {PLURAL} under way: end some, or wait"
        );
        Self::new(429, "TooManyRequests", message).after(5)
    }

    /// The request makes no sense.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// A parameter is not allowed with the others. Clients take another way upon it.
    pub fn invalid(what: &str) -> Self {
        Self::new(
            422,
            "Invalid",
            format!("ListOptions.meta.k8s.io \"\" is invalid: {what}"),
        )
    }

    /// It is not known who asks.
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// Who asks may not.
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

    /// There is no such object.
    pub fn no_object(name: &str) -> Self {
        let message = format!("{PLURAL}.{GROUP} \"{name}\" not found");
        Self {
            name: Some(name.to_owned()),
            ..Self::new(404, "NotFound", message)
        }
    }

    /// There is no such path.
    pub fn no_path() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    /// There is no way to write.
    pub fn method() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "nodemetrics are measured, not written: only get, list and watch are served",
        )
    }

    /// The client understands nothing that we speak.
    pub fn not_acceptable() -> Self {
        Self::new(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json",
        )
    }

    /// What was asked for is too long ago.
    pub fn expired() -> Self {
        Self::new(410, "Expired", "too old resource version: list again")
    }

    /// The version is not there yet.
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

    /// Another replica leads, or none does yet.
    pub fn not_leading() -> Self {
        Self::new(503, "ServiceUnavailable", NOT_LEADING).after(1)
    }

    /// Whether it is that.
    pub fn is_not_leading(&self) -> bool {
        self.message == NOT_LEADING
    }

    /// The API server doesn't tell who asks, or whether they may.
    pub fn unknown(what: &str) -> Self {
        Self::new(
            503,
            "ServiceUnavailable",
            format!("failed to ask the API server {what}"),
        )
        .after(1)
    }

    /// As the API has it.
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

impl From<Unavailable> for Refusal {
    fn from(why: Unavailable) -> Self {
        match why {
            Unavailable::NotLeading => Self::not_leading(),
            Unavailable::Expired => Self::expired(),
            Unavailable::Future(now) => Self::too_large(now),
        }
    }
}
