//! The `ep` command.
//!
//! | module | duty |
//! | --- | --- |
//! | [`cli`] | arguments |
//! | [`info`], [`demo`], [`mod@bench`] | the commands |
//! | [`between`] | several nodes: what was asked for, and the network for it |
//! | [`place`], [`launch`], [`rank`] | rank processes: where they run, from outside, from inside |
//! | [`trace`] | recorded routings |
//! | [`memory`], [`clock`] | aligned buffers, the barrier, time |
//! | [`output`], [`progress`], [`table`], [`heat`], [`svg`] | what people and programs read |

mod bench;
mod between;
mod cli;
mod clock;
mod demo;
mod heat;
mod info;
mod launch;
mod memory;
mod output;
mod place;
mod progress;
mod rank;
mod svg;
mod table;
mod trace;

use clap::Parser;

use cli::{Cli, Command};

fn main() {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Info(args) => info::run(args.json),
        Command::Rank => rank::serve(),
        Command::Fabric => bench::fabric::serve(),
    };
    if let Err(error) = result {
        if output::reader_left(&error) {
            return;
        }
        eprintln!("ep: {error:#}");
        std::process::exit(1);
    }
}
