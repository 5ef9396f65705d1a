//! The `ep` command.

fn main() {}
