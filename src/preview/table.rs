//! Text tables.

use std::collections::BTreeMap;
use std::fmt;

use anstyle::Style;

/// Rows of equal length; the first is the header.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// Of cells, by row and column.
    styles: BTreeMap<(usize, usize), Style>,
    /// Right-aligned columns.
    right: &'static [usize],
    /// Hidden columns.
    hidden: Vec<usize>,
    /// Maximum width of the columns; longer cells are shortened.
    max_cell: Option<usize>,
}

/// Between columns.
const GAP: usize = 2;
/// Cells are not shortened further.
const MIN_CELL: usize = 4;

impl Table {
    /// A table with this header; the columns in `right` are right-aligned.
    pub fn new(header: &[&str], right: &'static [usize]) -> Self {
        let header = header.iter().map(|&title| title.to_owned());
        Self {
            rows: vec![header.collect()],
            styles: BTreeMap::new(),
            right,
            hidden: Vec::new(),
            max_cell: None,
        }
    }

    /// Adds a row, as long as the header.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Gives the cell of the last row in this column a style.
    pub fn style(&mut self, column: usize, style: Style) {
        self.styles.insert((self.rows.len() - 1, column), style);
    }

    /// Hides columns, in the order of `hide_first`, until no line is wider than `width`, and returns their titles. If that is
    /// not enough, the widest cells are shortened.
    pub fn fit(&mut self, width: usize, hide_first: &[usize]) -> Vec<String> {
        for &column in hide_first {
            if self.is_within(width) {
                break;
            }
            self.hidden.push(column);
        }
        let mut max = self.shown().map(|column| self.width(column)).max();
        while let Some(cell) = max.filter(|cell| *cell >= MIN_CELL && !self.is_within(width)) {
            self.max_cell = Some(cell);
            max = Some(cell - 1);
        }
        let titles = self.rows.first();
        let hidden = self.hidden.iter();
        hidden
            .filter_map(|column| titles?.get(*column).cloned())
            .collect()
    }

    fn is_within(&self, width: usize) -> bool {
        let widths = self.shown().map(|column| self.width(column) + GAP);
        widths.sum::<usize>() <= width + GAP
    }

    fn shown(&self) -> impl Iterator<Item = usize> {
        let columns = 0..self.rows.first().map_or(0, Vec::len);
        columns.filter(|column| !self.hidden.contains(column))
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let width = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
        self.max_cell.map_or(width, |max| width.min(max))
    }
}

/// A cell of at most `max` characters. Its middle is left out: names often differ at their ends.
fn shortened(cell: &str, max: usize) -> String {
    let count = cell.chars().count();
    if count <= max {
        return cell.to_owned();
    }
    let tail = max.saturating_sub(1) / 2;
    let head = max.saturating_sub(1) - tail;
    let start = cell.chars().take(head);
    let end = cell.chars().skip(count - tail);
    start.chain(['…']).chain(end).collect()
}

/// The text in lines of at most `width`, broken between words; a single word may be longer.
pub fn wrapped(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else {
        return text.to_owned();
    };
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                *line += " ";
                *line += word;
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// The alternate form (`{:#}`) has the styles.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.first().map_or(0, Vec::len);
        let widths: Vec<usize> = (0..columns).map(|column| self.width(column)).collect();
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                if self.hidden.contains(&column) {
                    continue;
                }
                let width = widths.get(column).copied().unwrap_or(0);
                let cell = shortened(cell, width);
                let space = " ".repeat(width - cell.chars().count());
                let style = self.styles.get(&(number, column)).filter(|_| f.alternate());
                let cell =
                    style.map_or_else(|| cell.clone(), |style| format!("{style}{cell}{style:#}"));
                let (before, after) = if self.right.contains(&column) {
                    (&*space, "")
                } else {
                    ("", &*space)
                };
                line.extend([before, &cell, after, &" ".repeat(GAP)]);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NODE", "VALUE", "WOULD"], &[1]);
        table.push(vec!["a".to_owned(), "12 %".to_owned(), "-".to_owned()]);
        table.push(vec![
            "worker-1".to_owned(),
            "1890m".to_owned(),
            String::new(),
        ]);
        let text = "NODE      VALUE  WOULD\na          12 %  -\nworker-1  1890m\n";
        assert_eq!(table.to_string(), text);
    }

    #[test]
    fn a_narrow_terminal_hides_columns_not_rows() {
        let mut table = Table::new(&["NODE", "VALUE", "WOULD"], &[1]);
        table.push(
            ["worker-1", "1890m", "throttle"]
                .map(str::to_owned)
                .to_vec(),
        );
        let mut narrow = table.clone();
        assert_eq!(table.fit(25, &[2, 1]), [] as [&str; 0]);
        assert_eq!(
            table.to_string(),
            "NODE      VALUE  WOULD\nworker-1  1890m  throttle\n"
        );
        assert_eq!(narrow.fit(24, &[2, 1]), ["WOULD"]);
        assert_eq!(narrow.to_string(), "NODE      VALUE\nworker-1  1890m\n");
        assert_eq!(narrow.fit(5, &[1]), ["WOULD", "VALUE"]);
        assert_eq!(narrow.to_string(), "NODE\nwo…-1\n");
    }

    #[test]
    fn a_style_is_only_in_the_alternate_form_and_takes_no_width() {
        let mut table = Table::new(&["NODE", "VALUE", "WOULD"], &[1]);
        table.push(["a", "12 %", "-"].map(str::to_owned).to_vec());
        table.style(1, Style::new().bold());
        assert_eq!(table.to_string(), "NODE  VALUE  WOULD\na      12 %  -\n");
        let styled = "NODE  VALUE  WOULD\na      \u{1b}[1m12 %\u{1b}[0m  -\n";
        assert_eq!(format!("{table:#}"), styled);
    }

    #[test]
    fn a_long_name_leaves_room_for_the_other_columns() {
        let mut table = Table::new(&["NODE", "CPU%", "BREACHED"], &[1]);
        let name = "gke-production-default-pool-0a1b2c3d-x7kq";
        table.push([name, "91.0", "q/cpu"].map(str::to_owned).to_vec());
        assert_eq!(table.fit(30, &[]), [] as [&str; 0]);
        let expected = "NODE            CPU%  BREACHED\ngke-pro…d-x7kq  91.0  q/cpu\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn text_is_wrapped_between_words() {
        let text = "note: too narrow for LOAD, IN FORCE";
        assert_eq!(
            wrapped(text, Some(22)),
            "note: too narrow for\nLOAD, IN FORCE"
        );
        assert_eq!(wrapped(text, None), text);
        assert_eq!(wrapped(text, Some(1)).lines().count(), 7);
    }
}
