//! Where the demo is shown.

use std::io;

use super::view::View;

/// A terminal, or lines of text.
pub trait Show {
    /// Shows this moment.
    ///
    /// # Errors
    /// Where it cannot be written.
    fn show(&mut self, view: &View) -> io::Result<()>;

    /// Somebody pressed a key that means "stop".
    ///
    /// # Errors
    /// Where keys cannot be read.
    fn is_stop_asked(&mut self) -> io::Result<bool>;
}

impl<S: Show + ?Sized> Show for Box<S> {
    fn show(&mut self, view: &View) -> io::Result<()> {
        (**self).show(view)
    }

    fn is_stop_asked(&mut self) -> io::Result<bool> {
        (**self).is_stop_asked()
    }
}
