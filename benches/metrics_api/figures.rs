//! Prints measured figures with their bars.

/// All figures so far.
#[derive(Default)]
pub struct Figures {
    missed: Vec<String>,
}

impl Figures {
    /// Prints a figure whose bar is `max`.
    pub fn at_most(&mut self, what: &str, value: f64, unit: &str, max: f64) {
        // NaN misses the bar.
        let met = value <= max;
        let verdict = if met { "" } else { "  MISSED" };
        let bar = format!("{unit} (bar: {}){verdict}", formatted(max));
        println!("  {what:<66} {:>9} {bar}", formatted(value));
        if !met {
            self.missed.push(what.to_owned());
        }
    }

    /// Prints missed bars; whether there are none.
    pub fn all_met(&self) -> bool {
        for what in &self.missed {
            println!("missed: {what}");
        }
        self.missed.is_empty()
    }
}

/// Prints a figure without a bar.
pub fn print(what: &str, value: f64, unit: &str) {
    println!("  {what:<66} {:>9} {unit}", formatted(value));
}

fn formatted(value: f64) -> String {
    let digits = match value.abs() {
        size if size < 0.1 => 4,
        size if size < 10.0 => 2,
        size if size < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// The quantile of the values; NaN if there are none.
pub fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index"
    )]
    let index = (share * last).ceil() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}
