//! Logs go to standard error; `RUST_LOG` sets the level.

use std::env;
use std::io;

use anstream::{AutoStream, ColorChoice};
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

const VARIABLE: &str = "RUST_LOG";
const DEFAULT: LevelFilter = LevelFilter::INFO;

/// The format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One object on one line
    Json,
}

/// How a component logs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct LogArgs {
    /// Format of the log on standard error
    #[arg(
        long = "log-format",
        value_name = "FORMAT",
        value_enum,
        default_value_t
    )]
    pub(super) format: LogFormat,
}

/// Sets up logging, once per process. An invalid `RUST_LOG` is reported, and the default is used.
#[expect(
    clippy::disallowed_methods,
    reason = "Rust programs read RUST_LOG from the environment"
)]
pub(super) fn init(format: LogFormat) {
    let wanted = env::var(VARIABLE).unwrap_or_default();
    let read = targets(&wanted);
    let error = read.as_ref().err().map(ToString::to_string);
    let result = tracing_subscriber::registry()
        .with(read.unwrap_or_else(|_| Targets::new().with_default(DEFAULT)))
        .with(lines(format, io::stderr, is_coloured()))
        .try_init();
    // A second call fails, which is fine.
    drop(result);
    if let Some(error) = error {
        tracing::warn!(
            error,
            "invalid {VARIABLE}=`{wanted}`: use a value such as `warn` or `info,plimsoll=debug`; using `{DEFAULT}` now"
        );
    }
}

/// Writes one line for each event. JSON has no spans, because this program has none.
fn lines<S, W>(format: LogFormat, writer: W, is_coloured: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => lines.with_ansi(is_coloured).boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .boxed(),
    }
}

/// Whether standard error is coloured.
fn is_coloured() -> bool {
    AutoStream::choice(&io::stderr()) != ColorChoice::Never
}

/// Parses levels by target (`warn`, `plimsoll=debug`, separated by commas); other targets log at `info`.
fn targets(wanted: &str) -> Result<Targets, ParseError> {
    let wanted = wanted.trim();
    if wanted.is_empty() {
        return Ok(Targets::new().with_default(DEFAULT));
    }
    let read: Targets = wanted.parse()?;
    let others = read.default_level().unwrap_or(DEFAULT);
    Ok(read.with_default(others))
}

#[cfg(test)]
mod tests {
    use std::io::Seek as _;

    use serde_json::Value;
    use tracing::Level;

    use super::*;

    /// What a component logs in this format.
    fn logged(format: LogFormat) -> String {
        let mut file = tempfile::tempfile().expect("a file");
        let writer = file.try_clone().expect("the same file");
        let subscriber = tracing_subscriber::registry().with(lines(format, writer, false));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(node = "worker-1", pods = 3, "throttled \"{}\"", "batch");
        });
        file.rewind().expect("the start");
        io::read_to_string(file).expect("text")
    }

    #[test]
    fn a_json_line_has_time_level_target_message_and_fields() {
        let text = logged(LogFormat::Json);
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).expect("JSON");
        for (field, expected) in [
            ("level", Value::from("WARN")),
            ("target", Value::from(module_path!())),
            ("message", Value::from("throttled \"batch\"")),
            ("node", Value::from("worker-1")),
            ("pods", Value::from(3)),
        ] {
            assert_eq!(line[field], expected, "{field}: {text}");
        }
        let time = line["timestamp"].as_str().expect("a time");
        assert!(time.parse::<jiff::Timestamp>().is_ok(), "{time}");
        assert_eq!(
            line.as_object().map(serde_json::Map::len),
            Some(6),
            "{text}"
        );
    }

    #[test]
    fn a_text_line_has_the_same() {
        let text = logged(LogFormat::Text);
        let expected = "throttled \"batch\" node=\"worker-1\" pods=3\n";
        assert!(
            text.ends_with(expected) && text.contains(" WARN "),
            "{text}"
        );
    }

    #[test]
    fn unnamed_targets_log_at_info() {
        for (wanted, target, finest) in [
            ("", "plimsoll::node", Level::INFO),
            ("warn", "plimsoll::node", Level::WARN),
            ("plimsoll=debug", "plimsoll::node", Level::DEBUG),
            ("plimsoll=debug", "hyper", Level::INFO),
            ("error,plimsoll=warn", "hyper", Level::ERROR),
        ] {
            let targets = targets(wanted).expect(wanted);
            for level in [
                Level::ERROR,
                Level::WARN,
                Level::INFO,
                Level::DEBUG,
                Level::TRACE,
            ] {
                let enabled = targets.would_enable(target, &level);
                assert_eq!(enabled, level <= finest, "{wanted}: {target} {level}");
            }
        }
    }

    #[test]
    fn an_invalid_level_is_rejected() {
        assert!(targets("plimsoll=loud").is_err());
    }
}
