//! Decodes large kinds through JSON values, so that one decoder is compiled for manifests, responses and watches.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// An object that is decoded through a JSON value.
#[derive(Clone, Debug)]
pub struct Typed<K>(pub K);

impl<'de, K: DeserializeOwned> Deserialize<'de> for Typed<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let object = serde_json::from_value(Value::deserialize(from)?);
        object.map(Self).map_err(D::Error::custom)
    }
}

impl<K: Resource<DynamicType = ()>> Resource for Typed<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}
