//! A matrix of numbers as blocks of shade, with the numbers in them.

use std::fmt::Write;

/// What one rank gives to another, for all pairs.
pub(crate) struct Heat {
    /// Over the map.
    pub(crate) title: String,
    /// By source, then by destination.
    pub(crate) values: Vec<Vec<f64>>,
}

/// Shades from little to much: up to which part of the mean, and 256-colour codes of background and text.
const SHADES: [(f64, char, u8, u8); 5] = [
    (0.5, ' ', 195, 16),
    (0.8, '░', 153, 16),
    (1.25, '▒', 111, 16),
    (2.0, '▓', 69, 231),
    (f64::INFINITY, '█', 27, 231),
];

/// Columns of a terminal that the maps fit.
const WIDTH: usize = 100;
/// Columns between maps.
const GAP: usize = 3;
/// Columns of a cell: the shade, the number, and a blank.
const CELL: usize = 6;
const LABEL: usize = 7;

/// A number in at most four columns: `987`, `12k`, `3.4M`.
fn short(value: f64) -> String {
    match value {
        ..1000.0 => format!("{value:.0}"),
        ..9950.0 => format!("{:.1}k", value / 1e3),
        ..999_500.0 => format!("{:.0}k", value / 1e3),
        ..9.95e6 => format!("{:.1}M", value / 1e6),
        _ => format!("{:.0}M", value / 1e6),
    }
}

/// What the shades, or the colours, mean.
pub(crate) fn legend(colour: bool) -> String {
    let words = ["below half the mean", "below 0.8", "about the mean", "above 1.25", "above 2"];
    let entry = |(&(_, shade, back, _), words): (&(f64, char, u8, u8), &str)| match (colour, shade) {
        (true, _) => format!("\x1b[48;5;{back}m  \x1b[0m {words}"),
        (false, ' ') => format!("blank: {words}"),
        (false, shade) => format!("{shade} {words}"),
    };
    SHADES.iter().zip(words).map(entry).collect::<Vec<_>>().join("   ")
}

impl Heat {
    fn width(&self) -> usize {
        (LABEL + CELL * self.values.len()).max(self.title.chars().count())
    }

    /// The lines of the map, each [`Heat::width`] columns wide.
    fn lines(&self, colour: bool) -> Vec<String> {
        let width = self.width();
        let sum: f64 = self.values.iter().flatten().sum();
        let mean = sum / self.values.iter().flatten().count().max(1) as f64;
        let mut heads = " ".repeat(LABEL);
        for rank in 0..self.values.len() {
            let _ = write!(heads, "{:<CELL$}", format!("to {rank}"));
        }
        let mut lines = vec![format!("{:<width$}", self.title), format!("{heads:<width$}")];
        for (rank, row) in self.values.iter().enumerate() {
            let mut line = format!("{:<LABEL$}", format!("from {rank}"));
            for &value in row {
                let below = |shade: &&(f64, char, u8, u8)| value <= shade.0 * mean;
                let (_, shade, back, text) = SHADES.iter().find(below).unwrap_or(&SHADES[SHADES.len() - 1]);
                let number = short(value);
                let _ = match colour {
                    true => write!(line, "\x1b[48;5;{back};38;5;{text}m{number:>5}\x1b[0m "),
                    false => write!(line, "{shade}{number:>4} "),
                };
            }
            let used = LABEL + CELL * row.len();
            lines.push(format!("{line}{}", " ".repeat(width - used)));
        }
        lines
    }
}

/// The maps, as many side by side as fit.
pub(crate) fn render(maps: &[Heat], colour: bool) -> String {
    let mut text = String::new();
    let mut rest = maps;
    while let Some(first) = rest.first() {
        let (mut count, mut width) = (1, first.width());
        while rest.get(count).is_some_and(|next| width + GAP + next.width() <= WIDTH) {
            width += GAP + rest[count].width();
            count += 1;
        }
        let blocks: Vec<Vec<String>> = rest[..count].iter().map(|map| map.lines(colour)).collect();
        for line in 0..blocks.iter().map(Vec::len).max().unwrap_or(0) {
            let parts: Vec<&str> =
                blocks.iter().filter_map(|block| block.get(line)).map(String::as_str).collect();
            text.push_str(parts.join(&" ".repeat(GAP)).trim_end());
            text.push('\n');
        }
        rest = &rest[count..];
        if !rest.is_empty() {
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(title: &str, ranks: usize) -> Heat {
        let values =
            (0..ranks).map(|from| (0..ranks).map(|to| (from * to * 1000) as f64).collect()).collect();
        Heat { title: title.to_string(), values }
    }

    #[test]
    fn numbers_stay_short() {
        for (value, text) in [
            (0.0, "0"),
            (999.0, "999"),
            (9_949.0, "9.9k"),
            (9_950.0, "10k"),
            (999_499.0, "999k"),
            (1e6, "1.0M"),
            (4e7, "40M"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn maps_stand_beside_each_other_within_a_hundred_columns() {
        let text = render(&[map("a", 4), map("b", 4), map("c", 4)], false);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(text.lines().count(), 6, "{text}");
        assert!(render(&[map("a", 8), map("b", 8)], false).lines().count() > 11);
        let few = render(&[map("a", 2), map("b", 2)], false);
        assert_eq!(few.lines().count(), 4, "{few}");
        assert!(few.contains("from 1") && few.contains("█1.0k"), "{few}");
    }

    #[test]
    fn colour_changes_no_number() {
        let plain = |text: String| -> String {
            let without = text.split('\x1b').map(|part| part.split_once('m').map_or(part, |(_, rest)| rest));
            without.collect::<String>()
        };
        let coloured = plain(render(&[map("a", 3)], true));
        assert!(coloured.contains("4.0k") && !coloured.contains('\x1b'), "{coloured}");
        assert!(legend(false).chars().count() <= WIDTH && legend(true).contains("above 2"));
    }
}
