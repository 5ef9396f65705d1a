//! A network inside one process.
