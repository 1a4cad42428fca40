//! The time between two evaluations of the rules.

use std::time::Duration;

use super::duration;

/// The shortest period.
const MIN_PERIOD: Duration = Duration::from_millis(100);

/// The period of the agents.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct EvaluationPeriod {
    /// Time between two evaluations of the rules, at least 100ms: the same for all agents and the controller
    #[arg(long = "evaluation-period", value_name = "DURATION", value_parser = parse, default_value = "10s")]
    pub(super) period: Duration,
}

/// Parses a period.
pub(super) fn parse(text: &str) -> Result<Duration, String> {
    let period = duration::positive(text)?;
    if period < MIN_PERIOD {
        return Err("the shortest period is 100ms".to_owned());
    }
    Ok(period)
}
