//! Who shares memory with whom, and over which ranks the others are reached. All of it is a pure function of the
//! ranks' nodes and of the route, so every rank knows what every other will do.

use crate::layout::Neighbours;

/// The cell of a rank that shares memory with this one.
pub(crate) const NO_CELL: u32 = u32::MAX;

/// Ranks of another node that this rank reaches through one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Takes this rank's messages for the cell, and is in it.
    pub(crate) relay: usize,
    /// The relay's number among this rank's links.
    pub(crate) link: usize,
    /// Ascending.
    pub(crate) ranks: Vec<usize>,
}

/// A rank of another node whose messages this rank takes, for itself and for others of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) rank: usize,
    /// Its number among this rank's links.
    pub(crate) link: usize,
}

/// The group as one rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    rank: usize,
    node_of: Vec<usize>,
    /// Ranks that share memory with this one, itself included; ascending.
    locals: Vec<usize>,
    /// The place of each rank among the ranks that share memory with it.
    place_of: Vec<u32>,
    /// Other ranks; ascending.
    remotes: Vec<usize>,
    cells: Vec<Cell>,
    /// The cell of each rank, or [`NO_CELL`].
    cell_of: Vec<u32>,
    sources: Vec<Source>,
    /// Per local place: the remote ranks whose messages for *this* rank that place takes; ascending.
    served_by: Vec<Vec<usize>>,
    /// The rank at the other end of each link; ascending.
    links: Vec<usize>,
    direct: bool,
}

impl Topology {
    /// All ranks share memory; `node_of` only names nodes.
    pub(crate) fn of_one_memory(rank: usize, node_of: Vec<usize>) -> Topology {
        let num_ranks = node_of.len();
        Topology {
            rank,
            locals: (0..num_ranks).collect(),
            place_of: (0..num_ranks as u32).collect(),
            remotes: Vec::new(),
            cells: Vec::new(),
            cell_of: vec![NO_CELL; num_ranks],
            sources: Vec::new(),
            served_by: vec![Vec::new(); num_ranks],
            links: Vec::new(),
            direct: false,
            node_of,
        }
    }

    /// The ranks of a node share memory; messages go between nodes. `direct`: every remote rank is a cell of its
    /// own.
    pub(crate) fn of_nodes(rank: usize, node_of: Vec<usize>, direct: bool) -> Topology {
        let num_nodes = node_of.iter().max().map_or(0, |last| last + 1);
        let mut members = vec![Vec::new(); num_nodes];
        let mut place_of = Vec::with_capacity(node_of.len());
        for (member, &node) in node_of.iter().enumerate() {
            place_of.push(members[node].len() as u32);
            members[node].push(member);
        }
        let own = node_of[rank];
        let relay = |node: usize, of: usize| members[node][place_of[of] as usize % members[node].len()];
        let remotes: Vec<usize> = (0..node_of.len()).filter(|&other| node_of[other] != own).collect();
        let takes = |local: usize, other: usize| {
            if direct { local == rank } else { relay(own, other) == local }
        };
        let sources: Vec<usize> = remotes.iter().copied().filter(|&other| takes(rank, other)).collect();
        let mut cells: Vec<Cell> = Vec::new();
        for (node, ranks) in members.iter().enumerate().filter(|(node, _)| *node != own) {
            if direct {
                cells.extend(ranks.iter().map(|&only| Cell { relay: only, link: 0, ranks: vec![only] }));
            } else {
                cells.push(Cell { relay: relay(node, rank), link: 0, ranks: ranks.clone() });
            }
        }
        let mut links: Vec<usize> =
            cells.iter().map(|cell| cell.relay).chain(sources.iter().copied()).collect();
        links.sort_unstable();
        links.dedup();
        // Every relay and every source was just put into the list.
        let link_to = |other: usize| links.partition_point(|&link| link < other);
        let mut cell_of = vec![NO_CELL; node_of.len()];
        for (index, cell) in cells.iter_mut().enumerate() {
            cell.link = link_to(cell.relay);
            cell.ranks.iter().for_each(|&member| cell_of[member] = index as u32);
        }
        let sources = sources.into_iter().map(|rank| Source { rank, link: link_to(rank) }).collect();
        let served_by = members[own]
            .iter()
            .map(|&local| remotes.iter().copied().filter(|&other| takes(local, other)).collect())
            .collect();
        let locals = std::mem::take(&mut members[own]);
        Topology {
            rank,
            locals,
            place_of,
            remotes,
            cells,
            cell_of,
            sources,
            served_by,
            links,
            direct,
            node_of,
        }
    }

