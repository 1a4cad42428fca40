//! Latency of important pods beside batch pods: unprotected, and protected in several ways.
//!
//! `cargo bench --bench protect --target x86_64-unknown-linux-musl [-- --rounds 5 --length-factor 1 --only burst,many,redis,cpu-burst --program FILE --any-load --write --assert]`
//!
//! Every way runs in every round, one after the other, on fresh cgroups of this machine with real load. Plimsoll's ways are the
//! real engine and actuators, as `plimsoll run` has them; the ways of others are drivers over the same files, `peers.rs`. Figures
//! are medians of the rounds. Each request's latency goes to `target/bench/protect/`; `--write` renews the table and the plot of
//! `docs/protection.md`, and the README's picture. `--draw` measures nothing, and draws both pictures from the page's table. With `--any-load` it measures beside other processes, to see that a scene works: such figures are not written.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot measure fails")]
#![allow(clippy::print_stdout, reason = "its output")]

mod cpu_burst;
mod figures;
mod peers;
mod plot;
mod redis;
mod report;
mod round;
mod scenes;
mod ways;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use plimsoll::demo::leftovers;
use plimsoll::node::cgroup::Hierarchy;

use crate::figures::SceneFigures;
use crate::round::Ground;
use crate::scenes::Scene;

/// Cargo adds `--bench` to the arguments.
fn argument(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.nth(1)
}

/// Whether a list of scenes names this one; `many` is all of its sizes.
fn names(list: &str, scene: &str) -> bool {
    list.split(',').any(|named| {
        let rest = scene.strip_prefix(named);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    })
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

/// Draws the pictures of a table into a directory. Without the README's scene its picture stays as it is.
fn draw(table: &str, scenes: &[Scene], directory: &Path) {
    plot::draw(table, scenes, &directory.join("protection.svg"));
    let readme = directory.join("protected.svg");
    if !plot::draw_for_readme(table, &readme) {
        println!("not drawn: {}: the table lacks a way", readme.display());
    }
}

/// Draws the pictures of the page's table.
fn redraw() {
    let page = fs::read_to_string(docs().join("protection.md")).unwrap();
    let [_, table, _] = report::parts(&page);
    draw(table, &Scene::all(1), &docs());
}

/// Prints the table, and keeps it with its pictures; renews the page by them if asked to.
fn keep(measured: &report::Measured, cpus: u32, write: bool) {
    let table = measured.table();
    println!("{table}");
    let raw = round::raw();
    fs::write(raw.join("table.md"), &table).unwrap();
    let scenes = Scene::all(cpus);
    draw(&table, &scenes, &raw);
    println!("raw: {}", raw.display());
    if write {
        report::renew(&docs().join("protection.md"), &table);
        draw(&table, &scenes, &docs());
    }
}

fn main() -> ExitCode {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    let assert = has("--assert");
    let any_load = has("--any-load");
    if any_load && has("--write") {
        println!("figures of a busy machine are not written: leave out --any-load");
        return ExitCode::FAILURE;
    }
    if has("--draw") {
        redraw();
        return ExitCode::SUCCESS;
    }
    let Ok(hierarchy) = Hierarchy::detect(Path::new("/proc"), None) else {
        println!("not measured: no cgroup tree with the cpu controller is mounted");
        return ExitCode::from(u8::from(assert));
    };
    let rounds: usize = argument("--rounds").map_or(5, |rounds| rounds.parse().unwrap());
    let length_factor: u32 =
        argument("--length-factor").map_or(1, |factor| factor.parse().unwrap());
    let only = argument("--only");
    let wanted = |name: &str| only.as_ref().is_none_or(|only| names(only, name));
    leftovers::remove_all(&hierarchy);
    let program =
        argument("--program").unwrap_or_else(|| env!("CARGO_BIN_EXE_plimsoll").to_owned());
    let ground = Ground::new(hierarchy, program.into(), any_load);
    let machine = ground.machine();
    println!("{machine}");
    let mut scenes: Vec<SceneFigures> = Scene::all(ground.cpus)
        .into_iter()
        .filter(|scene| wanted(scene.name))
        .map(|mut scene| {
            scene.length *= length_factor;
            ground.measure(&scene, rounds)
        })
        .collect();
    if wanted(redis::NAME) {
        scenes.extend(redis::measure(&ground, rounds));
    }
    let cpu_burst = wanted(cpu_burst::NAME).then(|| cpu_burst::measure(&ground, rounds));
    let measured = report::Measured {
        machine,
        rounds,
        scenes,
        cpu_burst,
    };
    keep(&measured, ground.cpus, has("--write"));
    let missed = measured.missed();
    for bar in &missed {
        println!("missed: {bar}");
    }
    ExitCode::from(u8::from(assert && !missed.is_empty()))
}
