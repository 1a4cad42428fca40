//! The demo on a terminal. Everything fits 80 columns and 24 rows; 40 columns show every pod with fewer figures.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, SparklineBar, Table, Widget};

use super::phase::Phase;
use super::view::{LogEntry, NodeView, PodView, Second, View};
use crate::engine::units::{MilliCpu, Quota};

/// Above the threshold, and during the overload.
const OVER: Color = Color::LightRed;
/// Below the threshold, and while the policies are in force.
const UNDER: Color = Color::LightGreen;
const MUTED: Color = Color::Gray;
const FOOTER: &str = " q or Ctrl-C: stop now and restore everything";

/// Draws the view.
pub fn draw(frame: &mut Frame<'_>, view: &View) {
    let [head, node, pods, latency, events, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(4),
        Constraint::Length(rows(view.pods.len()) + 3),
        Constraint::Length(5),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(heading(view), head);
    frame.render_widget(UsageBar(&view.node), node);
    frame.render_widget(pod_table(&view.pods, pods.width), pods);
    draw_latency(frame, latency, view);
    frame.render_widget(event_list(&view.events, events), events);
    frame.render_widget(Line::from(FOOTER).fg(MUTED), foot);
}

fn rows(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

fn heading(view: &View) -> Paragraph<'_> {
    let label = Span::styled(
        " Plimsoll demo on this machine ",
        Style::new().reversed().bold(),
    );
    let time = format!(
        "  {} s, at most {} s left",
        view.elapsed.as_secs(),
        view.left.as_secs()
    );
    let first = Line::from(vec![
        label,
        Span::raw("  "),
        Span::raw(view.machine.as_str()),
        Span::raw(time).fg(MUTED),
    ]);
    let phase = Line::from(vec![
        Span::raw(format!(" {} ", phase_number(view.phase))).fg(MUTED),
        Span::styled(
            view.phase.to_string(),
            Style::new().fg(phase_colour(view.phase)).bold(),
        ),
    ]);
    Paragraph::new(vec![first, phase])
}

fn phase_number(phase: Phase) -> String {
    format!("{}/5", phase as u8 + 1)
}

const fn phase_colour(phase: Phase) -> Color {
    match phase {
        Phase::Overloaded => OVER,
        Phase::Enforced => UNDER,
        Phase::Alone | Phase::Release | Phase::Done => MUTED,
    }
}

/// The node's CPU as a bar with the threshold drawn on it.
struct UsageBar<'a>(&'a NodeView);

impl Widget for UsageBar<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let node = self.0;
        let usage = node
            .usage
            .map_or_else(|| "not known yet".to_owned(), |usage| usage.to_string());
        let block = Block::bordered().title(format!(
            " CPU of the node: {usage} of {}, threshold {} ",
            node.capacity, node.threshold
        ));
        let inner = block.inner(area);
        block.render(area, buffer);
        if inner.height < 2 || inner.width < 4 {
            return;
        }
        let threshold = column(node.threshold, node.capacity, inner.width);
        let filled = node
            .usage
            .map_or(0, |usage| column(usage, node.capacity, inner.width));
        for x in 0..inner.width {
            let cell = &mut buffer[(inner.x + x, inner.y)];
            cell.set_symbol(if x < filled { "█" } else { "░" });
            let colour = match (x < filled, x > threshold) {
                (true, true) => OVER,
                (true, false) => UNDER,
                (false, _) => Color::DarkGray,
            };
            cell.set_fg(colour);
        }
        draw_threshold(threshold, inner, buffer);
    }
}

/// The threshold on the bar, with its name below.
fn draw_threshold(column: u16, inner: Rect, buffer: &mut Buffer) {
    let style = Style::new()
        .fg(Color::LightYellow)
        .bg(Color::Black)
        .add_modifier(Modifier::BOLD);
    let x = inner.x + column.min(inner.width - 1);
    buffer.set_string(x, inner.y, "┃", style);
    let name = "threshold";
    let right = rows(name.len()) + 2;
    if column + right < inner.width {
        buffer.set_string(x, inner.y + 1, format!("┃ {name}"), style);
    } else {
        let start = x.saturating_sub(right - 1).max(inner.x);
        buffer.set_string(start, inner.y + 1, format!("{name} ┃"), style);
    }
}

