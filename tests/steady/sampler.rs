//! A steady sample allocates nothing and opens nothing.

use std::path::Path;

use crate::collect_support::{CgroupFixture, everything, uid};
use allocation_counter::measure;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use plimsoll::clock::boot_time;
use plimsoll::engine::Demand;
use plimsoll::engine::sample::{PodSample, Sample};
use plimsoll::node::collect::Sampler;

const PODS: usize = 110;

/// Takes three samples while no file can be opened, and returns how often memory was allocated.
fn steady_allocations(sampler: &mut Sampler, demand: &Demand, sample: &mut Sample) -> u64 {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard).unwrap();
    let opening = std::fs::File::open("/proc/stat");
    let counted = measure(|| {
        for _ in 0..3 {
            sampler.sample_node(boot_time(), demand, sample);
            sampler.sample_pods(boot_time(), demand, sample);
        }
    });
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert!(opening.is_err(), "the limit must be in force");
    counted.count_total
}

#[test]
fn a_steady_sample_of_110_pods_allocates_nothing_and_opens_nothing() {
    let _files = crate::files();
    let Some(mut ground) = CgroupFixture::make() else {
        return;
    };
    let mut pods = Vec::new();
    for number in 0..PODS {
        pods.push((
            uid(&format!("pod-{number}")),
            ground.mkdir(&format!("p{number}")),
        ));
        for container in ["main", "pause"] {
            ground.mkdir(&format!("p{number}/{container}"));
        }
    }
    ground.spawn("p7/main", "exec sleep 600");
    for demand in [Demand::default(), everything()] {
        let mut sampler = Sampler::new(Path::new("/proc"), ground.hierarchy.clone());
        sampler.set_pods(pods.iter().cloned());
        let mut sample = Sample::default();
        for _ in 0..3 {
            sampler.sample_node(boot_time(), &demand, &mut sample);
            sampler.sample_pods(boot_time(), &demand, &mut sample);
        }
        assert_eq!(steady_allocations(&mut sampler, &demand, &mut sample), 0);
        assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());
        assert_eq!(sample.pods.len(), PODS);
        let read = |pod: &PodSample| pod.cpu_nanos.is_some() && pod.memory.is_some();
        assert!(sample.pods.iter().all(read));
        let mut containers = sample.pods.iter().flat_map(|pod| &pod.containers);
        assert!(containers.all(|it| it.run_delay_nanos.is_some() && it.periods.is_some()));
        let listed: usize = sample.pods.iter().map(|pod| pod.containers.len()).sum();
        assert_eq!(listed, if demand.run_delay { 2 * PODS } else { 0 });
    }
}
