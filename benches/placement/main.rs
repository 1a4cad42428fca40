//! Where schedulers place pods, compared by simulation: `tests/support/placement/` says what of it is real code and what is
//! restated.
//!
//! `make simulate`, or `cargo bench --bench placement --target x86_64-unknown-linux-musl [-- --seeds 5 --nodes 100 --only
//! steady,burst --write]`
//!
//! Each scene runs with each scheduler and each seed, at virtual time; the result depends on nothing else. `--write` renews the
//! table and the plot of `docs/internals/scheduling-comparison.md`.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot measure fails")]
#![allow(clippy::print_stdout, reason = "its output")]

#[path = "../../tests/support/engine/mod.rs"]
mod engine_support;
#[path = "../../tests/support/placement/mod.rs"]
mod placement;
mod plot;
mod report;
#[path = "../../tests/support/simulation/mod.rs"]
mod simulation;

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;

use plimsoll::clock;

use crate::placement::Way;
use crate::placement::cluster::Cluster;
use crate::placement::outcome::Outcome;
use crate::placement::scenes::Scene;
use crate::report::{Measured, Row, SceneTable};

/// Cargo adds `--bench` to the arguments.
fn argument(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.nth(1)
}

fn main() {
    let seeds: u64 = argument("--seeds").map_or(5, |seeds| seeds.parse().unwrap());
    let nodes: usize = argument("--nodes").map_or(100, |nodes| nodes.parse().unwrap());
    let only = argument("--only");
    let wanted = |scene: &Scene| {
        let mut names = only.iter().flat_map(|only| only.split(','));
        only.is_none() || names.any(|only| only == scene.name())
    };
    let scenes: Vec<Scene> = Scene::ALL.into_iter().filter(wanted).collect();
    let measured = Measured {
        nodes,
        seeds,
        scenes: run_all(&scenes, nodes, seeds),
    };
    let table = measured.table();
    println!("{table}");
    let raw = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/placement");
    fs::create_dir_all(&raw).unwrap();
    plot::draw(&measured, &raw.join("scheduling-comparison.svg"));
    println!("plot: {}", raw.display());
    if std::env::args().any(|arg| arg == "--write") {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/internals");
        report::renew(&docs.join("scheduling-comparison.md"), &table);
        let plot = "scheduling-comparison.svg";
        fs::copy(raw.join(plot), docs.join(plot)).unwrap();
    }
}

/// All runs, on all CPUs; the longest scenes first.
fn run_all(scenes: &[Scene], nodes: usize, seeds: u64) -> Vec<SceneTable> {
    let runs = scenes.iter().flat_map(|scene| {
        let ways = Way::ALL.into_iter();
        ways.flat_map(move |way| (0..seeds).map(move |seed| (*scene, way, seed)))
    });
    let mut runs: Vec<_> = runs.collect();
    runs.sort_by_key(|(scene, _, _)| *scene == Scene::Day);
    let left = Mutex::new(runs);
    let done = Mutex::new(Vec::new());
    let cpus = thread::available_parallelism().map_or(1, Into::into);
    thread::scope(|scope| {
        for _ in 0..cpus {
            scope.spawn(|| {
                loop {
                    let Some((scene, way, seed)) = left.lock().unwrap().pop() else {
                        return;
                    };
                    let outcome = run(scene, way, seed, nodes);
                    done.lock().unwrap().push((scene, way, seed, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(_, _, seed, _)| *seed);
    let of = |scene: Scene, way: Way| Row {
        way,
        outcomes: done
            .iter()
            .filter(|it| (it.0, it.1) == (scene, way))
            .map(|it| it.3.clone())
            .collect(),
    };
    let tables = scenes.iter().map(|scene| SceneTable {
        scene: *scene,
        rows: Way::ALL.map(|way| of(*scene, way)).into_iter().collect(),
    });
    tables.collect()
}

fn run(scene: Scene, way: Way, seed: u64, nodes: usize) -> Outcome {
    let started = clock::boot_time();
    let nodes = scene.nodes(nodes);
    let outcome = Cluster::new(scene.workload(nodes, seed), way, seed).run();
    println!(
        "{} {} {seed}: hot {:.0} node-minutes, {:.1} points, {} evictions; {:.1} s",
        scene.name(),
        way.name(),
        outcome.hot_minutes,
        outcome.balance(),
        outcome.evictions,
        clock::boot_time().since(started).as_secs_f64()
    );
    outcome
}
