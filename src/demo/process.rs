//! The processes that the demo starts, and the requests that the important pod reports.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::cgroups::{CgroupError, DemoCgroups};
use super::latency::Request;
use super::load::Service;
use super::pods::DemoPod;
use crate::engine::time::BootTime;

/// A process of the demo could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be started.
    #[error("failed to start {} for {demo_pod}: {source}", program.display())]
    Start {
        /// The program.
        program: std::path::PathBuf,
        /// The pod.
        demo_pod: String,
        /// The cause.
        source: io::Error,
    },
    /// It cannot be moved into its cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// A process in the cgroup of its pod; killed on drop.
#[derive(Debug)]
pub struct Load {
    child: Child,
}

impl Load {
    /// Starts `program` as the pod's process. It waits until it is in its cgroup.
    fn start(
        program: &Path,
        subcommand: &str,
        demo_pod: &DemoPod,
        arguments: &[String],
        cgroups: &DemoCgroups,
        out: Stdio,
    ) -> Result<Self, LoadError> {
        let failed = |source| LoadError::Start {
            program: program.to_owned(),
            demo_pod: demo_pod.name.clone(),
            source,
        };
        let child = Command::new(program)
            .arg0("plimsoll")
            .arg(subcommand)
            .arg(format!("--parent={}", std::process::id()))
            .arg(format!("--threads={}", demo_pod.threads))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(Stdio::null())
            // Its own process group: Ctrl-C must reach only the demo.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut load = Self { child };
        cgroups.add_process(load.child.id(), &cgroups.cgroup(demo_pod))?;
        let mut stdin = load.child.stdin.take();
        stdin
            .as_mut()
            .map_or(Ok(()), |pipe| pipe.write_all(b"\n"))
            .map_err(failed)?;
        Ok(load)
    }

    /// Starts the batch work of a pod.
    ///
    /// # Errors
    /// Where it cannot be started or moved into its cgroup.
    pub fn batch(
        program: &Path,
        demo_pod: &DemoPod,
        cgroups: &DemoCgroups,
    ) -> Result<Self, LoadError> {
        Self::start(
            program,
            "demo-burner",
            demo_pod,
            &[],
            cgroups,
            Stdio::null(),
        )
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Fails only if the process has exited already.
        let _exited = self.child.kill();
        let _exited = self.child.wait();
    }
}

/// The important pod: its process, and the requests that it has reported.
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
    /// Where it cannot be started or moved into its cgroup.
    pub fn start(
        program: &Path,
        demo_pod: &DemoPod,
        service: Service,
        cgroups: &DemoCgroups,
    ) -> Result<Self, LoadError> {
        let arguments = [
            format!("--rate={}", service.rate),
            format!("--work-micros={}", service.work.as_micros()),
            format!("--patience-millis={}", service.patience.as_millis()),
        ];
        let out = Stdio::piped();
        let mut load = Load::start(program, "demo-worker", demo_pod, &arguments, cgroups, out)?;
        let (sender, requests) = mpsc::channel();
        let out = load.child.stdout.take();
        let patience = service.patience;
        let reader = out.map(|out| thread::spawn(move || read_requests(out, patience, &sender)));
        Ok(Self {
            load,
            requests,
            reader,
        })
    }

    /// The requests that have finished since the last call.
    pub fn finished_requests(&self) -> impl Iterator<Item = Request> {
        self.requests.try_iter()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.load.is_alive()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _exited = self.load.child.kill();
        if let Some(reader) = self.reader.take() {
            // The pipe is closed once the process is dead.
            let _panicked = reader.join();
        }
    }
}

fn read_requests(out: ChildStdout, patience: Duration, sender: &mpsc::Sender<Request>) {
    let lines = BufReader::new(out).lines().map_while(Result::ok);
    for request in lines.filter_map(|line| parse_request(&line, patience)) {
        if sender.send(request).is_err() {
            return;
        }
    }
}

/// Parses a line of [`super::load::serve`].
fn parse_request(line: &str, patience: Duration) -> Option<Request> {
    let (due, latency) = line.split_once(' ')?;
    let served = latency != "-";
    Some(Request {
        due: BootTime::from_nanos(due.parse().ok()?),
        latency: if served {
            Duration::from_nanos(latency.parse().ok()?)
        } else {
            patience
        },
        served,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_of_the_worker_are_parsed() {
        const PATIENCE: Duration = Duration::from_secs(1);
        let request = parse_request("5000000000 910000", PATIENCE).unwrap();
        assert_eq!(request.due, BootTime::from_nanos(5_000_000_000));
        assert_eq!(request.latency, Duration::from_micros(910));
        assert!(request.served);
        for partial in ["", "5", "5 ", " 5", "5 x"] {
            assert_eq!(parse_request(partial, PATIENCE), None, "{partial:?}");
        }
    }

    #[test]
    fn a_request_that_was_given_up_has_waited_all_its_patience() {
        const PATIENCE: Duration = Duration::from_secs(1);
        let request = parse_request("5000000000 -", PATIENCE).unwrap();
        assert_eq!(request.latency, PATIENCE);
        assert!(!request.served);
    }
}
