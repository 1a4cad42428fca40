//! The view on a terminal. Everything fits 80 columns and 24 rows; on 40 columns every pod is there, with fewer figures.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, SparklineBar, Table, Widget};

use super::story::Act;
use super::view::{Happening, NodeView, PodView, Second, Source, View};
use crate::engine::units::{MilliCpu, Quota};

/// Over the line, and what the overload does.
const OVER: Color = Color::LightRed;
/// Below the line, and what the policies do.
const UNDER: Color = Color::LightGreen;
const QUIET: Color = Color::Gray;

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
    frame.render_widget(Gauge(&view.node), node);
    frame.render_widget(pod_table(&view.pods, pods.width), pods);
    draw_latency(frame, latency, view);
    frame.render_widget(event_list(&view.events, events), events);
    frame.render_widget(Line::from(footer(view)).fg(QUIET), foot);
}

fn rows(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

fn heading(view: &View) -> Paragraph<'_> {
    let (label, from) = match &view.source {
        Source::Live { machine } => (
            Span::styled(
                " Plimsoll demo on this machine ",
                Style::new().reversed().bold(),
            ),
            machine,
        ),
        Source::Replay { recorded } => (
            Span::styled(
                " REPLAY of a recording ",
                Style::new().fg(Color::Black).bg(Color::LightYellow).bold(),
            ),
            recorded,
        ),
    };
    let time = format!(
        "  {} s, at most {} s left",
        view.elapsed.as_secs(),
        view.left.as_secs()
    );
    let first = Line::from(vec![
        label,
        Span::raw("  "),
        Span::raw(from),
        Span::raw(time).fg(QUIET),
    ]);
    let act = Line::from(vec![
        Span::raw(format!(" {} ", act_number(view.act))).fg(QUIET),
        Span::styled(
            view.act.to_string(),
            Style::new().fg(act_colour(view.act)).bold(),
        ),
    ]);
    Paragraph::new(vec![first, act])
}

fn act_number(act: Act) -> String {
    format!("{}/5", act as u8 + 1)
}

const fn act_colour(act: Act) -> Color {
    match act {
        Act::Overloaded => OVER,
        Act::Enforced => UNDER,
        Act::Alone | Act::Release | Act::Over => QUIET,
    }
}

/// The node's CPU as a bar with the load line drawn on it.
struct Gauge<'a>(&'a NodeView);

impl Widget for Gauge<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let node = self.0;
        let usage = node
            .usage
            .map_or_else(|| "not known yet".to_owned(), |usage| usage.to_string());
        let block = Block::bordered().title(format!(
            " CPU of the node: {usage} of {}, load line {} ",
            node.capacity, node.line
        ));
        let inner = block.inner(area);
        block.render(area, buffer);
        if inner.height < 2 || inner.width < 4 {
            return;
        }
        let line = column(node.line, node.capacity, inner.width);
        let filled = node
            .usage
            .map_or(0, |usage| column(usage, node.capacity, inner.width));
        for x in 0..inner.width {
            let cell = &mut buffer[(inner.x + x, inner.y)];
            cell.set_symbol(if x < filled { "█" } else { "░" });
            let colour = match (x < filled, x > line) {
                (true, true) => OVER,
                (true, false) => UNDER,
                (false, _) => Color::DarkGray,
            };
            cell.set_fg(colour);
        }
        draw_line(line, inner, buffer);
    }
}

/// The mark on the bar, with its name below.
fn draw_line(line: u16, inner: Rect, buffer: &mut Buffer) {
    let style = Style::new()
        .fg(Color::LightYellow)
        .bg(Color::Black)
        .add_modifier(Modifier::BOLD);
    let x = inner.x + line.min(inner.width - 1);
    buffer.set_string(x, inner.y, "┃", style);
    let name = "load line";
    let right = rows(name.len()) + 2;
    if line + right < inner.width {
        buffer.set_string(x, inner.y + 1, format!("┃ {name}"), style);
    } else {
        let begin = x.saturating_sub(right - 1).max(inner.x);
        buffer.set_string(begin, inner.y + 1, format!("{name} ┃"), style);
    }
}

/// Where `part` of `whole` stands on `width` columns.
fn column(part: MilliCpu, whole: MilliCpu, width: u16) -> u16 {
    let scaled = u128::from(part.0) * u128::from(width) / u128::from(whole.0.max(1));
    u16::try_from(scaled).map_or(width, |column| column.min(width))
}

/// A column of the table of pods.
struct Column {
    title: &'static str,
    width: Constraint,
    /// A narrower table does without.
    least: u16,
    cell: fn(&PodView) -> String,
}

const COLUMNS: [Column; 7] = {
    const fn column(
        title: &'static str,
        width: u16,
        least: u16,
        cell: fn(&PodView) -> String,
    ) -> Column {
        let width = Constraint::Length(width);
        Column {
            title,
            width,
            least,
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
            least: 80,
            cell: allowance_bar,
        },
    ]
};

fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}

fn pod_table(pods: &[PodView], width: u16) -> Table<'_> {
    let shown = || COLUMNS.iter().filter(|column| column.least <= width);
    let head = Row::new(shown().map(|column| column.title)).fg(QUIET);
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

/// How much of its use so far the quota leaves, as a short bar.
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
        reason = "a latency is positive, and a cast saturates"
    )]
    let micros = second.p99_ms.map(|p99| (p99 * 1000.0) as u64);
    SparklineBar::from(micros).style(Style::new().fg(act_colour(second.act)))
}

fn event_list(events: &[Happening], area: Rect) -> Paragraph<'_> {
    let room = usize::from(area.height.saturating_sub(2));
    let newest = events.len().saturating_sub(room);
    let lines = events.iter().skip(newest).map(|event| {
        Line::from(vec![
            Span::raw(format!("{:5.1}s ", event.after.as_secs_f64())).fg(QUIET),
            Span::raw(event.what.as_str()),
        ])
    });
    Paragraph::new(lines.collect::<Vec<_>>()).block(Block::bordered().title(" what happened "))
}

fn footer(view: &View) -> &'static str {
    match view.source {
        Source::Live { .. } => " q or Ctrl-C: stop now and put everything back",
        Source::Replay { .. } => " q or Ctrl-C: stop. Nothing on this machine is changed.",
    }
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
