//! The view as lines of text, for pipes and logs.

use std::io::{self, Write};
use std::time::Duration;

use super::show::Show;
use super::story::Act;
use super::view::{Happening, PodView, Source, View};
use crate::engine::units::MilliCpu;

/// A line of figures this often, besides one for each thing that happens.
const FIGURES_EVERY: Duration = Duration::from_secs(2);

/// Writes lines.
#[derive(Debug)]
pub struct Plain<W> {
    out: W,
    act: Option<Act>,
    told: usize,
    figures: Duration,
}

impl<W: Write> Plain<W> {
    /// Nothing told yet.
    pub const fn new(out: W) -> Self {
        Self {
            out,
            act: None,
            told: 0,
            figures: Duration::ZERO,
        }
    }

    fn line(&mut self, view: &View, after: Duration, text: &str) -> io::Result<()> {
        let replay = match view.source {
            Source::Live { .. } => "",
            Source::Replay { .. } => "REPLAY ",
        };
        writeln!(self.out, "{replay}{:6.1} s  {text}", after.as_secs_f64())
    }

    /// The next events, as long as they are `due`.
    fn tell_events(&mut self, view: &View, due: impl Fn(&Happening) -> bool) -> io::Result<()> {
        for event in view
            .events
            .iter()
            .skip(self.told)
            .take_while(|event| due(event))
        {
            self.told += 1;
            self.line(view, event.after, &event.what)?;
        }
        Ok(())
    }

    fn begin(&mut self, view: &View) -> io::Result<()> {
        match &view.source {
            Source::Live { machine } => {
                writeln!(self.out, "Plimsoll demo on this machine: {machine}")
            }
            Source::Replay { recorded } => {
                writeln!(
                    self.out,
                    "REPLAY of a recording, not this machine: {recorded}"
                )
            }
        }
    }
}

impl<W: Write> Show for Plain<W> {
    fn show(&mut self, view: &View) -> io::Result<()> {
        if self.act.is_none() {
            self.begin(view)?;
        }
        // An act begins at the very moment of the view: what happened before comes first.
        self.tell_events(view, |event| event.after < view.elapsed)?;
        if self.act != Some(view.act) {
            self.act = Some(view.act);
            self.line(view, view.elapsed, &format!("== {} ==", view.act))?;
        }
        self.tell_events(view, |_| true)?;
        if view.elapsed >= self.figures {
            self.figures = view.elapsed + FIGURES_EVERY;
            self.line(view, view.elapsed, &figures(view))?;
        }
        self.out.flush()
    }

    fn is_stop_asked(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

fn figures(view: &View) -> String {
    let node = amount(view.node.usage);
    let pods: Vec<String> = view.pods.iter().map(pod_figures).collect();
    let p99 = view
        .latest_p99()
        .map_or_else(|| "-".to_owned(), |p99| format!("{p99:.2} ms"));
    format!(
        "node {node}/{} (line {}) | {} | p99 {p99}",
        view.node.capacity,
        view.node.line,
        pods.join(", ")
    )
}

fn pod_figures(pod: &PodView) -> String {
    let quota = pod
        .quota
        .map_or_else(|| "?".to_owned(), |quota| quota.to_string());
    format!("{} {} of {quota}", pod.name, amount(pod.usage))
}

fn amount(usage: Option<MilliCpu>) -> String {
    usage.map_or_else(|| "?".to_owned(), |usage| usage.to_string())
}
