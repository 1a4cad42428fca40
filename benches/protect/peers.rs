//! How others throttle batch pods, as drivers over the same cgroup files: their formulas in code of our own.
//!
//! - koordlet (koordinator 18d83bf, `pkg/koordlet/qosmanager/plugins/cpusuppress/cpu_suppress.go`, `calculateBESuppressCPU` and
//!   `adjustByCfsQuota`), with the policy `cfsQuota`: each second, capacity x threshold - use of other pods - use of the system. Its
//!   default threshold is 65 %. (Its default policy `cpuset` leaves batch at least two CPUs: on a node of two it does nothing. Its
//!   feature gate `BECPUIdleSuppress` sets the idle class, as `idle class only` does here.)
//! - crane (2b0ddae, `pkg/ensurance/executor/cpu_usage.go`), as documented: an evaluation every 10 s, after two of them above the
//!   threshold a step of 10 % of the quota, or of the use where there is none, down to the request. (In its code the step is never
//!   reached: `watermark.go` removes the gap first.)

use std::sync::Arc;
use std::time::Duration;

use plimsoll::clock::boot_time;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::MilliCpu;
use plimsoll::scene::cgroups::SceneCgroups;
use plimsoll::scene::pod::ScenePod;

use crate::round::{Ground, Meter};

/// koordlet's interval.
const SUPPRESS_INTERVAL: Duration = Duration::from_secs(1);
/// 2000 us of a period of 100 ms.
const MIN_QUOTA: f64 = 20.0;
/// Of the node's CPU: smaller changes are not written, and larger increases are limited.
const MIN_DELTA: f64 = 0.01;
const MAX_INCREASE: f64 = 0.1;

/// koordlet's suppression of batch pods by quota.
pub struct Koordlet {
    pub next: BootTime,
    cgroups: Arc<SceneCgroups>,
    capacity: f64,
    percent: u64,
    node: Meter,
    important: Vec<Meter>,
    batch: Vec<(ScenePod, Meter)>,
    /// Of all batch pods together, as koordlet writes it into their common parent.
    quota: Option<f64>,
}

impl Koordlet {
    pub fn new(
        ground: &Ground,
        cgroups: &Arc<SceneCgroups>,
        important: &[ScenePod],
        batch: &[ScenePod],
        percent: u64,
    ) -> Self {
        let meter = |pod: &ScenePod| Meter::pod(cgroups, pod);
        Self {
            next: boot_time() + SUPPRESS_INTERVAL,
            cgroups: Arc::clone(cgroups),
            capacity: ground.capacity() as f64,
            percent,
            node: Meter::node(),
            important: important.iter().map(meter).collect(),
            batch: batch.iter().map(|pod| (pod.clone(), meter(pod))).collect(),
            quota: None,
        }
    }

    pub fn act(&mut self, now: BootTime) {
        self.next = now + SUPPRESS_INTERVAL;
        let important: f64 = self.important.iter_mut().map(Meter::millicores).sum();
        let batch: f64 = self.batch.iter_mut().map(|(_, it)| it.millicores()).sum();
        let system = (self.node.millicores() - important - batch).max(0.0);
        let wanted = self.capacity * self.percent as f64 / 100.0 - important - system;
        let Some(quota) = next_quota(wanted, self.quota, self.capacity) else {
            return;
        };
        self.quota = Some(quota);
        // The scene's pods have no common parent: each gets its part.
        let part = MilliCpu(round(quota / self.batch.len() as f64).max(10));
        for (pod, _) in &self.batch {
            self.cgroups
                .set_quota(&self.cgroups.cgroup(pod), Some(part))
                .unwrap();
        }
    }
}

/// The quota to write, in millicores; `None`: leave it.
fn next_quota(wanted: f64, current: Option<f64>, capacity: f64) -> Option<f64> {
    let wanted = wanted.max(MIN_QUOTA);
    let Some(current) = current else {
        return Some(wanted);
    };
    if (wanted - current).abs() < capacity * MIN_DELTA && wanted > MIN_QUOTA {
        return None;
    }
    Some(wanted.min(current + capacity * MAX_INCREASE))
}

/// crane's evaluation period, steps, and thresholds of its examples.
const CRANE_PERIOD: Duration = Duration::from_secs(10);
const CRANE_STEP: f64 = 0.1;
const AVOIDANCE_THRESHOLD: u32 = 2;
/// `--execute-excess`
const EXCESS: f64 = 1.1;

/// crane's throttle.
pub struct Crane {
    pub next: BootTime,
    cgroups: Arc<SceneCgroups>,
    threshold: f64,
    node: Meter,
    batch: Vec<(ScenePod, Meter, Option<f64>)>,
    breaches: u32,
}

impl Crane {
    pub fn new(cgroups: &Arc<SceneCgroups>, batch: &[ScenePod], threshold: u64) -> Self {
        let batch = batch.iter().map(|pod| {
            let meter = Meter::pod(cgroups, pod);
            (pod.clone(), meter, None)
        });
        Self {
            next: boot_time() + CRANE_PERIOD,
            cgroups: Arc::clone(cgroups),
            threshold: threshold as f64,
            node: Meter::node(),
            batch: batch.collect(),
            breaches: 0,
        }
    }

    pub fn act(&mut self, now: BootTime) {
        self.next = now + CRANE_PERIOD;
        let usage = self.node.millicores();
        let uses: Vec<f64> = self
            .batch
            .iter_mut()
            .map(|(_, it, _)| it.millicores())
            .collect();
        self.breaches = if usage > self.threshold {
            self.breaches + 1
        } else {
            0
        };
        if self.breaches < AVOIDANCE_THRESHOLD {
            return;
        }
        let mut gap = EXCESS * (usage - self.threshold);
        // The pod that uses most first.
        let mut order: Vec<usize> = (0..uses.len()).collect();
        order.sort_by(|a, b| uses[*b].total_cmp(&uses[*a]));
        for index in order {
            if gap <= 0.0 {
                return;
            }
            let (pod, _, quota) = &mut self.batch[index];
            let new = quota.unwrap_or(uses[index]) * (1.0 - CRANE_STEP);
            let new = new.max(pod.request.0 as f64);
            *quota = Some(new);
            gap -= (uses[index] - new).max(0.0);
            self.cgroups
                .set_quota(
                    &self.cgroups.cgroup(pod),
                    Some(MilliCpu(round(new).max(10))),
                )
                .unwrap();
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "millicores of a machine"
)]
fn round(millicores: f64) -> u64 {
    millicores.max(0.0).round() as u64
}
