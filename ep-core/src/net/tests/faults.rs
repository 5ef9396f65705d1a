//! Peers that die, links that break, queues that are too small, ports that end early.

use std::time::Instant;

use super::cluster::{Cluster, bells, far, link_to, peers_of, proxy, shape};
use super::traffic::{Traffic, run};
use crate::Status;
use crate::net::sim::{SimNet, SimOptions};
use crate::net::transport::FaultClass;
use crate::net::{Closed, Kind, Port, PortSpec, Stream};

const DESC: Stream = Stream::new(0, Kind::Desc);
const ROWS: Stream = Stream::new(0, Kind::Rows);

fn options(seed: u64) -> SimOptions {
    SimOptions { seed, ..SimOptions::default() }
}

/// Rounds until `rank` has lost its link to `peer`.
fn failure(cluster: &mut Cluster, rank: usize, peer: usize) -> (FaultClass, String) {
    for _ in 0..100_000 {
        cluster.round();
        if let Some(failure) = cluster.port(rank).failure(link_to(rank, peer)) {
            assert_eq!(failure.peer, peer);
            return (failure.class, failure.text.clone());
        }
    }
    panic!("rank {rank} does not notice that rank {peer} is gone");
}

#[test]
fn a_killed_peer_fails_its_links_and_the_others_go_on() {
    for seed in 1..=5 {
        let mut cluster = Cluster::connected(options(seed), &[1, 2, 1, 1], 1);
        let mut traffic = Traffic::new(seed, 4, 1, 60);
        for _ in 0..2000 {
            traffic.act(&cluster);
            cluster.round();
        }
        traffic.stopped[2] = true;
        cluster.net.kill(cluster.ranks[2].nics[0]);
        run(&mut cluster, &mut traffic, &format!("seed {seed}: rank 2 was killed"));
        let sends = |cluster: &Cluster, rank: usize| {
            let port = cluster.port(rank);
            port.send(link_to(rank, 2), Stream::new(0, Kind::Error), 0, 16).unwrap();
        };
        for rank in [0, 1, 3] {
            sends(&cluster, rank);
            let (class, text) = failure(&mut cluster, rank, 2);
            assert_eq!(class, FaultClass::PeerDead, "{text}");
            assert!(text.contains("rank 2"), "{text}");
        }
        assert!(cluster.port(2).failure(0).unwrap().text.contains("is lost"));
    }
}

#[test]
fn a_restarted_peer_is_another_one() {
    let mut cluster = Cluster::connected(options(1), &[1, 1], 1);
    cluster.net.restart(cluster.ranks[1].nics[0]);
    cluster.port(0).send(0, DESC, 0, 16).unwrap();
    let (class, text) = failure(&mut cluster, 0, 1);
    assert_eq!(class, FaultClass::PeerDead);
    assert!(text.contains("error 9"), "{text}");
}

#[test]
fn a_cut_link_fails_at_both_ends_and_no_other_does() {
    let mut cluster = Cluster::connected(options(2), &[1, 1, 1], 1);
    cluster.net.cut(cluster.ranks[0].nics[0], cluster.ranks[1].nics[0]);
    cluster.port(0).send(link_to(0, 1), DESC, 0, 16).unwrap();
    cluster.port(1).send(link_to(1, 0), DESC, 0, 16).unwrap();
    cluster.port(2).send(link_to(2, 0), DESC, 0, 16).unwrap();
    assert_eq!(failure(&mut cluster, 0, 1).0, FaultClass::PeerDead);
    assert_eq!(failure(&mut cluster, 1, 0).0, FaultClass::PeerDead);
    assert!(cluster.port(0).landed(link_to(0, 2), DESC, 0).is_some());
    assert_eq!(cluster.port(0).failure(link_to(0, 2)), None);
}

#[test]
fn a_storm_of_again_ends_well_in_time_or_fails_the_links() {
    let mut cluster = Cluster::connected(options(3), &[1, 1], 1);
    let mut traffic = Traffic::new(3, 2, 1, 30);
    cluster.net.set_again_one_in(1);
    for _ in 0..300 {
        traffic.act(&cluster);
        cluster.round();
    }
    cluster.net.set_again_one_in(3);
    run(&mut cluster, &mut traffic, "after the storm");
    assert!(cluster.net.stats().again > 100);

    cluster.net.set_again_one_in(1);
    cluster.port(0).send(0, Stream::new(0, Kind::Error), 0, 16).unwrap();
    let (class, text) = failure(&mut cluster, 0, 1);
    assert_eq!(class, FaultClass::Stuck, "{text}");
}

