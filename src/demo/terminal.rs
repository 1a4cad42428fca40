//! The demo on a terminal.

use std::io;
use std::panic;
use std::path::PathBuf;
use std::sync::Once;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::picture;
use super::screen;
use super::show::Show;
use super::story::Act;
use super::view::View;

/// The terminal in raw mode on its alternate screen. It is put back when this is dropped, and before the message of a
/// panic is printed.
#[derive(Debug)]
pub struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    /// Takes over the terminal.
    ///
    /// # Errors
    /// Where there is none.
    pub fn open() -> io::Result<Self> {
        restore_before_panics();
        Ok(Self {
            terminal: ratatui::try_init()?,
        })
    }
}

/// ratatui's own hook does the same, but anew for every initialisation.
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

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

impl Show for Screen {
    fn show(&mut self, view: &View) -> io::Result<()> {
        self.terminal
            .draw(|frame| screen::draw(frame, view))
            .map(drop)
    }

    fn is_stop_asked(&mut self) -> io::Result<bool> {
        while event::poll(Duration::ZERO)? {
            if let Event::Key(key) = event::read()?
                && means_stop(key)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// In raw mode Ctrl-C arrives as a key, not as a signal.
fn means_stop(key: KeyEvent) -> bool {
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (ctrl_c || key.code == KeyCode::Char('q'))
}

/// Saves one moment of the run as a picture, and shows everything as `inner` does.
pub struct Photographer<S> {
    inner: S,
    path: PathBuf,
    /// The moment: so long after the policies came into force.
    delay: Duration,
    enforced_at: Option<Duration>,
    taken: bool,
}

impl<S: Show> Photographer<S> {
    /// Takes the picture once the policies have been in force for `delay`.
    pub const fn new(inner: S, path: PathBuf, delay: Duration) -> Self {
        Self {
            inner,
            path,
            delay,
            enforced_at: None,
            taken: false,
        }
    }
}

impl<S: Show> Show for Photographer<S> {
    fn show(&mut self, view: &View) -> io::Result<()> {
        if view.act == Act::Enforced && !self.taken {
            let since = *self.enforced_at.get_or_insert(view.elapsed);
            if view.elapsed.saturating_sub(since) >= self.delay {
                std::fs::write(&self.path, picture::of(view)?)?;
                self.taken = true;
            }
        }
        self.inner.show(view)
    }

    fn is_stop_asked(&mut self) -> io::Result<bool> {
        self.inner.is_stop_asked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q_and_ctrl_c_mean_stop_and_nothing_else_does() {
        let key = |code, modifiers| means_stop(KeyEvent::new(code, modifiers));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!key(KeyCode::Enter, KeyModifiers::NONE));
    }
}
