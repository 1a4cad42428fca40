//! Finding the word that was probably meant.

/// The nearest of the known words, if it is near enough to be a slip.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    let (distance, best) = known
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .min()?;
    let allowed = (word.len() / 3).clamp(1, 4);
    (distance <= allowed).then_some(best)
}

/// Levenshtein's distance, without regard to case.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.to_lowercase().chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.to_lowercase().chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
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

    #[test]
    fn a_slip_is_found_and_a_stranger_is_not() {
        let known = ["cpuThrottle", "memoryThrottle"];
        assert_eq!(nearest("cputhrottle", known), Some("cpuThrottle"));
        assert_eq!(nearest("cpuThrotle", known), Some("cpuThrottle"));
        assert_eq!(nearest("eviction", known), None);
        assert_eq!(nearest("x", ["a"]), Some("a"));
        assert_eq!(nearest(&"x".repeat(1000), known), None);
        assert_eq!(nearest("x", []), None);
    }
}
