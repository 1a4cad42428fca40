//! Gaps in saved values: JSON has no NaN, so they are written as `null`.

use serde::{Deserialize, Deserializer};

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Box<[f32]>, D::Error> {
    let values = Vec::<Option<f32>>::deserialize(from)?;
    let values = values.into_iter().map(|value| value.unwrap_or(f32::NAN));
    Ok(values.collect())
}
