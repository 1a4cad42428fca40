//! Kernel files that are read repeatedly through descriptors that stay open.
//!
//! Opening a cgroup file costs ten times as much as reading it, so a [`CachedFile`] opens its file once and then reads
//! it at offset 0, which makes the kernel generate the text again. After the cgroup is removed, reads fail with
//! ENODEV, even if another cgroup has taken its name.

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
    /// The cgroup or process that it belongs to does not exist (any more). This is normal.
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
        /// The kernel's error.
        source: io::Error,
    },
    /// The text does not have the kernel's format.
    #[error("failed to parse {0}")]
    Malformed(Arc<Path>),
}

/// How many descriptors may stay open. Files beyond the budget are opened and closed at each read.
#[derive(Clone, Debug)]
pub struct FdBudget(Arc<AtomicUsize>);

/// Descriptors reserved for everything else: journal, sockets, terminal, libraries.
const RESERVED_FDS: u64 = 256;

impl FdBudget {
    /// A budget of `fds` descriptors.
    pub fn new(fds: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(fds)))
    }

    /// Raises this process's soft limit of open files to the hard limit; the budget is what that leaves.
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

    /// Descriptors still available.
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

/// One open descriptor's share of the budget, returned on drop.
#[derive(Debug)]
struct Permit(Arc<AtomicUsize>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The buffer that files are read into. It grows to the longest file and is reused.
#[derive(Debug)]
pub struct Buffer(Vec<u8>);

/// No kernel file read here comes near this size.
const MAX_FILE_SIZE: usize = 16 << 20;

impl Default for Buffer {
    fn default() -> Self {
        Self(vec![0; 8192])
    }
}

impl Buffer {
    fn grow(&mut self) -> bool {
        let can_grow = self.0.len() < MAX_FILE_SIZE;
        if can_grow {
            self.0.resize(self.0.len() * 2, 0);
        }
        can_grow
    }
}

/// A file that is opened at the first read and then stays open.
#[derive(Debug)]
pub struct CachedFile {
    path: Arc<Path>,
    state: State,
}

#[derive(Debug)]
enum State {
    Closed,
    Open(
        File,
        #[expect(dead_code, reason = "kept for its drop")] Permit,
    ),
    Absent,
}

impl CachedFile {
    /// Does not open the file yet.
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

    /// Whether the file is open, so that a removed cgroup cannot be mistaken for its successor.
    pub const fn is_open(&self) -> bool {
        matches!(self.state, State::Open(..))
    }

    /// Closes the file; the next read opens whatever then has this path.
    pub fn close(&mut self) {
        self.state = State::Closed;
    }

    /// Makes the next read try again to open a file that was absent.
    pub fn retry_absent(&mut self) {
        if matches!(self.state, State::Absent) {
            self.state = State::Closed;
        }
    }

    /// Reads a file that holds one number.
    ///
    /// # Errors
    /// If the file does not hold exactly one number; see [`ReadError`].
    pub fn read_number(&mut self, fds: &FdBudget) -> Result<u64, ReadError> {
        // A u64 and its newline take 21 bytes.
        let mut text = [0; 32];
        let length = self.with_file(fds, |file| pread(file, &mut text, 0))?;
        self.parsed(parse::number(&text[..length]))
    }

    /// Reads a file that the kernel returns in one read: `/proc/{stat,meminfo,loadavg,pressure}` and all cgroup files
    /// except task lists. One system call.
    ///
    /// # Errors
    /// See [`ReadError`].
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

    /// Reads a file that the kernel returns record by record, where a short read is not the end: task lists,
    /// `/proc/diskstats`, `/proc/net/dev`.
    ///
    /// # Errors
    /// See [`ReadError`].
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

    /// Turns a failed parse (`None`) into [`ReadError::Malformed`].
    ///
    /// # Errors
    /// If `value` is `None`.
    pub fn parsed<T>(&self, value: Option<T>) -> Result<T, ReadError> {
        value.ok_or_else(|| ReadError::Malformed(Arc::clone(&self.path)))
    }

    fn with_file<T>(
        &mut self,
        fds: &FdBudget,
        read: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<T, ReadError> {
        let result = match &self.state {
            State::Open(file, _) => read(file),
            State::Absent => return Err(ReadError::Absent(Arc::clone(&self.path))),
            State::Closed => {
                let file = File::open(&self.path).map_err(|error| self.failed_open(error))?;
                let result = read(&file);
                if let Some(permit) = fds.take() {
                    self.state = State::Open(file, permit);
                }
                result
            }
        };
        result.map_err(|error| self.failed_read(error))
    }

    /// A missing file in an existing directory is not supported here; if the directory is missing too, it is gone.
    fn failed_open(&mut self, source: io::Error) -> ReadError {
        let path = Arc::clone(&self.path);
        let missing = source.kind() == io::ErrorKind::NotFound;
        match path.parent() {
            Some(directory) if missing && directory.exists() => {
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
            // Pressure files of a kernel booted with `psi=0`.
            self.state = State::Absent;
            ReadError::Absent(path)
        } else {
            ReadError::Io { path, source }
        }
    }
}

/// ENODEV from a removed cgroup's file, ESRCH from an exited task's.
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
