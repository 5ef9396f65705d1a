//! Which ranks share memory, and which have the network between them. Whether two ranks share memory is found by
//! trying: a connection to the other's abstract socket, which exists on its machine only. Host names say nothing.

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::device::Backend;
use super::hello::{Hello, number, without_network};
use super::link::Listener;
use super::topology::Topology;
use crate::bootstrap::Bootstrap;
use crate::config::{GroupConfig, Route, Transport};
use crate::error::{Error, Result, Status};

/// The way to every rank.
pub(super) struct Nodes {
    pub(super) topology: Topology,
    /// Connections in which this rank asks, to ranks of other processes that share memory with it; those that were
    /// made to find that out.
    pub(super) asking: Vec<(usize, OwnedFd)>,
    /// Why messages go between nodes, or why they do not.
    pub(super) reason: String,
}

/// Finds the nodes. Collective, and the same on every rank.
///
/// # Errors
/// [`Status::Unsupported`] if a rank cannot be reached, [`Status::Mismatch`] if node ids contradict what ranks found.
pub(super) fn find(
    config: &GroupConfig,
    backend: &Backend,
    bootstrap: &mut dyn Bootstrap,
    listener: &Listener,
    hellos: &[Hello],
    deadline: Instant,
) -> Result<Nodes> {
    let rank = bootstrap.rank();
    let transport = Transport::from_code(config.transport)?;
    let named: Vec<usize> = number(hellos.iter().map(|hello| hello.node_id));
    let has_ids = hellos[0].node_id != 0;
    let has_network = without_network(hellos).is_none();
    if transport == Transport::Fabric && !has_network {
        return Err(no_network(backend, hellos, "EP_TRANSPORT_FABRIC was asked for"));
    }
    let direct = Route::from_code(config.route)? == Route::Direct;
    if transport == Transport::Fabric && has_ids {
        let topology = Topology::of_nodes(rank, named, direct);
        return Ok(Nodes { topology, asking: Vec::new(), reason: String::from("asked for") });
    }
    let of_one_process = hellos.iter().all(|hello| hello.process == hellos[0].process);
    if transport == Transport::SharedMemory || !has_network || of_one_process {
        let reason = match transport {
            Transport::SharedMemory => String::from("asked for"),
            _ if of_one_process => String::from("all ranks are threads of one process"),
            _ => format!("without a network ({})", backend.network_reason),
        };
        return Ok(Nodes { topology: Topology::of_one_memory(rank, named), asking: Vec::new(), reason });
    }
    let mut asking = Vec::new();
    let mut reached = vec![0u8; hellos.len().div_ceil(8)];
    for (peer, hello) in hellos.iter().enumerate() {
        let reaches = hello.process == hellos[rank].process
            || match listener.ask(rank, peer, &hello.socket) {
                Ok(socket) => {
                    asking.push((peer, socket));
                    true
                }
                Err(error) if error.status == Status::Unsupported => false,
                Err(error) => return Err(error),
            };
        reached[peer / 8] |= u8::from(reaches) << (peer % 8);
    }
    let reached = bootstrap.all_gather(&reached, deadline)?;
    let found = islands(&reached)?;
    if found.iter().all(|&island| island == 0) {
        let reason = String::from("all ranks reach each other's memory");
        return Ok(Nodes { topology: Topology::of_one_memory(rank, named), asking, reason });
    }
    let node_of = if has_ids { within(&named, &found)? } else { found };
    let own = node_of[rank];
    asking.retain(|(peer, _)| node_of[*peer] == own);
    let reason = String::from("not all ranks reach each other's memory");
    Ok(Nodes { topology: Topology::of_nodes(rank, node_of, direct), asking, reason })
}

fn no_network(backend: &Backend, hellos: &[Hello], what: &str) -> Error {
    let without = without_network(hellos).unwrap_or(0);
    Error::new(
        Status::Unsupported,
        format!("{what}, and rank {without} has no network (here: {})", backend.network_reason),
    )
}

/// Sets of ranks that reach each other, from what each rank reaches.
fn islands(reached: &[Vec<u8>]) -> Result<Vec<usize>> {
    let bytes = reached.len().div_ceil(8);
    let reaches = |from: usize, to: usize| reached[from][to / 8] & 1 << (to % 8) != 0;
    for (rank, map) in reached.iter().enumerate() {
        if map.len() != bytes {
            return Err(Error::new(
                Status::Bootstrap,
                format!("rank {rank} told of {} bytes of ranks that it reaches, expected {bytes}", map.len()),
            ));
        }
    }
    for (from, map) in reached.iter().enumerate() {
        let odd = |to: &usize| reaches(from, *to) && reached[*to] != *map;
        if let Some(to) = (0..reached.len()).find(odd) {
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "ranks {from} and {to} share memory, but not with the same ranks; put the ranks of a machine \
                     into one network namespace and under one user"
                ),
            ));
        }
    }
    Ok(number(reached.iter()))
}

/// Node ids, if no node spans ranks that do not reach each other.
fn within(named: &[usize], found: &[usize]) -> Result<Vec<usize>> {
    for (rank, node) in named.iter().enumerate() {
        let first = named.iter().position(|other| other == node).unwrap_or(rank);
        if found[first] != found[rank] {
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "ranks {first} and {rank} have one node_id but share no memory; give each machine its own"
                ),
            ));
        }
    }
    Ok(named.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn islands_are_found_when_all_ranks_say_the_same_of_them() {
        let maps = [vec![0b0101], vec![0b1010], vec![0b0101], vec![0b1010]];
        assert_eq!(islands(&maps).unwrap(), [0, 1, 0, 1]);
        assert_eq!(islands(&[vec![0b11], vec![0b11]]).unwrap(), [0, 0]);
    }

    #[test]
    fn ranks_that_do_not_agree_whom_they_reach_are_named() {
        let one_way = islands(&[vec![0b11], vec![0b10]]).unwrap_err();
        assert!(one_way.message.contains("ranks 0 and 1"), "{one_way}");
        let chain = islands(&[vec![0b011], vec![0b111], vec![0b110]]).unwrap_err();
        assert_eq!(chain.status, Status::Mismatch);
        assert_eq!(islands(&[vec![0b1, 0], vec![0b10]]).unwrap_err().status, Status::Bootstrap);
    }

    #[test]
    fn a_node_id_that_spans_machines_is_refused_and_a_machine_of_several_ids_is_not() {
        assert_eq!(within(&[0, 0, 1, 2], &[0, 0, 1, 1]).unwrap(), [0, 0, 1, 2]);
        let error = within(&[0, 1, 0], &[0, 0, 1]).unwrap_err();
        assert!(error.message.contains("ranks 0 and 2"), "{error}");
    }
}
