//! What keeps the binary small at link time.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo tells a build script by its environment"
)]

use std::path::Path;
use std::{env, fs};

/// Discards the tables by which a panic would unwind, a tenth of the binary: a release aborts, and, stripped as it is, has
/// no names for a backtrace. Those of the C runtime are an end mark that it refers to.
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
    // Relocations take a tenth of what they would in the older form; every static libc since musl 1.2.4 reads it.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        let folder = env::var("OUT_DIR").map_err(std::io::Error::other)?;
        let script = Path::new(&folder).join("no-unwind-tables.ld");
        fs::write(&script, NO_UNWIND_TABLES)?;
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{}", script.display());
    }
    Ok(())
}
