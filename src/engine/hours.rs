//! The hours in which a rule is active, by the local clock of a time zone.
//!
//! The time zones are those in the program, never those of the machine, so that all nodes and the controller agree.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::{Date, Weekday};
use jiff::tz::{TimeZone, TimeZoneDatabase};

/// The last minute of a day that a span can end at, `24:00`.
const MIDNIGHT: u16 = 24 * 60;
const DAYS: [(&str, Weekday); 7] = [
    ("Mon", Weekday::Monday),
    ("Tue", Weekday::Tuesday),
    ("Wed", Weekday::Wednesday),
    ("Thu", Weekday::Thursday),
    ("Fri", Weekday::Friday),
    ("Sat", Weekday::Saturday),
    ("Sun", Weekday::Sunday),
];

/// One entry of `activeDuring`, such as `22:00-06:00 Europe/Berlin` or `Mon-Fri 08:00-18:00 UTC`.
///
/// From the start on, and before the end. An end before the start is on the next day, which need not be one of the days.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hours {
    /// The first and the last of the days on which it starts; `None` is every day.
    days: Option<(Weekday, Weekday)>,
    /// Minutes after midnight, below 24:00.
    start: u16,
    /// Minutes after midnight, at most 24:00, and not the start.
    end: u16,
    zone: TimeZone,
}

/// Why an entry of `activeDuring` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoursError {
    /// It has another form.
    #[error(
        "\"{0}\" is not a span of hours with a time zone; write for example \"22:00-06:00 Europe/Berlin\" or \
         \"Mon-Fri 08:00-18:00 UTC\""
    )]
    Form(String),
    /// Start and end are the same.
    #[error(
        "\"{0}\" has no hours, since it ends when it starts; write 00:00-24:00 for the whole day"
    )]
    Empty(String),
    /// There is no such time zone.
    #[error("there is no time zone named \"{0}\"")]
    UnknownZone(String),
}

impl Hours {
    /// Whether it contains this moment.
    ///
    /// A start or end that the clock skips when it is set forward is as much later as the clock was set (02:30 is 03:30); of
    /// one that it shows twice, the first counts.
    pub fn contains(&self, time: Timestamp) -> bool {
        let today = self.zone.to_datetime(time).date();
        // A span may end on the next day. Where clocks are set back over midnight, that of tomorrow has already started.
        let near = [today.yesterday(), Ok(today), today.tomorrow()];
        let mut spans = near.into_iter().flatten().filter_map(|day| self.on(day));
        spans.any(|span| span.contains(&time))
    }

    /// The span that starts on this day, if one does.
    fn on(&self, day: Date) -> Option<Range<Timestamp>> {
        if !self.starts_on(day.weekday()) {
            return None;
        }
        let last = if self.end <= self.start {
            day.tomorrow().ok()?
        } else {
            day
        };
        Some(self.instant(day, self.start)?..self.instant(last, self.end)?)
    }

    fn starts_on(&self, day: Weekday) -> bool {
        self.days
            .is_none_or(|(first, last)| first.until(day) <= first.until(last))
    }

    /// `None` only at the ends of time.
    fn instant(&self, day: Date, minute: u16) -> Option<Timestamp> {
        let (day, minute) = if minute == MIDNIGHT {
            (day.tomorrow().ok()?, 0)
        } else {
            (day, minute)
        };
        let [hour, minute] = [minute / 60, minute % 60].map(i8::try_from);
        let local = day.at(hour.ok()?, minute.ok()?, 0, 0);
        self.zone.to_ambiguous_timestamp(local).compatible().ok()
    }
}

/// The names of all time zones.
pub fn time_zones() -> Vec<String> {
    let zones = TimeZoneDatabase::bundled();
    zones.available().map(|name| name.to_string()).collect()
}

impl FromStr for Hours {
    type Err = HoursError;

