//! CPU bandwidth as the kernel's files hold it: so many microseconds in each period.

use crate::engine::units::{MilliCpu, Quota};

/// The smallest quota that the kernel takes, in microseconds (`min_cfs_quota_period` in `kernel/sched/core.c`).
pub const LEAST_QUOTA_US: u64 = 1000;

/// What `cpu.max` (v2), or `cpu.cfs_quota_us` with `cpu.cfs_period_us` (v1), say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    /// Microseconds of CPU time a period; `None` without a limit.
    pub quota_us: Option<u64>,
    /// Microseconds a period, above 0.
    pub period_us: u64,
}

impl Bandwidth {
    /// Takes a line of `cpu.max` apart: `max 100000` or `50000 100000`. `None` where it is neither.
    pub fn parse_v2(text: &str) -> Option<Self> {
        let (quota, period) = text.trim_end().split_once(' ')?;
        let quota_us = match quota {
            "max" => None,
            quota => Some(quota.parse().ok()?),
        };
        Self::new(quota_us, period.parse().ok()?)
    }

    /// The same from the two files of v1, where a negative quota is none.
    pub fn parse_v1(quota: &str, period: &str) -> Option<Self> {
        let quota: i64 = quota.trim_end().parse().ok()?;
        Self::new(u64::try_from(quota).ok(), period.trim_end().parse().ok()?)
    }

    fn new(quota_us: Option<u64>, period_us: u64) -> Option<Self> {
        (period_us > 0).then_some(Self {
            quota_us,
            period_us,
        })
    }

    /// The CPU that it allows, rounded down.
    pub fn quota(self) -> Quota {
        match self.quota_us {
            None => Quota::Unlimited,
            Some(us) => {
                MilliCpu::from_usage(us, self.period_us).map_or(Quota::Unlimited, Quota::Limit)
            }
        }
    }

    /// Takes it down to `limit` in the same period: never up, and not below what the kernel takes.
    #[must_use]
    pub fn limited_to(self, limit: MilliCpu) -> Self {
        let us = u128::from(limit.0) * u128::from(self.period_us) / 1000;
        let us = u64::try_from(us).unwrap_or(u64::MAX).max(LEAST_QUOTA_US);
        Self {
            quota_us: Some(self.quota_us.map_or(us, |own| own.min(us))),
            ..self
        }
    }

    /// Takes it down to what `other` allows, in its own period.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        let Some(other_us) = other.quota_us else {
            return self;
        };
        let scaled =
            u128::from(other_us) * u128::from(self.period_us) / u128::from(other.period_us);
        let scaled = u64::try_from(scaled)
            .unwrap_or(u64::MAX)
            .max(LEAST_QUOTA_US);
        Self {
            quota_us: Some(self.quota_us.map_or(scaled, |own| own.min(scaled))),
            ..self
        }
    }

    /// Whether it allows more than `other`.
    pub fn allows_more_than(self, other: Self) -> bool {
        match (self.quota_us, other.quota_us) {
            (None, other) => other.is_some(),
            (Some(_), None) => false,
            (Some(own), Some(theirs)) => {
                u128::from(own) * u128::from(other.period_us)
                    > u128::from(theirs) * u128::from(self.period_us)
            }
        }
    }

    /// As `cpu.max` holds it.
    pub fn text_v2(self) -> String {
        match self.quota_us {
            None => format!("max {}", self.period_us),
            Some(us) => format!("{us} {}", self.period_us),
        }
    }

    /// As `cpu.cfs_quota_us` holds it.
    pub fn text_v1(self) -> String {
        self.quota_us
            .map_or_else(|| "-1".to_owned(), |us| us.to_string())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bandwidth() -> impl Strategy<Value = Bandwidth> {
        let quota = proptest::option::of(LEAST_QUOTA_US..1_000_000_000);
        (quota, 1000..=1_000_000_u64).prop_map(|(quota_us, period_us)| Bandwidth {
            quota_us,
            period_us,
        })
    }

    #[test]
    fn what_the_kernel_writes_is_read() {
        let unlimited = Bandwidth {
            quota_us: None,
            period_us: 100_000,
        };
        let half = Bandwidth {
            quota_us: Some(50_000),
            period_us: 100_000,
        };
        assert_eq!(Bandwidth::parse_v2("max 100000\n"), Some(unlimited));
        assert_eq!(Bandwidth::parse_v2("50000 100000\n"), Some(half));
        assert_eq!(Bandwidth::parse_v1("-1\n", "100000\n"), Some(unlimited));
        assert_eq!(Bandwidth::parse_v1("50000\n", "100000\n"), Some(half));
        assert_eq!(half.quota(), Quota::Limit(MilliCpu(500)));
        assert_eq!(unlimited.quota(), Quota::Unlimited);
    }

    #[test]
    fn what_it_never_writes_is_not() {
        for text in [
            "",
            "max",
            "50000",
            "max 0",
            "x 100000",
            "50000 x",
            "-1 100000",
            "99999999999999999999999 100000",
        ] {
            assert_eq!(Bandwidth::parse_v2(text), None, "{text}");
        }
        assert_eq!(Bandwidth::parse_v1("", "100000"), None);
        assert_eq!(Bandwidth::parse_v1("1000", "0"), None);
    }

    proptest! {
        #[test]
        fn a_limit_never_raises_and_never_falls_below_the_least(
            own in bandwidth(), limit in 0..10_000_000_u64,
        ) {
            let limited = own.limited_to(MilliCpu(limit));
            prop_assert!(!limited.allows_more_than(own));
            prop_assert!(limited.quota_us.is_some_and(|us| us >= LEAST_QUOTA_US));
            prop_assert_eq!(limited.period_us, own.period_us);
        }

        #[test]
        fn the_smaller_of_two_allows_no_more_than_either(a in bandwidth(), b in bandwidth()) {
            let least = a.min(b);
            prop_assert!(!least.allows_more_than(a));
            // The kernel's least may be above a tiny share of a long period.
            prop_assert!(!least.allows_more_than(b) || least.quota_us == Some(LEAST_QUOTA_US));
        }

        #[test]
        fn texts_are_read_back(own in bandwidth()) {
            prop_assert_eq!(Bandwidth::parse_v2(&own.text_v2()), Some(own));
            let period = own.period_us.to_string();
            prop_assert_eq!(Bandwidth::parse_v1(&own.text_v1(), &period), Some(own));
        }
    }
}
