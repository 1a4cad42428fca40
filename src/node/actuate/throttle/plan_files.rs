//! Computes the wanted content of each file from a plan.

use std::sync::Arc;

use crate::engine::plan::{CpuClass, PodThrottle, TargetCgroup};
use crate::engine::units::MilliCpu;
use crate::node::cgroup::Controller;
use crate::node::cgroup::control_file::{ControlFile, ControlFileError, CpuDir, Role};
use crate::node::cgroup::kubepods::child_directories;
use crate::node::cgroup::parse::Bandwidth;

use super::Throttler;
use super::outcome::ThrottleOutcome;
use super::throttled_pod::{OwnedFile, ThrottledPod};

impl Throttler {
    /// Plans every file of one pod, and restores those that the plan no longer needs.
    ///
    /// # Errors
    /// [`ControlFileError::Gone`] if the pod is gone.
    pub(super) fn plan_files(
        &mut self,
        pod: &mut ThrottledPod,
        throttle: &PodThrottle,
        out: &mut Vec<ThrottleOutcome>,
    ) -> Result<(), ControlFileError> {
        let class = self.available_class(pod, throttle.class)?;
        // A class that changes is restored first: its originals are known exactly, and the next class starts from them.
        let same_class = class == pod.class && class != CpuClass::Normal;
        let wanted = |entry: &OwnedFile| match entry.role() {
            Role::Quota => has_quota(throttle, &entry.cgroup),
            // One that we lowered is restored before it is raised.
            Role::Burst => {
                let is_given = entry.is_raised_burst() && throttle.burst > MilliCpu::ZERO;
                is_given || has_quota(throttle, &entry.cgroup)
            }
            Role::Idle | Role::Weight => same_class,
        };
        let uid = &throttle.uid;
        self.journal_stale |= pod.release(uid, |entry| !wanted(entry), &mut self.effects, out);
        let base = throttle
            .target_cgroups
            .iter()
            .map(|target_cgroup| target_cgroup.base)
            .sum();
        // Files that could not be restored are tried again next time.
        if !same_class && !pod.owns_class() {
            self.plan_class(pod, class, base)?;
        }
        for target_cgroup in &throttle.target_cgroups {
            let Some(limit) = target_cgroup.quota else {
                continue;
            };
            match self.plan_quota(pod, throttle, target_cgroup, limit, out) {
                // A container may be gone while its pod still runs.
                Err(error) if error.is_gone() && !target_cgroup.cgroup.is_empty() => {
                    pod.entries
                        .retain(|entry| entry.cgroup != target_cgroup.cgroup);
                    self.journal_stale = true;
                }
                planned => planned?,
            }
        }
        self.plan_bursts(pod, throttle, out)
    }

    fn dir(&self, pod: &ThrottledPod, target_cgroup: &str) -> Result<CpuDir, ControlFileError> {
        let cgroup = pod
            .path
            .join(target_cgroup)
            .map_err(|_| ControlFileError::Malformed {
                path: pod.path.as_str().into(),
                text: target_cgroup.to_owned(),
            })?;
        CpuDir::open(&self.hierarchy, &cgroup)
    }

    fn plan_quota(
        &mut self,
        pod: &mut ThrottledPod,
        throttle: &PodThrottle,
        target_cgroup: &TargetCgroup,
        limit: MilliCpu,
        out: &mut Vec<ThrottleOutcome>,
    ) -> Result<(), ControlFileError> {
        if pod.entry(&target_cgroup.cgroup, Role::Quota).is_none() {
            return self.add_quota(pod, target_cgroup, limit);
        }
        let Some(entry) = pod.entry(&target_cgroup.cgroup, Role::Quota) else {
            return Ok(());
        };
        let original = entry.file.bandwidth(&entry.original)?;
        let target = original.limited_to(limit);
        if !original.allows_more_than(target) {
            let is_of_target_cgroup = |entry: &OwnedFile| {
                entry.cgroup == target_cgroup.cgroup
                    && matches!(entry.role(), Role::Quota | Role::Burst)
            };
            self.journal_stale |=
                pod.release(&throttle.uid, is_of_target_cgroup, &mut self.effects, out);
            return Ok(());
        }
        entry.base = target_cgroup.base;
        let text = entry.file.text(target);
        self.journal_stale |= entry.set_target(text);
        self.plan_burst(pod, &target_cgroup.cgroup, target)
    }