/// The column of `part` on a bar of `width` columns for `whole`.
fn column(part: MilliCpu, whole: MilliCpu, width: u16) -> u16 {
    let scaled = u128::from(part.0) * u128::from(width) / u128::from(whole.0.max(1));
    u16::try_from(scaled).map_or(width, |column| column.min(width))
}

/// A column of the table of pods.
struct Column {
    title: &'static str,
    width: Constraint,
    /// Narrower tables leave the column out.
    min_table_width: u16,
    cell: fn(&PodView) -> String,
}

const COLUMNS: [Column; 7] = {
    const fn column(
        title: &'static str,
        width: u16,
        min_table_width: u16,
        cell: fn(&PodView) -> String,
    ) -> Column {
        let width = Constraint::Length(width);
        Column {
            title,
            width,
            min_table_width,
            cell,
        }
    }
    [
        column("pod", 11, 0, |pod| pod.name.clone()),
        column("class", 11, 60, |pod| pod.class.clone()),
        column("weight", 7, 70, |pod| or_unknown(pod.weight.as_ref())),
        column("uses", 7, 0, |pod| or_unknown(pod.usage)),
        column("may use", 8, 0, |pod| or_unknown(pod.quota)),
        column("originally", 11, 50, |pod| or_unknown(pod.original)),
        Column {
            title: "",
            width: Constraint::Min(10),
            min_table_width: 80,
            cell: allowance_bar,
        },
    ]
};

fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}

fn pod_table(pods: &[PodView], width: u16) -> Table<'_> {
    let shown = || {
        COLUMNS
            .iter()
            .filter(|column| column.min_table_width <= width)
    };
    let head = Row::new(shown().map(|column| column.title)).fg(MUTED);
    let row = |pod: &PodView| {
        let style = if pod.is_throttled() {
            Style::new().fg(Color::LightYellow)
        } else {
            Style::new()
        };
        Row::new(shown().map(|column| (column.cell)(pod))).style(style)
    };
    Table::new(pods.iter().map(row), shown().map(|column| column.width))
        .header(head)
        .block(Block::bordered().title(" pods: CPU used and CPU quota "))
}

/// Usage against the quota of a throttled pod, as a short bar.
fn allowance_bar(pod: &PodView) -> String {
    const WIDTH: u64 = 16;
    match (pod.is_throttled(), pod.quota, pod.usage) {
        (true, Some(Quota::Limit(quota)), Some(usage)) => {
            let used = (usage.0.saturating_mul(WIDTH) / quota.0.max(1)).min(WIDTH);
            let bar: String = (0..WIDTH)
                .map(|i| if i < used { '▇' } else { '░' })
                .collect();
            bar
        }
        (true, ..) => "throttled".to_owned(),
        _ => String::new(),
    }
}

fn draw_latency(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let now = view
        .latest_p99()
        .map_or_else(|| "none yet".to_owned(), |p99| format!("{p99:.2} ms"));
    let highest = view.latency.iter().filter_map(|second| second.p99_ms);
    let highest = highest.fold(0.0, f64::max);
    let block = Block::bordered()
        .title(" important worker: p99 latency of each second ")
        .title(Line::from(format!(" now {now}, highest {highest:.2} ms ")).right_aligned());
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let shown = view.latency.len().saturating_sub(usize::from(inner.width));
    let bars: Vec<SparklineBar> = view.latency.iter().skip(shown).map(bar).collect();
    frame.render_widget(Sparkline::default().data(bars), inner);
}

/// In microseconds, since a bar's height is a whole number.
fn bar(second: &Second) -> SparklineBar {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a latency is positive, and a demo_pods saturates"
    )]
    let micros = second.p99_ms.map(|p99| (p99 * 1000.0) as u64);
    SparklineBar::from(micros).style(Style::new().fg(phase_colour(second.phase)))
}

fn event_list(events: &[LogEntry], area: Rect) -> Paragraph<'_> {
    let height = usize::from(area.height.saturating_sub(2));
    let newest = events.len().saturating_sub(height);
    let lines = events.iter().skip(newest).map(|event| {
        Line::from(vec![
            Span::raw(format!("{:5.1}s ", event.after.as_secs_f64())).fg(MUTED),
            Span::raw(event.message.as_str()),
        ])
    });
    Paragraph::new(lines.collect::<Vec<_>>()).block(Block::bordered().title(" events "))
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
