//! The same policies over a recorded demo, for machines whose cgroups cannot be written. It changes nothing.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::time::Duration;

use jiff::tz::TimeZone;

use super::cast::Cast;
use super::chronicle::Chronicle;
use super::policy::{self, PolicyError};
use super::recording::Programme;
use super::scene::Scene;
use super::show::Show;
use super::story::Schedule;
use super::view::{Second, Source, View};
use crate::engine::pod::Pod;
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::engine::time::BootTime;
use crate::node::clock::boot_time;
use crate::node::machine::event::{Decision, Event};
use crate::ordered;
use crate::standalone::wake::Wake;
use crate::trace::read::TraceError;
use crate::trace::replay::{Replay, Summary};
use crate::trace::{Header, Tick};

/// A demo that was recorded with `plimsoll demo --record`, and what that trace does not hold.
const TRACE: &str = include_str!("recorded.trace");
const PROGRAMME: &str = include_str!("recorded.programme.json");

/// A recording cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace is broken.
    #[error("failed to read the recorded trace: {0}")]
    Trace(#[from] TraceError),
    /// What belongs to it is broken.
    #[error("failed to read what belongs to the recorded trace: {0}")]
    Programme(#[from] serde_json::Error),
    /// The policies cannot be applied to it.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// It cannot be shown.
    #[error("failed to show the recording: {0}")]
    Show(#[source] io::Error),
}

/// What came of a replay.
#[derive(Debug)]
pub struct Replayed {
    /// The machine that was recorded, and when.
    pub recorded: String,
    /// What the policies would have done.
    pub summary: Summary,
    /// Somebody stopped it.
    pub stopped: bool,
}

/// Plays the recording that this program carries, in about `total`.
///
/// # Errors
/// Where it cannot be read or shown.
pub fn play(total: Duration, wake: &Wake, show: &mut dyn Show) -> Result<Replayed, ReplayError> {
    let programme: Programme = serde_json::from_str(PROGRAMME)?;
    let mut reel = Reel::open(TRACE.as_bytes(), programme)?;
    let begun = boot_time();
    let mut stopped = false;
    while reel.step()? {
        show.show(&reel.view()).map_err(ReplayError::Show)?;
        let due = begun + reel.position().mul_f64(reel.speed(total));
        let signal = wake.wait_until(due).map_err(ReplayError::Show)?;
        if signal.is_some() || show.is_stop_asked().map_err(ReplayError::Show)? {
            stopped = true;
            break;
        }
    }
    Ok(Replayed {
        recorded: reel.recorded.clone(),
        summary: reel.replay.summary(),
        stopped,
    })
}

/// A recording on its way through the engine.
struct Reel<R> {
    replay: Replay<R>,
    programme: Programme,
    recorded: String,
    scene: Scene,
    chronicle: Chronicle,
}

impl<R: BufRead> Reel<R> {
    fn open(trace: R, programme: Programme) -> Result<Self, ReplayError> {
        let mut refused = None;
        let compiled = |header: &Header| {
            let node = NodeFacts::from(&header.node);
            adapted(&node, programme.asked).unwrap_or_else(|error| {
                refused = Some(error);
                PolicySet::default()
            })
        };
        let (header, replay) = Replay::open(trace, compiled)?;
        if let Some(error) = refused {
            return Err(error.into());
        }
        let mut chronicle = Chronicle::begin(programme.begun);
        for (act, at) in programme.acts.iter().skip(1) {
            chronicle.enter(*act, *at);
        }
        let cast = Cast::for_cpus(header.node.cpus.max(1));
        let date = header
            .time
            .to_zoned(TimeZone::UTC)
            .strftime("%Y-%m-%d %H:%M UTC");
        Ok(Self {
            recorded: format!("{}, {date}", programme.machine),
            scene: Scene::new(cast.capacity(), cast.line()),
            replay,
            programme,
            chronicle,
        })
    }

    fn step(&mut self) -> Result<bool, ReplayError> {
        if !self.replay.step()? {
            return Ok(false);
        }
        self.scene.see(&self.replay.tick().sample);
        let replay = &self.replay;
        let told = replay.transitions().iter().map(|transition| {
            let rules = &replay.policy().rules;
            let rule = rules.iter().find(|rule| rule.id == transition.rule);
            let pod = transition.change.pod().and_then(|uid| replay.pod(uid));
            Event::Decision(Decision {
                transition: transition.clone(),
                metric: rule.map(|rule| rule.metric.to_string()),
                pod_name: pod.map(|pod| pod.full_name().to_string()),
            })
        });
        let told: Vec<Event> = told.collect();
        self.chronicle.hear(self.replay.tick().now, &told, false);
        Ok(true)
    }

    fn tick(&self) -> &Tick {
        self.replay.tick()
    }

    fn now(&self) -> BootTime {
        self.tick().now
    }

    /// How far into the recording.
    fn position(&self) -> Duration {
        self.now().since(self.programme.begun)
    }

    /// Seconds of replay for a second of recording.
    fn speed(&self, total: Duration) -> f64 {
        let lasted = self.programme.lasted.as_secs_f64().max(1.0);
        (total.as_secs_f64() / lasted).min(1.0)
    }

    fn latency(&self) -> Vec<Second> {
        let seconds = usize::try_from(self.position().as_secs()).unwrap_or(usize::MAX);
        let shown = self.programme.p99_ms.iter().take(seconds);
        (0..)
            .zip(shown)
            .map(|(second, p99_ms)| Second {
                p99_ms: *p99_ms,
                act: self
                    .chronicle
                    .act_at(self.programme.begun + Duration::from_secs(second)),
            })
            .collect()
    }

    fn view(&self) -> View {
        let pods = self.tick().sample.pods.iter();
        let mut known: Vec<&Pod> = pods
            .filter_map(|sample| self.replay.pod(&sample.uid))
            .collect();
        // The important one first.
        ordered::sort_by(&mut known, |a, b| b.qos.cmp(&a.qos));
        let weights: &BTreeMap<String, String> = &self.programme.weights;
        View {
            source: Source::Replay {
                recorded: self.recorded.clone(),
            },
            act: self.chronicle.act_at(self.now()),
            elapsed: self.position(),
            left: self.programme.lasted.saturating_sub(self.position()),
            node: self.scene.node(),
            pods: known
                .iter()
                .map(|pod| self.scene.pod(pod, weights.get(&pod.name).cloned()))
                .collect(),
            latency: self.latency(),
            events: self.chronicle.happenings().to_vec(),
        }
    }
}

/// The policies as the recorded demo had them.
fn adapted(node: &NodeFacts, asked: Duration) -> Result<PolicySet, PolicyError> {
    let cast = Cast::for_cpus(node.cpus.max(1));
    let schedule = Schedule::lasting(asked);
    Ok(policy::adapt(&cast, &schedule, node)?.policy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::plain::Plain;
    use crate::demo::story::Act;

    #[test]
    fn the_recording_that_the_program_carries_shows_every_act_and_throttling() {
        let programme: Programme = serde_json::from_str(PROGRAMME).unwrap();
        let mut reel = Reel::open(TRACE.as_bytes(), programme).unwrap();
        let mut acts = Vec::new();
        let mut out = Vec::new();
        let mut plain = Plain::new(&mut out);
        while reel.step().unwrap() {
            let view = reel.view();
            acts.push(view.act);
            plain.show(&view).unwrap();
        }
        acts.dedup();
        let told = String::from_utf8(out).unwrap();
        assert_eq!(
            acts[..4],
            [Act::Alone, Act::Overloaded, Act::Enforced, Act::Release]
        );
        assert!(
            told.starts_with("REPLAY of a recording, not this machine"),
            "{told}"
        );
        assert!(
            told.lines().all(|line| line.starts_with("REPLAY ")),
            "{told}"
        );
        assert!(
            told.contains("(preview, not done): throttle demo/batch-"),
            "{told}"
        );
        let summary = reel.replay.summary();
        assert!(
            summary.rules.values().any(|rule| rule.steps_down > 0),
            "{summary:?}"
        );
        assert!(reel.latency().iter().any(|second| second.p99_ms.is_some()));
    }
}
