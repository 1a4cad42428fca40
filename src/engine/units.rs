//! Quantities that carry their unit.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// None of it.
            pub const ZERO: Self = Self(0);

            /// `self - other`, or zero if `other` is larger.
            #[must_use]
            pub const fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::ZERO, Add::add)
            }
        }
    };
}

unit! {
    /// Thousandths of one CPU: `MilliCpu(1500)` is one and a half CPUs.
    MilliCpu
}
unit! {
    /// Bytes.
    Bytes
}

impl fmt::Display for MilliCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}m", self.0)
    }
}

impl fmt::Display for Bytes {
    /// With a binary suffix, as Kubernetes writes quantities: `1.5Gi`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SUFFIXES: [(&str, u64); 4] = [
            ("Ti", 1 << 40),
            ("Gi", 1 << 30),
            ("Mi", 1 << 20),
            ("Ki", 1 << 10),
        ];
        match SUFFIXES.iter().find(|(_, size)| self.0 >= *size) {
            Some((suffix, size)) if self.0.is_multiple_of(*size) => {
                write!(f, "{}{suffix}", self.0 / size)
            }
            Some((suffix, size)) => write!(f, "{:.1}{suffix}", self.0 as f64 / *size as f64),
            None => write!(f, "{}", self.0),
        }
    }
}

impl MilliCpu {
    /// The CPU usage of `nanos` of run time over `elapsed` nanoseconds; `None` if no time passed.
    pub fn from_usage(nanos: u64, elapsed: u64) -> Option<Self> {
        if elapsed == 0 {
            return None;
        }
        let milli = u128::from(nanos) * 1000 / u128::from(elapsed);
        u64::try_from(milli).ok().map(Self)
    }

    /// `percent` of it, rounded down.
    #[must_use]
    pub fn percent(self, percent: u8) -> Self {
        let part = u128::from(self.0) * u128::from(percent) / 100;
        Self(u64::try_from(part).unwrap_or(u64::MAX))
    }
}

/// How much CPU a cgroup may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Quota {
    /// No limit: `max` on cgroup v2, `-1` on v1.
    Unlimited,
    /// At most this much CPU.
    Limit(MilliCpu),
}

impl Quota {
    /// The smaller of the quota and `usage`.
    #[must_use]
    pub fn min_usage(self, usage: MilliCpu) -> MilliCpu {
        match self {
            Self::Unlimited => usage,
            Self::Limit(limit) => limit.min(usage),
        }
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlimited => f.write_str("max"),
            Self::Limit(limit) => limit.fmt(f),
        }
    }
}
