//! Text tables.

use std::fmt;

/// Rows of equal length; the first is the header.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// Right-aligned columns.
    right: &'static [usize],
    /// Hidden columns.
    hidden: Vec<usize>,
    /// Maximum line length.
    max_width: Option<usize>,
}

/// Between columns.
const GAP: usize = 2;

impl Table {
    /// A table with this header; the columns in `right` are right-aligned.
    pub fn new(header: &[&str], right: &'static [usize]) -> Self {
        let header = header.iter().map(|&title| title.to_owned());
        Self {
            rows: vec![header.collect()],
            right,
            hidden: Vec::new(),
            max_width: None,
        }
    }

    /// Adds a row, as long as the header.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Hides columns, in the order of `hide_first`, until no line is wider than `width`, and returns their titles. If that is
    /// not enough, lines are truncated.
    pub fn fit(&mut self, width: usize, hide_first: &[usize]) -> Vec<String> {
        for &column in hide_first {
            if self.is_within(width) {
                break;
            }
            self.hidden.push(column);
        }
        self.max_width = Some(width);
        let titles = self.rows.first();
        let hidden = self.hidden.iter();
        hidden
            .filter_map(|column| titles?.get(*column).cloned())
            .collect()
    }

    fn is_within(&self, width: usize) -> bool {
        let columns = 0..self.rows.first().map_or(0, Vec::len);
        let shown = columns.filter(|column| !self.hidden.contains(column));
        let widths = shown.map(|column| self.width(column) + GAP);
        widths.sum::<usize>() <= width + GAP
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.first().map_or(0, Vec::len);
        let widths: Vec<usize> = (0..columns).map(|column| self.width(column)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                if self.hidden.contains(&column) {
                    continue;
                }
                let width = widths.get(column).copied().unwrap_or(0);
                let cell = if self.right.contains(&column) {
                    format!("{cell:>width$}{:GAP$}", "")
                } else {
                    format!("{cell:width$}{:GAP$}", "")
                };
                line += &cell;
            }
            let line = line.trim_end();
            match self.max_width {
                Some(max) if line.chars().count() > max => {
                    let start: String = line.chars().take(max.saturating_sub(1)).collect();
                    writeln!(f, "{start}…")?;
                }
                _ => writeln!(f, "{line}")?,
            }
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
        assert_eq!(narrow.to_string(), "NODE\nwork…\n");
    }
}
