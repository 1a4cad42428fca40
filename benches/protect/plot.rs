//! How much slower important pods are than alone, as bars: a panel for each scene of the table in `docs/protection.md`, a bar for
//! each way, and the scene's limit as a band.

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

/// A scene of the table.
struct Panel {
    title: String,
    bars: Vec<Bar>,
}

struct Bar {
    way: String,
    times_alone: f64,
    /// Batch's CPU in percent of what is left, as the table has it.
    of_left: String,
}

/// Draws the table, so that the picture shows what the page says.
pub fn draw(table: &str, scenes: &[Scene], path: &Path) {
    let panels = read(table);
    let rows: Vec<&[Panel]> = panels.chunks(COLUMNS).collect();
    let height = |row: &&[Panel]| {
        let most = row.iter().map(|panel| panel.bars.len()).max().unwrap_or(0);
        HEADER + ROW * i32::try_from(most).unwrap() + FOOTER
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
            draw_panel(panel, limit, &area, (column * WIDTH, top));
        }
        top += height(&row);
    }
    area.present().unwrap();
}

/// The scenes with their ways but *alone*, in the table's order.
fn read(table: &str) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    let mut columns = Vec::new();
    for line in table.lines() {
        if let Some(title) = line.strip_prefix("### ") {
            panels.push(Panel {
                title: title.to_owned(),
                bars: Vec::new(),
            });
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if cells[0] == "way" {
            columns = cells;
        } else if let Some(panel) = panels.last_mut()
            && line.starts_with("| ")
            && cells.len() == columns.len()
            && cells[0] != Way::Alone.name()
        {
            let cell = |name: &str| {
                columns
                    .iter()
                    .position(|it| *it == name)
                    .map(|at| cells[at])
            };
            panel.bars.push(Bar {
                way: cells[0].to_owned(),
                times_alone: cell("times alone").unwrap().parse().unwrap(),
                of_left: cell("of what is left").unwrap().to_owned(),
            });
        }
    }
    panels.retain(|panel| !panel.bars.is_empty());
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

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw_panel(panel: &Panel, limit: f64, area: &Area<'_>, (left, top): (i32, i32)) {
    let write = |text: &str, (x, y): (i32, i32), size: i32, colour: RGBColor, side: HPos| {
        let style = ("sans-serif", size).into_font().color(&colour);
        let style = style.pos(Pos::new(side, VPos::Center));
        area.draw(&Text::new(text, (left + x, top + y), style))
            .unwrap();
    };
    let fill = |from: (i32, i32), to: (i32, i32), style: ShapeStyle| {
        let corners = [from, to].map(|(x, y)| (left + x, top + y));
        area.draw(&Rectangle::new(corners, style)).unwrap();
    };
    let bottom = HEADER + ROW * i32::try_from(panel.bars.len()).unwrap();
    write(&panel.title, (12, 17), 18, BLACK, HPos::Left);
    let band = RGBColor(205, 235, 205).filled();
    fill((place(1.0), HEADER), (place(limit), bottom), band);
    for (row, bar) in (0..).zip(&panel.bars) {
        let middle = HEADER + ROW * row + ROW / 2;
        write(&bar.way, (BARS.0 - 8, middle), 13, BLACK, HPos::Right);
        let end = place(bar.times_alone);
        let colour = if bar.times_alone <= limit {
            RGBColor(20, 120, 60)
        } else {
            RGBColor(190, 90, 40)
        };
        let from = (BARS.0.min(end), middle - 6);
        fill(from, (end, middle + 6), colour.filled());
        let figures = format!("{} x, batch {}", digits(bar.times_alone), bar.of_left);
        write(&figures, (BARS.1 + 10, middle), 13, BLACK, HPos::Left);
    }
    let grey = RGBColor(110, 110, 110);
    for tick in TICKS {
        let text = format!("{tick}");
        write(&text, (place(tick), bottom + 9), 11, grey, HPos::Center);
    }
    let axis = format!("p99, times alone; the band ends at {limit}");
    let middle = i32::midpoint(BARS.0, BARS.1);
    write(&axis, (middle, bottom + 24), 11, grey, HPos::Center);
}
