//! Events on standard output: text, or one JSON object a line. `docs/without-kubernetes.md` describes both.

use std::io::{self, Write};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::engine::time::BootTime;
use crate::messages::event::{Event, EventLine};

/// The format of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EventFormat {
    /// Text for people, in local time.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Writes events, each with its wall-clock time.
#[derive(Debug)]
pub struct EventOutput<W> {
    format: EventFormat,
    zone: TimeZone,
    out: W,
}

impl<W: Write> EventOutput<W> {
    /// An output in local time.
    pub fn new(format: EventFormat, out: W) -> Self {
        Self {
            format,
            zone: TimeZone::system(),
            out,
        }
    }

    /// Writes `events`; `time` is the wall clock at `now`.
    ///
    /// # Errors
    /// Where `out` cannot be written.
    pub fn write(&mut self, events: &[Event], now: BootTime, time: Timestamp) -> io::Result<()> {
        for event in events {
            let ago = now.since(event.at());
            let time = time.checked_sub(ago).unwrap_or(time);
            self.write_one(event, time)?;
        }
        if events.is_empty() {
            return Ok(());
        }
        self.out.flush()
    }

    fn write_one(&mut self, event: &Event, time: Timestamp) -> io::Result<()> {
        match self.format {
            EventFormat::Text if event.is_detail() => Ok(()),
            EventFormat::Text => {
                let local = time.to_zoned(self.zone.clone());
                writeln!(self.out, "{} {event}", local.strftime("%H:%M:%S%.3f"))
            }
            EventFormat::Json => {
                let line = EventLine {
                    time,
                    event: event.clone(),
                };
                serde_json::to_writer(&mut self.out, &line)?;
                writeln!(self.out)
            }
        }
    }
}
