//! A table of text.

use std::fmt;

/// Where a column's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// At the left: words.
    Left,
    /// At the right: numbers.
    Right,
}

/// Rows under headings.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub(crate) fn new(columns: &[(&str, Align)]) -> Table {
        let columns = columns.iter().map(|(name, align)| (name.to_string(), *align)).collect();
        Table { columns, rows: Vec::new() }
    }

    /// Adds a row with one cell per column.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for every column: {cells:?}");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.columns[column].0.chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let padded =
                cells.zip(&widths).zip(&self.columns).map(|((cell, &width), (_, align))| match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_string()
        };
        writeln!(f, "{}", line(&mut self.columns.iter().map(|(name, _)| name.as_str())))?;
        writeln!(f, "{}", widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>().join("  "))?;
        for row in &self.rows {
            writeln!(f, "{}", line(&mut row.iter().map(String::as_str)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_right_and_words_left() {
        let mut table = Table::new(&[("op", Align::Left), ("us", Align::Right)]);
        table.row(vec!["dispatch".into(), "7".into()]);
        table.row(vec!["plan".into(), "1234".into()]);
        assert_eq!(table.to_string(), "op          us\n--------  ----\ndispatch     7\nplan      1234\n");
    }
}
