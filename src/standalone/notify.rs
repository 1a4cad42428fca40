//! What systemd is told (`Type=notify`, `WatchdogSec=`); nothing where it does not ask.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::engine::time::BootTime;

/// The service manager's ear.
#[derive(Debug)]
pub struct Notifier {
    /// Half of what the watchdog allows between two signs of life.
    interval: Option<Duration>,
    next: BootTime,
    status: String,
}

impl Notifier {
    /// Reads what systemd asks for from the environment.
    pub fn from_environment(now: BootTime) -> Self {
        Self {
            interval: sd_notify::watchdog_enabled().map(|allowed| allowed / 2),
            next: now,
            status: String::new(),
        }
    }

    /// Samples are complete: the service is up.
    pub fn ready(&self) {
        tell(&[NotifyState::Ready]);
    }

    /// The service is going down.
    pub fn stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// One line for `systemctl status`, where it differs from the last.
    pub fn status(&mut self, status: String) {
        if self.status != status {
            tell(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// When the next sign of life is due.
    pub fn next(&self) -> Option<BootTime> {
        self.interval.map(|_| self.next)
    }

    /// A sign of life, where one is due.
    pub fn alive(&mut self, now: BootTime) {
        if let Some(interval) = self.interval
            && now >= self.next
        {
            tell(&[NotifyState::Watchdog]);
            self.next = now + interval;
        }
    }
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "failed to notify the service manager");
    }
}
