//! A screen as SVG: what ratatui would have put on a terminal, cell by cell.

use std::fmt::Write;
use std::io;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

use super::screen;
use super::view::View;

/// Columns and rows of the picture.
const SIZE: (u16, u16) = (80, 24);
/// Width and height of a cell, and the margin, in pixels.
const CELL: (f64, f64) = (9.0, 19.0);
/// At which a letter of most monospaced fonts (0.602 em) fills its cell: not every viewer stretches text.
const FONT_SIZE: f64 = 14.95;
const MARGIN: f64 = 14.0;
const BACKGROUND: &str = "#14181f";
const FOREGROUND: &str = "#d5dae3";

/// The view as it looks on a terminal of 80 columns and 24 rows.
///
/// # Errors
/// Where it cannot be drawn.
pub fn of(view: &View) -> io::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(SIZE.0, SIZE.1)).map_err(io::Error::other)?;
    terminal
        .draw(|frame| screen::draw(frame, view))
        .map_err(io::Error::other)?;
    Ok(svg(terminal.backend().buffer()))
}

/// A buffer as SVG. Blocks and lines are drawn as shapes, so that they join whatever the font.
fn svg(buffer: &Buffer) -> String {
    let area = buffer.area;
    let width = f64::from(area.width) * CELL.0 + 2.0 * MARGIN;
    let height = f64::from(area.height) * CELL.1 + 2.0 * MARGIN;
    let mut shapes = String::new();
    for y in 0..area.height {
        for x in 0..area.width {
            draw_cell(&mut shapes, &buffer[(x, y)], Place::of(x, y));
        }
        draw_text(&mut shapes, buffer, y);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\" font-size=\"{FONT_SIZE}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{BACKGROUND}\"/>\n{shapes}</svg>\n"
    )
}

/// The upper left corner of a cell.
#[derive(Clone, Copy)]
struct Place {
    x: f64,
    y: f64,
}

impl Place {
    fn of(x: u16, y: u16) -> Self {
        Self {
            x: f64::from(x).mul_add(CELL.0, MARGIN),
            y: f64::from(y).mul_add(CELL.1, MARGIN),
        }
    }
}

/// Background and everything that is a shape.
fn draw_cell(out: &mut String, cell: &Cell, place: Place) {
    let (foreground, background) = colours(cell);
    if background != BACKGROUND {
        rect(out, place, (0.0, 0.0), CELL, background, 1.0);
    }
    match cell.symbol() {
        "░" => rect(out, place, (0.0, 0.0), CELL, foreground, 0.35),
        symbol => {
            if let Some(eighths) = eighths(symbol) {
                let height = CELL.1 * f64::from(eighths) / 8.0;
                rect(
                    out,
                    place,
                    (0.0, CELL.1 - height),
                    (CELL.0, height),
                    foreground,
                    1.0,
                );
            } else if let Some(arms) = arms(symbol) {
                draw_arms(out, place, arms, foreground);
            }
        }
    }
}

