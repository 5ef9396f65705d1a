//! Explores every interleaving of the protocol's steps and checks what `docs/PROTOCOL.md` claims.
//!
//! Each claim comes with its opposite: a mistake seeded into the protocol, or a rule left out, for which the
//! checker must find a counterexample. Each run prints its number of states (`--nocapture`) and has a
//! lower bound on it, so that a model that no longer explores anything fails too.

mod model;

use std::fmt::Debug;
use std::hash::Hash;

use model::{AGREED, ENDED, EPOCHS, MEMORY, NAMED, RESULT, link, proxy, reuse, ring};
use model::{COMBINE, Call, Config, DISPATCH, Deadlines, FAILED, Issue, Mistake, UPDATE};
use stateright::{Checker, HasDiscoveries, Model};

/// The most steps that a run may take; it bounds time and memory.
const MAX_STEPS: usize = 8_000_000;

const OTHER_SHAPE: Call = Call { shape: 1, ..DISPATCH };

/// Explores everything; nothing may be found.
fn holds<M>(name: &str, min_states: usize, model: M)
where
    M: Model<State: Hash + Debug + PartialEq + Clone + Send + Sync> + Send + Sync + 'static,
    M::Action: Debug + PartialEq + Clone,
{
    let checker = model.checker().target_state_count(MAX_STEPS).spawn_bfs().join();
    let (states, steps) = (checker.unique_state_count(), checker.state_count());
    println!("holds in {states:>8} states, {steps:>8} steps: {name}");
    checker.assert_properties();
    assert!(steps < MAX_STEPS, "{name}: not explored to the end");
    assert!(states >= min_states, "{name}: only {states} states, expected at least {min_states}");
}

