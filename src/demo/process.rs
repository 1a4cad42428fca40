//! The processes that the demo starts, and what the important one reports.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::cast::Role;
use super::latency::Request;
use super::stage::{Stage, StageError};
use crate::engine::time::BootTime;

/// A process of the demo could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It does not start.
    #[error("failed to start {} for {role}: {source}", program.display())]
    Start {
        /// The program.
        program: std::path::PathBuf,
        /// The pod.
        role: String,
        /// Why.
        source: io::Error,
    },
    /// It cannot be put into its cgroup.
    #[error(transparent)]
    Admit(#[from] StageError),
}

/// A process in the cgroup of its pod. It is killed when this is dropped.
#[derive(Debug)]
pub struct Load {
    child: Child,
}

impl Load {
    /// Starts `program` as the pod's process. It waits until it is in its cgroup before it does anything.
    fn start(
        program: &Path,
        subcommand: &str,
        role: &Role,
        stage: &Stage,
        out: Stdio,
    ) -> Result<Self, LoadError> {
        let failed = |source| LoadError::Start {
            program: program.to_owned(),
            role: role.name.clone(),
            source,
        };
        let child = Command::new(program)
            .arg0("plimsoll")
            .arg(subcommand)
            .arg(format!("--parent={}", std::process::id()))
            .arg(format!("--threads={}", role.threads))
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(Stdio::null())
            // In a group of its own, so that a Ctrl-C meant for the demo does not reach it first.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut load = Self { child };
        stage.admit(load.child.id(), &stage.cgroup(role))?;
        let mut go = load.child.stdin.take();
        go.as_mut()
            .map_or(Ok(()), |pipe| pipe.write_all(b"\n"))
            .map_err(failed)?;
        Ok(load)
    }

    /// Starts the batch work of a pod.
    ///
    /// # Errors
    /// Where it does not start or cannot be put into its cgroup.
    pub fn batch(program: &Path, role: &Role, stage: &Stage) -> Result<Self, LoadError> {
        Self::start(program, "demo-burner", role, stage, Stdio::null())
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It fails only where the process has ended already.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// The important worker: its process, and the requests that it has reported.
#[derive(Debug)]
pub struct Worker {
    load: Load,
    requests: Receiver<Request>,
    reader: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the important pod's process.
    ///
    /// # Errors
    /// Where it does not start or cannot be put into its cgroup.
    pub fn start(program: &Path, role: &Role, stage: &Stage) -> Result<Self, LoadError> {
        let mut load = Load::start(program, "demo-worker", role, stage, Stdio::piped())?;
        let (tell, requests) = mpsc::channel();
        let out = load.child.stdout.take();
        let reader = out.map(|out| thread::spawn(move || read_requests(out, &tell)));
        Ok(Self {
            load,
            requests,
            reader,
        })
    }

    /// The requests that have ended since the last call.
    pub fn ended(&self) -> impl Iterator<Item = Request> {
        self.requests.try_iter()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.load.is_alive()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ended = self.load.child.kill();
        if let Some(reader) = self.reader.take() {
            // Its pipe has ended with the process.
            let _ended = reader.join();
        }
    }
}

fn read_requests(out: ChildStdout, tell: &mpsc::Sender<Request>) {
    let lines = BufReader::new(out).lines().map_while(Result::ok);
    for request in lines.filter_map(|line| parse_request(&line)) {
        if tell.send(request).is_err() {
            return;
        }
    }
}

/// A line of [`super::load::serve`].
fn parse_request(line: &str) -> Option<Request> {
    let (due, latency) = line.split_once(' ')?;
    Some(Request {
        due: BootTime::from_nanos(due.parse().ok()?),
        latency: Duration::from_nanos(latency.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_worker_is_read_and_a_torn_one_is_not() {
        let request = parse_request("5000000000 910000").unwrap();
        assert_eq!(request.due, BootTime::from_nanos(5_000_000_000));
        assert_eq!(request.latency, Duration::from_micros(910));
        for torn in ["", "5", "5 ", " 5", "5 x"] {
            assert_eq!(parse_request(torn), None, "{torn:?}");
        }
    }
}