#[test]
fn a_completion_queue_that_is_too_small_is_refused_with_the_numbers() {
    let layout = crate::net::PortLayout::new(shape(3, 2)).unwrap();
    let needed = 3 * layout.incoming_per_link() + 64;
    let open = |cq_depth: usize| {
        let net = SimNet::stepped(SimOptions { cq_depth, ..options(1) });
        let (mut proxy, _) = proxy(&net, 1);
        let (_, bells) = bells(2);
        proxy.open(PortSpec { shape: shape(3, 2), rank: 0, peers: vec![1, 2, 3], bells }).map(drop)
    };
    assert_eq!(open(needed), Ok(()));
    let error = open(needed - 1).unwrap_err();
    assert_eq!(error.status, Status::Capacity);
    for part in [needed.to_string(), (needed - 1).to_string(), "3 links".into(), "sim 0".into()] {
        assert!(error.message.contains(&part), "{part} is not in {error}");
    }
}

#[test]
fn a_queue_of_exactly_the_budget_takes_everything_that_can_come_at_once() {
    let layout = crate::net::PortLayout::new(shape(3, 2)).unwrap();
    let cq_depth = 3 * layout.incoming_per_link() + 64;
    for seed in 1..=3 {
        let options = SimOptions { cq_depth, tx_depth: 4096, ..options(seed) };
        let mut cluster = Cluster::connected(options, &[1; 4], 2);
        // Rows of rank 0 first, so that credits for them can come too.
        send_all(cluster.port(0), &[Kind::Rows]);
        for _ in 0..1000 {
            cluster.round();
        }
        (0..4).for_each(|rank| send_all(cluster.port(rank), if rank == 0 { &WITHOUT_ROWS } else { &ALL }));
        // Rank 0 posts what it may, and then does not look for a long time.
        cluster.ranks[0].proxy.turn(0);
        for _ in 0..5000 {
            for rank in 1..4 {
                let now = cluster.net.now_ns();
                cluster.ranks[rank].proxy.turn(now);
                free_rows(cluster.port(rank));
            }
            for _ in 0..20 {
                cluster.net.step();
            }
        }
        let most = cluster.net.stats().most_completions;
        assert!(most * 10 > cq_depth * 9, "seed {seed}: the queue held {most} of {cq_depth}: not all came");
        for _ in 0..5000 {
            cluster.round();
        }
        for rank in 0..4 {
            (0..3).for_each(|link| assert_eq!(cluster.port(rank).failure(link), None, "seed {seed}"));
            (0..3).for_each(|link| assert_eq!(cluster.port(rank).stats(link).arrived, 1 + 39, "seed {seed}"));
        }
    }
}

const ALL: [Kind; 5] = [Kind::Rows, Kind::Desc, Kind::Request, Kind::Response, Kind::Error];
const WITHOUT_ROWS: [Kind; 4] = [Kind::Desc, Kind::Request, Kind::Response, Kind::Error];

/// A window of these on every link.
fn send_all(port: &Port, kinds: &[Kind]) {
    for link in 0..3 {
        for stream in (0..2).flat_map(|lane| kinds.iter().map(move |&kind| Stream::new(lane, kind))) {
            let window = port.layout().window(stream);
            (0..window).for_each(|seq| port.send(link, stream, seq, 16).unwrap());
        }
    }
}

/// Gives credit for the rows that have come, as often as it may.
fn free_rows(port: &Port) {
    for link in 0..3 {
        for lane in 0..2 {
            let rows = Stream::new(lane, Kind::Rows);
            let landed = (0..8).take_while(|&seq| port.landed(link, rows, seq).is_some()).count();
            (0..=landed as u64).for_each(|consumed| port.send_credit(link, rows, consumed).unwrap());
        }
    }
}

#[test]
fn a_peer_that_has_not_connected_refuses_the_probe() {
    let mut cluster = Cluster::open(options(1), &[1, 1], 1);
    let pending = cluster.port(0).begin_connect(cluster.offers_for(0));
    cluster.answers(vec![pending]).remove(0).unwrap();
    let pending = cluster.port(0).begin_probe(far());
    let error = cluster.answers(vec![pending]).remove(0).unwrap_err();
    assert_eq!(error.status, Status::PeerLost);
    assert!(error.message.contains("rank 1") && error.message.contains("does not know this one"), "{error}");
}

#[test]
fn a_network_that_cuts_immediates_is_found_by_the_probe() {
    let mut cluster = Cluster::open(SimOptions { immediate_mask: 0xFFFF, ..options(1) }, &[1, 1], 1);
    cluster.connect().unwrap();
    let errors: Vec<_> = cluster.probe().into_iter().map(|answer| answer.unwrap_err().message).collect();
    assert!(errors.iter().any(|text| text.contains("upper half")), "{errors:?}");
}

