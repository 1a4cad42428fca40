//! The demo as lines of text, for pipes and logs.

use std::io::{self, Write};
use std::time::Duration;

use super::phase::Phase;
use super::renderer::Renderer;
use super::view::{DemoView, LogEntry, PodView};
use crate::engine::units::MilliCpu;

/// Interval between lines with figures, beside one for each log entry.
const FIGURES_INTERVAL: Duration = Duration::from_secs(2);

/// Writes lines of text.
#[derive(Debug)]
pub struct TextRenderer<W> {
    out: W,
    phase: Option<Phase>,
    entries_written: usize,
    next_figures: Duration,
}

impl<W: Write> TextRenderer<W> {
    /// A renderer that has written nothing yet.
    pub const fn new(out: W) -> Self {
        Self {
            out,
            phase: None,
            entries_written: 0,
            next_figures: Duration::ZERO,
        }
    }

    fn line(&mut self, after: Duration, text: &str) -> io::Result<()> {
        writeln!(self.out, "{:6.1} s  {text}", after.as_secs_f64())
    }

    /// Writes the next log entries while they are `due`.
    fn write_entries(
        &mut self,
        view: &DemoView,
        due: impl Fn(&LogEntry) -> bool,
    ) -> io::Result<()> {
        for event in view
            .events
            .iter()
            .skip(self.entries_written)
            .take_while(|event| due(event))
        {
            self.entries_written += 1;
            self.line(event.after, &event.message)?;
        }
        Ok(())
    }
}

impl<W: Write> Renderer for TextRenderer<W> {
    fn render(&mut self, view: &DemoView) -> io::Result<()> {
        if self.phase.is_none() {
            writeln!(self.out, "Plimsoll demo on this machine: {}", view.machine)?;
        }
        // The phase starts at the time of the view: earlier entries come first.
        self.write_entries(view, |event| event.after < view.elapsed)?;
        if self.phase != Some(view.phase) {
            self.phase = Some(view.phase);
            self.line(view.elapsed, &format!("== {} ==", view.phase))?;
        }
        self.write_entries(view, |_| true)?;
        if view.elapsed >= self.next_figures {
            self.next_figures = view.elapsed + FIGURES_INTERVAL;
            self.line(view.elapsed, &figures(view))?;
        }
        self.out.flush()
    }

    fn stop_requested(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

fn figures(view: &DemoView) -> String {
    let node = amount(view.node.usage);
    let pods: Vec<String> = view.pods.iter().map(pod_figures).collect();
    let p99 = view
        .latest_p99()
        .map_or_else(|| "-".to_owned(), |p99| format!("{p99:.2} ms"));
    format!(
        "node {node}/{} (threshold {}) | {} | p99 {p99}",
        view.node.capacity,
        view.node.threshold,
        pods.join(" | ")
    )
}

fn pod_figures(pod: &PodView) -> String {
    let quota = pod
        .quota
        .map_or_else(|| "?".to_owned(), |quota| quota.to_string());
    let idle = if pod.idle { ", idle class" } else { "" };
    format!("{} {} of {quota}{idle}", pod.name, amount(pod.usage))
}

fn amount(usage: Option<MilliCpu>) -> String {
    usage.map_or_else(|| "?".to_owned(), |usage| usage.to_string())
}
