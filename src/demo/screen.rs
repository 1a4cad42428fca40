//! The demo on a terminal. Everything fits 80 columns and 24 rows; 40 columns show every pod with fewer figures.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Table, Widget};

use super::phase::Phase;
use super::plot::{Plot, PlotCell, SCALE_WIDTH, legend};
use super::view::{DemoNode, DemoView, LogEntry, PodView};
use crate::engine::units::MilliCpu;

/// Above the threshold, and during the overload.
const OVER: Color = Color::LightRed;
/// Below the threshold, and while the policies are in force.
const UNDER: Color = Color::LightGreen;
const MUTED: Color = Color::Gray;
/// The moments of action.
const MARK: Color = Color::LightYellow;
const FOOTER: &str = " q or Ctrl-C: stop now and restore everything";

/// Draws the view.
pub fn draw(frame: &mut Frame<'_>, view: &DemoView) {
    let [head, node, pods, latency, events, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(2),
        Constraint::Length(rows(view.pods.len()) + 3),
        Constraint::Length(plot_height(frame.area().height)),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(heading(view), head);
    frame.render_widget(UsageBar(&view.node), node);
    frame.render_widget(pod_table(view, pods.width), pods);
    draw_latency(frame, latency, view);
    frame.render_widget(event_list(&view.events, events), events);
    frame.render_widget(Line::from(FOOTER).fg(MUTED), foot);
}

/// What a terminal has more than 24 rows goes to the plot first.
fn plot_height(height: u16) -> u16 {
    height.saturating_sub(16).clamp(8, 14)
}

fn rows(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

fn heading(view: &DemoView) -> Paragraph<'_> {
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

/// The node's CPU in words, and as a bar with the threshold drawn on it.
struct UsageBar<'a>(&'a DemoNode);

impl Widget for UsageBar<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let node = self.0;
        let usage = node
            .usage
            .map_or_else(|| "not known yet".to_owned(), |usage| usage.to_string());
        let words = format!(
            " CPU of the node: {usage} of {}, threshold {}",
            node.capacity, node.threshold
        );
        Line::from(words).render(area, buffer);
        if area.height < 2 || area.width < 6 {
            return;
        }
        let bar = Rect {
            x: area.x + 1,
            y: area.y + 1,
            width: area.width - 2,
            height: 1,
        };
        let threshold = column(node.threshold, node.capacity, bar.width);
        let filled = node
            .usage
            .map_or(0, |usage| column(usage, node.capacity, bar.width));
        for x in 0..bar.width {
            let cell = &mut buffer[(bar.x + x, bar.y)];
            cell.set_symbol(if x < filled { "█" } else { "░" });
            let colour = match (x < filled, x > threshold) {
                (true, true) => OVER,
                (true, false) => UNDER,
                (false, _) => Color::DarkGray,
            };
            cell.set_fg(colour);
        }
        let style = Style::new()
            .fg(Color::LightYellow)
            .bg(Color::Black)
            .add_modifier(Modifier::BOLD);
        buffer.set_string(bar.x + threshold.min(bar.width - 1), bar.y, "┃", style);
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
    cell: fn(&PodView, MilliCpu) -> String,
}

const COLUMNS: [Column; 7] = {
    const fn column(
        title: &'static str,
        width: u16,
        min_table_width: u16,
        cell: fn(&PodView, MilliCpu) -> String,
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
        column("pod", 10, 0, |pod, _| pod.name.clone()),
        column("class", 10, 60, |pod, _| pod.class.clone()),
        column("weight", 7, 70, |pod, _| or_unknown(pod.weight.as_ref())),
        column("may use", 11, 0, |pod, _| allowance(pod)),
        column("originally", 10, 50, |pod, _| or_unknown(pod.original)),
        column("uses", 7, 0, |pod, _| or_unknown(pod.usage)),
        Column {
            title: "",
            width: Constraint::Min(10),
            min_table_width: 80,
            cell: use_bar,
        },
    ]
};

fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}

fn allowance(pod: &PodView) -> String {
    let quota = or_unknown(pod.quota);
    if pod.idle {
        format!("{quota}, idle")
    } else {
        quota
    }
}

fn pod_table(view: &DemoView, width: u16) -> Table<'_> {
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
        Row::new(shown().map(|column| (column.cell)(pod, view.node.capacity))).style(style)
    };
    Table::new(
        view.pods.iter().map(row),
        shown().map(|column| column.width),
    )
    .header(head)
    .block(Block::bordered().title(" pods: CPU that each may use, and uses "))
}

/// A pod's share of all CPUs, as a short bar.
fn use_bar(pod: &PodView, capacity: MilliCpu) -> String {
    const WIDTH: u16 = 16;
    let used = pod.usage.map_or(0, |usage| column(usage, capacity, WIDTH));
    (0..WIDTH)
        .map(|x| if x < used { '▇' } else { '░' })
        .collect()
}

fn draw_latency(frame: &mut Frame<'_>, area: Rect, view: &DemoView) {
    let now = view
        .latest_p99()
        .map_or_else(|| "none yet".to_owned(), |p99| format!("{p99:.0} ms"));
    let block = Block::bordered()
        .title(" important pod: p99 of each second ")
        .title(Line::from(format!(" now {now} ")).right_aligned());
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let legend = legend_lines(view, inner.width);
    let height = usize::from(inner.height).saturating_sub(legend.len() + 1);
    let total = view.elapsed + view.left;
    let plot = Plot::new(&view.latency, total, &view.marks, usize::from(inner.width));
    let bars = plot.rows(height).enumerate().map(|(row, cells)| {
        let scale = Span::raw(plot.scale(row, height)).fg(MUTED);
        let cells = cells.into_iter().map(cell_span);
        std::iter::once(scale).chain(cells).collect::<Line<'_>>()
    });
    let marks = format!("{:SCALE_WIDTH$}{}", "", plot.mark_row());
    let mut lines: Vec<Line<'_>> = bars.collect();
    lines.push(Line::from(marks).fg(MARK));
    lines.extend(legend.into_iter().map(|line| Line::from(line).fg(MARK)));
    frame.render_widget(Paragraph::new(lines), inner);
}

fn cell_span(cell: PlotCell) -> Span<'static> {
    let colour = match cell {
        PlotCell::Bar(_, phase) => phase_colour(phase),
        PlotCell::Mark | PlotCell::Empty => MARK,
    };
    Span::raw(cell.symbol().to_string()).fg(colour)
}

/// As many marks on a line as fit.
fn legend_lines(view: &DemoView, width: u16) -> Vec<String> {
    let mut lines = vec![String::new()];
    for entry in legend(&view.marks) {
        let line = lines.last_mut();
        match line.filter(|line| line.len() + entry.len() + 2 <= usize::from(width)) {
            Some(line) => {
                line.push_str("  ");
                line.push_str(&entry);
            }
            None => lines.push(format!("  {entry}")),
        }
    }
    lines
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