    fn from_str(text: &str) -> Result<Self, HoursError> {
        let form = || HoursError::Form(text.to_owned());
        let (rest, zone) = text.rsplit_once(' ').ok_or_else(form)?;
        let (days, span) = match rest.split_once(' ') {
            Some((days, span)) => (Some(parse_days(days).ok_or_else(form)?), span),
            None => (None, rest),
        };
        let (start, end) = span.split_once('-').ok_or_else(form)?;
        let start = parse_minute(start).filter(|start| *start < MIDNIGHT);
        let (start, end) = start.zip(parse_minute(end)).ok_or_else(form)?;
        if !is_name(zone) {
            return Err(form());
        }
        if start == end {
            return Err(HoursError::Empty(text.to_owned()));
        }
        let zone = TimeZoneDatabase::bundled()
            .get(zone)
            .map_err(|_| HoursError::UnknownZone(zone.to_owned()))?;
        Ok(Self {
            days,
            start,
            end,
            zone,
        })
    }
}

fn parse_days(text: &str) -> Option<(Weekday, Weekday)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let day = |name| DAYS.iter().find(|(known, _)| *known == name);
    Some((day(first)?.1, day(last)?.1))
}

/// `HH:MM` as minutes after midnight, at most 24:00.
fn parse_minute(text: &str) -> Option<u16> {
    let (hour, minute) = text.split_once(':')?;
    let number = |text: &str, max: u16| {
        let digits = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| text.parse::<u16>().ok()).flatten();
        number.filter(|number| *number <= max)
    };
    let minutes = number(hour, 24)? * 60 + number(minute, 59)?;
    (minutes <= MIDNIGHT).then_some(minutes)
}

/// Whether it can be the name of a time zone.
fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    let starts = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    starts && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"_+-/".contains(&byte))
}

impl fmt::Display for Hours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((first, last)) = self.days {
            f.write_str(day_name(first))?;
            if first != last {
                write!(f, "-{}", day_name(last))?;
            }
            f.write_str(" ")?;
        }
        let [start, end] = [self.start, self.end].map(|at| (at / 60, at % 60));
        write!(
            f,
            "{:02}:{:02}-{:02}:{:02} {}",
            start.0,
            start.1,
            end.0,
            end.1,
            self.zone.iana_name().unwrap_or("UTC")
        )
    }
}

