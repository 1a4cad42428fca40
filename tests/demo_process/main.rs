//! `plimsoll demo` as a process: on this machine's cgroups, and where these cannot be written.
#![expect(clippy::panic, reason = "a test that cannot go on panics")]

mod live;
mod obstacles;
mod support;