    fn add_quota(
        &mut self,
        pod: &mut ThrottledPod,
        target_cgroup: &TargetCgroup,
        limit: MilliCpu,
    ) -> Result<(), ControlFileError> {
        let dir = self.dir(pod, &target_cgroup.cgroup)?;
        let file = dir.required(Role::Quota)?;
        let reading = file.read()?;
        let original = file.bandwidth(reading.text())?;
        let target = original.limited_to(limit);
        if !original.allows_more_than(target) {
            return Ok(());
        }
        let text = file.text(target);
        let location = (Arc::clone(&target_cgroup.cgroup), dir.inode());
        let mut entry = OwnedFile::fresh(location, file, target_cgroup.base, reading.text(), text);
        entry.partner = dir.control_file(Role::Burst)?;
        pod.insert(entry);
        self.journal_stale = true;
        self.plan_burst(pod, &target_cgroup.cgroup, target)
    }

    /// The kernel rejects a quota below the burst, so the burst is lowered with it, to its original at least. It is restored, or
    /// given again, only after the quota.
    fn plan_burst(
        &mut self,
        pod: &mut ThrottledPod,
        target_cgroup: &str,
        target: Bandwidth,
    ) -> Result<(), ControlFileError> {
        let max = target.quota.unwrap_or(u64::MAX);
        if let Some(entry) = pod.entry(target_cgroup, Role::Burst) {
            let original = micros(&entry.file, &entry.original)?;
            let lowered = micros(&entry.file, &entry.ours)?.min(original).min(max);
            self.journal_stale |= entry.set_target(lowered.to_string().into());
            return Ok(());
        }
        let Some(quota) = pod.entry(target_cgroup, Role::Quota) else {
            return Ok(());
        };
        let Some(file) = &quota.partner else {
            return Ok(());
        };
        let reading = file.read()?;
        if micros(file, reading.text())? <= max {
            return Ok(());
        }
        let location = (Arc::clone(&quota.cgroup), quota.inode);
        if let Some(file) = quota.partner.take() {
            let ours = max.to_string().into();
            let entry = OwnedFile::fresh(location, file, MilliCpu::ZERO, reading.text(), ours);
            pod.insert(entry);
            self.journal_stale = true;
        }
        Ok(())
    }

    /// Raises the burst of each cgroup of the pod that has a quota: a container's own quota throttles it, not the pod's.
    fn plan_bursts(
        &mut self,
        pod: &mut ThrottledPod,
        throttle: &PodThrottle,
        out: &mut Vec<ThrottleOutcome>,
    ) -> Result<(), ControlFileError> {
        if pod.burst == throttle.burst {
            let raised = |entry: &&mut OwnedFile| entry.is_raised_burst();
            for entry in pod.entries.iter_mut().filter(raised) {
                match limit_burst(entry) {
                    // The next check drops it.
                    Err(error) if error.is_gone() => {}
                    changed => self.journal_stale |= changed?,
                }
            }
            return Ok(());
        }
        pod.burst = throttle.burst;
        if throttle.burst == MilliCpu::ZERO {
            return Ok(());
        }
        self.raise_burst(pod, "", throttle.burst, out)?;
        let dir = self.hierarchy.dir(Controller::Cpu, &pod.path);
        let containers = dir.map_or_else(|| Ok(Vec::new()), |dir| child_directories(&dir));
        for container in containers.unwrap_or_default() {
            match self.raise_burst(pod, &container, throttle.burst, out) {
                Err(error) if error.is_gone() => {}
                raised => raised?,
            }
        }
        Ok(())
    }

