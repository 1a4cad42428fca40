//! A process that stands still is ended, so that its connections end with it.
//!
//! The kernel keeps the connections of a stopped process open, and whoever waits at their other end is told nothing. So
//! the work is done by a child, which says twice a second that it runs; what can be told to end is the child of a process
//! that does nothing but listen to that. In a container that one is process 1, which nothing in there can kill or stop.

use std::env;
use std::fs::File;
use std::io::{self, PipeReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;

use crate::cluster::election::RENEW_DEADLINE;

/// How often the child says that it runs.
const BEAT: Duration = Duration::from_millis(500);
/// By then a leader does not lead any more: nothing is lost that was not lost before.
const PATIENCE: Duration = RENEW_DEADLINE;
/// Exit status where the child stood still.
const STOOD_STILL: u8 = 3;
/// What a shell adds to the signal that a process died of.
const BY_SIGNAL: i32 = 128;
/// What the child is to get in place of its parent.
const PASSED_ON: [Signal; 6] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// For how long no beat has come; `None` before the first: who only starts has no connections.
///
/// It is the parent's own waits that are counted, not time: while the whole container or machine is paused the parent does
/// not wait either, and nothing is held against the child.
#[derive(Debug, Default)]
struct Silence(Option<Duration>);

impl Silence {
    /// Beats came.
    const fn end(&mut self) {
        self.0 = Some(Duration::ZERO);
    }

    /// The parent has waited for a beat in vain. Says for how long by now, where that is too long.
    fn goes_on(&mut self) -> Option<Duration> {
        let waited = self.0.as_mut()?;
        *waited += BEAT;
        Some(*waited).filter(|waited| *waited > PATIENCE)
    }
}

/// Runs this command again as a child, which gets `--watched` as its last argument, until it ends or stands still.
///
/// # Errors
/// The child can't be started, or nothing can be heard of it.
pub(super) fn supervise() -> anyhow::Result<ExitCode> {
    // Blocked, they wait to be read, from before there is a child on.
    let set: SigSet = PASSED_ON.into_iter().collect();
    set.thread_block().context("failed to block signals")?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&set, flags).context("failed to wait for signals")?;
    let (mut child, beats) = start().context("failed to start the process that is watched")?;
    let stood_still = listen(&child, beats, &signals).context("failed to watch the process")?;
    if stood_still.is_some() {
        child.kill().context("failed to end the process")?;
    }
    // Its connections and ports are free when it is gone, not before.
    let ended = child.wait().context("failed to wait for the process")?;
    let Some(silent) = stood_still else {
        return Ok(ExitCode::from(status(ended)));
    };
    tracing::error!(
        "the controller did nothing for {silent:?}, as if it had been stopped: ended it so that its clients find another replica"
    );
    Ok(ExitCode::from(STOOD_STILL))
}

/// The same program with the same arguments, and the pipe by which it tells that it runs.
fn start() -> io::Result<(Child, PipeReader)> {
    let (beats, to_parent) = io::pipe()?;
    let mut args = env::args_os();
    let name = args.next().unwrap_or_default();
    // Not by its name: the file may have been replaced.
    let child = Command::new("/proc/self/exe")
        .arg0(name)
        .args(args)
        .arg("--watched")
        .stdout(to_parent)
        .spawn()?;
    Ok((child, beats))
}

/// Passes signals on to the child until it has closed its end of the pipe, or was silent for as long as this says.
fn listen(
    child: &Child,
    mut beats: PipeReader,
    signals: &SignalFd,
) -> anyhow::Result<Option<Duration>> {
    let pid = Pid::from_raw(child.id().cast_signed());
    let wait = PollTimeout::try_from(BEAT)?;
    let mut silence = Silence::default();
    loop {
        let [told, signalled] = [beats.as_fd(), signals.as_fd()];
        let mut both = [told, signalled].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut both, wait) {
            Ok(0) => {
                let too_long = silence.goes_on();
                if too_long.is_some() {
                    return Ok(too_long);
                }
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let has_told = both[0].any().unwrap_or(true);
        while let Some(signal) = signals.read_signal()? {
            // It is not waited for yet, so that the id is nobody else's.
            kill(pid, Signal::try_from(signal.ssi_signo.cast_signed())?)?;
        }
        if has_told {
            if beats.read(&mut [0; 512])? == 0 {
                return Ok(None);
            }
            silence.end();
        }
    }
}

/// What a shell would say.
fn status(ended: ExitStatus) -> u8 {
    let by_signal = || ended.signal().map(|signal| BY_SIGNAL + signal);
    let code = ended.code().or_else(by_signal);
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(u8::MAX)
}

/// Tells the parent from now on that this process runs, by a thread of its own: who computes for long does not stand
/// still. Ends with the parent, at once: whoever kills that one without a goodbye wants all of it to be gone.
/// To be called before there is another thread, which would go on without the signals that the parent blocked.
///
/// # Errors
/// There is no such thread, or no parent.
pub(super) fn beat() -> anyhow::Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("failed to end with the parent")?;
    let set: SigSet = PASSED_ON.into_iter().collect();
    set.thread_unblock().context("failed to take signals")?;
    let parent = io::stdout().as_fd().try_clone_to_owned();
    let mut parent = File::from(parent.context("failed to find the parent")?);
    let mut beat = move || parent.write_all(&[0]);
    beat().context("failed to tell the parent that this process runs")?;
    let beats = move || {
        while beat().is_ok() {
            thread::park_timeout(BEAT);
        }
        raise(Signal::SIGKILL)
    };
    let thread = thread::Builder::new().name("beat".to_owned()).spawn(beats);
    thread.map(drop).context("failed to start a thread")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For how many waits in vain it is patient.
    fn patience(silence: &mut Silence) -> u32 {
        (0..1000).find(|_| silence.goes_on().is_some()).unwrap()
    }

    #[test]
    fn a_child_that_beat_and_is_silent_for_longer_than_it_may_lead_stands_still() {
        let mut silence = Silence::default();
        silence.end();
        assert_eq!(BEAT * patience(&mut silence), RENEW_DEADLINE);
        assert_eq!(silence.goes_on(), Some(RENEW_DEADLINE + 2 * BEAT));
    }

    #[test]
    fn one_beat_makes_up_for_all_that_were_missing() {
        let mut silence = Silence::default();
        silence.end();
        let patient = patience(&mut silence);
        silence.end();
        assert_eq!(patience(&mut silence), patient);
    }

    #[test]
    fn a_child_that_has_yet_to_start_is_waited_for() {
        let mut silence = Silence::default();
        assert!((0..1000).all(|_| silence.goes_on().is_none()));
    }

    #[test]
    fn the_exit_status_is_the_childs_or_says_of_which_signal_it_died() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        assert_eq!(status(exited(0)), 0);
        assert_eq!(status(exited(2)), 2);
        let killed = ExitStatus::from_raw(Signal::SIGKILL as i32);
        assert_eq!(status(killed), 137);
    }
}
