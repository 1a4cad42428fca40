//! Notifications to systemd (`Type=notify`, `WatchdogSec=`); none where it asks for none.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::engine::time::BootTime;

/// Notifies the service manager.
#[derive(Debug)]
pub struct Notifier {
    /// Half of the watchdog timeout.
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

    /// The service is up: the first samples are complete.
    pub fn ready(&self) {
        send(&[NotifyState::Ready]);
    }

    /// The service is going down.
    pub fn stopping(&self) {
        send(&[NotifyState::Stopping]);
    }

    /// Sets the line in `systemctl status`, if it changed.
    pub fn status(&mut self, status: String) {
        if self.status != status {
            send(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// When the next watchdog ping is due.
    pub fn next(&self) -> Option<BootTime> {
        self.interval.map(|_| self.next)
    }

    /// Pings the watchdog, if due.
    pub fn alive(&mut self, now: BootTime) {
        if let Some(interval) = self.interval
            && now >= self.next
        {
            send(&[NotifyState::Watchdog]);
            self.next = now + interval;
        }
    }
}

fn send(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "failed to notify the service manager");
    }
}
