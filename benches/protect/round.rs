//! One round: fresh cgroups, the load, a way to protect, and what is measured.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use plimsoll::clock::boot_time;
use plimsoll::demo::leftovers::PREFIX;
use plimsoll::engine::Demand;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::sample::{CpuTimes, Sample};
use plimsoll::engine::time::BootTime;
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::collect::Sampler;
use plimsoll::scene::cgroups::SceneCgroups;
use plimsoll::scene::latency::{Latencies, TimeSpan};
use plimsoll::scene::pod::ScenePod;
use plimsoll::scene::process::{LoadProcess, Worker};

use crate::figures::{Figures, SceneFigures};
use crate::scenes::{Batch, Scene};
use crate::ways::{Control, Way};

/// Of the machine's CPU, for all processes but those of the scene.
const QUIET: f64 = 0.1;
/// Measurements that others disturbed are repeated, up to this number; the last one counts.
const MAX_TRIES: u32 = 10;
/// The important pods run alone for so long before the batch pods start.
const WARM_UP: Duration = Duration::from_secs(1);
/// Crane's rounds are long, since it acts after 20 s for the first time, and few.
const CRANE_ROUNDS: usize = 2;
const CRANE_LENGTH: Duration = Duration::from_secs(40);

/// The machine that is measured on.
pub struct Ground {
    pub hierarchy: Hierarchy,
    pub node: NodeFacts,
    pub cpus: u32,
    /// What runs as load.
    pub program: PathBuf,
    /// Measure beside other processes.
    any_load: bool,
}

impl Ground {
    pub fn new(hierarchy: Hierarchy, program: PathBuf, any_load: bool) -> Self {
        let mut sampler = Sampler::new(Path::new("/proc"), hierarchy.clone());
        let mut sample = Sample::default();
        sampler.sample_node(boot_time(), &Demand::default(), &mut sample);
        let cpus = sample.node.cpu.unwrap().online;
        let node = NodeFacts {
            cpus,
            memory: sample.node.memory.unwrap().total,
            ..NodeFacts::default()
        };
        Self {
            hierarchy,
            node,
            cpus,
            program,
            any_load,
        }
    }

    /// Millicores.
    pub fn capacity(&self) -> u64 {
        u64::from(self.cpus) * 1000
    }

    pub fn machine(&self) -> String {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let version = if self.hierarchy.is_v2() { "v2" } else { "v1" };
        format!(
            "{} CPUs, Linux {}, cgroup {version}",
            self.cpus,
            read("/proc/sys/kernel/osrelease").trim()
        )
    }

    /// Named as those of a demo, which removes what a killed one left.
    pub fn cgroups(&self, pods: &[&ScenePod]) -> Arc<SceneCgroups> {
        let name = format!("{PREFIX}{}", std::process::id());
        let shares = 1024 * u64::from(self.cpus);
        Arc::new(SceneCgroups::create(self.hierarchy.clone(), pods, &name, shares).unwrap())
    }

    /// All ways in each round, one after the other.
    pub fn measure(&self, scene: &Scene, rounds: usize) -> SceneFigures {
        let rounds = rounds.min(scene.max_rounds);
        let ways = scene.ways.iter();
        let mut figures: Vec<(Way, Vec<Figures>)> = ways.map(|way| (*way, Vec::new())).collect();
        let mut csv = String::from("round,way,due_ms,latency_us,served\n");
        for round in 0..rounds {
            for (way, of_way) in &mut figures {
                if *way == Way::Crane && round >= CRANE_ROUNDS {
                    continue;
                }
                let mut rows = String::new();
                let measured = self.undisturbed(|| {
                    rows.clear();
                    self.round(&scene.with(*way), *way, round, &mut rows)
                });
                csv.push_str(&rows);
                println!("{} {}: {}", scene.name, way.name(), measured.line());
                of_way.push(measured);
            }
        }
        fs::write(raw().join(format!("{}.csv", scene.name)), csv).unwrap();
        let wants = scene.batch.iter().map(|(pod, batch)| batch.wants(pod).0);
        SceneFigures {
            name: scene.name,
            about: scene.about.clone(),
            max_ratio: scene.max_ratio,
            must_hold: scene.must_hold.clone(),
            capacity: self.capacity() as f64,
            batch_wants: wants.sum::<u64>() as f64,
            ways: figures,
        }
    }

    /// Measures when the rest of the machine is quiet, and again if it was not during the measurement.
    pub fn undisturbed(&self, mut measure: impl FnMut() -> Figures) -> Figures {
        let quiet = self.capacity() as f64 * QUIET;
        for _ in 1..MAX_TRIES {
            if self.any_load {
                break;
            }
            wait_until_quiet(quiet);
            let figures = measure();
            if figures.others < quiet {
                return figures;
            }
            println!("again: other processes used {:.0}m", figures.others);
        }
        measure()
    }

