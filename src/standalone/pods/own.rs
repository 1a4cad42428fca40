//! The cgroups that this process runs in. They and their ancestors are never acted on.

use std::fs;
use std::path::Path;

use super::is_at_or_below;
use crate::node::cgroup::CgroupPath;

/// This process's cgroups in every tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnCgroups(Vec<String>);

impl OwnCgroups {
    /// Reads `<proc_root>/self/cgroup`; empty if it cannot be read.
    pub fn read(proc_root: &Path) -> Self {
        let text = fs::read_to_string(proc_root.join("self/cgroup")).unwrap_or_default();
        Self::parse(&text)
    }

    /// Parses a `cgroup` file (cgroups(7)): `id:controllers:path` lines.
    pub fn parse(text: &str) -> Self {
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        let below_root = paths
            .map(|path| path.trim_matches('/').to_owned())
            .filter(|path| !path.is_empty());
        Self(below_root.collect())
    }

    /// Whether this process runs in `cgroup` or below it.
    pub fn is_within(&self, cgroup: &CgroupPath) -> bool {
        self.0
            .iter()
            .any(|own| is_at_or_below(own, cgroup.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_and_ancestors_of_this_process_are_its_own() {
        let own = OwnCgroups::parse(
            "4:memory:/\n1:cpu,cpuacct:/system.slice/plimsoll.service\n0::/x:y\n",
        );
        let within = |path: &str| own.is_within(&CgroupPath::new(path).expect("a path"));
        assert!(within("system.slice"));
        assert!(within("system.slice/plimsoll.service"));
        assert!(within("x:y"));
        assert!(!within("system.slice/plimsoll"));
        assert!(!within("system.slice/plimsoll.service/below"));
        assert!(!within("batch.slice"));
    }
}
