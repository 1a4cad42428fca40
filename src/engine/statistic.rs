//! The windows over which values are summarized, and how: `avg_5m`, `stddev_1h`, `p95_1d`, `max_avg_1d`.

use std::fmt;
use std::time::Duration;

/// A window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Span {
    /// 1 minute.
    Minute = 0,
    /// 5 minutes.
    FiveMinutes = 1,
    /// 30 minutes.
    HalfHour = 2,
    /// 1 hour.
    Hour = 3,
    /// 1 day.
    Day = 4,
}

impl Span {
    /// All of them, the shortest first.
    pub const ALL: [Self; 5] = [
        Self::Minute,
        Self::FiveMinutes,
        Self::HalfHour,
        Self::Hour,
        Self::Day,
    ];

    /// Its length.
    pub const fn length(self) -> Duration {
        match self {
            Self::Minute => Duration::from_mins(1),
            Self::FiveMinutes => Duration::from_mins(5),
            Self::HalfHour => Duration::from_mins(30),
            Self::Hour => Duration::from_hours(1),
            Self::Day => Duration::from_hours(24),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Minute => "1m",
            Self::FiveMinutes => "5m",
            Self::HalfHour => "30m",
            Self::Hour => "1h",
            Self::Day => "1d",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|span| span.name() == name)
    }
}

/// A window with a highest 5-minute average.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeakSpan {
    /// 1 hour.
    Hour,
    /// 1 day.
    Day,
}

/// A percentile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Percentile {
    /// The median.
    P50 = 50,
    /// The 90th percentile.
    P90 = 90,
    /// The 95th percentile.
    P95 = 95,
    /// The 99th percentile.
    P99 = 99,
}

impl Percentile {
    const ALL: [Self; 4] = [Self::P50, Self::P90, Self::P95, Self::P99];
}

/// One number that summarizes a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Statistic {
    /// `avg_*`: the mean over the covered time.
    Average(Span),
    /// `stddev_*`: the standard deviation.
    Deviation(Span),
    /// `p50_*`, `p90_*`, `p95_*`, `p99_*`.
    Percentile(Percentile, Span),
    /// `max_avg_1h`, `max_avg_1d`: the highest average of any 5 minutes.
    Peak(PeakSpan),
}

impl Statistic {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let of_span = |span| {
            let percentiles = Percentile::ALL.map(|percentile| Self::Percentile(percentile, span));
            [Self::Average(span), Self::Deviation(span)]
                .into_iter()
                .chain(percentiles)
        };
        let peaks = [Self::Peak(PeakSpan::Hour), Self::Peak(PeakSpan::Day)];
        Span::ALL.into_iter().flat_map(of_span).chain(peaks)
    }

    /// The statistic of that name.
    pub fn parse(name: &str) -> Option<Self> {
        if let Some(span) = name.strip_prefix("max_avg_") {
            return match Span::parse(span)? {
                Span::Hour => Some(Self::Peak(PeakSpan::Hour)),
                Span::Day => Some(Self::Peak(PeakSpan::Day)),
                _ => None,
            };
        }
        let (what, span) = name.split_once('_')?;
        let span = Span::parse(span)?;
        match what {
            "avg" => Some(Self::Average(span)),
            "stddev" => Some(Self::Deviation(span)),
            _ => {
                let mut known = Percentile::ALL.into_iter();
                let found = known.find(|known| format!("p{}", *known as u8) == what)?;
                Some(Self::Percentile(found, span))
            }
        }
    }

    /// Whether a metric has the name of a window, such as `gpu_usage_avg_5m`.
    pub fn ends(name: &str) -> bool {
        let ends = |statistic: Self| {
            let rest = name.strip_suffix(&statistic.to_string());
            rest.is_some_and(|rest| rest.len() > 1 && rest.ends_with('_'))
        };
        Self::all().any(ends)
    }

    /// The length of its window.
    pub const fn length(self) -> Duration {
        match self {
            Self::Average(span) | Self::Deviation(span) | Self::Percentile(_, span) => {
                span.length()
            }
            Self::Peak(PeakSpan::Hour) => Span::Hour.length(),
            Self::Peak(PeakSpan::Day) => Span::Day.length(),
        }
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Average(span) => write!(f, "avg_{}", span.name()),
            Self::Deviation(span) => write!(f, "stddev_{}", span.name()),
            Self::Percentile(percentile, span) => {
                write!(f, "p{}_{}", *percentile as u8, span.name())
            }
            Self::Peak(PeakSpan::Hour) => f.write_str("max_avg_1h"),
            Self::Peak(PeakSpan::Day) => f.write_str("max_avg_1d"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_to_the_statistic_that_prints_it() {
        for statistic in Statistic::all() {
            assert_eq!(Statistic::parse(&statistic.to_string()), Some(statistic));
        }
        assert_eq!(Statistic::all().count(), 32);
    }

    #[test]
    fn a_window_is_known_by_the_end_of_its_name() {
        for name in ["gpu_usage_avg_5m", "x_p95_1d", "load_max_avg_1h"] {
            assert!(Statistic::ends(name), "{name}");
        }
        for name in ["avg_5m", "_avg_5m", "gpu_usage", "gpuavg_5m", "x_avg_5m_y"] {
            assert!(!Statistic::ends(name), "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_no_statistic() {
        for name in [
            "",
            "avg",
            "avg_",
            "avg_2m",
            "p96_1h",
            "max_avg_5m",
            "max_1h",
            "AVG_5m",
            "avg_5m_",
        ] {
            assert_eq!(Statistic::parse(name), None, "{name}");
        }
    }
}
