//! Arithmetic on CPU bandwidth limits, and their text form.

use crate::engine::units::MilliCpu;

use super::parse::{self, Bandwidth};

/// The smallest quota that the kernel accepts, in microseconds (`min_cfs_quota_period` in `kernel/sched/core.c`).
pub const MIN_QUOTA_US: u64 = 1000;

impl Bandwidth {
    /// Parses `cpu.max`, with or without its newline. `None` if it is malformed.
    pub fn parse_v2(text: &str) -> Option<Self> {
        parse::cpu_max(line(text).as_bytes())
    }

    /// Parses `cpu.cfs_quota_us` and `cpu.cfs_period_us`.
    pub fn parse_v1(quota: &str, period: &str) -> Option<Self> {
        let quota = parse::cfs_quota(line(quota).as_bytes())?;
        let period = parse::number(line(period).as_bytes()).filter(|period| *period > 0)?;
        Some(Self { quota, period })
    }

    /// Lowers the quota to `limit` with the same period. Never raises it, and never goes below the kernel's minimum.
    #[must_use]
    pub fn limited_to(self, limit: MilliCpu) -> Self {
        let us = self.micros(limit).max(MIN_QUOTA_US);
        Self {
            quota: Some(self.quota.map_or(us, |own| own.min(us))),
            ..self
        }
    }

    /// That much CPU over one period, in microseconds.
    pub fn micros(self, cpu: MilliCpu) -> u64 {
        let us = u128::from(cpu.0) * u128::from(self.period) / 1000;
        u64::try_from(us).unwrap_or(u64::MAX)
    }

    /// Lowers the quota to what `other` allows, keeping its own period.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        let Some(other_us) = other.quota else {
            return self;
        };
        let scaled = u128::from(other_us) * u128::from(self.period) / u128::from(other.period);
        let scaled = u64::try_from(scaled).unwrap_or(u64::MAX).max(MIN_QUOTA_US);
        Self {
            quota: Some(self.quota.map_or(scaled, |own| own.min(scaled))),
            ..self
        }
    }

    /// Whether it allows more than `other`.
    pub fn allows_more_than(self, other: Self) -> bool {
        match (self.quota, other.quota) {
            (None, other) => other.is_some(),
            (Some(_), None) => false,
            (Some(own), Some(theirs)) => {
                u128::from(own) * u128::from(other.period)
                    > u128::from(theirs) * u128::from(self.period)
            }
        }
    }

    /// The text for `cpu.max`.
    pub fn text_v2(self) -> String {
        match self.quota {
            None => format!("max {}", self.period),
            Some(us) => format!("{us} {}", self.period),
        }
    }

    /// The text for `cpu.cfs_quota_us`.
    pub fn text_v1(self) -> String {
        self.quota
            .map_or_else(|| "-1".to_owned(), |us| us.to_string())
    }
}

fn line(text: &str) -> String {
    format!("{}\n", text.trim_end())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine::units::Quota;

    fn bandwidth() -> impl Strategy<Value = Bandwidth> {
        let quota = proptest::option::of(MIN_QUOTA_US..1_000_000_000);
        (quota, 1000..=1_000_000_u64).prop_map(|(quota, period)| Bandwidth { quota, period })
    }

    #[test]
    fn kernel_formats_are_parsed() {
        let unlimited = Bandwidth {
            quota: None,
            period: 100_000,
        };
        let half = Bandwidth {
            quota: Some(50_000),
            period: 100_000,
        };
        assert_eq!(Bandwidth::parse_v2("max 100000\n"), Some(unlimited));
        assert_eq!(Bandwidth::parse_v2("50000 100000\n"), Some(half));
        assert_eq!(Bandwidth::parse_v1("-1\n", "100000\n"), Some(unlimited));
        assert_eq!(Bandwidth::parse_v1("50000\n", "100000\n"), Some(half));
        assert_eq!(half.limit(), Quota::Limit(MilliCpu(500)));
        assert_eq!(unlimited.limit(), Quota::Unlimited);
    }

    #[test]
    fn malformed_text_is_rejected() {
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
        fn a_limit_never_raises_the_quota_nor_goes_below_the_minimum(
            own in bandwidth(), limit in 0..10_000_000_u64,
        ) {
            let limited = own.limited_to(MilliCpu(limit));
            prop_assert!(!limited.allows_more_than(own));
            prop_assert!(limited.quota.is_some_and(|us| us >= MIN_QUOTA_US));
            prop_assert_eq!(limited.period, own.period);
        }

        #[test]
        fn the_minimum_of_two_allows_no_more_than_either(a in bandwidth(), b in bandwidth()) {
            let smaller = a.min(b);
            prop_assert!(!smaller.allows_more_than(a));
            // The kernel's minimum may exceed a tiny share of a long period.
            prop_assert!(!smaller.allows_more_than(b) || smaller.quota == Some(MIN_QUOTA_US));
        }

        #[test]
        fn text_round_trips(own in bandwidth()) {
            prop_assert_eq!(Bandwidth::parse_v2(&own.text_v2()), Some(own));
            let period = own.period.to_string();
            prop_assert_eq!(Bandwidth::parse_v1(&own.text_v1(), &period), Some(own));
        }
    }
}
