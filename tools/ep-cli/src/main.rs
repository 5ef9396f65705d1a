//! The `ep` command.
//!
//! | module | duty |
//! | --- | --- |
//! | [`cli`] | arguments |
//! | [`demo`], [`bench`] | `ep demo`, `ep bench` |
//! | [`launch`], [`rank`] | rank processes, from outside and from inside |
//! | [`trace`] | recorded routings |
//! | [`memory`], [`clock`] | aligned buffers, the barrier, time |
//! | [`table`], [`heat`], [`progress`] | output |

mod bench;
mod cli;
mod clock;
mod demo;
mod heat;
mod launch;
mod memory;
mod progress;
mod rank;
mod table;
mod trace;

use clap::Parser;

use cli::{Cli, Command};

fn main() {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Rank => rank::serve(),
    };
    if let Err(error) = result {
        eprintln!("ep: {error:#}");
        std::process::exit(1);
    }
}
