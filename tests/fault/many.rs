//! 256 ranks in one process, and what a plan costs with so many.

use std::time::Duration;

use ep_core::bootstrap::LocalBootstrap;
use ep_core::config::{GroupConfig, Layout, PlanConfig};
use ep_core::engine::{Group, Plan};
use ep_core::perturb::{Disturbance, Perturb};

use crate::threads::{LONG, Watchdog, config, run};
use crate::work::{Member, Place, Shape};

const NUM_RANKS: usize = 256;

fn one_lane() -> GroupConfig {
    GroupConfig { num_lanes: 1, ..config(LONG) }
}

fn shape(layout: Layout, place: Place) -> Shape {
    Shape {
        max_tokens: 4,
        topk: 8,
        num_experts: NUM_RANKS + 3,
        cols: 17,
        ..Shape::small(NUM_RANKS, layout, place)
    }
}

#[test]
fn two_hundred_and_fifty_six_ranks_dispatch_and_combine() {
    let _watchdog = Watchdog::new("256 ranks", 3 * LONG);
    run(
        NUM_RANKS,
        &one_lane(),
        |_| Perturb::none(),
        |group| {
            let mut flat = Member::new(group, shape(Layout::Flat, Place::Ring)).expect("the plan is made");
            let mut major =
                Member::new(group, shape(Layout::ExpertMajor, Place::Window)).expect("windows are made");
            for seed in 0..2 {
                flat.round(seed).expect("the flat round works");
                major.round(seed).expect("the expert-major round works");
            }
        },
    );
}

/// Steps of a disturbed rank are its messages: a plan's update has nothing else.
#[test]
fn plan_sends_one_message_to_each_rank() {
    for num_ranks in [1, 2, 5, 9] {
        let messages_fit = |limit: u64| {
            let stop = |rank: usize| if rank == 0 { limit + 1 } else { 0 };
            let none = Disturbance { seed: 0, delay_one_in: 0, delay_max: Duration::ZERO, stop_at_step: 0 };
            let perturb = |rank| Perturb::new(Disturbance { stop_at_step: stop(rank), ..none });
            let shape = Shape::small(num_ranks, Layout::ExpertMajor, Place::Ring);
            let results = run(num_ranks, &config(Duration::from_millis(500)), perturb, |group| {
                let mut member = Member::new(group, shape).expect("the plan is made");
                member.prepare(1);
                member.update(None).is_ok()
            });
            results[0]
        };
        assert!(messages_fit(num_ranks as u64), "more than {num_ranks} messages among {num_ranks} ranks");
        assert!(
            !messages_fit(num_ranks as u64 - 1),
            "less than {num_ranks} messages among {num_ranks} ranks"
        );
    }
}

/// The most that a plan may need, in 32-bit words: a few for each slot of this rank, its own row of counts,
/// its own column twice (counts, and first rows), a few for each rank, and the rounding of each array to a
/// cache line. Nothing grows with ranks times experts.
fn most_words(num_ranks: usize, config: &PlanConfig, num_local: usize) -> usize {
    let slots = (config.max_tokens as usize + 1) * config.topk as usize;
    let row = config.num_experts as usize;
    let columns = 2 * num_ranks * (1 + num_local);
    4 * slots + row + columns + 2 * (num_local + 1) + 8 * num_ranks + 16 * 16
}

#[test]
fn plan_holds_its_own_row_and_column_of_counts_only() {
    // The other ranks of these groups are never asked: a rank alone makes plans for 256.
    let _watchdog = Watchdog::new("plans of 256 ranks", 3 * LONG);
    run(
        NUM_RANKS,
        &one_lane(),
        |_| Perturb::none(),
        |group| {
            if group.rank() != 0 {
                return;
            }
            for experts_per_rank in [1, 4, 16] {
                for (max_tokens, topk) in [(0, 1), (128, 8), (4096, 8)] {
                    let config = PlanConfig {
                        topk,
                        max_tokens,
                        num_experts: (NUM_RANKS * experts_per_rank) as u32,
                        layout: Layout::ExpertMajor,
                        ..PlanConfig::default()
                    };
                    let bytes = Plan::bytes(group, &config).expect("the config is right");
                    let most = 4 * most_words(NUM_RANKS, &config, experts_per_rank);
                    assert!(bytes <= most, "{bytes} bytes, at most {most} for {config:?}");
                    let matrix = 4 * NUM_RANKS * NUM_RANKS * experts_per_rank;
                    assert!(max_tokens > 128 || bytes < matrix, "{bytes} bytes, all counts are {matrix}");
                }
            }
        },
    );
}

#[test]
fn group_of_one_is_a_group() {
    let bootstrap = LocalBootstrap::group(1).remove(0);
    let deadline = std::time::Instant::now() + LONG;
    let group = Group::create(&config(LONG), Box::new(bootstrap), deadline).expect("the group is made");
    for layout in [Layout::Flat, Layout::ExpertMajor] {
        for place in [Place::Window, Place::Ring] {
            Member::new(&group, Shape::large(1, layout, place)).unwrap().round(7).expect("the round works");
        }
    }
}
