//! Properties of cells, relays and links, over even, uneven and scattered nodes.

use super::*;

/// Nodes of given sizes, rank after rank, or dealt out in turn.
fn shapes() -> Vec<Vec<usize>> {
    let in_a_row = |sizes: &[usize]| -> Vec<usize> {
        sizes.iter().enumerate().flat_map(|(node, &size)| vec![node; size]).collect()
    };
    let mut shapes = vec![
        in_a_row(&[1]),
        in_a_row(&[4]),
        in_a_row(&[1, 1]),
        in_a_row(&[2, 2]),
        in_a_row(&[1, 3]),
        in_a_row(&[3, 1]),
        in_a_row(&[5, 2, 1, 3]),
        in_a_row(&[1; 9]),
        in_a_row(&[8; 16]),
        vec![0, 1, 0, 2, 1, 0, 2],
        vec![0, 1, 2, 0, 1, 2, 0, 1, 0, 0],
    ];
    let mut random = 0x2545_F491u64;
    for _ in 0..40 {
        let mut node_of = Vec::new();
        let mut next = 0;
        for _ in 0..1 + random % 23 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let node = (random >> 33) as usize % 6;
            // Numbered by first appearance, as a group does it.
            let node = node.min(next);
            next = next.max(node + 1);
            node_of.push(node);
        }
        shapes.push(node_of);
    }
    shapes
}

fn everyone(node_of: &[usize], direct: bool) -> Vec<Topology> {
    (0..node_of.len()).map(|rank| Topology::of_nodes(rank, node_of.to_vec(), direct)).collect()
}

#[test]
fn cells_split_the_remote_ranks_and_their_relay_is_one_of_them() {
    for node_of in shapes() {
        for direct in [false, true] {
            for (rank, topology) in everyone(&node_of, direct).iter().enumerate() {
                let mut reached: Vec<usize> = topology.locals().to_vec();
                assert!(reached.contains(&rank));
                for (index, cell) in topology.cells().iter().enumerate() {
                    assert!(cell.ranks.contains(&cell.relay));
                    assert_eq!(topology.links()[cell.link], cell.relay);
                    assert!(cell.ranks.is_sorted());
                    assert!(cell.ranks.iter().all(|&member| node_of[member] == node_of[cell.relay]));
                    assert!(cell.ranks.iter().all(|&member| topology.cell_of()[member] == index as u32));
                    assert_eq!(direct, direct && cell.ranks.len() == 1);
                    reached.extend(&cell.ranks);
                }
                reached.sort_unstable();
                assert_eq!(reached, (0..node_of.len()).collect::<Vec<_>>(), "{node_of:?} rank {rank}");
                let places = topology.locals().iter().map(|&local| topology.place(local));
                assert!(places.eq((0..topology.locals().len()).map(Some)));
                assert!(topology.remotes().iter().all(|&remote| topology.place(remote).is_none()));
            }
        }
    }
}

#[test]
fn a_relay_serves_exactly_those_who_chose_it_for_exactly_the_cell_they_mean() {
    for node_of in shapes() {
        for direct in [false, true] {
            let all = everyone(&node_of, direct);
            for (rank, topology) in all.iter().enumerate() {
                for cell in topology.cells() {
                    let relay = &all[cell.relay];
                    let source = relay.sources().iter().find(|source| source.rank == rank);
                    let source = source.expect("the relay knows its source");
                    assert_eq!(relay.links()[source.link], rank);
                    let served: Vec<usize> =
                        relay.served_places().map(|place| relay.locals()[place]).collect();
                    assert_eq!(served, cell.ranks);
                    for &member in &cell.ranks {
                        assert_eq!(all[member].local_relay(rank), cell.relay);
                        let place = all[member].place(cell.relay).expect("of one node");
                        assert!(all[member].served_by(place).contains(&rank));
                    }
                }
                let chosen = all.iter().flat_map(|other| other.cells()).filter(|cell| cell.relay == rank);
                assert_eq!(chosen.count(), topology.sources().len());
            }
        }
    }
}

#[test]
fn links_are_known_at_both_ends_and_are_few() {
    for node_of in shapes() {
        let num_nodes = node_of.iter().max().map_or(0, |last| last + 1);
        for direct in [false, true] {
            let all = everyone(&node_of, direct);
            for (rank, topology) in all.iter().enumerate() {
                assert!(topology.links().is_sorted());
                for &peer in topology.links() {
                    assert_ne!(node_of[peer], node_of[rank]);
                    assert!(all[peer].links().contains(&rank), "{node_of:?}: {rank} and {peer}");
                }
                let others = topology.cells().len() + topology.sources().len();
                assert!(topology.links().len() <= others);
                if !direct {
                    assert_eq!(topology.cells().len(), num_nodes - 1);
                }
            }
        }
    }
}

#[test]
fn ranks_of_a_node_agree_on_the_order_of_the_ranks_that_each_of_them_serves() {
    for node_of in shapes() {
        let all = everyone(&node_of, false);
        for topology in &all {
            for (place, &local) in topology.locals().iter().enumerate() {
                let known: Vec<usize> = all[local].sources().iter().map(|source| source.rank).collect();
                assert_eq!(topology.served_by(place), known);
                assert!(known.len() <= topology.max_relayed());
                assert_eq!(topology.max_relayed(), all[local].max_relayed());
            }
        }
    }
}

#[test]
fn even_nodes_share_the_work_evenly() {
    let node_of: Vec<usize> = (0..1024).map(|rank| rank / 8).collect();
    for rank in [0, 5, 517, 1023] {
        let topology = Topology::of_nodes(rank, node_of.clone(), false);
        assert_eq!(
            (topology.cells().len(), topology.sources().len(), topology.links().len()),
            (127, 127, 127)
        );
        assert!(topology.cells().iter().all(|cell| cell.relay % 8 == rank % 8));
    }
}

#[test]
fn without_a_network_there_is_one_memory_whatever_the_nodes() {
    let topology = Topology::of_one_memory(2, vec![0, 1, 0, 1]);
    assert_eq!(topology.locals(), [0, 1, 2, 3]);
    assert!(topology.cells().is_empty() && topology.sources().is_empty() && topology.remotes().is_empty());
    assert_eq!((topology.own_place(), topology.place(3)), (2, Some(3)));
}
