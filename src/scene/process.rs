//! The processes of a scene, and the requests that they report.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::cgroups::{CgroupError, SceneCgroups};
use super::latency::TimedRequest;
use super::load::Service;
use super::pod::ScenePod;
use crate::engine::time::BootTime;

/// A process of a scene could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be started.
    #[error("failed to start {} for {pod}: {source}", program.display())]
    Start {
        /// The program.
        program: std::path::PathBuf,
        /// The pod.
        pod: String,
        /// The cause.
        source: io::Error,
    },
    /// It cannot be moved into its cgroup.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// A process in the cgroup of its pod; killed on drop.
#[derive(Debug)]
pub struct LoadProcess {
    child: Child,
}

impl LoadProcess {
    /// Starts `program` as the pod's process, in its cgroup. What it does begins with [`Self::begin`].
    fn spawn(
        program: &Path,
        arguments: &[String],
        pod: &ScenePod,
        cgroups: &SceneCgroups,
        [stdin, stdout]: [Stdio; 2],
    ) -> Result<Self, LoadError> {
        let child = Command::new(program)
            .arg0("plimsoll")
            .args(arguments)
            .arg(format!("--parent={}", std::process::id()))
            .stdin(stdin)
            .stdout(stdout)
            .stderr(Stdio::null())
            // Its own process group: Ctrl-C must reach only the parent.
            .process_group(0)
            .spawn()
            .map_err(failed(program, pod))?;
        let load = Self { child };
        cgroups.add_process(load.child.id(), &cgroups.cgroup(pod))?;
        Ok(load)
    }

    fn begin(&mut self) -> io::Result<()> {
        let stdin = self.child.stdin.take();
        stdin.map_or(Ok(()), |mut pipe| pipe.write_all(b"\n"))
    }

    /// Starts the batch work of a pod: threads that are always busy.
    ///
    /// # Errors
    /// Where it cannot be started or moved into its cgroup.
    pub fn batch(
        program: &Path,
        pod: &ScenePod,
        cgroups: &SceneCgroups,
    ) -> Result<Self, LoadError> {
        let arguments = [
            "demo-burner".to_owned(),
            format!("--threads={}", pod.threads),
        ];
        let pipes = [Stdio::piped(), Stdio::null()];
        let mut load = Self::spawn(program, &arguments, pod, cgroups, pipes)?;
        load.begin().map_err(failed(program, pod))?;
        Ok(load)
    }

    /// Starts batch work of a limited rate. Its latency is not measured.
    ///
    /// # Errors
    /// Where it cannot be started or moved into its cgroup.
    pub fn paced(
        program: &Path,
        pod: &ScenePod,
        service: Service,
        cgroups: &SceneCgroups,
    ) -> Result<Self, LoadError> {
        let pipes = [Stdio::piped(), Stdio::null()];
        let mut load = Self::spawn(program, &arguments(service), pod, cgroups, pipes)?;
        load.begin().map_err(failed(program, pod))?;
        Ok(load)
    }

    /// Whether it still runs.
    pub fn check_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

fn failed(program: &Path, pod: &ScenePod) -> impl FnOnce(io::Error) -> LoadError {
    let (program, pod) = (program.to_owned(), pod.name.clone());
    move |source| LoadError::Start {
        program,
        pod,
        source,
    }
}

fn arguments(service: Service) -> Vec<String> {
    let mut arguments = vec![
        "demo-worker".to_owned(),
        format!("--threads={}", service.threads),
        format!("--rate={}", service.rate),
        format!("--work-micros={}", service.work.as_micros()),
        format!(
            "--request-timeout-millis={}",
            service.request_timeout.as_millis()
        ),
    ];
    arguments.extend(
        service
            .first_of_chain
            .then(|| "--first-of-chain".to_owned()),
    );
    arguments
}

impl Drop for LoadProcess {
    fn drop(&mut self) {
        // Fails only if the process has exited already.
        let _exited = self.child.kill();
        let _exited = self.child.wait();
    }
}

/// A server or a chain of them: the processes, and the requests that they have reported.
#[derive(Debug)]
pub struct Worker {
    loads: Vec<LoadProcess>,
    requests: Receiver<TimedRequest>,
    reader: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a server.
    ///
    /// # Errors
    /// Where it cannot be started or moved into its cgroup.
    pub fn start(
        program: &Path,
        pod: &ScenePod,
        service: Service,
        cgroups: &SceneCgroups,
    ) -> Result<Self, LoadError> {
        let service = Service {
            first_of_chain: false,
            ..service
        };
        Self::chain(program, std::slice::from_ref(pod), service, cgroups)
    }

