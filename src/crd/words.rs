//! Words of messages: the one that was probably meant, quoted ones, and lists of names.

/// The known word that was probably meant, ignoring case. Candidates are chosen by Jaro-Winkler similarity and ranked by
/// Sorensen-Dice, because Jaro-Winkler gives much weight to the start of a word.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const MIN_SIMILARITY: f64 = 0.85;
    const MAX_LENGTH: usize = 64;
    let word = (word.len() <= MAX_LENGTH).then(|| word.to_lowercase())?;
    let similar = known.into_iter().filter_map(|known| {
        let lower = known.to_lowercase();
        let is_near = strsim::jaro_winkler(&word, &lower) >= MIN_SIMILARITY;
        is_near.then(|| (strsim::sorensen_dice(&word, &lower), known))
    });
    let nearest = similar.max_by(|a, b| a.0.total_cmp(&b.0));
    nearest.map(|(_, known)| known)
}

/// A string in quotes, truncated if it is long.
pub(super) fn quoted(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    if text.chars().count() <= MAX_CHARS {
        return format!("\"{text}\"");
    }
    let start: String = text.chars().take(MAX_CHARS).collect();
    format!("\"{start}...\"")
}

/// Truncates to at most `max` bytes.
pub fn truncated(mut text: String, max: usize) -> String {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max.saturating_sub(3)));
        text.push_str("...");
    }
    text
}

/// The first `max` names: `a, b and 3 more`.
pub fn named<S: AsRef<str>>(names: impl IntoIterator<Item = S>, max: usize) -> String {
    let names: Vec<S> = names.into_iter().collect();
    let first: Vec<&str> = names.iter().take(max).map(S::as_ref).collect();
    match names.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::metric::Metric;

    #[test]
    fn only_a_similar_word_is_suggested() {
        let known = ["cpuThrottle", "memoryThrottle"];
        assert_eq!(nearest("cputhrottle", known), Some("cpuThrottle"));
        assert_eq!(nearest("cpuThrotle", known), Some("cpuThrottle"));
        assert_eq!(nearest("eviction", known), None);
        assert_eq!(nearest("x", ["a"]), None);
        assert_eq!(nearest(&"x".repeat(1000), known), None);
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn long_texts_and_lists_are_truncated() {
        assert_eq!(truncated("ä".repeat(10), 9), "äää...");
        assert_eq!(truncated("short".to_owned(), 9), "short");
        assert_eq!(named(["a", "b"], 2), "a, b");
        assert_eq!(named(["a", "b", "c"], 2), "a, b and 1 more");
        assert_eq!(named::<&str>([], 2), "");
    }

    #[test]
    fn a_misspelt_metric_is_found() {
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
        let unrelated = nearest("p99_latency", names.iter().map(String::as_str));
        assert_eq!(unrelated, None);
    }
}
