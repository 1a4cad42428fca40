//! Files of the kernel that are read again and again, through descriptors that stay open.
//!
//! Opening a cgroup file costs ten times what reading it does, so a [`Gauge`] opens its file once and reads it at
//! offset 0 from then on, which makes the kernel compute the text anew. When the cgroup is removed the
//! descriptor answers ENODEV: the clean sign that it is gone, even where another cgroup has taken its name.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::parse;

/// Why a file gave no value.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The cgroup or the process that it belongs to does not exist (any more). Normal.
    #[error("{0} is gone")]
    Gone(Arc<Path>),
    /// This kernel, or this cgroup's set of controllers, has no such file.
    #[error("{0} does not exist")]
    Absent(Arc<Path>),
    /// Reading failed.
    #[error("failed to read {path}: {source}")]
    Io {
        /// The file.
        path: Arc<Path>,
        /// What the kernel answered.
        source: io::Error,
    },
    /// The text is not what the kernel writes there.
    #[error("failed to understand what {0} holds")]
    Malformed(Arc<Path>),
}

/// How many descriptors may be kept open. Gauges beyond it open and close their file at each reading.
#[derive(Clone, Debug)]
pub struct FdBudget(Arc<AtomicUsize>);

/// Descriptors left for everything else: journal, sockets, terminal, whatever a library opens.
const RESERVED_FDS: u64 = 256;

impl FdBudget {
    /// At most `fds` at once.
    pub fn new(fds: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(fds)))
    }

    /// Raises this process's soft limit of open files to the hard one, and allows what it leaves.
    pub fn raise() -> Self {
        let limit = match getrlimit(Resource::RLIMIT_NOFILE) {
            Ok((soft, hard)) if soft < hard => {
                match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
                    Ok(()) => hard,
                    Err(_) => soft,
                }
            }
            Ok((soft, _)) => soft,
            Err(_) => 1024,
        };
        let spare = limit.saturating_sub(RESERVED_FDS);
        Self::new(usize::try_from(spare).unwrap_or(usize::MAX))
    }

    /// Descriptors that may still be kept.
    pub fn left(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn take(&self) -> Option<Permit> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            });
        taken.is_ok().then(|| Permit(Arc::clone(&self.0)))
    }
}

