//! Each target over its seeds, and for a second over random mutations of them.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use allocation_counter::measure;
use fastrand::Rng;

use super::{FuzzTarget, TARGETS};
use crate::clock::boot_time;

/// How long each runs.
const DURATION: Duration = Duration::from_secs(1);
/// Input that often breaks parsers.
const TOKENS: [&str; 24] = [
    "0",
    "-1",
    "-0",
    "1e999",
    "1e-999",
    "0.1",
    "NaN",
    "Inf",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775807",
    "9223372036854775808",
    "null",
    "\"\"",
    "[]",
    "{}",
    "\n",
    "\r",
    "\t",
    "\\",
    "\"",
    ",",
    ":",
    "\u{fe0f}",
];

macro_rules! fuzzed {
    ($($name:ident)*) => {
        const FUZZED: &[&str] = &[$(stringify!($name)),*];

        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*
    };
}

fuzzed! {
    accept certificate cgroup eviction headers journal keys manifest mounts pod pressure proc prometheus quantity query relay
    report summary token trace watermark
}

#[test]
fn every_target_is_fuzzed_here() {
    assert_eq!(TARGETS.map(|target| target.name), FUZZED);
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fuzz(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.expect("a target");
    let seeds = seeds(name);
    for seed in &seeds {
        run(target, seed);
    }
    let mut random = Rng::new();
    let start = boot_time();
    while boot_time().since(start) < DURATION {
        run(target, &mutated(&mut random, &seeds, target.max_len));
    }
}

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let directory = root().join("fuzz/corpus").join(name);
    let files = fs::read_dir(&directory).expect("a directory of seeds");
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no seeds", directory.display());
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

fn run(target: &FuzzTarget, input: &[u8]) {
    let checked = catch_unwind(AssertUnwindSafe(|| {
        let used = measure(|| (target.check)(input)).bytes_max;
        assert!(
            used <= target.max_memory(input.len()),
            "{} bytes of input took {used} bytes of memory",
            input.len()
        );
    }));
    if checked.is_err() {
        let directory = root().join("target/fuzz/crashes").join(target.name);
        fs::create_dir_all(&directory).expect("a directory");
        let file = directory.join(format!("crash-{:08x}", crc32fast::hash(input)));
        fs::write(&file, input).expect("a file");
        panic!("run it again by: make fuzz AGAIN={}", file.display());
    }
}

/// A seed with up to eight changes.
fn mutated(random: &mut Rng, seeds: &[Vec<u8>], max_len: usize) -> Vec<u8> {
    let mut input = seeds[random.usize(..seeds.len())].clone();
    for _ in 0..=random.u8(..8) {
        let at = random.usize(..=input.len());
        let to = at + random.usize(..=(input.len() - at).min(64));
        let part = match random.u8(..6) {
            0 => Vec::new(),
            1 => vec![random.u8(..)],
            2 => TOKENS[random.usize(..TOKENS.len())].as_bytes().to_vec(),
            3 => input[at..to].repeat(random.usize(2..10)),
            4 => {
                let other = random.usize(..seeds.len());
                spliced(random, &seeds[other])
            }
            _ => input[at..to]
                .iter()
                .map(|byte| byte ^ (1 << random.u8(..8)))
                .collect(),
        };
        // Replace or insert.
        let end = if random.bool() { to } else { at };
        input.splice(at..end, part);
    }
    input.truncate(max_len);
    input
}

/// A part of another seed.
fn spliced(random: &mut Rng, seed: &[u8]) -> Vec<u8> {
    let start = random.usize(..=seed.len());
    let end = start + random.usize(..=(seed.len() - start).min(256));
    seed[start..end].to_vec()
}
