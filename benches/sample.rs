//! CPU time of one sample of a node with many pods, compared with reading the same files.
//!
//! `cargo bench --bench sample --target x86_64-unknown-linux-musl [-- --pods 20,110 --rounds 40 --assert]`
//!
//! The variants take turns in every round, on real cgroups of this machine (two containers a pod), measured by the CPU
//! clock of this process: `sampler` is the product, `read_to_string` opens, reads and closes the same files, `pread` reads
//! them from open descriptors and does nothing else. `demanded` is the sampler when rules need everything that it can read,
//! for information. Raw figures go to `target/bench/sample.csv`.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot measure fails")]
#![allow(clippy::print_stdout, reason = "its output")]

#[path = "../tests/support/collect/mod.rs"]
mod collect_support;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use collect_support::{CgroupFixture, everything, uid};
use nix::time::{ClockId, clock_gettime};
use plimsoll::clock::boot_time;
use plimsoll::engine::Demand;
use plimsoll::engine::sample::Sample;
use plimsoll::node::cgroup::Controller;
use plimsoll::node::collect::Sampler;

const VARIANTS: [&str; 4] = ["sampler", "read_to_string", "pread", "demanded"];
/// A single sample of 20 pods is near the cost of reading the clock.
const SAMPLES_PER_TURN: u64 = 5;

const MIN_GAIN: f64 = 8.0;
/// Below, the fixed cost of a sample is as large as that of its files.
const GAIN_FROM: usize = 100;
/// Above, the kernel's data of so many cgroups exceeds the CPU caches, and even bare `pread` gains less than eight times:
/// there only the overhead over `pread` has a bar.
const GAIN_UP_TO: usize = 250;
const MAX_OVERHEAD: f64 = 1.5;
/// Maximum growth of the sampler's cost per pod with the number of pods, relative to that of bare `pread`.
const MAX_GROWTH: f64 = 1.25;

struct Options {
    pods: Vec<usize>,
    rounds: usize,
    assert: bool,
}

impl Options {
    /// Cargo adds `--bench` to the arguments.
    fn parse() -> Self {
        let args: Vec<String> = std::env::args().collect();
        let value = |name: &str| {
            let index = args.iter().position(|arg| arg == name)?;
            args.get(index + 1)
        };
        let sizes = value("--pods").map_or("20,110,250,500", String::as_str);
        Self {
            pods: sizes.split(',').map(|size| size.parse().unwrap()).collect(),
            rounds: value("--rounds").map_or(60, |rounds| rounds.parse().unwrap()),
            assert: args.iter().any(|arg| arg == "--assert"),
        }
    }
}

/// Nanoseconds per sample in each round, for each variant.
type Figures = [Vec<f64>; 4];

fn main() -> ExitCode {
    let options = Options::parse();
    let Some(ground) = CgroupFixture::make() else {
        println!("not measured: cgroups cannot be created here");
        return ExitCode::from(u8::from(options.assert));
    };
    println!("{}", machine(&ground));
    let mut csv = String::from("pods,round,variant,nanoseconds_per_sample\n");
    let mut results = Vec::new();
    println!("CPU time of one sample in microseconds, median (5 %..95 %)");
    for &pods in &options.pods {
        let figures = measure(&ground, pods, options.rounds);
        record(&mut csv, pods, &figures);
        println!("{}", row(pods, &figures));
        results.push((pods, figures));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/sample.csv");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, csv).unwrap();
    println!("raw: {}", path.display());
    let missed = missed(&results);
    for bar in &missed {
        println!("missed: {bar}");
    }
    ExitCode::from(u8::from(options.assert && !missed.is_empty()))
}

fn machine(ground: &CgroupFixture) -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let version = if ground.hierarchy.is_v2() { "v2" } else { "v1" };
    format!(
        "machine: {cpus} CPUs, Linux {}, cgroup {version}, load {}",
        read("/proc/sys/kernel/osrelease").trim(),
        read("/proc/loadavg").trim(),
    )
}

fn measure(ground: &CgroupFixture, pods: usize, rounds: usize) -> Figures {
    let names: Vec<String> = (0..pods).map(|pod| format!("{pods}-{pod}")).collect();
    for name in &names {
        ground.mkdir(&format!("{name}/main"));
        ground.mkdir(&format!("{name}/pause"));
    }
    let files = files(ground, &names);
    let open: Vec<File> = files.iter().map(|path| File::open(path).unwrap()).collect();
    let mut lean = SampledPods::new(ground, &names, Demand::default());
    let mut full = SampledPods::new(ground, &names, everything());
    let mut figures = Figures::default();
    // Two warm-up rounds do not count.
    for round in 0..rounds + 2 {
        for turn in 0..VARIANTS.len() {
            let variant = (round + turn) % VARIANTS.len();
            let cost = cost(|| match variant {
                0 => lean.sample(),
                1 => read_to_string(&files),
                2 => pread(&open),
                _ => full.sample(),
            });
            if round >= 2 {
                figures[variant].push(cost);
            }
        }
    }
    for name in &names {
        ground.rmdir(name);
    }
    figures
}

