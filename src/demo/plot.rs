//! The important pod's p99 over time as bars of text, with the moments of action marked. Pure.

use std::iter;
use std::time::Duration;

use anstyle::Style;

use super::phase::Phase;
use super::view::{Mark, Second};

/// Columns left of the bars, for the scale.
pub const SCALE_WIDTH: usize = 7;
/// Heights of a bar within one row.
const EIGHTHS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Bars over a logarithmic scale: alone and overloaded differ by orders of magnitude.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// The highest p99 of each column in milliseconds, with its phase; `None` without a request.
    bars: Vec<Option<(f64, Phase)>>,
    /// Columns of the marks, ascending.
    marks: Vec<usize>,
    /// The ends of the scale: decimal logarithms of milliseconds.
    low: f64,
    high: f64,
}

/// One character of the plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlotCell {
    /// Part of a bar.
    Bar(char, Phase),
    /// Above the bar at the moment of a mark.
    Mark,
    /// Nothing.
    Empty,
}

impl PlotCell {
    /// The character.
    pub const fn symbol(self) -> char {
        match self {
            Self::Bar(symbol, _) => symbol,
            Self::Mark => '┊',
            Self::Empty => ' ',
        }
    }
}

impl Plot {
    /// A plot of `seconds` of a run that lasts `total`, `width` columns wide with its scale. Longer runs have several seconds
    /// in a column, shorter ones several columns for a second.
    pub fn new(seconds: &[Second], total: Duration, marks: &[Mark], width: usize) -> Self {
        let width = width.saturating_sub(SCALE_WIDTH).max(1);
        let total = usize::try_from(total.as_secs()).unwrap_or(usize::MAX);
        let total = total.max(seconds.len()).max(1);
        let per_column = total.div_ceil(width);
        let per_second = (width / total).max(1);
        let highest = |seconds: &[Second]| {
            let known = seconds.iter().filter_map(|it| Some((it.p99_ms?, it.phase)));
            known.max_by(|a, b| a.0.total_cmp(&b.0))
        };
        let bars: Vec<_> = seconds
            .chunks(per_column)
            .flat_map(|chunk| std::iter::repeat_n(highest(chunk), per_second))
            .collect();
        let values = || bars.iter().flatten().map(|(ms, _)| ms.max(0.001).log10());
        let low = values().reduce(f64::min).map_or(0.0, f64::floor);
        // The next 2, 5 or 10.
        let high = values().reduce(f64::max).map_or(1.0, |it| {
            let steps = [2.0, 5.0, 10.0].map(|step: f64| it.floor() + step.log10());
            steps.into_iter().find(|step| *step >= it).unwrap_or(it)
        });
        let column = |mark: &Mark| {
            let millis = usize::try_from(mark.after.as_millis()).unwrap_or(usize::MAX);
            (millis.saturating_mul(per_second) / 1000 / per_column).min(width - 1)
        };
        let mut columns: Vec<usize> = Vec::new();
        for column in marks.iter().map(column) {
            // Each mark has a column of its own.
            let free = columns.last().map_or(0, |last| last + 1);
            columns.push(column.max(free));
        }
        Self {
            bars,
            marks: columns,
            low,
            high: high.max(low + 1.0),
        }
    }

    /// The cells of each of `height` rows, the top row first.
    pub fn rows(&self, height: usize) -> impl Iterator<Item = Vec<PlotCell>> {
        let width = self
            .bars
            .len()
            .max(self.marks.last().map_or(0, |last| last + 1));
        (0..height).rev().map(move |row| {
            (0..width)
                .map(|column| self.cell(column, row, height))
                .collect()
        })
    }

    fn cell(&self, column: usize, row: usize, height: usize) -> PlotCell {
        let bar = self.bars.get(column).copied().flatten();
        let bar = bar.and_then(|(ms, phase)| {
            let above = self.eighths(ms, height).checked_sub(row * 8 + 1)?;
            Some(PlotCell::Bar(EIGHTHS[above.min(7)], phase))
        });
        let mark = self.marks.contains(&column);
        bar.unwrap_or(if mark {
            PlotCell::Mark
        } else {
            PlotCell::Empty
        })
    }