    fn raise_burst(
        &mut self,
        pod: &mut ThrottledPod,
        cgroup: &str,
        burst: MilliCpu,
        out: &mut Vec<ThrottleOutcome>,
    ) -> Result<(), ControlFileError> {
        if let Some(entry) = pod.entry(cgroup, Role::Burst) {
            entry.base = burst;
            self.journal_stale |= limit_burst(entry)?;
            return Ok(());
        }
        let dir = self.dir(pod, cgroup)?;
        let Some(file) = dir.control_file(Role::Burst)? else {
            if !std::mem::replace(&mut self.burst_missing, true) {
                out.push(ThrottleOutcome::NoBurst);
            }
            return Ok(());
        };
        let reading = file.read()?;
        let location = (Arc::from(cgroup), dir.inode());
        let mut entry =
            OwnedFile::fresh(location, file, burst, reading.text(), reading.text().into());
        entry.partner = Some(dir.required(Role::Quota)?);
        if limit_burst(&mut entry)? {
            pod.insert(entry);
            self.journal_stale = true;
        }
        Ok(())
    }

    /// The class, or the lowest weight if the kernel has no idle class.
    fn available_class(
        &self,
        pod: &ThrottledPod,
        class: CpuClass,
    ) -> Result<CpuClass, ControlFileError> {
        if class != CpuClass::Idle || class == pod.class {
            return Ok(class);
        }
        let idle = self.dir(pod, "")?.control_file(Role::Idle)?;
        Ok(idle.map_or(CpuClass::LowestWeight, |_| class))
    }

    /// Puts the pod into the class.
    fn plan_class(
        &mut self,
        pod: &mut ThrottledPod,
        class: CpuClass,
        base: MilliCpu,
    ) -> Result<(), ControlFileError> {
        if class == CpuClass::Normal {
            pod.class = class;
            return Ok(());
        }
        let dir = self.dir(pod, "")?;
        let weight = dir.required(Role::Weight)?;
        let reading = weight.read()?;
        let location = (Arc::from(""), dir.inode());
        let entry = |file, original: &str, ours: &str| {
            OwnedFile::fresh(location.clone(), file, base, original, ours.into())
        };
        let mut entries = Vec::new();
        match dir.control_file(Role::Idle)? {
            // Another writer made it idle.
            Some(idle) if idle.read()?.text() == "1" => {}
            Some(idle) if class == CpuClass::Idle => {
                let class = idle.read()?;
                let expected = weight.kind().idle_weight();
                let mut follower = entry(weight, reading.text(), expected);
                follower.follows_idle = true;
                entries.extend([entry(idle, class.text(), "1"), follower]);
            }
            _ if reading.text() == weight.kind().min_weight() => {}
            _ => {
                let min = weight.kind().min_weight();
                entries.push(entry(weight, reading.text(), min));
            }
        }
        pod.class = class;
        self.journal_stale |= !entries.is_empty();
        for entry in entries {
            pod.insert(entry);
        }
        Ok(())
    }
}

fn has_quota(throttle: &PodThrottle, cgroup: &str) -> bool {
    let mut targets = throttle.target_cgroups.iter();
    targets.any(|it| *it.cgroup == *cgroup && it.quota.is_some())
}

/// Plans the burst of an entry again: at most its cgroup's quota now, and not below its original. Returns whether that is a change.
fn limit_burst(entry: &mut OwnedFile) -> Result<bool, ControlFileError> {
    let Some(quota) = &entry.partner else {
        return Ok(false);
    };
    let bandwidth = quota.bandwidth(quota.read()?.text())?;
    let original = micros(&entry.file, &entry.original)?;
    // Without a quota nothing throttles.
    let burst = bandwidth
        .quota
        .map_or(0, |quota| quota.min(bandwidth.micros(entry.base)));
    Ok(entry.set_target(burst.max(original).to_string().into()))
}

/// Parses a burst file's microseconds.
pub(super) fn micros(file: &ControlFile, text: &str) -> Result<u64, ControlFileError> {
    text.parse().map_err(|_| ControlFileError::Malformed {
        path: file.path().to_owned(),
        text: text.to_owned(),
    })
}