    fn round(&self, scene: &Scene, way: Way, round: usize, csv: &mut String) -> Figures {
        let program = &self.program;
        let cgroups = scene.cgroups(self, way);
        let worker = if scene.service.first_of_chain {
            Worker::chain(program, &scene.important, scene.service, &cgroups)
        } else {
            Worker::start(program, &scene.important[0], scene.service, &cgroups)
        };
        let worker = worker.unwrap();
        run_until(boot_time() + WARM_UP, &mut Control::Nothing);
        let batch_pods: Vec<ScenePod> = scene.batch.iter().map(|(pod, _)| pod.clone()).collect();
        let started = boot_time();
        let batch = if way == Way::Alone {
            Vec::new()
        } else {
            start_batch(program, scene, &cgroups)
        };
        let mut whole = Meters::new(&cgroups, &scene.important, &batch_pods);
        let mut control = Control::start(way, self, &cgroups, scene, &batch_pods);
        let length = if way == Way::Crane {
            CRANE_LENGTH
        } else {
            scene.length
        };
        let (settled, ended) = (started + length / 2, started + length);
        run_until(settled, &mut control);
        let mut meters = Meters::new(&cgroups, &scene.important, &batch_pods);
        run_until(ended, &mut control);
        let [node, important, batch_used] = meters.millicores();
        let others = whole.others();
        // What is due shortly before the end is still served beside the batch pods.
        run_until(ended + scene.service.request_timeout, &mut control);
        drop(control);
        drop(batch);
        let mut latencies = Latencies::default();
        latencies.extend(worker.finished_requests().inspect(|request| {
            if request.due >= started && request.due < ended {
                let due = request.due.since(started).as_millis();
                let latency = request.latency.as_micros();
                let served = u8::from(request.served);
                writeln!(csv, "{round},{},{due},{latency},{served}", way.name()).unwrap();
            }
        }));
        let span = TimeSpan {
            from: settled,
            to: ended,
        };
        Figures {
            latency: latencies.over(span).unwrap(),
            node,
            important,
            batch: batch_used,
            others,
            round: Some((
                latencies,
                TimeSpan {
                    from: started,
                    to: ended,
                },
            )),
        }
    }
}

/// Where raw samples go.
pub fn raw() -> PathBuf {
    let raw = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/protect");
    fs::create_dir_all(&raw).unwrap();
    raw
}

fn start_batch(program: &Path, scene: &Scene, cgroups: &SceneCgroups) -> Vec<LoadProcess> {
    let loads = scene.batch.iter().map(|(pod, batch)| match batch {
        Batch::Busy => LoadProcess::batch(program, pod, cgroups),
        Batch::Paced(service) => LoadProcess::paced(program, pod, *service, cgroups),
    });
    loads.map(Result::unwrap).collect()
}

fn wait_until_quiet(millicores: f64) {
    let mut node = Meter::node();
    for waited in 0..300 {
        run_until(boot_time() + Duration::from_secs(1), &mut Control::Nothing);
        if node.millicores() < millicores {
            return;
        }
        if waited == 0 {
            println!("waiting until other processes are quiet");
        }
    }
}

/// Lets a way act until then.
pub fn run_until(end: BootTime, control: &mut Control) {
    loop {
        let now = boot_time();
        if now >= end {
            return;
        }
        let next = control.next().min(end);
        if next > now {
            thread::park_timeout(next.since(now));
        } else {
            control.act(now);
        }
    }
}

/// CPU use since the last reading.
pub struct Meter {
    read: Box<dyn FnMut() -> u64>,
    at: BootTime,
    nanos: u64,
}

impl Meter {
    fn new(mut read: impl FnMut() -> u64 + 'static) -> Self {
        let nanos = read();
        Self {
            read: Box::new(read),
            at: boot_time(),
            nanos,
        }
    }

    pub fn pod(cgroups: &Arc<SceneCgroups>, pod: &ScenePod) -> Self {
        let cgroup: CgroupPath = cgroups.cgroup(pod);
        let cgroups = Arc::clone(cgroups);
        Self::new(move || cgroups.cpu_nanos(&cgroup).unwrap())
    }

    pub fn node() -> Self {
        let hierarchy = Hierarchy::detect(Path::new("/proc"), None).unwrap();
        let mut sampler = Sampler::new(Path::new("/proc"), hierarchy);
        Self::new(move || {
            let mut sample = Sample::default();
            sampler.sample_node(boot_time(), &Demand::default(), &mut sample);
            sample.node.cpu.map_or(0, |CpuTimes { busy, .. }| busy)
        })
    }

    pub fn millicores(&mut self) -> f64 {
        let (at, nanos) = (boot_time(), (self.read)());
        let elapsed = at.since(self.at).as_nanos().max(1) as f64;
        let used = nanos.saturating_sub(self.nanos) as f64;
        (self.at, self.nanos) = (at, nanos);
        used * 1000.0 / elapsed
    }
}

/// Of the node, the important pods and the batch pods.
pub struct Meters {
    node: Meter,
    important: Vec<Meter>,
    batch: Vec<Meter>,
}

impl Meters {
    pub fn new(cgroups: &Arc<SceneCgroups>, important: &[ScenePod], batch: &[ScenePod]) -> Self {
        let meter = |pod: &ScenePod| Meter::pod(cgroups, pod);
        Self {
            node: Meter::node(),
            important: important.iter().map(meter).collect(),
            batch: batch.iter().map(meter).collect(),
        }
    }

    /// Of everything but the scene.
    pub fn others(&mut self) -> f64 {
        let [node, important, batch] = self.millicores();
        (node - important - batch).max(0.0)
    }

    pub fn millicores(&mut self) -> [f64; 3] {
        let sum = |meters: &mut Vec<Meter>| meters.iter_mut().map(Meter::millicores).sum();
        [
            self.node.millicores(),
            sum(&mut self.important),
            sum(&mut self.batch),
        ]
    }
}