    /// At least one: a value is always seen.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "within the height of the plot"
    )]
    fn eighths(&self, ms: f64, height: usize) -> usize {
        let part = (ms.max(0.001).log10() - self.low) / (self.high - self.low);
        let eighths = (part.clamp(0.0, 1.0) * (height * 8) as f64).round() as usize;
        eighths.max(1)
    }

    /// The scale beside row `row` from the top: the power of ten in it.
    pub fn scale(&self, row: usize, height: usize) -> String {
        let range = self.high - self.low;
        let edge = |row: usize| self.high - range * row as f64 / height as f64;
        let power = edge(row).floor();
        let last = row + 1 == height;
        let label = if power > edge(row + 1) || (last && power >= edge(row + 1)) {
            duration(power)
        } else {
            String::new()
        };
        format!("{label:>6} ")
    }

    /// The row below the bars: the number of each mark.
    pub fn mark_row(&self) -> String {
        let mut row = String::new();
        for (number, column) in (1_usize..).zip(&self.marks) {
            let spaces = column.saturating_sub(row.chars().count());
            row.extend(std::iter::repeat_n(' ', spaces));
            row.push_str(&number.to_string());
        }
        row
    }

    /// The whole plot as lines of text, each cell in this style.
    pub fn lines(&self, height: usize, style: impl Fn(PlotCell) -> Style) -> Vec<String> {
        let line = |(row, cells): (usize, Vec<PlotCell>)| {
            let last = cells.iter().rposition(|cell| *cell != PlotCell::Empty);
            let shown = &cells[..last.map_or(0, |last| last + 1)];
            let alike = shown.chunk_by(|a, b| style(*a) == style(*b));
            let painted = alike.map(|cells| {
                let text: String = cells.iter().map(|cell| cell.symbol()).collect();
                paint(&text, style(cells[0]))
            });
            let line: String = iter::once(self.scale(row, height)).chain(painted).collect();
            line.trim_end().to_owned()
        };
        let mut lines: Vec<String> = self.rows(height).enumerate().map(line).collect();
        let marks = paint(&self.mark_row(), style(PlotCell::Mark));
        lines.push(format!("{:SCALE_WIDTH$}{marks}", ""));
        lines
    }
}

/// A text in this style.
fn paint(text: &str, style: Style) -> String {
    format!("{style}{text}{style:#}")
}

/// What the numbers of the marks mean.
pub fn legend(marks: &[Mark]) -> Vec<String> {
    let numbered = (1..).zip(marks);
    numbered
        .map(|(number, mark)| format!("{number} {}", mark.what))
        .collect()
}

/// 10 to this power, in milliseconds.
fn duration(power: f64) -> String {
    let ms = 10_f64.powf(power);
    if ms >= 999.0 {
        format!("{:.0} s", ms / 1000.0)
    } else {
        format!("{} ms", (ms * 1000.0).round() / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(p99_ms: f64, phase: Phase) -> Second {
        Second {
            p99_ms: Some(p99_ms),
            phase,
        }
    }

    fn mark(millis: u64) -> Mark {
        Mark {
            after: Duration::from_millis(millis),
            what: "something",
        }
    }

    fn plain(_: PlotCell) -> Style {
        Style::new()
    }

    fn run() -> Vec<Second> {
        let mut seconds = vec![second(20.0, Phase::Alone); 3];
        seconds.extend([second(1000.0, Phase::Overloaded); 3]);
        seconds.extend([second(20.0, Phase::Enforced); 4]);
        seconds
    }

    #[test]
    fn harm_and_cure_are_seen_with_their_moments() {
        let marks = [mark(3000), mark(6000), mark(6100)];
        let plot = Plot::new(&run(), Duration::from_secs(10), &marks, SCALE_WIDTH + 10);
        assert_eq!(
            plot.lines(4, plain),
            [
                "   1 s    ▄▄▄┊┊",
                "          ███┊┊",
                "100 ms    ███┊┊",
                " 10 ms ▄▄▄███▄▄▄▄",
                "          1  23",
            ]
        );
    }

    #[test]
    fn each_cell_has_its_style_and_cells_alike_share_it() {
        let plot = Plot::new(&run(), Duration::from_secs(10), &[], SCALE_WIDTH + 10);
        let bold_if_overloaded = |cell| match cell {
            PlotCell::Bar(_, Phase::Overloaded) => Style::new().bold(),
            _ => Style::new(),
        };
        let lines = plot.lines(2, bold_if_overloaded);
        assert_eq!(lines[1], "100 ms ▂▂▂\u{1b}[1m███\u{1b}[0m▂▂▂▂");
    }

    #[test]
    fn a_long_run_keeps_the_highest_of_each_column() {
        let mut seconds = vec![second(20.0, Phase::Alone); 100];
        seconds[57] = second(1000.0, Phase::Alone);
        let plot = Plot::new(&seconds, Duration::from_secs(100), &[], SCALE_WIDTH + 10);
        assert_eq!(plot.lines(1, plain)[0], "   1 s ▁▁▁▁▁▇▁▁▁▁");
    }

    #[test]
    fn a_short_run_fills_the_width() {
        let plot = Plot::new(&run(), Duration::from_secs(10), &[], SCALE_WIDTH + 40);
        assert_eq!(plot.bars.len(), 40);
    }

    #[test]
    fn a_run_without_requests_and_tiny_widths_can_be_drawn() {
        for width in [0, 1, 8, 40] {
            let empty = Plot::new(&[], Duration::ZERO, &[mark(5000)], width);
            assert_eq!(empty.lines(3, plain).len(), 4);
        }
    }
}