    /// The node of each rank, numbered from 0 in order of first appearance.
    pub(crate) fn node_of(&self) -> &[usize] {
        &self.node_of
    }

    /// Ranks that share memory with this one, itself included; ascending.
    pub(crate) fn locals(&self) -> &[usize] {
        &self.locals
    }

    /// The place of `rank` in [`Topology::locals`]; None if it is remote.
    pub(crate) fn place(&self, rank: usize) -> Option<usize> {
        (self.cell_of[rank] == NO_CELL).then(|| self.place_of[rank] as usize)
    }

    /// This rank's place.
    pub(crate) fn own_place(&self) -> usize {
        self.place_of[self.rank] as usize
    }

    /// Ranks that are reached by messages; ascending.
    pub(crate) fn remotes(&self) -> &[usize] {
        &self.remotes
    }

    /// Where this rank's messages go.
    pub(crate) fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// The cell of each rank, or [`NO_CELL`].
    pub(crate) fn cell_of(&self) -> &[u32] {
        &self.cell_of
    }

    /// Whose messages this rank takes; ascending.
    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The local ranks, by place, for which this rank takes messages.
    pub(crate) fn served_places(&self) -> std::ops::Range<usize> {
        if self.direct { self.own_place()..self.own_place() + 1 } else { 0..self.locals.len() }
    }

    /// The remote ranks whose messages for this rank the rank at local `place` takes; ascending. If that is another
    /// rank, they are all that it serves.
    pub(crate) fn served_by(&self, place: usize) -> &[usize] {
        &self.served_by[place]
    }

    /// The local rank that takes the messages of `remote` for this rank.
    pub(crate) fn local_relay(&self, remote: usize) -> usize {
        let place =
            if self.direct { self.own_place() } else { self.place_of[remote] as usize % self.locals.len() };
        self.locals[place]
    }

    /// The most remote ranks whose messages one rank of this node takes for the others of its node.
    pub(crate) fn max_relayed(&self) -> usize {
        if self.direct { 0 } else { self.served_by.iter().map(Vec::len).max().unwrap_or(0) }
    }

    /// Ranks of the largest node among those that share memory.
    pub(crate) fn largest_node(&self) -> usize {
        if self.remotes.is_empty() {
            return self.locals.len();
        }
        self.place_of.iter().max().map_or(1, |place| *place as usize + 1)
    }

    /// Links that a rank of this group has if its nodes are even.
    pub(crate) fn usual_links(&self) -> usize {
        match self.direct {
            true => self.remotes.len(),
            false => self.node_of.iter().max().copied().unwrap_or(0),
        }
    }

    /// Who writes into this rank's segment.
    pub(crate) fn neighbours(&self) -> Neighbours {
        Neighbours {
            num_locals: self.locals.len(),
            has_remotes: !self.remotes.is_empty(),
            max_relayed: self.max_relayed(),
        }
    }

    /// The rank at the other end of each link; ascending.
    pub(crate) fn links(&self) -> &[usize] {
        &self.links
    }

    /// True if there is a network between nodes, on every rank of the group.
    pub(crate) fn is_networked(&self) -> bool {
        !self.remotes.is_empty()
    }

    /// True if messages to ranks of one node go to each by itself.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
