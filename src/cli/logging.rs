//! Logs go to standard error; `RUST_LOG` sets the level.

use std::env;
use std::io;

use anstream::{AutoStream, ColorChoice};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const VARIABLE: &str = "RUST_LOG";
const DEFAULT: LevelFilter = LevelFilter::INFO;

/// Sets up logging, once per process. An invalid `RUST_LOG` is reported, and the default is used.
#[expect(
    clippy::disallowed_methods,
    reason = "Rust programs read RUST_LOG from the environment"
)]
pub(super) fn init() {
    let wanted = env::var(VARIABLE).unwrap_or_default();
    let read = targets(&wanted);
    let error = read.as_ref().err().map(ToString::to_string);
    let stderr = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(is_coloured());
    let result = tracing_subscriber::registry()
        .with(read.unwrap_or_else(|_| Targets::new().with_default(DEFAULT)))
        .with(stderr)
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
    use tracing::Level;

    use super::*;

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
