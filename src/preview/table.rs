//! Columns for a terminal.

use std::fmt;

/// Rows of equal length; the first is the header.
pub struct Table {
    rows: Vec<Vec<String>>,
    /// Columns that are numbers stand to the right.
    right: &'static [usize],
}

impl Table {
    /// With its header; the columns in `right` stand to the right.
    pub fn new(header: &[&str], right: &'static [usize]) -> Self {
        let header = header.iter().map(|&title| title.to_owned());
        Self {
            rows: vec![header.collect()],
            right,
        }
    }

    /// A row as long as the header.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
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
                let width = widths.get(column).copied().unwrap_or(0);
                let cell = if self.right.contains(&column) {
                    format!("{cell:>width$}  ")
                } else {
                    format!("{cell:width$}  ")
                };
                line += &cell;
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
    fn columns_are_as_wide_as_their_widest_cell_and_lines_end_with_their_text() {
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
}
