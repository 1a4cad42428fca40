//! How the CPU use of a pod changes: recorded by `plimsoll run --record` from real processes, each relative to its own mean.
//! `traces/README.md` says which, and how.

use std::collections::BTreeMap;

use plimsoll::trace::TraceLine;
use plimsoll::trace::read::Reader;

use super::TICK;

/// CPU use in each tick, relative to the mean.
pub type Shape = Vec<f64>;

/// The shapes of the pods of a trace, by pod name.
pub fn of_trace(trace: &[u8]) -> BTreeMap<String, Shape> {
    let (_, mut reader) = Reader::open(trace).unwrap();
    // By pod: time and counter, in seconds.
    let mut counters: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    while let Some(line) = reader.read().unwrap() {
        let TraceLine::Tick(tick) = line else {
            continue;
        };
        for pod in &tick.sample.pods {
            let Some(nanos) = pod.cpu_nanos else { continue };
            let uid = pod.uid.to_string();
            let name = uid.rsplit('/').next().unwrap().split('@').next().unwrap();
            let reading = (pod.at.as_nanos() as f64 / 1e9, nanos as f64 / 1e9);
            counters.entry(name.to_owned()).or_default().push(reading);
        }
    }
    let shapes = counters
        .into_iter()
        .map(|(name, readings)| (name, shape(&readings)));
    shapes.collect()
}

fn shape(readings: &[(f64, f64)]) -> Shape {
    let mut used = Vec::new();
    let mut last = readings[0];
    for reading in readings {
        let elapsed = reading.0 - last.0;
        if elapsed >= TICK as f64 * 0.9 {
            used.push((reading.1 - last.1) / elapsed);
            last = *reading;
        }
    }
    let mean = used.iter().sum::<f64>() / used.len() as f64;
    used.iter().map(|used| used / mean).collect()
}
