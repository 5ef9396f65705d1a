//! One line on standard error that says how far the work is.

use std::io::{IsTerminal, Write};

/// The line; on a terminal it is redrawn, elsewhere each new word is a line of its own.
pub(crate) struct Progress {
    title: String,
    terminal: bool,
    last: Option<String>,
}

const BAR: usize = 24;

impl Progress {
    /// Progress of what `title` names.
    pub(crate) fn new(title: impl Into<String>) -> Progress {
        Progress { title: title.into(), terminal: std::io::stderr().is_terminal(), last: None }
    }

    /// Says what is being done, and the part of all that is done, where lines can be redrawn.
    pub(crate) fn detail(&mut self, what: &str, part: f64) {
        if self.terminal {
            self.show(what, part);
        }
    }

    /// Says what is being done, and the part of all that is done.
    pub(crate) fn show(&mut self, what: &str, part: f64) {
        let mut errors = std::io::stderr().lock();
        // Nothing depends on the progress being seen.
        if self.terminal {
            let full = (part.clamp(0.0, 1.0) * BAR as f64).round() as usize;
            let bar = format!("{}{}", "█".repeat(full), "·".repeat(BAR - full));
            let _ = write!(errors, "\r\x1b[K{bar} {} {what}", self.title);
            let _ = errors.flush();
        } else if self.last.as_deref() != Some(what) {
            let _ = writeln!(errors, "{} {what}", self.title.trim_end());
            self.last = Some(what.to_string());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
