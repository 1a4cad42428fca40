//! Progress with a count, of what takes over two seconds: one line on standard error, if it is a terminal.

use std::io::{self, IsTerminal as _, Write, stderr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// What takes less time shows nothing.
const DELAY: Duration = Duration::from_secs(2);
/// How often the line is written.
const INTERVAL: Duration = Duration::from_millis(200);
/// Removes the line.
const CLEAR: &str = "\r\x1b[K";

/// Shows progress until it is dropped.
#[derive(Debug)]
pub(super) struct ProgressLine {
    shared: Arc<Shared>,
    /// `None`: nothing is shown.
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    count: Mutex<Count>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Count {
    what: String,
    done: usize,
    total: Option<usize>,
    is_over: bool,
}

impl ProgressLine {
    /// Starts with what is done, for example `replaying samples`, and how many there are, if that is known.
    pub(super) fn new(what: &str, total: Option<usize>) -> Self {
        let progress = if stderr().is_terminal() {
            Self::on(stderr(), DELAY)
        } else {
            Self::hidden()
        };
        progress.next(what, total);
        progress
    }

    /// Shows nothing.
    pub(super) fn hidden() -> Self {
        Self {
            shared: Arc::default(),
            thread: None,
        }
    }

    fn on(output: impl Write + Send + 'static, delay: Duration) -> Self {
        let shared = Arc::<Shared>::default();
        let shown = Arc::clone(&shared);
        let thread = thread::Builder::new().name("progress".to_owned());
        // Without a thread no progress is shown; the command works all the same.
        let thread = thread.spawn(move || drop(shown.show(output, delay))).ok();
        Self { shared, thread }
    }

    /// What is done from now on.
    pub(super) fn next(&self, what: &str, total: Option<usize>) {
        let mut count = self.shared.count();
        (count.done, count.total) = (0, total);
        what.clone_into(&mut count.what);
    }

    /// One more is done.
    pub(super) fn advance(&self) {
        self.shared.count().done += 1;
    }

    /// So many are done.
    pub(super) fn set(&self, done: usize) {
        self.shared.count().done = done;
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.shared.count().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

impl Shared {
    fn count(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, mut output: impl Write, delay: Duration) -> io::Result<()> {
        if self.is_over_after(delay) {
            return Ok(());
        }
        loop {
            let line = self.count().to_string();
            write!(output, "{CLEAR}{line}")?;
            output.flush()?;
            if self.is_over_after(INTERVAL) {
                write!(output, "{CLEAR}")?;
                return output.flush();
            }
        }
    }

    fn is_over_after(&self, time: Duration) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(self.count(), time, |count| !count.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)?;
        match self.total {
            Some(total) => write!(f, ": {} of {total}", self.done),
            None if self.done > 0 => write!(f, ": {}", self.done),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    struct Screen(Sender<String>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let text = String::from_utf8_lossy(bytes).into_owned();
            self.0.send(text).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_line_has_the_count_and_is_removed_at_the_end() {
        let (sender, receiver) = channel();
        let progress = ProgressLine::on(Screen(sender), Duration::ZERO);
        progress.next("asking kubelets", Some(12));
        (0..7).for_each(|_| progress.advance());
        let mut screen = String::new();
        while !screen.ends_with("asking kubelets: 7 of 12") {
            let more = receiver.recv_timeout(Duration::from_secs(10));
            screen += &more.expect("the line is written");
        }
        drop(progress);
        screen.extend(receiver.try_iter());
        assert!(screen.ends_with(CLEAR), "{screen:?}");
    }

    #[test]
    fn what_is_quick_shows_nothing() {
        let (sender, receiver) = channel();
        drop(ProgressLine::on(Screen(sender), Duration::from_mins(1)));
        assert_eq!(receiver.try_iter().count(), 0);
    }

    #[test]
    fn a_count_without_a_total_is_shown_once_there_is_one() {
        let count = |done| Count {
            what: "waiting".to_owned(),
            done,
            ..Count::default()
        };
        assert_eq!(count(0).to_string(), "waiting");
        assert_eq!(count(3).to_string(), "waiting: 3");
    }
}
