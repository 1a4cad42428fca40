//! Samples the whole node, from `/proc`.

use std::path::Path;
use std::sync::Arc;

use nix::unistd::{SysconfVar, sysconf};

use super::proc;
use super::refill::Refill;
use super::sampler::SampleContext;
use super::waits::SystemSlice;
use crate::engine::Demand;
use crate::engine::sample::{DiskSample, InterfaceSample, NodeSample, SystemService};
use crate::node::cgroup::cached_file::CachedFile;
use crate::node::cgroup::parse::lines;
use crate::node::cgroup::{CgroupPath, Hierarchy};

/// The open files of the node.
#[derive(Debug)]
pub struct NodeReader {
    /// Length of a clock tick in nanoseconds.
    tick: u64,
    stat: CachedFile,
    meminfo: CachedFile,
    vmstat: CachedFile,
    loadavg: CachedFile,
    pressure: [CachedFile; 3],
    diskstats: CachedFile,
    net_dev: CachedFile,
    /// `None` on cgroup v1, which has no pressure files.
    system: Option<SystemSlice>,
}

impl NodeReader {
    /// A reader of the files below `proc_root` and of `system.slice`; opens nothing yet.
    pub fn new(proc_root: &Path, hierarchy: &Hierarchy) -> Self {
        let file = |name: &str| CachedFile::new(proc_root.join(name));
        Self {
            tick: 1_000_000_000 / ticks_per_second(),
            stat: file("stat"),
            meminfo: file("meminfo"),
            vmstat: file("vmstat"),
            loadavg: file("loadavg"),
            pressure: ["pressure/cpu", "pressure/memory", "pressure/io"].map(file),
            diskstats: file("diskstats"),
            // Process 1 is in the host's network namespace, whichever this process is in.
            net_dev: file("1/net/dev"),
            system: match hierarchy {
                Hierarchy::V2 { root } => Some(SystemSlice::below(root)),
                Hierarchy::V1 { .. } => None,
            },
        }
    }

    /// Reads the network interfaces from `net_dev` instead.
    pub fn set_net_dev(&mut self, net_dev: &Path) {
        self.net_dev = CachedFile::new(net_dev.to_owned());
    }

    /// Sets the pods' cgroups.
    pub fn set_pods<'a>(&mut self, pods: impl Iterator<Item = &'a CgroupPath>) {
        if let Some(system) = &mut self.system {
            system.set_pods(pods);
        }
    }

    /// Reads the system services if `demand` asks for them.
    pub fn sample_system(
        &mut self,
        reading: &mut SampleContext,
        demand: &Demand,
        services: &mut Vec<SystemService>,
    ) {
        match self.system.as_mut().filter(|_| demand.pod_pressure) {
            Some(system) => system.read(reading, services),
            None => services.clear(),
        }
    }

    /// Reads CPU and memory, and what else `demand` asks for.
    pub fn sample(&mut self, reading: &mut SampleContext, demand: &Demand, node: &mut NodeSample) {
        let tick = self.tick;
        node.tasks = None;
        node.cpu = reading.text(&mut self.stat, |text| {
            node.tasks = demand.tasks.then(|| proc::tasks(text)).flatten();
            proc::cpu_times(text, tick)
        });
        node.memory = reading.text(&mut self.meminfo, proc::memory);
        node.load = reading.text_if(demand.load, &mut self.loadavg, proc::load);
        for ((value, file), wanted) in node
            .pressure
            .iter_mut()
            .zip(&mut self.pressure)
            .zip(demand.pressure)
        {
            *value = reading.text_if(wanted, file, proc::pressure);
        }
        node.page_scans = demand
            .pod_pressure
            .then(|| proc::page_scans(reading.records(&mut self.vmstat)))
            .flatten();
        self.disks(reading, demand.disks, &mut node.disks);
        self.interfaces(reading, demand.interfaces, &mut node.interfaces);
    }

    fn disks(&mut self, reading: &mut SampleContext, wanted: bool, disks: &mut Vec<DiskSample>) {
        let mut refill = Refill::new(disks);
        if !wanted {
            return;
        }
        let text = reading.records(&mut self.diskstats);
        for (name, counts) in lines(text).filter_map(proc::disk) {
            let disk = refill.next(
                |disk| *disk.device == *name,
                || DiskSample {
                    device: Arc::from(name),
                    ..DiskSample::default()
                },
            );
            [
                disk.reads,
                disk.read_bytes,
                disk.writes,
                disk.write_bytes,
                disk.io_ms,
            ] = counts;
        }
    }

    fn interfaces(
        &mut self,
        reading: &mut SampleContext,
        wanted: bool,
        interfaces: &mut Vec<InterfaceSample>,
    ) {
        let mut refill = Refill::new(interfaces);
        if !wanted {
            return;
        }
        let text = reading.records(&mut self.net_dev);
        for (name, counts) in lines(text).filter_map(proc::interface) {
            let interface = refill.next(
                |interface| *interface.interface == *name,
                || InterfaceSample {
                    interface: Arc::from(name),
                    ..InterfaceSample::default()
                },
            );
            [
                interface.receive_bytes,
                interface.receive_packets,
                interface.receive_drops,
                interface.send_bytes,
                interface.send_packets,
                interface.send_drops,
            ] = counts;
        }
    }
}

/// `USER_HZ`: the unit of `/proc/stat`.
fn ticks_per_second() -> u64 {
    let answer = sysconf(SysconfVar::CLK_TCK).ok().flatten();
    answer
        .and_then(|ticks| u64::try_from(ticks).ok())
        .filter(|ticks| *ticks > 0)
        .unwrap_or(100)
}
