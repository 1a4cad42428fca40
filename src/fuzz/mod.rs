//! Every parser of untrusted bytes, with invariants that hold for any input. `make fuzz` runs them under libFuzzer, and the tests here
//! over the corpus in `fuzz/corpus` and mutations of it. No release contains this module.
//!
//! A new parser gets a function in one of the files here, a line in [`TARGETS`] and a directory of seeds.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a broken invariant panics"
)]

mod files;
mod http;
mod kernel;
mod tokens;

#[cfg(test)]
mod tests;

/// One parser, or a few that read the same kind of input.
#[derive(Clone, Copy, Debug)]
pub struct FuzzTarget {
    /// The argument of `make fuzz`, and the directory of the seeds.
    pub name: &'static str,
    /// Parses the input; panics if an invariant does not hold.
    pub check: fn(&[u8]),
    /// Longer inputs never reach the parser, or find nothing new.
    pub max_len: usize,
    /// MiB that any input may allocate, beside what its length allows.
    fixed_mib: u64,
}

/// Bytes that each byte of an input may allocate: a tree of values, some copies of it, and its texts.
const MEMORY_PER_BYTE: u64 = 2 << 10;

impl FuzzTarget {
    const fn new(name: &'static str, check: fn(&[u8]), max_len: usize) -> Self {
        Self {
            name,
            check,
            max_len,
            fixed_mib: 4,
        }
    }

    /// For a parser with a constant limit of its own.
    const fn with_mib(self, fixed_mib: u64) -> Self {
        Self { fixed_mib, ..self }
    }

    /// Bytes that the check of an input of this length may have allocated at any moment.
    pub fn max_memory(&self, len: usize) -> u64 {
        (self.fixed_mib << 20) + MEMORY_PER_BYTE * len as u64
    }
}

/// All targets.
pub const TARGETS: [FuzzTarget; 21] = [
    FuzzTarget::new("accept", http::accept, 4 << 10),
    FuzzTarget::new("certificate", tokens::certificate, 4 << 10),
    FuzzTarget::new("cgroup", kernel::cgroup, 4 << 10),
    FuzzTarget::new("eviction", http::eviction, crate::crd::eviction::MAX_BYTES),
    FuzzTarget::new("headers", http::headers, 4 << 10),
    FuzzTarget::new("journal", files::journal, 16 << 10),
    FuzzTarget::new("keys", tokens::keys, 8 << 10),
    FuzzTarget::new("manifest", files::manifest, 16 << 10).with_mib(256),
    FuzzTarget::new("mounts", kernel::mounts, 4 << 10),
    FuzzTarget::new("pod", files::pod, 16 << 10),
    FuzzTarget::new("pressure", kernel::pressure, 1 << 10),
    FuzzTarget::new("proc", kernel::proc, 4 << 10),
    FuzzTarget::new("prometheus", kernel::prometheus, 16 << 10),
    FuzzTarget::new("quantity", files::quantity, 1 << 10),
    FuzzTarget::new("query", http::query, 4 << 10),
    FuzzTarget::new("relay", http::relay, 16 << 10),
    FuzzTarget::new(
        "report",
        http::report,
        crate::crd::report::MAX_ACCEPTED_BYTES,
    ),
    FuzzTarget::new("summary", http::summary, 1 << 10),
    FuzzTarget::new("token", tokens::token, 9 << 10),
    FuzzTarget::new("trace", files::trace, 16 << 10),
    FuzzTarget::new("watermark", files::watermark, 16 << 10),
];