/// CPU nanoseconds of this process for one run of `work`.
fn cost(mut work: impl FnMut()) -> f64 {
    let before = cpu_nanos();
    for _ in 0..SAMPLES_PER_TURN {
        work();
    }
    (cpu_nanos() - before) as f64 / SAMPLES_PER_TURN as f64
}

fn cpu_nanos() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap();
    now.tv_sec().unsigned_abs() * 1_000_000_000 + now.tv_nsec().unsigned_abs()
}

struct SampledPods {
    sampler: Sampler,
    demand: Demand,
    sample: Sample,
}

impl SampledPods {
    fn new(ground: &CgroupFixture, names: &[String], demand: Demand) -> Self {
        let mut sampler = Sampler::new(Path::new("/proc"), ground.hierarchy.clone());
        sampler.set_pods(names.iter().map(|name| (uid(name), ground.path(name))));
        Self {
            sampler,
            demand,
            sample: Sample::default(),
        }
    }

    fn sample(&mut self) {
        self.sampler
            .sample_node(boot_time(), &self.demand, &mut self.sample);
        self.sampler
            .sample_pods(boot_time(), &self.demand, &mut self.sample);
        assert!(
            black_box(&self.sample)
                .pods
                .iter()
                .all(|pod| pod.cpu_nanos.is_some())
        );
    }
}

/// The files that the sampler reads when no rule needs more.
fn files(ground: &CgroupFixture, names: &[String]) -> Vec<PathBuf> {
    let (cpu, memory) = if ground.hierarchy.is_v2() {
        ("cpu.stat", "memory.current")
    } else {
        ("cpuacct.usage", "memory.usage_in_bytes")
    };
    let mut files = vec![PathBuf::from("/proc/stat"), PathBuf::from("/proc/meminfo")];
    for name in names {
        files.push(ground.dir(Controller::Cpuacct, name).join(cpu));
        files.push(ground.dir(Controller::Memory, name).join(memory));
    }
    files
}

fn read_to_string(files: &[PathBuf]) {
    for path in files {
        black_box(fs::read_to_string(path).unwrap());
    }
}

fn pread(open: &[File]) {
    let mut buffer = [0; 8192];
    for file in open {
        black_box(file.read_at(&mut buffer, 0).unwrap());
    }
}

fn record(csv: &mut String, pods: usize, figures: &Figures) {
    for (variant, rounds) in VARIANTS.iter().zip(figures) {
        for (round, nanos) in rounds.iter().enumerate() {
            writeln!(csv, "{pods},{round},{variant},{nanos:.0}").unwrap();
        }
    }
}

fn row(pods: usize, figures: &Figures) -> String {
    let mut row = format!("{pods:>4} pods");
    for (variant, rounds) in VARIANTS.iter().zip(figures) {
        let micros = |part| quantile(rounds, part) / 1000.0;
        write!(
            row,
            "  {variant} {:.0} ({:.0}..{:.0})",
            micros(0.5),
            micros(0.05),
            micros(0.95)
        )
        .unwrap();
    }
    let (gain, overhead) = (gain(figures), overhead(figures));
    write!(
        row,
        "  | {gain:.1}x less than read_to_string, {overhead:.2}x pread"
    )
    .unwrap();
    row
}

fn gain(figures: &Figures) -> f64 {
    quantile(&figures[1], 0.5) / quantile(&figures[0], 0.5)
}

fn overhead(figures: &Figures) -> f64 {
    quantile(&figures[0], 0.5) / quantile(&figures[2], 0.5)
}

fn quantile(figures: &[f64], part: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index between 0 and the last"
    )]
    let index = (part * last as f64).round() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

/// The bars that are missed.
fn missed(results: &[(usize, Figures)]) -> Vec<String> {
    let mut missed = Vec::new();
    for (pods, figures) in results {
        let (gain, overhead) = (gain(figures), overhead(figures));
        if gain < MIN_GAIN && (GAIN_FROM..=GAIN_UP_TO).contains(pods) {
            missed.push(format!(
                "{pods} pods: {gain:.1}x less than read_to_string, {MIN_GAIN} required"
            ));
        }
        if overhead > MAX_OVERHEAD {
            missed.push(format!(
                "{pods} pods: {overhead:.2}x pread, {MAX_OVERHEAD} allowed"
            ));
        }
    }
    missed.extend(not_linear(results));
    missed
}

/// Compares the cost per pod at the largest size with that at the first size of at least 100 pods.
fn not_linear(results: &[(usize, Figures)]) -> Option<String> {
    let first = results.iter().find(|(pods, _)| *pods >= 100)?;
    let last = results.last()?;
    let per_pod = |variant: usize, (pods, figures): &(usize, Figures)| {
        quantile(&figures[variant], 0.5) / *pods as f64
    };
    let growth = |variant| per_pod(variant, last) / per_pod(variant, first);
    let (ours, floor) = (growth(0), growth(2));
    println!(
        "cost per pod at {} pods relative to {}: sampler {ours:.2}, pread {floor:.2}",
        last.0, first.0
    );
    (ours > floor * MAX_GROWTH)
        .then(|| format!("not linear in pods: {ours:.2}, bare pread {floor:.2}"))
}
