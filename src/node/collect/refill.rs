//! Refills a list while reusing its allocations.

/// Overwrites the entries of a list from its start; leftover old entries are removed on drop.
pub struct Refill<'a, T> {
    list: &'a mut Vec<T>,
    filled: usize,
}

impl<'a, T> Refill<'a, T> {
    /// Starts at the first entry.
    pub const fn new(list: &'a mut Vec<T>) -> Self {
        Self { list, filled: 0 }
    }

    /// The next entry if it `matches`, else a `new` one in its place.
    pub fn next(&mut self, matches: impl FnOnce(&T) -> bool, new: impl FnOnce() -> T) -> &mut T {
        let index = self.filled;
        self.filled += 1;
        match self.list.get(index) {
            Some(entry) if matches(entry) => {}
            Some(_) => self.list[index] = new(),
            None => self.list.push(new()),
        }
        &mut self.list[index]
    }

    /// Leaves the next entry unchanged if it `matches`.
    pub fn skip(&mut self, matches: impl FnOnce(&T) -> bool) {
        if self.list.get(self.filled).is_some_and(matches) {
            self.filled += 1;
        }
    }

    /// Discards the last entry.
    pub const fn discard_last(&mut self) {
        self.filled = self.filled.saturating_sub(1);
    }
}

impl<T> Drop for Refill<'_, T> {
    fn drop(&mut self) {
        self.list.truncate(self.filled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matching_entries_are_reused_and_the_rest_removed() {
        let mut list = vec!["a".to_owned(), "b".to_owned(), "c".to_owned()];
        let first = list[0].as_ptr();
        let mut refill = Refill::new(&mut list);
        for name in ["a", "x"] {
            refill.next(|entry| entry == name, || name.to_owned());
        }
        drop(refill);
        assert_eq!(list, ["a", "x"]);
        assert_eq!(list[0].as_ptr(), first);
    }
}
