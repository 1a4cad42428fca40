//! Where the demo is shown.

use std::io;

use super::view::DemoView;

/// A terminal, or lines of text.
pub trait Renderer {
    /// Shows the current state of the demo.
    ///
    /// # Errors
    /// Where it cannot be written.
    fn render(&mut self, view: &DemoView) -> io::Result<()>;

    /// Whether the user pressed a key that stops the demo.
    ///
    /// # Errors
    /// Where keys cannot be read.
    fn stop_requested(&mut self) -> io::Result<bool>;
}
