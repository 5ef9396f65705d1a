//! Standard output. A reader that has gone away, as `head` does, is no failure.

use std::io::{self, ErrorKind, Write};

/// Writes `text` and a line's end.
///
/// # Errors
/// If the output cannot be written.
pub(crate) fn say(text: impl AsRef<str>) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_ref().as_bytes())?;
    output.write_all(b"\n")?;
    output.flush()
}

/// True if the reader of the output has gone away.
pub(crate) fn reader_left(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(ErrorKind::BrokenPipe)
}
