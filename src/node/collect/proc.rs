//! Parsers for the `/proc` files of the whole node that do not allocate.
//!
//! Text that is empty, truncated or overflowing gives `None`, never 0. Fields appended by later kernels are ignored.

use crate::engine::sample::{CpuTimes, NodeMemory, Pressure};
use crate::engine::units::Bytes;
use crate::node::cgroup::parse::{fields, fraction, keyed, lines, unsigned};

/// The kernel counts 512-byte sectors, whatever the device's sector size.
const SECTOR: u64 = 512;

/// `/proc/stat`: the first line is the sum over all CPUs, followed by one line per online CPU.
///
/// `tick` is the length of a clock tick in nanoseconds, `10^9 / sysconf(_SC_CLK_TCK)`.
pub fn cpu_times(text: &[u8], tick: u64) -> Option<CpuTimes> {
    let mut lines = lines(text);
    let mut fields = fields(lines.next()?);
    if fields.next()? != b"cpu" {
        return None;
    }
    let (busy, idle) = busy_and_idle(fields, tick)?;
    let online = lines.take_while(|line| line.starts_with(b"cpu")).count();
    Some(CpuTimes {
        busy,
        idle,
        online: u32::try_from(online).ok().filter(|online| *online > 0)?,
    })
}

/// Like [`cpu_times`], for the CPUs selected by `counts`.
pub fn cpu_times_of(text: &[u8], tick: u64, counts: impl Fn(usize) -> bool) -> Option<CpuTimes> {
    let mut times = CpuTimes::default();
    for line in lines(text).skip(1) {
        let mut fields = fields(line);
        let Some(number) = fields.next().and_then(|name| name.strip_prefix(b"cpu")) else {
            break;
        };
        let number = usize::try_from(unsigned(number)?).ok()?;
        if counts(number) {
            let (busy, idle) = busy_and_idle(fields, tick)?;
            times.busy = times.busy.wrapping_add(busy);
            times.idle = times.idle.wrapping_add(idle);
            times.online += 1;
        }
    }
    (times.online > 0).then_some(times)
}

fn busy_and_idle<'a>(mut fields: impl Iterator<Item = &'a [u8]>, tick: u64) -> Option<(u64, u64)> {
    let mut next = || unsigned(fields.next()?);
    let [user, nice, system] = [next()?, next()?, next()?];
    let [idle, io_wait] = [next()?, next()?];
    let [irq, soft_irq, steal] = [next()?, next()?, next()?];
    let busy = nanos(&[user, nice, system, irq, soft_irq, steal], tick);
    Some((busy, nanos(&[idle, io_wait], tick)))
}

/// With 512 CPUs the sum passes 2^64 ns after 14 months: it wraps, so that only one difference is lost.
fn nanos(ticks: &[u64], tick: u64) -> u64 {
    let ticks = ticks.iter().fold(0_u64, |sum, one| sum.wrapping_add(*one));
    ticks.wrapping_mul(tick)
}

/// `/proc/stat`: tasks that are runnable or waiting for I/O.
pub fn tasks(text: &[u8]) -> Option<u64> {
    let [running, blocked] = keyed(text, [b"procs_running", b"procs_blocked"]);
    // One of the running tasks is this process.
    running?.saturating_sub(1).checked_add(blocked?)
}

/// `/proc/meminfo`
pub fn memory(text: &[u8]) -> Option<NodeMemory> {
    const KEYS: [&[u8]; 6] = [
        b"MemTotal:",
        b"MemAvailable:",
        b"Hugetlb:",
        b"AnonPages:",
        b"Shmem:",
        b"Active(file):",
    ];
    let mut values = [None; KEYS.len()];
    for line in lines(text) {
        let mut fields = fields(line);
        let key = fields.next();
        let Some(index) = KEYS.iter().position(|wanted| Some(*wanted) == key) else {
            continue;
        };
        let kib = fields.next().and_then(unsigned);
        let in_kib = fields.next() == Some(b"kB");
        let bytes = kib.filter(|_| in_kib)?.checked_mul(1024)?;
        values[index] = Some(Bytes(bytes));
    }
    let [total, available, hugetlb, anon, shmem, active_file] = values;
    Some(NodeMemory {
        total: total.filter(|total| *total > Bytes::ZERO)?,
        available: available?,
        hugetlb: hugetlb.unwrap_or_default(),
        anon,
        shmem,
        active_file,
    })
}

/// `/proc/vmstat`: pages scanned to reclaim memory of the node. The kernel does not count reclaim of one cgroup here.
pub fn page_scans(text: &[u8]) -> Option<u64> {
    let keys: [&[u8]; 3] = [b"pgscan_kswapd", b"pgscan_direct", b"pgscan_khugepaged"];
    let [kswapd, direct, khugepaged] = keyed(text, keys);
    let scans = kswapd?.checked_add(direct?)?;
    scans.checked_add(khugepaged.unwrap_or_default())
}

