//! What must hold of the reference and the generator by themselves, whatever a library does.

use std::collections::HashMap;

use ep_core::config::{Layout, ReduceOrder};
use ep_core::reference::{CombineCase, Routing, combine, float};
use ep_core::tensor::Dtype;

use crate::case::{CombineOp, DispatchOp, Op};
use crate::job::{JobId, Kind};

/// Calls `check` with each dispatch and its routing, for the first random jobs.
fn each_op(mut check: impl FnMut(&Routing, &Op)) {
    for seed in 1..=60 {
        let job = JobId { kind: Kind::Random, seed, networked: false };
        for case in job.build().cases {
            let mut routing = None;
            for op in &case.ops {
                match op {
                    Op::Update(update) => routing = Some(update.routing.clone()),
                    other => check(routing.as_ref().expect("a case begins with an update"), other),
                }
            }
        }
    }
}

#[test]
fn every_assignment_is_delivered_once_or_counted_as_dropped() {
    each_op(|routing, op| {
        let Op::Dispatch(DispatchOp { expected, .. }) = op else { return };
        for (rank, out) in expected.iter().enumerate() {
            let mut seen: HashMap<(i32, i32, i32), usize> = HashMap::new();
            for row in (0..out.capacity).filter(|&row| out.src_rank[row] >= 0) {
                let slot = if routing.layout == Layout::Flat { -1 } else { out.src_slot[row] };
                *seen.entry((out.src_rank[row], out.src_token[row], slot)).or_default() += 1;
            }
            assert!(seen.values().all(|&times| times == 1));
            let counts = routing.counts(rank);
            let real_rows: i64 = counts.rows_per_source.iter().sum();
            assert_eq!(seen.len() + out.num_dropped, real_rows as usize);
            if routing.layout == Layout::ExpertMajor {
                assert_eq!(counts.rows_per_expert.iter().sum::<i64>(), real_rows);
                assert_eq!(out.rows_per_expert.iter().sum::<i64>() as usize, seen.len());
                assert!(
                    out.expert_offsets
                        .iter()
                        .all(|at| (*at as usize).is_multiple_of(routing.expert_alignment))
                );
                assert_eq!(*out.expert_offsets.last().unwrap() as usize, out.num_required);
            } else {
                assert_eq!(real_rows, counts.num_tokens);
                let assigned = out.topk_idx.iter().filter(|&&local| local >= 0).count();
                assert_eq!(out.rows_per_expert.iter().sum::<i64>() as usize, assigned);
            }
        }
    });
}

#[test]
fn combining_ones_counts_the_rows_of_each_token() {
    each_op(|routing, op| {
        let Op::Dispatch(DispatchOp { expected, .. }) = op else { return };
        let one = float::encode(Dtype::F32, 1.0);
        let rows: Vec<Vec<u8>> = expected.iter().map(|out| one.repeat(out.num_rows)).collect();
        let mut counts: HashMap<(usize, usize), f32> = HashMap::new();
        for out in expected {
            for row in (0..out.capacity).filter(|&row| out.src_rank[row] >= 0) {
                *counts.entry((out.src_rank[row] as usize, out.src_token[row] as usize)).or_default() += 1.0;
            }
        }
        for order in orders(routing.layout) {
            let out = combine(&CombineCase { rows: &rows, ..plain(routing, order) });
            for (rank, out) in out.iter().enumerate() {
                for (token, sum) in float::decode(Dtype::F32, &out.combined).into_iter().enumerate() {
                    assert_eq!(sum, counts.get(&(rank, token)).copied().unwrap_or(0.0));
                }
            }
        }
    });
}

