//! How much slower important pods are than alone, as bars, from the table in `docs/protection.md`: a panel for each scene, a bar
//! for each way, and the scene's limit as a band; and one scene for the README.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::scenes::Scene;
use crate::ways::Way;

const WIDTH: i32 = 560;
const HEADER: i32 = 34;
const ROW: i32 = 22;
const FOOTER: i32 = 34;
const COLUMNS: usize = 2;
/// Where the bars begin and end in a panel: names are before, figures behind.
const BARS: (i32, i32) = (178, 390);
/// Of the axis, in times alone.
const TICKS: [f64; 7] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
const AXIS: (f64, f64) = (0.8, 120.0);

const GOOD: RGBColor = RGBColor(20, 120, 60);
const BAD: RGBColor = RGBColor(190, 90, 40);
const GREY: RGBColor = RGBColor(110, 110, 110);

/// The scene of the README's picture, its way (the first that the table has), its size, and where its bars begin and end.
const README_SCENE: &str = "Burst";
const README_WAYS: [Way; 2] = [Way::Standing, Way::Idle];
const README_SIZE: (u32, u32) = (800, 282);
const README_BARS: (i32, i32) = (176, 570);

/// A scene of the table.
struct Panel<'a> {
    title: &'a str,
    rows: Vec<Row<'a>>,
}

/// A way of a scene: the names of the columns with its cells.
struct Row<'a>(Vec<(&'a str, &'a str)>);

impl Panel<'_> {
    fn row(&self, way: Way) -> Option<&Row<'_>> {
        let name = way.name();
        self.rows.iter().find(|row| row.cell("way") == name)
    }

    /// All ways but *alone*, in the table's order.
    fn bars(&self) -> impl Iterator<Item = &Row<'_>> {
        let alone = Way::Alone.name();
        let rows = self.rows.iter();
        rows.filter(move |row| row.cell("way") != alone)
    }

    fn height(&self) -> i32 {
        HEADER + ROW * i32::try_from(self.bars().count()).unwrap()
    }
}

impl Row<'_> {
    fn cell(&self, column: &str) -> &str {
        let mut cells = self.0.iter();
        cells.find(|(name, _)| *name == column).unwrap().1
    }

    fn times_alone(&self) -> f64 {
        self.cell("times alone").parse().unwrap()
    }

    fn p99_ms(&self) -> f64 {
        self.cell("p99 ms").parse().unwrap()
    }

    fn batch_cpus(&self) -> f64 {
        let millis = self.cell("batch CPU").strip_suffix('m').unwrap();
        millis.parse::<f64>().unwrap() / 1000.0
    }
}

/// Draws the table, so that the picture shows what the page says.
pub fn draw(table: &str, scenes: &[Scene], path: &Path) {
    let panels = read(table);
    let rows: Vec<&[Panel<'_>]> = panels.chunks(COLUMNS).collect();
    let height = |row: &&[Panel<'_>]| {
        let highest = row.iter().map(Panel::height).max();
        highest.unwrap_or(HEADER) + FOOTER
    };
    let size = (WIDTH * 2, rows.iter().map(height).sum::<i32>());
    let size = (size.0.cast_unsigned(), size.1.cast_unsigned());
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE).unwrap();
    let mut top = 0;
    for row in rows {
        for (column, panel) in (0..).zip(row) {
            let limit = scenes
                .iter()
                .find(|scene| panel.title.eq_ignore_ascii_case(scene.name));
            let limit = limit.map_or(1.1, |scene| scene.max_ratio);
            let canvas = Canvas {
                area: &area,
                left: column * WIDTH,
                top,
            };
            draw_panel(panel, limit, &canvas);
        }
        top += height(&row);
    }
    area.present().unwrap();
}

/// Draws what protection is worth, for the README: the service of one scene alone, unprotected and protected, and what batch
/// gets. Returns whether the table has these three.
pub fn draw_for_readme(table: &str, path: &Path) -> bool {
    let panels = read(table);
    let scene = panels.iter().find(|panel| panel.title == README_SCENE);
    let row = |way| scene.and_then(|scene| scene.row(way));
    let protected = README_WAYS.into_iter().find_map(row);
    let (Some(alone), Some(unprotected), Some(protected)) =
        (row(Way::Alone), row(Way::Unprotected), protected)
    else {
        return false;
    };
    let area = SVGBackend::new(path, README_SIZE).into_drawing_area();
    area.fill(&WHITE).unwrap();
    let canvas = Canvas {
        area: &area,
        left: 0,
        top: 0,
    };
    let ms = |row: &Row<'_>| format!("{} ms", row.cell("p99 ms"));
    let times = |row: &Row<'_>| format!("{}, {} times alone", ms(row), digits(row.times_alone()));
    let title = "p99 latency of an important service on a busy node";
    canvas.write(title, (16, 24), 21, BLACK, HPos::Left);
    let latencies = [
        ("alone", alone.p99_ms(), ms(alone), GREY),
        (
            "beside batch pods",
            unprotected.p99_ms(),
            times(unprotected),
            BAD,
        ),
        ("with Plimsoll", protected.p99_ms(), times(protected), GOOD),
    ];
    canvas.bars(&latencies, 46, 30);
    let cpus = |row: &Row<'_>| format!("{} CPUs", digits(row.batch_cpus()));
    let left = protected.cell("of what is left");
    let kept = format!("{}, {left} of what the service leaves", cpus(protected));
    let title = "CPU that the batch pods use";
    canvas.write(title, (16, 160), 17, BLACK, HPos::Left);
    let batch = [
        (
            "beside batch pods",
            unprotected.batch_cpus(),
            cpus(unprotected),
            BAD,
        ),
        ("with Plimsoll", protected.batch_cpus(), kept, GOOD),
    ];
    canvas.bars(&batch, 174, 24);
    let given_up = unprotected.cell("given up");
    let way = protected.cell("way");
    let lost = format!(
        "Unprotected, the service gives up {given_up} of its requests. With Plimsoll: {way}."
    );
    canvas.write(&lost, (16, 242), 14, GREY, HPos::Left);
    let measured = table.split(['(', ';']).next().unwrap_or_default().trim();
    let measured = format!("{measured}: scene burst of docs/protection.md, medians.");
    canvas.write(&measured, (16, 262), 14, GREY, HPos::Left);
    area.present().unwrap();
    true
}