    /// Starts a chain of services, one for each pod: a request takes [`Service::work`] in each. Latency is from the arrival at
    /// the first until the last has served it.
    ///
    /// # Errors
    /// Where one cannot be started or moved into its cgroup.
    pub fn chain(
        program: &Path,
        pods: &[ScenePod],
        service: Service,
        cgroups: &SceneCgroups,
    ) -> Result<Self, LoadError> {
        let mut loads: Vec<LoadProcess> = Vec::new();
        for pod in pods {
            let before = loads.last_mut().and_then(|load| load.child.stdout.take());
            let (arguments, stdin) = match before {
                None => (arguments(service), Stdio::piped()),
                Some(before) => {
                    let work = format!("--work-micros={}", service.work.as_micros());
                    (vec!["demo-stage".to_owned(), work], before.into())
                }
            };
            let pipes = [stdin, Stdio::piped()];
            loads.push(LoadProcess::spawn(
                program, &arguments, pod, cgroups, pipes,
            )?);
        }
        let out = loads.last_mut().and_then(|load| load.child.stdout.take());
        let (sender, requests) = mpsc::channel();
        let request_timeout = service.request_timeout;
        let reader =
            out.map(|out| thread::spawn(move || read_requests(out, request_timeout, &sender)));
        if let (Some(first), Some(pod)) = (loads.first_mut(), pods.first()) {
            first.begin().map_err(failed(program, pod))?;
        }
        Ok(Self {
            loads,
            requests,
            reader,
        })
    }

    /// The requests that have finished since the last call.
    pub fn finished_requests(&self) -> impl Iterator<Item = TimedRequest> {
        self.requests.try_iter()
    }

    /// Whether all processes still run.
    pub fn check_alive(&mut self) -> bool {
        self.loads.iter_mut().all(LoadProcess::check_alive)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.loads.clear();
        if let Some(reader) = self.reader.take() {
            // The pipe is closed once the last process is dead.
            let _panicked = reader.join();
        }
    }
}

fn read_requests(out: ChildStdout, request_timeout: Duration, sender: &mpsc::Sender<TimedRequest>) {
    let lines = BufReader::new(out).lines().map_while(Result::ok);
    for request in lines.filter_map(|line| parse_request(&line, request_timeout)) {
        if sender.send(request).is_err() {
            return;
        }
    }
}

/// Parses a line of [`super::load::serve`].
fn parse_request(line: &str, request_timeout: Duration) -> Option<TimedRequest> {
    let (due, latency) = line.split_once(' ')?;
    let served = latency != "-";
    Some(TimedRequest {
        due: BootTime::from_nanos(due.parse().ok()?),
        latency: if served {
            Duration::from_nanos(latency.parse().ok()?)
        } else {
            request_timeout
        },
        served,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_of_the_worker_are_parsed() {
        const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
        let request = parse_request("5000000000 910000", REQUEST_TIMEOUT).unwrap();
        assert_eq!(request.due, BootTime::from_nanos(5_000_000_000));
        assert_eq!(request.latency, Duration::from_micros(910));
        assert!(request.served);
        for partial in ["", "5", "5 ", " 5", "5 x"] {
            assert_eq!(parse_request(partial, REQUEST_TIMEOUT), None, "{partial:?}");
        }
    }

    #[test]
    fn a_request_that_was_given_up_has_waited_for_the_whole_timeout() {
        const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
        let request = parse_request("5000000000 -", REQUEST_TIMEOUT).unwrap();
        assert_eq!(request.latency, REQUEST_TIMEOUT);
        assert!(!request.served);
    }
}
