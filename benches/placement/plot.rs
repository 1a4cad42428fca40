//! Hot-spot minutes of each scheduler: a panel for each scene, a bar for each scheduler, a line from the lowest seed to the highest.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::placement::Way;
use crate::report::{Measured, SceneTable, title};

const PANEL: (u32, u32) = (470, 270);

pub fn draw(measured: &Measured, path: &Path) {
    let count = u32::try_from(measured.scenes.len().max(1)).unwrap();
    let columns = count.min(2);
    let rows = count.div_ceil(columns);
    let area = SVGBackend::new(path, (PANEL.0 * columns, PANEL.1 * rows)).into_drawing_area();
    area.fill(&WHITE).unwrap();
    let panels = area.split_evenly((rows as usize, columns as usize));
    for (scene, panel) in measured.scenes.iter().zip(&panels) {
        draw_scene(scene, panel);
    }
    area.present().unwrap();
}

fn draw_scene(scene: &SceneTable, panel: &DrawingArea<SVGBackend<'_>, Shift>) {
    let spreads: Vec<_> = scene
        .rows
        .iter()
        .map(|row| (row.way, row.spread(|it| it.hot_minutes)))
        .collect();
    let highest = spreads.iter().map(|(_, it)| it.highest).fold(1.0, f64::max);
    let rows = spreads.len() as f64;
    let mut chart = ChartBuilder::on(panel)
        .caption(title(scene.scene.name()), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .build_cartesian_2d(0.0..highest * 1.45, rows..0.0)
        .unwrap();
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(TRANSPARENT)
        .x_desc("node-minutes over the load line")
        .draw()
        .unwrap();
    let bars = (0_u32..).zip(&spreads).map(|(row, (way, spread))| {
        let top = f64::from(row);
        let corners = [(0.0, top + 0.45), (spread.mean, top + 0.9)];
        Rectangle::new(corners, colour(*way).mix(0.7).filled())
    });
    chart.draw_series(bars).unwrap();
    for (row, (way, spread)) in (0_u32..).zip(&spreads) {
        let middle = f64::from(row) + 0.675;
        let range = [(spread.lowest, middle), (spread.highest, middle)];
        chart.draw_series(LineSeries::new(range, BLACK)).unwrap();
        let style = ("sans-serif", 13)
            .into_font()
            .color(&BLACK)
            .pos(Pos::new(HPos::Left, VPos::Bottom));
        let text = format!(" {}: {:.0}", way.name(), spread.mean);
        let at = (0.0, f64::from(row) + 0.43);
        chart.draw_series([Text::new(text, at, style)]).unwrap();
    }
}

const fn colour(way: Way) -> RGBColor {
    match way {
        Way::Default => RGBColor(120, 120, 120),
        Way::Crane | Way::Koordinator | Way::Trimaran => RGBColor(60, 80, 180),
        Way::Label | Way::Extender => RGBColor(20, 120, 60),
    }
}
