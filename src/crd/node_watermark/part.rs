//! A list item that may be of a later version.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// An item of a list, or any other JSON value: so that an item of a later version does not make the object unreadable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Part<T> {
    /// An item with only fields that this version knows.
    Known(T),
    /// Any other value.
    Other(Value),
}

impl<T: DeserializeOwned> Part<T> {
    /// The item, or why it cannot be read.
    ///
    /// # Errors
    /// Names the unknown or invalid field.
    pub fn known(&self) -> Result<Cow<'_, T>, String>
    where
        T: Clone,
    {
        match self {
            Self::Known(item) => Ok(Cow::Borrowed(item)),
            Self::Other(value) => T::deserialize(value)
                .map(Cow::Owned)
                .map_err(|error| error.to_string()),
        }
    }
}

impl<T: JsonSchema> JsonSchema for Part<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}