/// One kept descriptor's share of the budget, given back on drop.
#[derive(Debug)]
struct Permit(Arc<AtomicUsize>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The memory that texts are read into. It grows to the longest text and stays.
#[derive(Debug)]
pub struct Buffer(Vec<u8>);

/// No file that is read here comes near this size; a longer one is not what it should be.
const LONGEST_TEXT: usize = 16 << 20;

impl Default for Buffer {
    fn default() -> Self {
        Self(vec![0; 8192])
    }
}

impl Buffer {
    fn grow(&mut self) -> bool {
        let room = self.0.len() < LONGEST_TEXT;
        if room {
            self.0.resize(self.0.len() * 2, 0);
        }
        room
    }
}

/// A file that is opened at the first reading and then kept.
#[derive(Debug)]
pub struct Gauge {
    path: Arc<Path>,
    state: State,
}

#[derive(Debug)]
enum State {
    Closed,
    Kept(
        File,
        #[expect(dead_code, reason = "held for its drop")] Permit,
    ),
    Absent,
}

impl Gauge {
    /// A gauge on `path`; nothing is opened yet.
    pub fn new(path: impl Into<Arc<Path>>) -> Self {
        Self {
            path: path.into(),
            state: State::Closed,
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a descriptor is held, so that a removed cgroup cannot be mistaken for its successor.
    pub const fn is_kept(&self) -> bool {
        matches!(self.state, State::Kept(..))
    }

    /// Closes the file; the next reading opens what then has its name.
    pub fn forget(&mut self) {
        self.state = State::Closed;
    }

    /// Looks for the file again at the next reading where there was none.
    pub fn look_again(&mut self) {
        if matches!(self.state, State::Absent) {
            self.state = State::Closed;
        }
    }

    /// Reads a file that holds one number.
    ///
    /// # Errors
    /// Anything but exactly one number, as [`ReadError`] tells.
    pub fn read_number(&mut self, fds: &FdBudget) -> Result<u64, ReadError> {
        // A u64 and its newline take 21 bytes.
        let mut text = [0; 32];
        let length = self.with_file(fds, |file| pread(file, &mut text, 0))?;
        self.understood(parse::number(&text[..length]))
    }

    /// Reads a file that the kernel writes in one go: all of `/proc/{stat,meminfo,loadavg,pressure}` and the
    /// cgroup files but the lists of tasks. One system call.
    ///
    /// # Errors
    /// As [`ReadError`] tells.
    pub fn read<'b>(
        &mut self,
        fds: &FdBudget,
        buffer: &'b mut Buffer,
    ) -> Result<&'b [u8], ReadError> {
        let length = self.with_file(fds, |file| {
            loop {
                let length = pread(file, &mut buffer.0, 0)?;
                if length < buffer.0.len() || !buffer.grow() {
                    break Ok(length);
                }
            }
        })?;
        Ok(&buffer.0[..length])
    }

    /// Reads a file that the kernel writes record by record, where a short read is not yet the end: lists of
    /// tasks, `/proc/diskstats`, `/proc/net/dev`.
    ///
    /// # Errors
    /// As [`ReadError`] tells.
    pub fn read_records<'b>(
        &mut self,
        fds: &FdBudget,
        buffer: &'b mut Buffer,
    ) -> Result<&'b [u8], ReadError> {
        let length = self.with_file(fds, |file| {
            let mut filled = 0;
            loop {
                if filled == buffer.0.len() && !buffer.grow() {
                    break Ok(filled);
                }
                match pread(file, &mut buffer.0[filled..], filled as u64)? {
                    0 => break Ok(filled),
                    more => filled += more,
                }
            }
        })?;
        Ok(&buffer.0[..length])
    }

    /// `value`, or that this file's text made none.
    ///
    /// # Errors
    /// [`ReadError::Malformed`] for `None`.
    pub fn understood<T>(&self, value: Option<T>) -> Result<T, ReadError> {
        value.ok_or_else(|| ReadError::Malformed(Arc::clone(&self.path)))
    }

    fn with_file<T>(
        &mut self,
        fds: &FdBudget,
        read: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<T, ReadError> {
        let result = match &self.state {
            State::Kept(file, _) => read(file),
            State::Absent => return Err(ReadError::Absent(Arc::clone(&self.path))),
            State::Closed => {
                let file = File::open(&self.path).map_err(|error| self.failed_open(error))?;
                let result = read(&file);
                if let Some(permit) = fds.take() {
                    self.state = State::Kept(file, permit);
                }
                result
            }
        };
        result.map_err(|error| self.failed_read(error))
    }

    /// A missing file in a folder that exists is not there by nature; with its folder gone, it is gone.
    fn failed_open(&mut self, source: io::Error) -> ReadError {
        let path = Arc::clone(&self.path);
        let missing = source.kind() == io::ErrorKind::NotFound;
        match path.parent() {
            Some(folder) if missing && folder.exists() => {
                self.state = State::Absent;
                ReadError::Absent(path)
            }
            _ if missing || is_gone(&source) => ReadError::Gone(path),
            _ => ReadError::Io { path, source },
        }
    }

    fn failed_read(&mut self, source: io::Error) -> ReadError {
        let path = Arc::clone(&self.path);
        if is_gone(&source) {
            self.state = State::Closed;
            ReadError::Gone(path)
        } else if source.raw_os_error() == Some(Errno::EOPNOTSUPP as i32) {
            // Pressure files of a kernel that was booted with `psi=0`.
            self.state = State::Absent;
            ReadError::Absent(path)
        } else {
            ReadError::Io { path, source }
        }
    }
}

/// ENODEV from a removed cgroup's file, ESRCH from an ended task's.
fn is_gone(error: &io::Error) -> bool {
    [Errno::ENODEV, Errno::ENOENT, Errno::ESRCH]
        .iter()
        .any(|errno| error.raw_os_error() == Some(*errno as i32))
}

fn pread(file: &File, text: &mut [u8], offset: u64) -> io::Result<usize> {
    loop {
        match file.read_at(text, offset) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
