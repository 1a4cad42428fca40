//! Linker options that keep the binary small.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo passes settings to build scripts in the environment"
)]

use std::path::Path;
use std::{env, fs};

/// Discards the unwind tables, a tenth of the binary: a release aborts on panic and has no symbols for a backtrace. The C
/// runtime's own tables stay, because it refers to them as an end marker.
const NO_UNWIND_TABLES: &str = "SECTIONS {
  /DISCARD/ : {
    *(EXCLUDE_FILE(*crtbegin*.o *crtend*.o) .eh_frame)
    *(.gcc_except_table .gcc_except_table.*)
  }
}
INSERT BEFORE .rodata;
";

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    // The options below are those of Linux's linkers.
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system != "linux") {
        return Ok(());
    }
    // Relative relocations are ten times smaller; musl supports them since 1.2.4.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        let directory = env::var("OUT_DIR").map_err(std::io::Error::other)?;
        let script = Path::new(&directory).join("no-unwind-tables.ld");
        fs::write(&script, NO_UNWIND_TABLES)?;
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{}", script.display());
    }
    Ok(())
}
