//! Waiting for the next deadline, a signal, or another thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::engine::time::BootTime;

/// Waits on a timer of `CLOCK_BOOTTIME` (which counts suspended time), on signals, and on an eventfd.
#[derive(Debug)]
pub struct Wake {
    epoll: Epoll,
    timer: TimerFd,
    signals: SignalFd,
    eventfd: Arc<EventFd>,
}

/// Wakes the loop from another thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// Ends the loop's wait.
    pub fn wake(&self) {
        // Fails only if the counter overflows, and then the loop wakes anyway.
        let _overflow = self.0.write(1);
    }
}

impl Wake {
    /// Blocks `signals` for this thread and those it starts later: they arrive here instead.
    ///
    /// # Errors
    /// Where the kernel refuses a descriptor.
    pub fn new(signals: &[Signal]) -> io::Result<Self> {
        let signals: SigSet = signals.iter().copied().collect();
        signals.thread_block()?;
        let wake = Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            timer: TimerFd::new(
                ClockId::CLOCK_BOOTTIME,
                TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
            )?,
            signals: SignalFd::with_flags(
                &signals,
                SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK,
            )?,
            eventfd: Arc::new(EventFd::from_flags(
                EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
            )?),
        };
        wake.watch(wake.timer.as_fd())?;
        wake.watch(wake.signals.as_fd())?;
        wake.watch(wake.eventfd.as_fd())?;
        Ok(wake)
    }

    fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, 0);
        Ok(self.epoll.add(fd, event)?)
    }

    /// Wakes this from other threads.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.eventfd))
    }

    /// Waits until `deadline`, a signal or a [`Waker`], whichever comes first; returns the signal, if any.
    ///
    /// # Errors
    /// Where the kernel refuses to wait.
    pub fn wait_until(&self, deadline: BootTime) -> io::Result<Option<Signal>> {
        // Zero would disarm the timer.
        let at = Duration::from_nanos(deadline.as_nanos().max(1));
        self.timer.set(
            Expiration::OneShot(TimeSpec::from_duration(at)),
            TimerSetTimeFlags::TFD_TIMER_ABSTIME,
        )?;
        let mut events = [EpollEvent::empty(); 3];
        match self.epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // `EAGAIN` where no other thread woke it.
        let _count = self.eventfd.read();
        let signal = self.signals.read_signal()?;
        Ok(signal.and_then(|info| Signal::try_from(info.ssi_signo.cast_signed()).ok()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::boot_time;

    #[test]
    fn it_wakes_at_the_deadline() {
        let wake = Wake::new(&[]).expect("descriptors");
        let deadline = boot_time() + Duration::from_millis(30);
        assert_eq!(wake.wait_until(deadline).expect("a wait"), None);
        assert!(boot_time() >= deadline);
        assert_eq!(wake.wait_until(BootTime::default()).expect("no wait"), None);
    }

    #[test]
    fn wakers_and_signals_wake_it_early() {
        let wake = Wake::new(&[Signal::SIGUSR2]).expect("descriptors");
        let never = boot_time() + Duration::from_hours(1);
        wake.waker().wake();
        assert_eq!(wake.wait_until(never).expect("a wait"), None);
        nix::sys::signal::raise(Signal::SIGUSR2).expect("a signal");
        assert_eq!(
            wake.wait_until(never).expect("a wait"),
            Some(Signal::SIGUSR2)
        );
    }
}