fn day_name(day: Weekday) -> &'static str {
    let known = DAYS.iter().find(|(_, known)| *known == day);
    known.map_or("", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hours(text: &str) -> Hours {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Each moment, in RFC 3339 with its offset, and whether the hours contain it.
    fn assert_contains(text: &str, moments: &[(&str, bool)]) {
        let hours = hours(text);
        for (moment, inside) in moments {
            let time: Timestamp = moment.parse().unwrap();
            assert_eq!(hours.contains(time), *inside, "{text} at {moment}");
        }
    }

    #[test]
    fn hours_are_half_open() {
        assert_contains(
            "08:00-18:00 UTC",
            &[
                ("2026-01-15T07:59:59.999999999Z", false),
                ("2026-01-15T08:00:00Z", true),
                ("2026-01-15T17:59:59.999999999Z", true),
                ("2026-01-15T18:00:00Z", false),
            ],
        );
    }

    #[test]
    fn an_end_before_the_start_is_on_the_next_day() {
        assert_contains(
            "22:00-06:00 Europe/Berlin",
            &[
                ("2026-01-15T21:59:59+01:00", false),
                ("2026-01-15T22:00:00+01:00", true),
                ("2026-01-16T05:59:59+01:00", true),
                ("2026-01-16T06:00:00+01:00", false),
                // Summer time: the same on the wall.
                ("2026-07-15T21:59:59+02:00", false),
                ("2026-07-15T22:00:00+02:00", true),
                ("2026-07-16T06:00:00+02:00", false),
            ],
        );
        for midnight in ["18:00-24:00 UTC", "18:00-00:00 UTC"] {
            assert_contains(
                midnight,
                &[
                    ("2026-01-15T23:59:59Z", true),
                    ("2026-01-16T00:00:00Z", false),
                ],
            );
        }
    }

    #[test]
    fn days_are_those_on_which_the_hours_start() {
        // 2026-01-16 is a Friday.
        assert_contains(
            "Mon-Fri 22:00-06:00 Europe/Berlin",
            &[
                ("2026-01-12T03:00:00+01:00", false),
                ("2026-01-12T22:00:00+01:00", true),
                ("2026-01-16T23:00:00+01:00", true),
                ("2026-01-17T05:59:59+01:00", true),
                ("2026-01-17T22:00:00+01:00", false),
            ],
        );
        assert_contains(
            "Sat-Sun 00:00-24:00 Europe/Berlin",
            &[
                ("2026-01-16T23:59:59+01:00", false),
                ("2026-01-17T00:00:00+01:00", true),
                ("2026-01-18T23:59:59+01:00", true),
                ("2026-01-19T00:00:00+01:00", false),
            ],
        );
        assert_contains(
            "Fri-Mon 10:00-11:00 UTC",
            &[
                ("2026-01-16T10:30:00Z", true),
                ("2026-01-19T10:30:00Z", true),
                ("2026-01-20T10:30:00Z", false),
            ],
        );
        assert_contains(
            "Sun 10:00-11:00 UTC",
            &[
                ("2026-01-18T10:30:00Z", true),
                ("2026-01-19T10:30:00Z", false),
            ],
        );
    }

    #[test]
    fn the_clock_in_berlin_is_set_forward() {
        // 2026-03-29: 01:59:59 is followed by 03:00:00.
        let night = [
            ("2026-03-28T22:00:00+01:00", true),
            ("2026-03-29T01:59:59+01:00", true),
            ("2026-03-29T05:59:59+02:00", true),
            ("2026-03-29T06:00:00+02:00", false),
        ];
        assert_contains("22:00-06:00 Europe/Berlin", &night);
        let skipped_start = [
            ("2026-03-29T03:00:00+02:00", false),
            ("2026-03-29T03:29:59+02:00", false),
            ("2026-03-29T03:30:00+02:00", true),
            ("2026-03-30T02:30:00+02:00", true),
        ];
        assert_contains("02:30-06:00 Europe/Berlin", &skipped_start);
        let skipped = [
            ("2026-03-29T03:15:00+02:00", true),
            ("2026-03-29T03:45:00+02:00", false),
        ];
        assert_contains("02:15-02:45 Europe/Berlin", &skipped);
    }

    #[test]
    fn the_clock_in_berlin_is_set_back() {
        // 2026-10-25: 02:59:59 is followed by 02:00:00.
        let night = [
            ("2026-10-24T22:00:00+02:00", true),
            ("2026-10-25T02:30:00+02:00", true),
            ("2026-10-25T02:30:00+01:00", true),
            ("2026-10-25T05:59:59+01:00", true),
            ("2026-10-25T06:00:00+01:00", false),
        ];
        assert_contains("22:00-06:00 Europe/Berlin", &night);
        let ends_in_the_repeated_hour = [
            ("2026-10-25T02:29:59+02:00", true),
            ("2026-10-25T02:30:00+02:00", false),
            ("2026-10-25T02:00:00+01:00", false),
        ];
        assert_contains("22:00-02:30 Europe/Berlin", &ends_in_the_repeated_hour);
        let starts_in_it = [
            ("2026-10-25T02:29:59+02:00", false),
            ("2026-10-25T02:30:00+02:00", true),
            ("2026-10-25T02:00:00+01:00", true),
        ];
        assert_contains("02:30-06:00 Europe/Berlin", &starts_in_it);
    }

    #[test]
    fn half_an_hour_on_lord_howe() {
        // 2026-10-04: 01:59:59 is followed by 02:30:00. 2026-04-05: 01:59:59 is followed by 01:30:00.
        let forward = [
            ("2026-10-04T02:30:00+11:00", false),
            ("2026-10-04T02:44:59+11:00", false),
            ("2026-10-04T02:45:00+11:00", true),
            ("2026-10-04T04:00:00+11:00", false),
        ];
        assert_contains("02:15-04:00 Australia/Lord_Howe", &forward);
        let back = [
            ("2026-04-05T01:44:59+11:00", false),
            ("2026-04-05T01:45:00+11:00", true),
            ("2026-04-05T01:30:00+10:30", true),
            ("2026-04-05T03:59:59+10:30", true),
            ("2026-04-05T04:00:00+10:30", false),
        ];
        assert_contains("01:45-04:00 Australia/Lord_Howe", &back);
    }

    #[test]
    fn the_whole_day_is_always() {
        // Clocks are set at midnight in Santiago; Apia skipped a day.
        let zones = ["UTC", "Europe/Berlin", "America/Santiago", "Pacific/Apia"];
        for zone in zones {
            let hours = hours(&format!("00:00-24:00 {zone}"));
            for from in [1_325_000_000, 1_767_225_600] {
                for quarter in 0..i64::from(4 * 24 * 366) {
                    let time = Timestamp::from_second(from + quarter * 900).unwrap();
                    assert!(hours.contains(time), "{zone} at {time}");
                }
            }
        }
    }

    #[test]
    fn two_halves_of_a_day_never_overlap_and_leave_no_gap() {
        // The second half starts where the first ends, also when clocks are set.
        for zone in ["Europe/Berlin", "Australia/Lord_Howe", "America/Santiago"] {
            for edge in ["02:15", "06:00", "23:45"] {
                let night = hours(&format!("12:00-{edge} {zone}"));
                let day = hours(&format!("{edge}-12:00 {zone}"));
                for quarter in 0..i64::from(4 * 24 * 366) {
                    let time = Timestamp::from_second(1_767_225_600 + quarter * 900).unwrap();
                    let active = [night.contains(time), day.contains(time)];
                    assert_ne!(active[0], active[1], "{zone} {edge} at {time}");
                }
            }
        }
    }

    #[test]
    fn what_is_printed_is_read_again() {
        for text in [
            "22:00-06:00 Europe/Berlin",
            "Mon-Fri 08:00-18:00 UTC",
            "Sun 00:00-24:00 America/Argentina/ComodRivadavia",
            "00:01-00:00 Etc/GMT+5",
        ] {
            assert_eq!(hours(text).to_string(), text);
        }
        assert_eq!(
            hours("Mon-Mon 08:00-18:00 europe/berlin").to_string(),
            "Mon 08:00-18:00 Europe/Berlin"
        );
    }

    #[test]
    fn invalid_hours_are_refused() {
        let form = |text: &str| HoursError::Form(text.to_owned());
        for text in [
            "",
            "22:00-06:00",
            "22:00-06:00 ",
            "22:00 - 06:00 UTC",
            "22:00-06:00  UTC",
            "22-06 UTC",
            "2:00-06:00 UTC",
            "22:00-06:60 UTC",
            "22:00-24:01 UTC",
            "24:00-06:00 UTC",
            "+2:00-06:00 UTC",
            "10pm-6am UTC",
            "22:00-06:00 CET-1CEST,M3.5.0",
            "mon-fri 22:00-06:00 UTC",
            "Mon,Tue 22:00-06:00 UTC",
            "Mon-Fri Sat 22:00-06:00 UTC",
        ] {
            assert_eq!(text.parse::<Hours>(), Err(form(text)));
        }
        let same = "22:00-22:00 UTC";
        assert_eq!(
            same.parse::<Hours>(),
            Err(HoursError::Empty(same.to_owned()))
        );
        assert_eq!(
            "22:00-06:00 Europe/Berln".parse::<Hours>(),
            Err(HoursError::UnknownZone("Europe/Berln".to_owned()))
        );
    }

    #[test]
    fn every_time_zone_can_be_named() {
        let zones = time_zones();
        assert!(zones.len() > 500, "{}", zones.len());
        for zone in zones {
            let text = format!("Mon-Fri 22:00-06:00 {zone}");
            assert!(text.len() <= 64, "{text}");
            assert_eq!(hours(&text).to_string(), text);
        }
    }
}
