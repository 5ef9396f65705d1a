//! Worlds: which ranks there are and which groups they form.

/// The settings of one group, the same on all its ranks but for the node ids.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupSpec {
    /// The world's ranks that are in it, ascending.
    pub members: Vec<usize>,
    /// `node_id` of each member; 0 lets the library find out, which on one machine gives one node.
    pub node_ids: Vec<u32>,
    pub num_lanes: u32,
    /// 0: the library's choice.
    pub ring_bytes: u32,
    /// 0: the library's choice, 256.
    pub max_local_experts: u32,
    /// The network between nodes; None: shared memory.
    pub between: Option<Between>,
}

/// Messages between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Between {
    /// `EP_ROUTE_`.
    pub route: i32,
    /// 0: the library's choice.
    pub chunk_bytes: u32,
    /// 0: the library's choice.
    pub chunk_window: u32,
}

impl GroupSpec {
    fn new(members: Vec<usize>) -> GroupSpec {
        let node_ids = vec![0; members.len()];
        GroupSpec { members, node_ids, num_lanes: 2, ring_bytes: 0, max_local_experts: 0, between: None }
    }

    fn nodes_of(mut self, node_ids: &[u32]) -> GroupSpec {
        self.node_ids = node_ids.to_vec();
        self
    }

    fn rings_of(mut self, ring_bytes: u32) -> GroupSpec {
        self.ring_bytes = ring_bytes;
        self
    }

    /// With the network between nodes.
    fn between(mut self, route: i32, chunk_bytes: u32, chunk_window: u32) -> GroupSpec {
        self.between = Some(Between { route, chunk_bytes, chunk_window });
        self
    }

    /// The node of each member. Ids here are given so that nodes ascend with their first rank and with
    /// their id.
    pub fn nodes(&self) -> Vec<usize> {
        let mut ids: Vec<u32> = self.node_ids.clone();
        ids.sort_unstable();
        ids.dedup();
        let node = |id: &u32| ids.iter().position(|other| other == id).expect("every id is listed");
        self.node_ids.iter().map(node).collect()
    }
}

/// Ranks, each a thread or a process, and the groups that they form at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub num_ranks: usize,
    pub groups: Vec<GroupSpec>,
}

impl World {
    fn of(group: GroupSpec) -> World {
        World { num_ranks: group.members.len(), groups: vec![group] }
    }
}

/// Rings so small that rows pass through them in many pieces. Not a power of two.
const SMALL_RING: u32 = 68 << 10;

/// Worlds of one group.
pub fn single() -> Vec<World> {
    let all = |num_ranks: usize| GroupSpec::new((0..num_ranks).collect());
    let mut worlds = vec![
        World::of(all(1)),
        World::of(all(2)),
        World::of(all(2).nodes_of(&[7, 9])),
        World::of(all(3).nodes_of(&[1, 1, 2])),
        World::of(all(4).nodes_of(&[1, 1, 2, 2])),
        World::of(all(4).rings_of(SMALL_RING)),
        World::of(all(5).nodes_of(&[3, 4, 3, 5, 4])),
        World::of(all(7)),
        World::of(all(8).nodes_of(&[1, 1, 1, 1, 2, 2, 2, 2])),
        World::of(all(8).rings_of(SMALL_RING)),
        World::of(all(16).nodes_of(&[1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4])),
        World::of(all(16)),
    ];
    worlds[0].groups[0].max_local_experts = 1000;
    worlds[1].groups[0].num_lanes = 1;
    worlds[4].groups[0].num_lanes = 16;
    worlds
}

/// Worlds of one group whose ranks share memory inside nodes only; as many as of [`single`].
pub fn networked() -> Vec<World> {
    let all = |node_ids: &[u32]| GroupSpec::new((0..node_ids.len()).collect()).nodes_of(node_ids);
    let mut worlds = vec![
        World::of(all(&[1, 2]).between(0, 0, 0)),
        World::of(all(&[1, 1, 2, 2]).between(0, 0, 0)),
        World::of(all(&[1, 2, 2, 2]).between(0, 0, 2)),
        World::of(all(&[1, 1, 2, 2]).between(2, 0, 0)),
        World::of(all(&[1, 2, 3, 4]).between(0, 32 << 10, 3)),
        World::of(all(&[1, 1, 2, 2, 3, 3]).between(0, 0, 0)),
        World::of(all(&[3, 4, 3, 5, 4]).between(0, 16 << 10, 1)),
        World::of(all(&[3, 4, 3, 5, 4, 3]).between(2, 16 << 10, 2)),
        World::of(all(&[1, 1, 1, 1, 2, 2, 2, 2]).between(0, 64 << 10, 4)),
        World::of(all(&[1, 1, 1, 2, 2]).between(0, 20 << 10, 2).rings_of(SMALL_RING)),
        World::of(all(&[1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]).between(0, 32 << 10, 2)),
        World::of(all(&[1, 2, 2, 3, 3, 3, 4, 4, 4, 4]).between(0, 48 << 10, 64)),
    ];
    worlds[4].groups[0].num_lanes = 5;
    worlds
}

/// Worlds of several groups at the same time, some with a network between nodes.
pub fn several_networked() -> Vec<World> {
    let group = |members: &[usize], node_ids: &[u32]| GroupSpec::new(members.to_vec()).nodes_of(node_ids);
    vec![
        World {
            num_ranks: 4,
            groups: vec![
                group(&[0, 1, 2, 3], &[1, 1, 2, 2]).between(0, 0, 0),
                group(&[0, 1, 2, 3], &[0, 0, 0, 0]),
                group(&[0, 2, 3], &[1, 2, 2]).between(2, 0, 0),
            ],
        },
        World {
            num_ranks: 4,
            groups: vec![
                group(&[0, 1], &[1, 2]).between(0, 0, 0),
                group(&[2, 3], &[0, 0]),
                group(&[0, 2], &[1, 2]).between(0, 32 << 10, 2),
                group(&[1, 3], &[1, 2]).between(0, 32 << 10, 2),
            ],
        },
    ]
}

/// Worlds of several groups at the same time.
pub fn several() -> Vec<World> {
    let group = |members: &[usize]| GroupSpec::new(members.to_vec());
    vec![
        // The same members twice.
        World { num_ranks: 3, groups: vec![group(&[0, 1, 2]), group(&[0, 1, 2]).rings_of(SMALL_RING)] },
        // All, and some.
        World { num_ranks: 4, groups: vec![group(&[0, 1, 2, 3]).nodes_of(&[1, 1, 2, 2]), group(&[1, 3])] },
        // Rows and columns of a 2 x 2 mesh.
        World { num_ranks: 4, groups: vec![group(&[0, 1]), group(&[2, 3]), group(&[0, 2]), group(&[1, 3])] },
        // Overlapping, one of them alone.
        World { num_ranks: 5, groups: vec![group(&[0, 1, 2, 3]), group(&[2, 3, 4]), group(&[4])] },
    ]
}
