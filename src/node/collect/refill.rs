//! Filling a kept list anew without giving its memory back.

/// Overwrites the entries of a list from its start; what is left of the old ones is dropped at the end.
pub struct Refill<'a, T> {
    list: &'a mut Vec<T>,
    filled: usize,
}

impl<'a, T> Refill<'a, T> {
    /// Starts at the first entry.
    pub const fn new(list: &'a mut Vec<T>) -> Self {
        Self { list, filled: 0 }
    }

    /// The next entry, if it `is_right` for what comes next; else a `new` one in its place.
    pub fn next(&mut self, is_right: impl FnOnce(&T) -> bool, new: impl FnOnce() -> T) -> &mut T {
        let place = self.filled;
        self.filled += 1;
        match self.list.get(place) {
            Some(entry) if is_right(entry) => {}
            Some(_) => self.list[place] = new(),
            None => self.list.push(new()),
        }
        &mut self.list[place]
    }

    /// Leaves the next entry as it is, if it `is_right`.
    pub fn keep(&mut self, is_right: impl FnOnce(&T) -> bool) {
        if self.list.get(self.filled).is_some_and(is_right) {
            self.filled += 1;
        }
    }

    /// Takes the last entry back: it turned out not to belong.
    pub const fn take_back(&mut self) {
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
    fn entries_that_fit_stay_where_they_are_and_the_rest_goes() {
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
