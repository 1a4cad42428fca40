//! `plimsoll demo`: two cgroups, one overload, and what the policies do about it.
