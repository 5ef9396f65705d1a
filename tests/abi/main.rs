//! `include/ep.h` against what the library is: names, types, layouts, values, symbols, and what every
//! entry does with input that it must refuse.

mod compile;
mod header;
mod layout;
mod lifetime;
mod misuse;
mod parity;
mod programs;
mod symbols;
