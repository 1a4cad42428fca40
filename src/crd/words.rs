//! Finding the word that was probably meant.

/// The nearest of the known words, without regard to case. Near enough to be a slip is what Jaro and Winkler find similar; of
/// these it is the one with the most pairs of letters in common, since they put much weight on how a word begins.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const NEAR: f64 = 0.85;
    const LONGEST: usize = 64;
    let word = (word.len() <= LONGEST).then(|| word.to_lowercase())?;
    let similar = known.into_iter().filter_map(|known| {
        let lower = known.to_lowercase();
        let is_near = strsim::jaro_winkler(&word, &lower) >= NEAR;
        is_near.then(|| (strsim::sorensen_dice(&word, &lower), known))
    });
    let nearest = similar.max_by(|a, b| a.0.total_cmp(&b.0));
    nearest.map(|(_, known)| known)
}

/// A text in quotes, cut where it is long.
pub(super) fn quoted(text: &str) -> String {
    const MOST: usize = 60;
    if text.chars().count() <= MOST {
        return format!("\"{text}\"");
    }
    let start: String = text.chars().take(MOST).collect();
    format!("\"{start}...\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::metric::Metric;

    #[test]
    fn a_slip_is_found_and_a_stranger_is_not() {
        let known = ["cpuThrottle", "memoryThrottle"];
        assert_eq!(nearest("cputhrottle", known), Some("cpuThrottle"));
        assert_eq!(nearest("cpuThrotle", known), Some("cpuThrottle"));
        assert_eq!(nearest("eviction", known), None);
        assert_eq!(nearest("x", ["a"]), None);
        assert_eq!(nearest(&"x".repeat(1000), known), None);
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn a_metric_that_was_probably_meant_is_found() {
        let names = Metric::names();
        for (written, meant) in [
            ("memory_usage", "memory_total_usage"),
            ("memory_utilisation", "memory_total_utilization"),
            ("cpu_total_utilisation", "cpu_total_utilization"),
            ("cpu-total-usage", "cpu_total_usage"),
            ("cpu_usage", "cpu_total_usage"),
            ("memory_presure_some_avg60", "memory_pressure_some_avg60"),
        ] {
            let nearest = nearest(written, names.iter().map(String::as_str));
            assert_eq!(nearest, Some(meant), "{written}");
        }
        let strange = nearest("p99_latency", names.iter().map(String::as_str));
        assert_eq!(strange, None);
    }
}