/// `/proc/loadavg`: the averages over 1, 5 and 15 minutes.
pub fn load(text: &[u8]) -> Option<[f64; 3]> {
    let mut fields = fields(lines(text).next()?);
    let mut next = || fraction(fields.next()?);
    Some([next()?, next()?, next()?])
}

/// `/proc/pressure/*` and `*.pressure`. Linux before 5.13 has no `full` line for CPU.
pub fn pressure(text: &[u8]) -> Option<Pressure> {
    let line = |kind: &[u8]| {
        lines(text).find_map(|line| {
            let mut fields = fields(line);
            (fields.next()? == kind).then(|| stalls(fields))
        })
    };
    let (some, some_total) = line(b"some")??;
    let (full, full_total) = match line(b"full") {
        Some(stalls) => stalls.map(|(averages, total)| (Some(averages), total))?,
        None => (None, None),
    };
    Some(Pressure {
        some,
        full,
        totals: [some_total, full_total],
    })
}

/// `avg10=0.00 avg60=0.00 avg300=0.00 total=0`: percentages, and microseconds (returned as nanoseconds).
fn stalls<'a>(mut fields: impl Iterator<Item = &'a [u8]>) -> Option<([f64; 3], Option<u64>)> {
    let mut next = |key: &[u8]| fraction(fields.next()?.strip_prefix(key)?);
    let averages = [next(b"avg10=")?, next(b"avg60=")?, next(b"avg300=")?];
    let total = fields
        .next()
        .and_then(|field| field.strip_prefix(b"total="));
    let micros = total.and_then(unsigned);
    Some((averages, micros.and_then(|micros| micros.checked_mul(1000))))
}

/// One line of `/proc/diskstats`: the device's name, and `[reads, bytes read, writes, bytes written, milliseconds
/// busy]`.
///
/// Partitions are separate devices, as the kernel lists them. Loop devices, RAM disks and zram are left out, since
/// they load no disk.
pub fn disk(line: &[u8]) -> Option<(&str, [u64; 5])> {
    let mut fields = fields(line).skip(2);
    let name = std::str::from_utf8(fields.next()?).ok()?;
    let mut next = || unsigned(fields.next()?);
    let [reads, _merged, read_sectors, _read_ms] = [next()?, next()?, next()?, next()?];
    let [writes, _merged, write_sectors, _write_ms] = [next()?, next()?, next()?, next()?];
    let [_in_flight, busy_ms, _weighted_ms] = [next()?, next()?, next()?];
    let read_bytes = read_sectors.checked_mul(SECTOR)?;
    let written_bytes = write_sectors.checked_mul(SECTOR)?;
    let is_disk = !["loop", "ram", "zram"]
        .iter()
        .any(|kind| is_numbered(name, kind));
    is_disk.then_some((name, [reads, read_bytes, writes, written_bytes, busy_ms]))
}

