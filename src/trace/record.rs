//! `--record FILE`: writes a trace.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{LineRef, TickRef, TraceHeader};
use crate::engine::plan::Transition;
use crate::engine::pod::Pod;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;

/// Size in bytes at which the file is renamed to `FILE.1`, so that both take at most twice as much.
pub const MAX_FILE_SIZE: u64 = 64 << 20;

/// A trace could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write the trace {}: {source}", path.display())]
pub struct RecordError {
    path: PathBuf,
    source: io::Error,
}

/// Writes a trace. Each file starts with header and pods, so that it can be replayed alone.
#[derive(Debug)]
pub struct TraceRecorder {
    path: PathBuf,
    header: TraceHeader,
    pods: Vec<Arc<Pod>>,
    file: BufWriter<File>,
    written: u64,
    limit: u64,
}

impl TraceRecorder {
    /// Starts a trace. An existing file is renamed to `FILE.1`.
    ///
    /// # Errors
    /// Where the file cannot be created.
    pub fn create(path: &Path, header: TraceHeader) -> Result<Self, RecordError> {
        Self::with_limit(path, header, MAX_FILE_SIZE)
    }

    fn with_limit(path: &Path, header: TraceHeader, limit: u64) -> Result<Self, RecordError> {
        let file = create(path).map_err(|source| RecordError {
            path: path.to_owned(),
            source,
        })?;
        let mut recorder = Self {
            path: path.to_owned(),
            header,
            pods: Vec::new(),
            file: BufWriter::new(file),
            written: 0,
            limit,
        };
        recorder.write_head()?;
        Ok(recorder)
    }

    /// Writes the pods if they changed.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn pods(&mut self, pods: &[Arc<Pod>]) -> Result<(), RecordError> {
        if self.pods != pods {
            self.pods = pods.to_vec();
            self.write(&LineRef::Pods(pods))?;
        }
        Ok(())
    }

    /// Writes a step of the engine: its sample and its decisions.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn tick<'a>(
        &mut self,
        now: BootTime,
        sample: &Sample,
        transitions: impl Iterator<Item = &'a Transition>,
    ) -> Result<(), RecordError> {
        self.write(&LineRef::Tick(TickRef { now, sample }))?;
        for transition in transitions {
            self.write(&LineRef::Transition(transition))?;
        }
        self.flush()?;
        if self.written >= self.limit {
            self.rotate(now)?;
        }
        Ok(())
    }

    fn rotate(&mut self, now: BootTime) -> Result<(), RecordError> {
        self.header.time = self.header.wall_time(now);
        self.header.at = now;
        self.file = BufWriter::new(create(&self.path).map_err(|source| self.failed(source))?);
        self.written = 0;
        self.write_head()
    }

    fn write_head(&mut self) -> Result<(), RecordError> {
        let header = self.header.clone();
        self.write(&LineRef::Header(&header))?;
        let pods = std::mem::take(&mut self.pods);
        self.write(&LineRef::Pods(&pods))?;
        self.pods = pods;
        self.flush()
    }

    fn write(&mut self, line: &LineRef<'_>) -> Result<(), RecordError> {
        let mut text = serde_json::to_vec(line)
            .map_err(io::Error::from)
            .map_err(|source| self.failed(source))?;
        text.push(b'\n');
        self.written += text.len() as u64;
        let wrote = self.file.write_all(&text);
        wrote.map_err(|source| self.failed(source))
    }

    fn flush(&mut self) -> Result<(), RecordError> {
        let flushed = self.file.flush();
        flushed.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> RecordError {
        RecordError {
            path: self.path.clone(),
            source,
        }
    }
}

/// Creates the file at `path` after renaming an existing one. Anything but a regular file (a pipe, `/dev/stdout`) is
/// opened as it is.
fn create(path: &Path) -> io::Result<File> {
    if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        return OpenOptions::new().write(true).open(path);
    }
    let mut old = path.as_os_str().to_owned();
    old.push(".1");
    match fs::rename(path, old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => File::create_new(path),
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::time::Duration;

    use super::*;
    use crate::engine::sample::{ProbeSample, Series};
    use crate::trace::read::Reader;
    use crate::trace::{TraceLine, TracedNode, VERSION};

    fn header() -> TraceHeader {
        TraceHeader {
            version: VERSION,
            plimsoll: "0".to_owned(),
            boot_id: "boot".to_owned(),
            at: BootTime::default(),
            time: jiff::Timestamp::UNIX_EPOCH,
            node: TracedNode::default(),
            period_nanos: None,
        }
    }

    fn lines(path: &Path) -> Vec<TraceLine> {
        let file = BufReader::new(File::open(path).expect("a trace"));
        let (_, mut reader) = Reader::open(file).expect("a header");
        std::iter::from_fn(|| reader.read().expect("a line")).collect()
    }

    #[test]
    fn numbers_that_json_lacks_survive_a_round_trip() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let path = dir.path().join("trace");
        let series = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.1 + 0.2].map(|value| Series {
            name: "s".into(),
            labels: Vec::new(),
            value,
        });
        let mut sample = Sample::default();
        sample.node.load = Some([0.1 + 0.2, 1e-7, 2.05]);
        sample.probes.push(ProbeSample {
            url: "u".into(),
            at: BootTime::default(),
            series: series.to_vec().into(),
        });
        let mut recorder = TraceRecorder::create(&path, header()).expect("a trace");
        let tick = recorder.tick(BootTime::default(), &sample, std::iter::empty());
        tick.expect("written");
        let Some(TraceLine::Tick(read)) = lines(&path).pop() else {
            panic!("no tick");
        };
        assert_eq!(read.sample.node, sample.node);
        let bits = |sample: &Sample| -> Vec<u64> {
            let series = sample.probes[0].series.iter();
            series.map(|series| series.value.to_bits()).collect()
        };
        assert_eq!(bits(&read.sample), bits(&sample));
    }

    #[test]
    fn a_long_recording_keeps_two_complete_files() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let path = dir.path().join("trace");
        let mut recorder = TraceRecorder::with_limit(&path, header(), 20_000).expect("a trace");
        for second in 0..200 {
            let now = BootTime::default() + Duration::from_secs(second);
            let tick = recorder.tick(now, &Sample::default(), std::iter::empty());
            tick.expect("written");
        }
        let old = dir.path().join("trace.1");
        for file in [&path, &old] {
            let size = fs::metadata(file).expect("a file").len();
            assert!(size < 21_000, "{size}");
            assert!(matches!(lines(file)[..], [TraceLine::Pods(_), ..]));
        }
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 2);
        let ticks = lines(&old).len() + lines(&path).len();
        assert!(ticks > 100, "{ticks}");
    }
}
