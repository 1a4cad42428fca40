//! `plimsoll demo` as a process: on this machine's cgroups, and where these cannot be written.

mod live;
mod obstacles;
mod support;
