//! Logs go to standard error; `RUST_LOG` chooses them.

use std::env;
use std::io;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const VARIABLE: &str = "RUST_LOG";
const DEFAULT: LevelFilter = LevelFilter::INFO;

/// Sets it up, once a process. What can't be read is told, and the default stands.
#[expect(
    clippy::disallowed_methods,
    reason = "the one setting that Rust programs take from there"
)]
pub(super) fn init() {
    let wanted = env::var(VARIABLE).unwrap_or_default();
    let read = targets(&wanted);
    let told = read.as_ref().err().map(ToString::to_string);
    let stderr = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    let set = tracing_subscriber::registry()
        .with(read.unwrap_or_else(|_| Targets::new().with_default(DEFAULT)))
        .with(stderr)
        .try_init();
    // A second call finds it done.
    drop(set);
    if let Some(error) = told {
        tracing::warn!(
            error,
            "failed to read {VARIABLE}=`{wanted}`: let it be such as `warn` or `info,plimsoll=debug`; it is `{DEFAULT}` now"
        );
    }
}

/// Levels by target (`warn`, `plimsoll=debug`, separated by commas); `info` for those that none names.
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
    fn what_is_not_named_is_told_from_info_on() {
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
                let told = targets.would_enable(target, &level);
                assert_eq!(told, level <= finest, "{wanted}: {target} {level}");
            }
        }
    }

    #[test]
    fn what_is_no_level_is_refused() {
        assert!(targets("plimsoll=loud").is_err());
    }
}