/// Explores until the property fails; it must.
fn finds<M>(name: &str, property: &'static str, model: M)
where
    M: Model<State: Hash + Debug + PartialEq + Clone + Send + Sync> + Send + Sync + 'static,
    M::Action: Debug + PartialEq + Clone,
{
    let failed = HasDiscoveries::AnyOf([property].into());
    let checker = model.checker().target_state_count(MAX_STEPS).finish_when(failed).spawn_bfs().join();
    let found = checker.discovery(property);
    let steps = found.map(|path| path.into_actions().len());
    println!("finds after {:>3} steps: {name}", steps.unwrap_or(0));
    assert!(steps.is_some(), "{name}: the checker did not find that this fails: {property}");
}

/// Three ranks of which the last one issues `odd` in the given epoch.
fn odd_one_out(calls: &[Call], epoch: usize, odd: Call) -> Config {
    let mut config = Config::new(3, calls);
    config.calls[2][0][epoch - 1] = odd;
    config
}

fn with(mistake: Mistake, config: Config) -> Config {
    Config { mistake: Some(mistake), ..config }
}

/// The last rank may stop at any step, for ever or until any later one.
fn with_stop(config: Config) -> Config {
    Config { stopper: Some(config.ranks - 1), deadlines: Deadlines::Long, ..config }
}

/// Two lanes with a thread each, or one thread for both that issues their calls in the given orders.
fn two_lanes(orders: Option<[&[usize]; 2]>) -> Config {
    let mut config = Config::new(2, &[UPDATE, DISPATCH, COMBINE]);
    config.lanes = 2;
    for rank in 0..2 {
        config.calls[rank][1] = vec![DISPATCH, COMBINE];
        config.order[rank] = orders.map(|orders| orders[rank].to_vec());
    }
    config
}

#[test]
fn calls_without_faults_end_ok_and_touch_only_what_they_may() {
    holds("2 ranks", 100, Config::new(2, &[UPDATE, DISPATCH, COMBINE, DISPATCH]));
    let calls = [UPDATE, DISPATCH, COMBINE, DISPATCH];
    holds("3 ranks, 2 rows", 100_000, Config { cells: [[2; 3]; 3], ..Config::new(3, &calls) });
    let uneven = [[0, 2, 0], [1, 0, 0], [0, 2, 0]];
    holds("3 ranks, uneven rows, also none", 10_000, Config { cells: uneven, ..Config::new(3, &calls) });
}

#[test]
fn mismatched_calls_fail_on_all_ranks_and_the_next_ones_work() {
    for base in [UPDATE, DISPATCH, COMBINE] {
        for odd in [UPDATE, DISPATCH, OTHER_SHAPE, COMBINE, FAILED].into_iter().filter(|&odd| odd != base) {
            let name = format!("{:?} {} among {:?}", odd.kind, odd.shape, base.kind);
            holds(&name, 5_000, odd_one_out(&[base, DISPATCH], 1, odd));
            holds(&name, 5_000, odd_one_out(&[COMBINE, base], 2, odd));
        }
    }
    let rows = Config { cells: [[2; 3]; 3], ..odd_one_out(&[DISPATCH, COMBINE], 1, UPDATE) };
    holds("update among dispatches, 2 rows", 50_000, rows);
    let mut three = odd_one_out(&[DISPATCH, UPDATE], 1, COMBINE);
    three.calls[1][0][0] = UPDATE;
    holds("three different calls", 1_000, three);
    holds("all fail by themselves", 1_000, Config::new(3, &[FAILED, DISPATCH]));
}

#[test]
fn smaller_mismatch_rules_fail() {
    let odd = || odd_one_out(&[DISPATCH, DISPATCH], 1, OTHER_SHAPE);
    finds("no arrival on mismatch", ENDED, with(Mistake::NoArrivalOnMismatch, odd()));
    let early = Mistake::MismatchEndsOnDescriptors;
    finds("a failed dispatch ends on descriptors", MEMORY, with(early, odd()));
    let combine = odd_one_out(&[COMBINE, COMBINE], 1, UPDATE);
    finds("a failed combine ends on descriptors", MEMORY, with(early, combine));
    let mut two = Config::new(2, &[DISPATCH, COMBINE]);
    two.calls[1][0][0] = UPDATE;
    holds("two ranks cannot show it", 30, with(early, two));
    let second = odd_one_out(&[UPDATE, DISPATCH], 2, OTHER_SHAPE);
    finds("the arrival status decides", AGREED, with(Mistake::ArrivalStatusDecides, second));
    let idle = Config { cells: [[0, 1, 0], [1, 0, 0], [0; 3]], ..odd_one_out(&[DISPATCH], 1, UPDATE) };
    finds("peers without rows are skipped", AGREED, with(Mistake::IdlePeersSkipped, idle));
    finds("failed calls meet", RESULT, with(Mistake::FailedMeets, Config::new(2, &[FAILED])));
}

#[test]
fn slots_follow_from_when_the_next_epoch_may_be_issued() {
    // (rule, descriptors are used in place, the fewest slots)
    let table = [
        (Issue::AfterEnd, false, 2),
        (Issue::AfterEnd, true, 2),
        (Issue::AfterDescriptors, false, 2),
        (Issue::AfterDescriptors, true, 3),
    ];
    for (issue, in_place, fewest) in table {
        for ranks in [2, 3] {
            // Rows would only make the state larger: this is about descriptors.
            let calls = [UPDATE, DISPATCH, UPDATE, UPDATE];
            let config = Config { issue, in_place, cells: [[0; 3]; 3], ..Config::new(ranks, &calls) };
            let name = format!("{ranks} ranks, issue {issue:?}, in place: {in_place}");
            let fewer = Config { slots: fewest - 1, ..config.clone() };
            finds(&format!("{name}, {} slots", fewest - 1), MEMORY, fewer);
            holds(&format!("{name}, {fewest} slots"), 100, Config { slots: fewest, ..config });
        }
    }
    let ahead = |ranks, slots| {
        let calls = [UPDATE; EPOCHS];
        Config { slots, issue: Issue::OneAhead, ..Config::new(ranks, &calls) }
    };
    finds("3 ranks, issue OneAhead, 3 slots", MEMORY, ahead(3, 3));
    holds("2 ranks, issue OneAhead, 4 slots", 300, ahead(2, 4));
    let odd = odd_one_out(&[UPDATE, DISPATCH, UPDATE, COMBINE], 3, FAILED);
    holds("2 slots, a failed call", 10_000, Config { slots: 2, ..odd.clone() });
    holds("3 slots, a failed call", 10_000, Config { slots: 3, ..odd });
    let odd = odd_one_out(&[DISPATCH, COMBINE], 1, FAILED);
    let early = Config { issue: Issue::AfterDescriptors, in_place: true, ..odd };
    holds("3 slots, issue AfterDescriptors, in place, a failed call", 10_000, early);
}

#[test]
fn seeded_mistakes_are_found() {
    let two = |calls: &[Call]| Config::new(2, calls);
    finds("issue without waiting", MEMORY, with(Mistake::IssueWithoutWaiting, two(&[UPDATE; 5])));
    finds("epoch word before content", MEMORY, with(Mistake::EpochWordBeforeContent, two(&[UPDATE])));
    finds("arrival before rows", RESULT, with(Mistake::ArrivalBeforeRows, two(&[DISPATCH])));
    finds("combine without readers", MEMORY, with(Mistake::CombineWithoutReaders, two(&[COMBINE])));
    let ahead = Config { issue: Issue::AfterDescriptors, ..two(&[DISPATCH; 2]) };
    finds("arrival compared for equality", ENDED, with(Mistake::ArrivalComparedForEquality, ahead));
    let stop = |calls: &[Call]| with_stop(Config::new(2, calls));
    finds("abort not checked", ENDED, with(Mistake::AbortNotChecked, stop(&[UPDATE; 2])));
    finds("reuse after abort", MEMORY, with(Mistake::ReuseAfterAbort, stop(&[DISPATCH])));
    finds("start after abort", MEMORY, with(Mistake::StartAfterAbort, stop(&[DISPATCH; 3])));
    let three = with_stop(Config::new(3, &[UPDATE; 2]));
    let claim = Config { deadlines: Deadlines::Spurious(2), ..stop(&[DISPATCH; 3]) };
    finds("a claim without a record does not break", MEMORY, with(Mistake::ClaimDoesNotBreak, claim));
    finds("a timeout looks for no older record", NAMED, with(Mistake::TimeoutLooksNowhere, three));
}

#[test]
fn a_rank_that_stops_is_named_to_all_and_does_no_harm_when_it_goes_on() {
    holds("2 ranks", 500, with_stop(Config::new(2, &[UPDATE, DISPATCH, COMBINE])));
    holds("3 ranks, update and dispatch", 100_000, with_stop(Config::new(3, &[UPDATE, DISPATCH])));
    holds("3 ranks, combine and dispatch", 100_000, with_stop(Config::new(3, &[COMBINE, DISPATCH])));
    let three = with_stop(Config::new(3, &[DISPATCH, COMBINE, UPDATE]));
    holds("3 ranks, dispatch, combine and update", 200_000, three);
    let mut odd = with_stop(odd_one_out(&[DISPATCH], 1, OTHER_SHAPE));
    holds("3 ranks, the odd one stops", 10_000, odd.clone());
    odd.stopper = Some(1);
    holds("3 ranks, one of the others stops", 10_000, odd);
}

#[test]
fn a_deadline_that_passes_at_any_time_ends_every_call() {
    let spurious = |ranks, config| Config { deadlines: Deadlines::Spurious(ranks), ..config };
    let stop = |config| Config { stopper: Some(2), ..config };
    holds("3 ranks, update", 100_000, spurious(3, stop(Config::new(3, &[UPDATE]))));
    holds("3 ranks, dispatch", 500_000, spurious(1, stop(Config::new(3, &[DISPATCH]))));
    holds("2 ranks", 1_000, spurious(2, with_stop(Config::new(2, &[UPDATE, DISPATCH, COMBINE]))));
}

#[test]
fn lanes_are_independent_but_one_thread_orders_its_calls() {
    holds("a thread per lane", 5_000, two_lanes(None));
    holds("a thread per lane, one rank stops", 100_000, with_stop(two_lanes(None)));
    let order: &[usize] = &[0, 1, 0, 1, 0];
    let other: &[usize] = &[1, 0, 1, 0, 0];
    holds("one thread, one order", 100, two_lanes(Some([order, order])));
    finds("one thread, two orders", ENDED, two_lanes(Some([order, other])));
    let deadlines = Deadlines::Spurious(2);
    holds("one thread, two orders, deadlines", 10, Config { deadlines, ..two_lanes(Some([order, other])) });
}

#[test]
fn rings_wrap_give_room_back_and_survive_failed_epochs() {
    use ring::Mistake::*;
    let epochs =
        vec![(vec![2, 1, 2, 2, 1, 2, 2], false), (vec![1, 2, 2, 2, 2], true), (vec![2, 1, 2], false)];
    let one = ring::Config { capacity: 8, epochs, both: false, mistake: None };
    holds("one ring", 500, one.clone());
    let epochs = vec![(vec![1; 6], false), (vec![1; 3], true), (vec![1; 2], false)];
    let both = ring::Config { capacity: 4, epochs, both: true, mistake: None };
    holds("a ring each way", 100_000, both.clone());
    for mistake in [
        HeadBeforeBytes,
        TailBeforeCopy,
        ArrivalBeforeHead,
        RoomOffByOne,
        NothingSkipped,
        SkippedBeforeArrival,
    ] {
        let config = ring::Config { mistake: Some(mistake), ..one.clone() };
        finds(&format!("ring: {mistake:?}"), ring::COPIED, config);
    }
    let waits = ring::Config { mistake: Some(WaitsForRoomOnly), ..one.clone() };
    finds("ring: WaitsForRoomOnly", ring::ENDED, waits);
    let sends = ring::Config { mistake: Some(SendsBeforeReceives), ..both };
    finds("ring: SendsBeforeReceives", ring::ENDED, sends);
    let large = ring::Config { epochs: vec![(vec![3, 6], false)], ..one };
    assert!(large.ring().max_piece() < 6);
    finds("ring: a piece larger than the ring can take", ring::ENDED, large);
}

#[test]
fn slots_between_nodes_are_used_again_only_when_they_are_free() {
    use link::Mistake::*;
    let rows = link::Config { window: 2, messages: 7, pieces: 1, bits: 2, answers: false, mistake: None };
    holds("rows, window 2", 300, rows);
    holds("rows, window 3", 1_000, link::Config { window: 3, bits: 3, ..rows });
    holds("rows, window 4", 10_000, link::Config { window: 4, bits: 3, ..rows });
    holds("rows, window 1", 20, link::Config { window: 1, bits: 1, ..rows });
    let cut = link::Config { pieces: 2, messages: 6, ..rows };
    holds("rows in two pieces", 1_000, cut);
    let answers = link::Config { answers: true, messages: 6, ..rows };
    holds("requests and answers", 1_000, answers);
    holds("requests and answers in two pieces", 10_000, link::Config { pieces: 2, messages: 4, ..answers });
    let with = |mistake, config| link::Config { mistake: Some(mistake), ..config };
    finds("lands with one piece", link::CONTENT, with(LandsWithOnePiece, cut));
    finds("notice before bytes", link::CONTENT, with(NoticeBeforeBytes, rows));
    finds("sent when posted", link::CONTENT, with(SentWhenPosted, rows));
    finds("credit when landed", link::CONTENT, with(CreditWhenLanded, rows));
    finds("credit with gaps", link::CONTENT, with(CreditWithGaps, rows));
    finds("credit is a total", link::ENDED, with(CreditIsTotal, rows));
    finds("credit too late", link::ENDED, with(CreditTooLate, rows));
    finds("a number of one bit less", link::CONTENT, with(NumberTooShort, rows));
    finds("request when the answer landed", link::CONTENT, with(RequestWhenAnswerLanded, answers));
}

#[test]
fn a_dead_peer_beside_living_ones_holds_nobody_up() {
    use proxy::Mistake::*;
    let commands = vec![0, 1, 0, 1, 2, 2];
    let dead = proxy::Config { commands, tx_depth: 3, window: 2, dead: Some(0), mistake: None };
    holds("one of three peers is dead", 100, dead.clone());
    holds("none is", 100, proxy::Config { dead: None, tx_depth: 1, ..dead.clone() });
    let with = |mistake| proxy::Config { mistake: Some(mistake), ..dead.clone() };
    finds("refused commands wait in the ring", proxy::SERVED, with(WaitsInTheRing));
    finds("refused commands wait in one queue", proxy::SERVED, with(OneQueue));
    let many = proxy::Config { commands: vec![0, 0, 0, 1, 1], ..with(NoCredit) };
    finds("a dead peer's writes fill the send queue", proxy::SERVED, many);
    let full = proxy::Config { tx_depth: 2, ..dead.clone() };
    finds("a send queue no larger than a window", proxy::SERVED, full);
}

#[test]
fn late_writes_of_a_rank_that_stopped_and_goes_on_touch_nothing_in_use() {
    use reuse::Mistake::*;
    holds("a stopped sender and two groups", 100, reuse::Config { mistake: None });
    for mistake in [FreedBeforeDeregistered, IncarnationIgnored, FreedWithWritesInFlight] {
        finds(&format!("reuse: {mistake:?}"), reuse::SAFE, reuse::Config { mistake: Some(mistake) });
    }
}