/// The lower blocks, from `▁` to `█`.
fn eighths(symbol: &str) -> Option<u8> {
    let blocks = ["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
    let index = blocks.iter().position(|block| *block == symbol)?;
    u8::try_from(index + 1).ok()
}

/// The arms of a line symbol: up, down, left, right, and the stroke's width.
#[derive(Clone, Copy)]
struct Arms([bool; 4], f64);

fn arms(symbol: &str) -> Option<Arms> {
    let thin = |up, down, left, right| Some(Arms([up, down, left, right], 1.2));
    match symbol {
        "─" => thin(false, false, true, true),
        "│" => thin(true, true, false, false),
        "┌" => thin(false, true, false, true),
        "┐" => thin(false, true, true, false),
        "└" => thin(true, false, false, true),
        "┘" => thin(true, false, true, false),
        "┃" => Some(Arms([true, true, false, false], 3.0)),
        _ => None,
    }
}

fn draw_arms(out: &mut String, place: Place, arms: Arms, colour: &str) {
    let Arms([up, down, left, right], stroke) = arms;
    let middle = (CELL.0 / 2.0, CELL.1 / 2.0);
    let half = stroke / 2.0;
    if up || down {
        let from = if up { 0.0 } else { middle.1 - half };
        let to = if down { CELL.1 } else { middle.1 + half };
        rect(
            out,
            place,
            (middle.0 - half, from),
            (stroke, to - from),
            colour,
            1.0,
        );
    }
    if left || right {
        let from = if left { 0.0 } else { middle.0 - half };
        let to = if right { CELL.0 } else { middle.0 + half };
        rect(
            out,
            place,
            (from, middle.1 - half),
            (to - from, stroke),
            colour,
            1.0,
        );
    }
}

fn rect(
    out: &mut String,
    place: Place,
    at: (f64, f64),
    size: (f64, f64),
    colour: &str,
    opacity: f64,
) {
    let (x, y) = (place.x + at.0, place.y + at.1);
    let _never_fails = writeln!(
        out,
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{:.2}\" fill=\"{colour}\" fill-opacity=\"{opacity}\"/>",
        size.0, size.1
    );
}

/// The letters of a row, in runs of one style, each stretched to its cells whatever the font.
fn draw_text(out: &mut String, buffer: &Buffer, y: u16) {
    let mut run: Option<Run> = None;
    for x in 0..buffer.area.width {
        let cell = &buffer[(x, y)];
        let style = (colours(cell).0, cell.modifier.contains(Modifier::BOLD));
        let letter = is_letter(cell).then(|| cell.symbol());
        match (&mut run, letter) {
            (Some(open), Some(letter)) if open.style == style => open.text.push_str(letter),
            (_, letter) => {
                if let Some(done) = run.take() {
                    done.write(out);
                }
                run = letter.filter(|letter| *letter != " ").map(|letter| Run {
                    place: Place::of(x, y),
                    style,
                    text: letter.to_owned(),
                });
            }
        }
    }
    if let Some(done) = run {
        done.write(out);
    }
}

/// Neither a block nor a line.
fn is_letter(cell: &Cell) -> bool {
    let symbol = cell.symbol();
    symbol != "░" && eighths(symbol).is_none() && arms(symbol).is_none()
}

struct Run {
    place: Place,
    style: (&'static str, bool),
    text: String,
}

impl Run {
    fn write(self, out: &mut String) {
        let text = self.text.trim_end();
        let (colour, bold) = self.style;
        let weight = if bold { " font-weight=\"bold\"" } else { "" };
        let width = text.chars().count() as f64 * CELL.0;
        let _never_fails = writeln!(
            out,
            "<text x=\"{:.2}\" y=\"{:.2}\" fill=\"{colour}\"{weight} textLength=\"{width:.2}\" xml:space=\"preserve\">{}</text>",
            self.place.x,
            CELL.1.mul_add(0.74, self.place.y),
            escape(text)
        );
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Foreground and background, reversed where the cell says so.
fn colours(cell: &Cell) -> (&'static str, &'static str) {
    let pair = (hex(cell.fg, FOREGROUND), hex(cell.bg, BACKGROUND));
    if cell.modifier.contains(Modifier::REVERSED) {
        (pair.1, pair.0)
    } else {
        pair
    }
}

/// The terminal colours that [`super::screen`] uses.
const fn hex(colour: Color, unset: &'static str) -> &'static str {
    match colour {
        Color::Black => BACKGROUND,
        Color::LightRed => "#ff6b6b",
        Color::LightGreen => "#5fd38d",
        Color::LightYellow => "#ffd166",
        Color::Gray => "#9aa4b5",
        Color::DarkGray => "#5c6675",
        Color::White => "#ffffff",
        _ => unset,
    }
}

#[cfg(test)]
mod tests {
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    use super::*;

    fn picture(text: &str, style: Style) -> String {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 12, 1));
        buffer.set_string(0, 0, text, style);
        svg(&buffer)
    }

    #[test]
    fn letters_are_text_and_blocks_are_shapes() {
        let svg = picture("a<b █", Style::new().fg(Color::LightRed));
        assert!(svg.contains(">a&lt;b</text>"), "{svg}");
        assert!(!svg.contains('█'), "{svg}");
        let full = "width=\"9.00\" height=\"19.00\" fill=\"#ff6b6b\"";
        assert!(svg.contains(full), "{svg}");
    }

    #[test]
    fn a_half_block_stands_on_the_ground() {
        let svg = picture("▄", Style::new());
        assert!(
            svg.contains("y=\"23.50\" width=\"9.00\" height=\"9.50\""),
            "{svg}"
        );
    }
}