#[test]
fn a_silent_nic_is_named_at_the_probes_deadline() {
    let mut cluster = Cluster::open(options(1), &[2, 2], 1);
    cluster.connect().unwrap();
    // Rank 1 sends nothing.
    let pending = cluster.port(0).begin_probe(Instant::now());
    let error = cluster.answers(vec![pending]).remove(0).unwrap_err();
    assert_eq!(error.status, Status::Timeout);
    assert!(error.message.contains("rank 1: nothing came over its NIC 0"), "{error}");
}

#[test]
fn ranks_with_different_numbers_of_nics_use_the_smaller_one_and_say_so() {
    let mut cluster = Cluster::open(options(1), &[3, 1], 1);
    let notes = cluster.connect().unwrap();
    let text = notes[0].as_deref().unwrap();
    assert!(text.contains("rank 1 has 1 NICs and this rank has 3") && text.contains("use 1"), "{text}");
    assert!(notes[1].is_some());
    assert_eq!(cluster.probe(), [Ok(()), Ok(())]);
}

#[test]
fn offers_that_do_not_fit_are_refused_naming_the_rank() {
    let mut cluster = Cluster::open(options(1), &[1, 1, 1], 1);
    let refused = |cluster: &mut Cluster, offers: Vec<Vec<u8>>| {
        let pending = cluster.port(0).begin_connect(offers);
        cluster.answers(vec![pending]).remove(0).unwrap_err()
    };
    let good = cluster.offers_for(0);
    let swapped = refused(&mut cluster, vec![good[1].clone(), good[0].clone()]);
    assert!(swapped.message.contains("rank 1") && swapped.message.contains("is of rank 2"), "{swapped}");
    let few = refused(&mut cluster, vec![good[0].clone()]);
    assert_eq!(few.status, Status::InvalidArgument);
    let mut other = good.clone();
    // The fingerprint's place.
    other[0][12] ^= 1;
    let other = refused(&mut cluster, other);
    assert_eq!(other.status, Status::Mismatch);
    assert!(other.message.contains("rank 1") && other.message.contains("windows"), "{other}");
    let garbage = refused(&mut cluster, vec![vec![7; 100], good[1].clone()]);
    assert_eq!(garbage.status, Status::Bootstrap);
}

#[test]
fn closing_posts_what_was_sent_before() {
    let mut cluster = Cluster::connected(options(1), &[1, 1], 1);
    (0..8).for_each(|seq| cluster.port(0).send(0, ROWS, seq, 80_000).unwrap());
    let pending = cluster.ranks[0].port.take().unwrap().begin_close(far());
    assert_eq!(cluster.answers(vec![pending]), [Ok(Closed::Drained)]);
    assert_eq!(cluster.ranks[0].proxy.num_ports(), 0);
    (0..8).for_each(|seq| assert!(cluster.port(1).landed(0, ROWS, seq).is_some(), "message {seq}"));
}

#[test]
fn memory_of_a_port_that_ends_early_is_kept_until_its_writes_have_completed() {
    let mut cluster = Cluster::connected(options(1), &[1, 1], 1);
    (0..8).for_each(|seq| cluster.port(0).send(0, ROWS, seq, 80_000).unwrap());
    cluster.ranks[0].proxy.turn(0);
    let mut pending = cluster.ranks[0].port.take().unwrap().begin_close(Instant::now());
    cluster.ranks[0].proxy.turn(0);
    assert_eq!(pending.try_take(), Some(Ok(Closed::Quarantined { writes: 8 })));
    assert_eq!(cluster.ranks[0].proxy.num_ports(), 1, "kept");
    while cluster.round() {}
    assert_eq!(cluster.ranks[0].proxy.num_ports(), 0, "freed");
    // The bytes came from memory that was still there.
    (0..8).for_each(|seq| assert!(cluster.port(1).landed(0, ROWS, seq).is_some(), "message {seq}"));
}

#[test]
fn what_comes_for_a_port_that_is_gone_fails_at_its_sender() {
    let mut cluster = Cluster::connected(options(1), &[1, 1], 1);
    drop(cluster.ranks[1].port.take());
    while cluster.round() {}
    cluster.port(0).send(0, DESC, 0, 16).unwrap();
    let (class, text) = failure(&mut cluster, 0, 1);
    assert!(matches!(class, FaultClass::BadAddress | FaultClass::UnknownPeer), "{text}");
}

#[test]
fn a_port_of_no_links_opens_and_closes() {
    let mut cluster = Cluster::connected(options(1), &[1], 1);
    assert_eq!(peers_of(0, 1), Vec::<usize>::new());
    let pending = cluster.ranks[0].port.take().unwrap().begin_close(far());
    assert_eq!(cluster.answers(vec![pending]), [Ok(Closed::Drained)]);
}
