//! Runs the target named by the environment variable `TARGET` under libFuzzer; started by `make fuzz`.
#![no_main]

use std::env;
use std::sync::OnceLock;

use allocation_counter::measure;
use libfuzzer_sys::{Corpus, fuzz_target};
use plimsoll::fuzz::{TARGETS, FuzzTarget};

static TARGET: OnceLock<FuzzTarget> = OnceLock::new();

fn target() -> FuzzTarget {
    let name = env::var("TARGET").unwrap_or_default();
    let found = TARGETS.into_iter().find(|target| target.name == name);
    found.unwrap_or_else(|| {
        let names = TARGETS.map(|target| target.name);
        panic!("TARGET is {name:?}, but must be one of {names:?}")
    })
}

fuzz_target!(|input: &[u8]| -> Corpus {
    let target = TARGET.get_or_init(target);
    if input.len() > target.max_len {
        return Corpus::Reject;
    }
    let used = measure(|| (target.check)(input)).bytes_max;
    assert!(
        used <= target.max_memory(input.len()),
        "{} bytes of input took {used} bytes of memory",
        input.len()
    );
    Corpus::Keep
});