#[test]
fn orders_agree_where_sums_are_exact_and_differ_where_they_are_not() {
    let mut differ = 0;
    each_op(|routing, op| {
        let Op::Combine(CombineOp { dtype: Dtype::F32, cols, rows, topk_weights, .. }) = op else { return };
        let case = |rows| CombineCase { cols: *cols, rows, ..plain(routing, ReduceOrder::Rank) };
        let small: Vec<Vec<u8>> = rows
            .iter()
            .map(|rows| {
                let small = |x: f32| if x.is_finite() { (x * 2.0).round().clamp(-9.0, 9.0) } else { 1.0 };
                float::decode(Dtype::F32, rows)
                    .into_iter()
                    .flat_map(|x| float::encode(Dtype::F32, small(x) + 0.0))
                    .collect()
            })
            .collect();
        let exact: Vec<_> = orders(routing.layout)
            .into_iter()
            .map(|order| combine(&CombineCase { order, ..case(&small) }))
            .collect();
        for pair in exact.windows(2) {
            assert_eq!(pair[0], pair[1]);
        }
        let run = |order| combine(&CombineCase { order, topk_weights, ..case(rows) });
        let rounded: Vec<_> = orders(routing.layout).into_iter().map(run).collect();
        differ += usize::from(rounded.windows(2).any(|pair| pair[0] != pair[1]));
    });
    assert!(differ > 0, "no case tells the orders apart");
}

fn orders(layout: Layout) -> Vec<ReduceOrder> {
    match layout {
        Layout::Flat => vec![ReduceOrder::Rank, ReduceOrder::NodeRank],
        Layout::ExpertMajor => vec![ReduceOrder::TopkSlot, ReduceOrder::Rank, ReduceOrder::NodeRank],
    }
}

fn plain(routing: &Routing, order: ReduceOrder) -> CombineCase<'_> {
    CombineCase {
        routing,
        dtype: Dtype::F32,
        cols: 1,
        rows: &[],
        row_weights: None,
        topk_weights: &[],
        bias: &[],
        order,
        wire_bf16: false,
    }
}

#[test]
fn random_jobs_reach_what_they_are_for() {
    let mut reached: HashMap<String, usize> = HashMap::new();
    for seed in 1..=400 {
        let id = JobId { kind: Kind::Random, seed, networked: false };
        let job = id.build();
        let case = &job.cases[0];
        let routing = case.first_routing();
        let mut reach = |what: String| *reached.entry(what).or_default() += 1;
        reach(format!("{} ranks", routing.num_ranks()));
        reach(format!("{:?}", routing.layout));
        reach(format!("alignment {}", routing.expert_alignment));
        if routing.experts_per_rank.contains(&0) {
            reach("a rank without experts".to_string());
        }
        if routing.topk_idx.iter().any(Vec::is_empty) {
            reach("a rank without tokens".to_string());
        }
        for op in &case.ops {
            match op {
                Op::Dispatch(dispatch) => {
                    reach(format!("{} payloads", dispatch.specs.len()));
                    for out in &dispatch.expected {
                        if out.num_dropped > 0 {
                            reach("dropped rows".to_string());
                        }
                        if out.capacity > out.num_required {
                            reach("room behind the last row".to_string());
                        }
                    }
                }
                Op::Combine(combine) => {
                    reach(format!("{:?} {} {:?}", combine.order, combine.wire_bf16, combine.dtype));
                    combine.bias.iter().for_each(|bias| reach(format!("{} biases", bias.len())));
                }
                Op::Update(_) | Op::Counts(_) => {}
            }
        }
    }
    let expected = [
        "1 ranks",
        "2 ranks",
        "3 ranks",
        "4 ranks",
        "5 ranks",
        "7 ranks",
        "8 ranks",
        "16 ranks",
        "Flat",
        "ExpertMajor",
        "alignment 1",
        "alignment 4",
        "alignment 7",
        "alignment 16",
        "alignment 128",
        "a rank without experts",
        "a rank without tokens",
        "1 payloads",
        "2 payloads",
        "3 payloads",
        "4 payloads",
        "dropped rows",
        "room behind the last row",
        "0 biases",
        "1 biases",
        "2 biases",
    ];
    for what in expected {
        assert!(reached.get(what).is_some_and(|&times| times >= 5), "{what}: {reached:?}");
    }
    let order = |name: &str| reached.iter().filter(|(what, _)| what.starts_with(name)).count();
    assert_eq!((order("Rank "), order("NodeRank "), order("TopkSlot ")), (6, 6, 6), "dtypes times wires");
}
