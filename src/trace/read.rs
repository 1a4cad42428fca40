//! Reading a trace, line by line.

use std::io::{self, BufRead, Read};

use super::{TraceHeader, TraceLine, VERSION};
use crate::crd::manifest::Position;
use crate::engine::time::BootTime;

/// Maximum length of a line in bytes.
const MAX_LINE: u64 = 64 << 20;

/// The trace cannot be read (further); [`TraceError::position`] says where.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file is empty.
    #[error("the trace is empty")]
    Empty,
    /// It does not start with a header.
    #[error(
        "this is not the header of a trace, as written by `plimsoll run --record FILE`: {reason}"
    )]
    NoHeader {
        /// The parser's error.
        reason: String,
    },
    /// Unsupported format version.
    #[error("the trace has format version {found}, this program reads version {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// A line is invalid.
    #[error("this is not a line of a trace: {reason}")]
    Invalid {
        /// Where it is.
        position: Position,
        /// The parser's error.
        reason: String,
    },
    /// The last line is incomplete.
    #[error(
        "this line is cut off: the recording was interrupted here; remove it to replay the others"
    )]
    Truncated {
        /// The line.
        line: usize,
    },
    /// Time goes backwards.
    #[error("this line is earlier than the line before: the trace is not from one recording")]
    Backwards {
        /// The line.
        line: usize,
    },
    /// It cannot be read.
    #[error("failed to read this line: {source}")]
    Io {
        /// The line.
        line: usize,
        /// The cause.
        source: io::Error,
    },
}

impl TraceError {
    /// Where it is in the trace.
    pub const fn position(&self) -> Position {
        match self {
            Self::Empty => Position::line(0),
            Self::NoHeader { .. } | Self::Version { .. } => Position::line(1),
            Self::Invalid { position, .. } => *position,
            Self::Truncated { line } | Self::Backwards { line } | Self::Io { line, .. } => {
                Position::line(*line)
            }
        }
    }
}

/// The error of a line that is no JSON, or other JSON.
fn invalid(line: usize, error: &serde_json::Error) -> TraceError {
    // The parser counts the lines of what it was given: this one.
    let reason = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    TraceError::Invalid {
        position: Position {
            line,
            column: error.column(),
        },
        reason: reason.strip_suffix(&place).unwrap_or(&reason).to_owned(),
    }
}

/// The lines of a trace after its header.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    line: usize,
    buffer: Vec<u8>,
    last: BootTime,
}

impl<R: BufRead> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// Where `input` does not start with a header of this version.
    pub fn open(input: R) -> Result<(TraceHeader, Self), TraceError> {
        let mut reader = Self {
            input,
            line: 0,
            buffer: Vec::new(),
            last: BootTime::default(),
        };
        let header = match reader.parse() {
            Ok(Some(TraceLine::Header(header))) => header,
            Ok(None) => return Err(TraceError::Empty),
            Ok(Some(_)) => {
                return Err(TraceError::NoHeader {
                    reason: "it is another line of a trace".to_owned(),
                });
            }
            Err(TraceError::Invalid { reason, .. }) => return Err(TraceError::NoHeader { reason }),
            Err(error) => return Err(error),
        };
        match header.version {
            VERSION => Ok((header, reader)),
            found => Err(TraceError::Version { found }),
        }
    }

    /// The next line; `None` at the end.
    ///
    /// # Errors
    /// Where the line is invalid. Nothing after it may be read.
    pub fn read(&mut self) -> Result<Option<TraceLine>, TraceError> {
        let line = self.parse()?;
        match &line {
            Some(TraceLine::Header(_)) => Err(TraceError::Invalid {
                position: Position::line(self.line),
                reason: "a second header".to_owned(),
            }),
            Some(TraceLine::Tick(tick)) if tick.now < self.last => {
                Err(TraceError::Backwards { line: self.line })
            }
            Some(TraceLine::Tick(tick)) => {
                self.last = tick.now;
                Ok(line)
            }
            _ => Ok(line),
        }
    }

    fn parse(&mut self) -> Result<Option<TraceLine>, TraceError> {
        self.buffer.clear();
        self.line += 1;
        let line = self.line;
        let read = (&mut self.input)
            .take(MAX_LINE)
            .read_until(b'\n', &mut self.buffer)
            .map_err(|source| TraceError::Io { line, source })?;
        if read == 0 {
            return Ok(None);
        }
        let whole = self.buffer.last() == Some(&b'\n');
        match serde_json::from_slice(&self.buffer) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(error) if !whole && error.is_eof() => Err(TraceError::Truncated { line }),
            Err(error) => Err(invalid(line, &error)),
        }
    }
}
