//! What was measured, beside what it may be.

/// All figures so far.
#[derive(Default)]
pub struct Figures {
    missed: Vec<String>,
}

impl Figures {
    /// Says a figure that may be `most`.
    pub fn at_most(&mut self, what: &str, value: f64, unit: &str, most: f64) {
        // What could not be measured is no figure.
        let met = value <= most;
        let verdict = if met { "" } else { "  MISSED" };
        let bar = format!("{unit} (bar: {}){verdict}", written(most));
        println!("  {what:<66} {:>9} {bar}", written(value));
        if !met {
            self.missed.push(what.to_owned());
        }
    }

    /// Whether every bar was met, and which were not.
    pub fn are_good(&self) -> bool {
        for what in &self.missed {
            println!("missed: {what}");
        }
        self.missed.is_empty()
    }
}

/// Says a figure that has no bar of its own.
pub fn say(what: &str, value: f64, unit: &str) {
    println!("  {what:<66} {:>9} {unit}", written(value));
}

fn written(value: f64) -> String {
    let digits = match value.abs() {
        size if size < 0.1 => 4,
        size if size < 10.0 => 2,
        size if size < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// The value that so large a share of all is not above; not a number where there are none.
pub fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a place in the list"
    )]
    let place = (share * last).ceil() as usize;
    values.get(place).copied().unwrap_or(f64::NAN)
}
