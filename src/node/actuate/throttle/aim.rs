//! Computes the wanted content of each file from a plan.

use std::sync::Arc;

use crate::engine::plan::{Lever, Throttle};
use crate::engine::units::MilliCpu;
use crate::node::cgroup::knob::{CpuDir, Knob, KnobError, Role};
use crate::node::cgroup::parse::Bandwidth;

use super::Throttler;
use super::hold::{Entry, Hold};
use super::outcome::Outcome;

impl Throttler {
    /// Plans every file of one pod, and restores those that the plan no longer needs.
    ///
    /// # Errors
    /// [`KnobError::Gone`] if the pod is gone.
    pub(super) fn aim(
        &mut self,
        hold: &mut Hold,
        throttle: &Throttle,
        out: &mut Vec<Outcome>,
    ) -> Result<(), KnobError> {
        let wanted = |entry: &Entry| match entry.role() {
            Role::Quota | Role::Burst => throttle
                .levers
                .iter()
                .any(|lever| lever.cgroup == entry.lever && lever.quota.is_some()),
            Role::Idle | Role::Weight => throttle.idle,
        };
        let uid = &throttle.uid;
        self.stale |= hold.release(uid, |entry| !wanted(entry), &mut self.effects, out);
        hold.class_seen &= throttle.idle;
        let base = throttle.levers.iter().map(|lever| lever.base).sum();
        if throttle.idle && !hold.class_seen {
            self.aim_class(hold, base)?;
        }
        for lever in &throttle.levers {
            let Some(limit) = lever.quota else { continue };
            match self.aim_quota(hold, throttle, lever, limit, out) {
                // A container may be gone while its pod still runs.
                Err(error) if error.is_gone() && !lever.cgroup.is_empty() => {
                    hold.entries.retain(|entry| entry.lever != lever.cgroup);
                    self.stale = true;
                }
                aimed => aimed?,
            }
        }
        Ok(())
    }

    fn dir(&self, hold: &Hold, lever: &str) -> Result<CpuDir, KnobError> {
        let cgroup = hold.path.join(lever).map_err(|_| KnobError::Malformed {
            path: hold.path.as_str().into(),
            text: lever.to_owned(),
        })?;
        CpuDir::open(&self.hierarchy, &cgroup)
    }

    fn aim_quota(
        &mut self,
        hold: &mut Hold,
        throttle: &Throttle,
        lever: &Lever,
        limit: MilliCpu,
        out: &mut Vec<Outcome>,
    ) -> Result<(), KnobError> {
        if hold.entry(&lever.cgroup, Role::Quota).is_none() {
            return self.begin_quota(hold, lever, limit);
        }
        let Some(entry) = hold.entry(&lever.cgroup, Role::Quota) else {
            return Ok(());
        };
        let original = entry.knob.bandwidth(&entry.original)?;
        let target = original.limited_to(limit);
        if !original.allows_more_than(target) {
            let on_lever = |entry: &Entry| {
                entry.lever == lever.cgroup && matches!(entry.role(), Role::Quota | Role::Burst)
            };
            self.stale |= hold.release(&throttle.uid, on_lever, &mut self.effects, out);
            return Ok(());
        }
        entry.base = lever.base;
        let text = entry.knob.text(target);
        self.stale |= entry.aim(text);
        self.aim_burst(hold, &lever.cgroup, target)
    }

    fn begin_quota(
        &mut self,
        hold: &mut Hold,
        lever: &Lever,
        limit: MilliCpu,
    ) -> Result<(), KnobError> {
        let dir = self.dir(hold, &lever.cgroup)?;
        let knob = dir.required(Role::Quota)?;
        let reading = knob.read()?;
        let original = knob.bandwidth(reading.text())?;
        let target = original.limited_to(limit);
        if !original.allows_more_than(target) {
            return Ok(());
        }
        let text = knob.text(target);
        let location = (Arc::clone(&lever.cgroup), dir.inode());
        let mut entry = Entry::fresh(location, knob, lever.base, reading.text(), text);
        entry.burst = dir.knob(Role::Burst)?;
        hold.insert(entry);
        self.stale = true;
        self.aim_burst(hold, &lever.cgroup, target)
    }

    /// The kernel rejects a quota below the burst, so the burst is lowered with it. It is restored only after the quota.
    fn aim_burst(
        &mut self,
        hold: &mut Hold,
        lever: &str,
        target: Bandwidth,
    ) -> Result<(), KnobError> {
        let max = target.quota.unwrap_or(u64::MAX);
        if let Some(entry) = hold.entry(lever, Role::Burst) {
            let lowered = micros(&entry.knob, &entry.ours)?.min(max);
            self.stale |= entry.aim(lowered.to_string().into());
            return Ok(());
        }
        let Some(quota) = hold.entry(lever, Role::Quota) else {
            return Ok(());
        };
        let Some(knob) = &quota.burst else {
            return Ok(());
        };
        let reading = knob.read()?;
        if micros(knob, reading.text())? <= max {
            return Ok(());
        }
        let location = (Arc::clone(&quota.lever), quota.inode);
        if let Some(knob) = quota.burst.take() {
            let ours = max.to_string().into();
            let entry = Entry::fresh(location, knob, MilliCpu::ZERO, reading.text(), ours);
            hold.insert(entry);
            self.stale = true;
        }
        Ok(())
    }

    /// Makes the pod idle class, or gives it the minimum weight if the kernel has no idle class.
    fn aim_class(&mut self, hold: &mut Hold, base: MilliCpu) -> Result<(), KnobError> {
        let dir = self.dir(hold, "")?;
        let weight = dir.required(Role::Weight)?;
        let reading = weight.read()?;
        let location = (Arc::from(""), dir.inode());
        let entry = |knob, original: &str, ours: &str| {
            Entry::fresh(location.clone(), knob, base, original, ours.into())
        };
        let mut entries = Vec::new();
        match dir.knob(Role::Idle)? {
            Some(idle) if idle.read()?.text() == "1" => {}
            Some(idle) => {
                let class = idle.read()?;
                let expected = weight.file().idle_weight();
                let mut follower = entry(weight, reading.text(), expected);
                follower.follows_idle = true;
                entries.extend([entry(idle, class.text(), "1"), follower]);
            }
            None if reading.text() == weight.file().least_weight() => {}
            None => {
                let min = weight.file().least_weight();
                entries.push(entry(weight, reading.text(), min));
            }
        }
        hold.class_seen = true;
        self.stale |= !entries.is_empty();
        for entry in entries {
            hold.insert(entry);
        }
        Ok(())
    }
}

/// Parses a burst file's microseconds.
pub(super) fn micros(knob: &Knob, text: &str) -> Result<u64, KnobError> {
    text.parse().map_err(|_| KnobError::Malformed {
        path: knob.path().to_owned(),
        text: text.to_owned(),
    })
}
