//! The `ep` command.
//!
//! | module | duty |
//! | --- | --- |
//! | [`cli`] | arguments |
//! | [`bench`] | `ep bench` |
//! | [`launch`], [`rank`] | rank processes, from outside and from inside |
//! | [`trace`] | recorded routings |
//! | [`memory`] | aligned buffers, the barrier |
//! | [`table`] | output |

mod bench;
mod cli;
mod launch;
mod memory;
mod rank;
mod table;
mod trace;

use clap::Parser;

use cli::{Cli, Command};

fn main() {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Rank => rank::serve(),
    };
    if let Err(error) = result {
        eprintln!("ep: {error:#}");
        std::process::exit(1);
    }
}
