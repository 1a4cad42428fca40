//! Latency of the important pods over the CPU that the batch pods got: a panel for each scene, a point for each way.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::figures::{SceneFigures, Summary};
use crate::report::Measured;
use crate::ways::Way;

const PANEL: (u32, u32) = (460, 340);
const LEGEND: u32 = 62;

pub fn draw(measured: &Measured, path: &Path) {
    let count = u32::try_from(measured.scenes.len().max(1)).unwrap();
    let columns = count.min(2);
    let height = PANEL.1 * count.div_ceil(columns);
    let size = (PANEL.0 * columns, height + LEGEND);
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE).unwrap();
    let (plots, legend) = area.split_vertically(height);
    let panels = plots.split_evenly((count.div_ceil(columns) as usize, columns as usize));
    for (scene, panel) in measured.scenes.iter().zip(&panels) {
        draw_scene(scene, panel);
    }
    for (number, (way, _)) in numbered(measured.scenes.iter().flat_map(|scene| &scene.ways)) {
        // Four in a row.
        let place = i32::try_from(number - 1).unwrap();
        let at = (16 + place % 4 * 225, 4 + place / 4 * 18);
        let style = ("sans-serif", 14).into_font().color(&colour(*way));
        let text = format!("{number} {}", way.name());
        legend.draw(&Text::new(text, at, style)).unwrap();
    }
    area.present().unwrap();
}

/// The ways with batch pods, each with its number.
fn numbered<'a, T: 'a>(
    ways: impl Iterator<Item = &'a (Way, T)>,
) -> impl Iterator<Item = (usize, &'a (Way, T))> {
    let mut seen = Vec::new();
    let first = ways.filter(move |(way, _)| {
        let new = *way != Way::Alone && !seen.contains(way);
        seen.push(*way);
        new
    });
    (1..).zip(first)
}

fn draw_scene(scene: &SceneFigures, panel: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) {
    let summaries = scene.summaries();
    let p99s = || summaries.iter().map(|row| row.p99);
    let low = p99s().fold(f64::INFINITY, f64::min) * 0.7;
    let high = p99s().fold(0.0, f64::max) * 1.6;
    let cpus = scene.capacity / 1000.0;
    let mut chart = ChartBuilder::on(panel)
        .caption(scene.name, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..cpus, (low..high).log_scale())
        .unwrap();
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("CPUs that the batch pods got")
        .y_desc("p99 of important pods, ms")
        .y_label_formatter(&|ms| format!("{ms}"))
        .draw()
        .unwrap();
    let alone = summaries.iter().find(|row| row.way == Way::Alone).unwrap();
    let line = [(0.0, alone.p99), (cpus, alone.p99)];
    chart
        .draw_series(LineSeries::new(line, BLACK.mix(0.4)))
        .unwrap();
    let label = |text: String, at: (f64, f64), colour: RGBColor, pos: Pos| {
        let style = ("sans-serif", 14).into_font().color(&colour).pos(pos);
        Text::new(text, at, style)
    };
    let right_end = (cpus * 0.99, alone.p99);
    let above = Pos::new(HPos::Right, VPos::Bottom);
    chart
        .draw_series([label("alone".to_owned(), right_end, BLACK, above)])
        .unwrap();
    let at = |row: &Summary| (row.batch / 1000.0, row.p99);
    let points = || summaries.iter().filter(|row| row.way != Way::Alone);
    chart
        .draw_series(points().map(|row| Circle::new(at(row), 4, colour(row.way).filled())))
        .unwrap();
    let labels = (1..).zip(points()).map(|(number, row)| {
        // On all sides in turn, so that those of neighbours do not cover each other.
        let side = [HPos::Left, HPos::Right][number % 2];
        let height = [VPos::Bottom, VPos::Bottom, VPos::Top, VPos::Top][number % 4];
        let text = format!(" {number} ");
        label(text, at(row), colour(row.way), Pos::new(side, height))
    });
    chart.draw_series(labels).unwrap();
}

const fn colour(way: Way) -> RGBColor {
    match way {
        Way::Alone => BLACK,
        Way::Unprotected => RGBColor(200, 40, 40),
        Way::BestEffort => RGBColor(150, 90, 20),
        Way::Quota | Way::Idle | Way::LowestWeight | Way::IdleAndQuota => RGBColor(20, 120, 60),
        Way::Koordlet(_) | Way::Crane => RGBColor(60, 80, 180),
    }
}