fn is_numbered(name: &str, kind: &str) -> bool {
    name.strip_prefix(kind)
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// One line of `/proc/net/dev`: the interface's name, and `[bytes, packets, drops]` received and then sent. `None` for
/// the two header lines and the loopback interface.
pub fn interface(line: &[u8]) -> Option<(&str, [u64; 6])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = std::str::from_utf8(line[..colon].trim_ascii()).ok()?;
    if name.is_empty() || name == "lo" {
        return None;
    }
    let mut counts = [0; 16];
    let mut fields = fields(&line[colon + 1..]);
    for count in &mut counts {
        *count = unsigned(fields.next()?)?;
    }
    let [bytes, packets, _, drops, ..] = counts;
    let [sent_bytes, sent_packets, _, sent_drops] = [counts[8], counts[9], counts[10], counts[11]];
    Some((
        name,
        [bytes, packets, drops, sent_bytes, sent_packets, sent_drops],
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAT: &[u8] = b"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\nprocs_running 3\nprocs_blocked 2\nsoftirq 1\n";
    const MEMINFO: &[u8] = b"MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   400 kB\n";
    const LOADAVG: &[u8] = b"0.11 0.24 0.25 1/91 17965\n";
    const PRESSURE: &[u8] = b"some avg10=1.50 avg60=2.00 avg300=0.25 total=99\n";
    const DISK: &[u8] = b" 254 0 vda 10 1 20 2 30 3 40 4 0 50 6";
    const INTERFACE: &[u8] = b"  eth0: 1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0";

    #[test]
    fn only_selected_cpus_are_summed() {
        let stat =
            b"cpu  9 0 0 9 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu2 10 0 0 20 0 0 0 0\nintr 1\n";
        let of = |counts: fn(usize) -> bool| cpu_times_of(stat, 10, counts);
        let times = |busy, idle, online| CpuTimes { busy, idle, online };
        assert_eq!(of(|cpu| cpu == 2), Some(times(100, 200, 1)));
        assert_eq!(of(|_| true), Some(times(370, 290, 2)));
        assert_eq!(of(|cpu| cpu == 1), None, "it is offline");
    }

    #[test]
    fn pools_of_huge_pages_are_neither_used_nor_capacity() {
        let text = b"MemTotal: 64000 kB\nMemAvailable: 3000 kB\nActive(file): 7 kB\nAnonPages: 5 kB\nShmem: 6 kB\nHugePages_Total: 30\nHugetlb: 60000 kB\n";
        let memory = memory(text).unwrap();
        let kib = |bytes: Bytes| bytes.0 / 1024;
        assert_eq!(
            (kib(memory.capacity()), memory.used().map(kib)),
            (4000, Some(1000))
        );
        let parts = [memory.anon, memory.shmem, memory.active_file];
        assert_eq!(parts.map(|part| part.map(kib)), [Some(5), Some(6), Some(7)]);
    }

    #[test]
    fn all_kinds_of_node_reclaim_count() {
        let text = b"pgscan_kswapd 1\npgscan_direct 20\npgscan_direct_throttle 7\npgscan_khugepaged 300\npgscan_proactive 9\npgscan_anon 5\n";
        assert_eq!(page_scans(text), Some(321));
        assert_eq!(page_scans(b"pgscan_kswapd 1\npgscan_direct 20\n"), Some(21));
        assert_eq!(page_scans(b"pgscan_direct 20\n"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = cpu_times_of(&text, 10_000_000, |_| true);
            let _ = (cpu_times(&text, 10_000_000), memory(&text), load(&text), pressure(&text));
            let _ = (disk(&text), interface(&text), tasks(&text), page_scans(&text));
        }

        #[test]
        fn truncated_text_is_parsed_fully_or_not_at_all(cut in 0..100_usize) {
            fn same<T: PartialEq>(text: &[u8], cut: usize, parse: impl Fn(&[u8]) -> Option<T>) -> bool {
                let part = parse(&text[..cut.min(text.len())]);
                part.is_none() || part == parse(text)
            }
            prop_assert!(same(STAT, cut, |text| cpu_times(text, 1)));
            prop_assert!(same(STAT, cut, tasks));
            prop_assert!(same(MEMINFO, cut, memory));
            prop_assert!(same(LOADAVG, cut, load));
            prop_assert!(same(PRESSURE, cut, pressure));
        }

        #[test]
        fn cpu_time_differences_survive_a_counter_wrap(before: [u32; 10], since: [u16; 10], wraps in 0..10_usize) {
            let tick = 10_000_000;
            let text = |columns: &[u64; 10]| {
                let columns = columns.map(|column| column.to_string()).join(" ");
                format!("cpu {columns}\ncpu0 {columns}\n").into_bytes()
            };
            let mut first = before.map(u64::from);
            first[wraps] = u64::MAX - u64::from(u32::MAX);
            let later: [u64; 10] = std::array::from_fn(|i| first[i] + u64::from(since[i]));
            let (one, two) = (cpu_times(&text(&first), tick), cpu_times(&text(&later), tick));
            let (one, two) = (one.unwrap(), two.unwrap());
            let grown = |columns: &[usize]| columns.iter().map(|i| u64::from(since[*i])).sum::<u64>() * tick;
            prop_assert_eq!(two.busy.wrapping_sub(one.busy), grown(&[0, 1, 2, 5, 6, 7]));
            prop_assert_eq!(two.idle.wrapping_sub(one.idle), grown(&[3, 4]));
        }

        #[test]
        fn stall_totals_are_in_nanoseconds(micros: u64, full: Option<u32>) {
            let line = |kind, total| format!("{kind} avg10=1.00 avg60=0.00 avg300=0.00 total={total}\n");
            let second = full.map_or_else(String::new, |total| line("full", u64::from(total)));
            let read = pressure((line("some", micros) + &second).as_bytes()).unwrap();
            prop_assert_eq!(read.totals, [micros.checked_mul(1000), full.map(|total| u64::from(total) * 1000)]);
            prop_assert_eq!((read.some[0], read.full.is_some()), (1.0, full.is_some()));
        }

        #[test]
        fn overflowing_numbers_are_rejected(index in 3..14_usize, column in 1..17_usize) {
            let huge = |line: &[u8], index: usize| {
                let text = std::str::from_utf8(line).unwrap();
                let fields = text.split_whitespace().enumerate();
                let fields = fields.map(|(i, it)| if i == index { "18446744073709551616" } else { it });
                fields.collect::<Vec<_>>().join(" ").into_bytes()
            };
            prop_assert!(disk(&huge(DISK, index)).is_none());
            prop_assert!(interface(&huge(INTERFACE, column)).is_none());
            prop_assert!(disk(DISK).is_some() && interface(INTERFACE).is_some());
        }
    }
}