/// The scenes with their ways, in the table's order.
fn read(table: &str) -> Vec<Panel<'_>> {
    let mut panels: Vec<Panel<'_>> = Vec::new();
    let mut columns = Vec::new();
    for line in table.lines() {
        if let Some(title) = line.strip_prefix("### ") {
            panels.push(Panel {
                title,
                rows: Vec::new(),
            });
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if cells[0] == "way" {
            columns = cells;
        } else if let Some(panel) = panels.last_mut()
            && line.starts_with("| ")
            && cells.len() == columns.len()
        {
            let named = columns.iter().copied().zip(cells);
            panel.rows.push(Row(named.collect()));
        }
    }
    panels.retain(|panel| !panel.rows.is_empty());
    panels
}

/// The place of a ratio on the logarithmic axis.
fn place(ratio: f64) -> i32 {
    let along = (ratio.clamp(AXIS.0, AXIS.1) / AXIS.0).ln() / (AXIS.1 / AXIS.0).ln();
    #[expect(clippy::cast_possible_truncation, reason = "within the panel")]
    let pixels = (along * f64::from(BARS.1 - BARS.0)).round() as i32;
    BARS.0 + pixels
}

/// At most three digits.
fn digits(ratio: f64) -> String {
    if ratio < 10.0 {
        format!("{ratio:.2}")
    } else if ratio < 100.0 {
        format!("{ratio:.1}")
    } else {
        format!("{ratio:.0}")
    }
}

/// A part of a picture, from its upper left corner on.
struct Canvas<'a, 'b> {
    area: &'a DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
    left: i32,
    top: i32,
}

impl Canvas<'_, '_> {
    fn write(&self, text: &str, (x, y): (i32, i32), size: i32, colour: RGBColor, align: HPos) {
        let style = ("sans-serif", size).into_font().color(&colour);
        let style = style.pos(Pos::new(align, VPos::Center));
        let text = Text::new(text, (self.left + x, self.top + y), style);
        self.area.draw(&text).unwrap();
    }

    fn fill(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) {
        let corners = [from, to].map(|(x, y)| (self.left + x, self.top + y));
        let filled = Rectangle::new(corners, colour.filled());
        self.area.draw(&filled).unwrap();
    }

    /// Bars on a linear axis from 0, the longest as long as there is room: name, value, what to write behind it.
    fn bars(&self, bars: &[(&str, f64, String, RGBColor)], top: i32, height: i32) {
        let (begin, end) = README_BARS;
        let longest = bars.iter().map(|bar| bar.1).fold(f64::EPSILON, f64::max);
        for (number, (name, value, text, colour)) in (0..).zip(bars) {
            let middle = top + height * number + height / 2;
            self.write(name, (begin - 10, middle), 17, BLACK, HPos::Right);
            #[expect(clippy::cast_possible_truncation, reason = "within the picture")]
            let length = (value / longest * f64::from(end - begin)).round() as i32;
            let to = begin + length.max(1);
            let half = height / 2 - 4;
            self.fill((begin, middle - half), (to, middle + half), *colour);
            self.write(text, (to + 8, middle), 17, BLACK, HPos::Left);
        }
    }
}

fn draw_panel(panel: &Panel<'_>, limit: f64, canvas: &Canvas<'_, '_>) {
    let bottom = panel.height();
    canvas.write(panel.title, (12, 17), 18, BLACK, HPos::Left);
    let band = RGBColor(205, 235, 205);
    canvas.fill((place(1.0), HEADER), (place(limit), bottom), band);
    for (row, bar) in (0..).zip(panel.bars()) {
        let middle = HEADER + ROW * row + ROW / 2;
        let times_alone = bar.times_alone();
        canvas.write(
            bar.cell("way"),
            (BARS.0 - 8, middle),
            13,
            BLACK,
            HPos::Right,
        );
        let end = place(times_alone);
        let colour = if times_alone <= limit { GOOD } else { BAD };
        let from = (BARS.0.min(end), middle - 6);
        canvas.fill(from, (end, middle + 6), colour);
        let left = bar.cell("of what is left");
        let figures = format!("{} x, batch {left}", digits(times_alone));
        canvas.write(&figures, (BARS.1 + 10, middle), 13, BLACK, HPos::Left);
    }
    for tick in TICKS {
        let text = format!("{tick}");
        canvas.write(&text, (place(tick), bottom + 9), 11, GREY, HPos::Center);
    }
    let axis = format!("p99, times alone; the band ends at {limit}");
    let middle = i32::midpoint(BARS.0, BARS.1);
    canvas.write(&axis, (middle, bottom + 24), 11, GREY, HPos::Center);
}
