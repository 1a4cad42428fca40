//! Compares what we read from real cgroups with what the independent library `cgroups-rs` reads.

use std::path::Path;

use cgroups_rs::fs::Cgroup;
use cgroups_rs::fs::cgroup_builder::CgroupBuilder;
use cgroups_rs::fs::cpu::CpuController;
use cgroups_rs::fs::hierarchies;

use plimsoll::clock::boot_time;
use plimsoll::engine::Demand;
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::sample::Sample;
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::collect::Sampler;

/// A cgroup created by `cgroups-rs` and removed on drop.
struct Made(Cgroup);

impl Made {
    fn new(name: &str, v2: bool) -> Self {
        let controllers: &[&str] = if v2 {
            &["cpu", "memory"]
        } else {
            &["cpu", "cpuacct", "memory"]
        };
        let controllers = controllers.iter().map(|name| (*name).to_owned()).collect();
        let builder = CgroupBuilder::new(name).set_specified_controllers(controllers);
        Self(builder.build(hierarchies::auto()).unwrap())
    }

    fn cpu(&self) -> &CpuController {
        self.0.controller_of().unwrap()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.0.delete().unwrap();
    }
}

fn quota_read(sampler: &mut Sampler) -> Quota {
    let demand = Demand {
        pod_quota: true,
        ..Demand::default()
    };
    let (now, mut sample) = (boot_time(), Sample::default());
    sampler.sample_node(now, &demand, &mut sample);
    sampler.sample_pods(now, &demand, &mut sample);
    sample.pods[0].target_cgroups[0].quota.unwrap()
}

#[test]
fn quotas_set_by_another_library_are_read() {
    let hierarchy = Hierarchy::detect(Path::new("/proc"), None).unwrap();
    assert_eq!(hierarchy.is_v2(), hierarchies::is_cgroup2_unified_mode());
    let name = format!("plimsoll-reference-{}", std::process::id());
    let made = Made::new(&name, hierarchy.is_v2());
    let mut sampler = Sampler::new(Path::new("/proc"), hierarchy);
    let pod = (PodUid::from("reference"), CgroupPath::new(&name).unwrap());
    sampler.set_pods(std::iter::once(pod));
    assert_eq!(quota_read(&mut sampler), Quota::Unlimited);
    for (quota, period, limit) in [
        (30_000, 100_000, 300),
        (200_000, 50_000, 4000),
        (1_000, 100_000, 10),
    ] {
        made.cpu()
            .set_cfs_quota_and_period(Some(quota), Some(period))
            .unwrap();
        assert_eq!(quota_read(&mut sampler), Quota::Limit(MilliCpu(limit)));
    }
    made.cpu().set_cfs_quota(-1).unwrap();
    assert_eq!(quota_read(&mut sampler), Quota::Unlimited);
}
