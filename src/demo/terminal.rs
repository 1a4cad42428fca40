//! The demo on a terminal.

use std::io;
use std::panic;
use std::sync::Once;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::renderer::Renderer;
use super::screen;
use super::view::DemoView;

/// The terminal in raw mode on its alternate screen; restored on drop, and before a panic message is printed.
#[derive(Debug)]
pub struct TerminalRenderer {
    terminal: DefaultTerminal,
}

impl TerminalRenderer {
    /// Takes over the terminal.
    ///
    /// # Errors
    /// Where there is no terminal.
    pub fn open() -> io::Result<Self> {
        restore_before_panics();
        Ok(Self {
            terminal: ratatui::try_init()?,
        })
    }
}

/// ratatui's own hook does the same, but adds one at every initialisation.
fn restore_before_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            ratatui::restore();
            before(info);
        }));
    });
}

impl Drop for TerminalRenderer {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

impl Renderer for TerminalRenderer {
    fn render(&mut self, view: &DemoView) -> io::Result<()> {
        self.terminal
            .draw(|frame| screen::draw(frame, view))
            .map(drop)
    }

    fn stop_requested(&mut self) -> io::Result<bool> {
        while event::poll(Duration::ZERO)? {
            if let Event::Key(key) = event::read()?
                && is_stop_key(key)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// In raw mode Ctrl-C arrives as a key, not as a signal.
fn is_stop_key(key: KeyEvent) -> bool {
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (ctrl_c || key.code == KeyCode::Char('q'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_q_and_ctrl_c_stop_the_demo() {
        let key = |code, modifiers| is_stop_key(KeyEvent::new(code, modifiers));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!key(KeyCode::Enter, KeyModifiers::NONE));
    }
}
