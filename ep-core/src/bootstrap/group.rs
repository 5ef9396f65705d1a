//! What the root knows of its group, and what follows from each event. No I/O happens here.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::wire::{Frame, Join, Kind};
use super::{MAX_RANKS, MAX_ROUND_BYTES, later, name_ranks, out_of_range, seconds};

/// What the root does after an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// All ranks have joined: tell them.
    Welcome,
    /// A round is complete: send this frame to every rank.
    Deliver(Vec<u8>),
    /// The group is broken: send this sentence to every rank.
    Fail(String),
    /// Send this sentence to the rank that caused the event, and to no other.
    Refuse(String),
    /// As `Refuse`, but the rank may have come for the next group of its id, too early.
    TurnAway(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Absent,
    Here,
    Gone,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Joining,
    Running,
    Failed(String),
}

#[derive(Debug)]
pub(super) struct Group {
    root: SocketAddr,
    phase: Phase,
    /// Empty until the first rank has said how many there are.
    members: Vec<Presence>,
    /// The rank that said so.
    first: usize,
    /// The earliest deadline of the ranks that wait, and how long that rank meant to wait.
    deadline: Option<(Instant, Duration)>,
    round: u64,
    blobs: Vec<Option<Vec<u8>>>,
    round_bytes: usize,
    /// Connections that did not know the secret, and where the last one came from.
    strangers: u64,
    last_stranger: Option<IpAddr>,
}

impl Group {
    pub(super) fn new(root: SocketAddr) -> Group {
        Group {
            root,
            phase: Phase::Joining,
            members: Vec::new(),
            first: 0,
            deadline: None,
            round: 0,
            blobs: Vec::new(),
            round_bytes: 0,
            strangers: 0,
            last_stranger: None,
        }
    }

    /// A connection did not know the secret. Whatever it is, it changes nothing but the text of a timeout: a rank with
    /// another secret is one that does not join.
    pub(super) fn note_stranger(&mut self, from: Option<IpAddr>) {
        self.strangers = self.strangers.saturating_add(1);
        self.last_stranger = from;
    }

    fn strangers(&self) -> String {
        let from = self.last_stranger.map_or(String::new(), |from| format!(", the last one from {from}"));
        match self.strangers {
            0 => String::new(),
            1 => format!("; a connection with another secret was refused{from}"),
            count => format!("; {count} connections with another secret were refused{from}"),
        }
    }

    /// An authenticated connection says which rank it is.
    pub(super) fn join(&mut self, join: &Join, now: Instant) -> Step {
        let (rank, num_ranks) = (join.rank as usize, join.num_ranks as usize);
        match &self.phase {
            Phase::Failed(text) => {
                let text = text.clone();
                let has_come = self.members.get(rank).is_some_and(|member| *member != Presence::Absent);
                self.mark_here(rank);
                return if has_come { Step::TurnAway(text) } else { Step::Refuse(text) };
            }
            Phase::Running => {
                let all = self.members.len();
                return Step::TurnAway(format!(
                    "rank {rank} cannot join: all {all} ranks of the group have met already (root {})",
                    self.root
                ));
            }
            Phase::Joining => {}
        }
        if num_ranks == 0 || num_ranks > MAX_RANKS {
            return Step::Refuse(format!("rank {rank} was started with {num_ranks} ranks"));
        }
        if self.members.is_empty() {
            self.members = vec![Presence::Absent; num_ranks];
            self.blobs = vec![None; num_ranks];
            self.first = rank;
        }
        self.sooner(join.remaining, join.timeout, now);
        let before = self.members.get(rank).copied();
        self.mark_here(rank);
        if num_ranks != self.members.len() {
            return self.fail(format!(
                "rank {rank} was started with {num_ranks} ranks, but rank {} with {}; start all ranks with \
                 the same number (root {})",
                self.first,
                self.members.len(),
                self.root
            ));
        }
        match before {
            None => self.fail(format!("{} (root {})", out_of_range(rank, num_ranks), self.root)),
            Some(Presence::Absent) if self.members.contains(&Presence::Absent) => Step::Nothing,
            Some(Presence::Absent) => {
                self.phase = Phase::Running;
                self.deadline = None;
                Step::Welcome
            }
            Some(Presence::Here | Presence::Gone) => self.fail(format!(
                "rank {rank} of {num_ranks} joined twice; give every process its own rank (root {})",
                self.root
            )),
        }
    }

    /// A rank gives its blob.
    pub(super) fn gather(
        &mut self,
        rank: usize,
        round: u64,
        blob: Vec<u8>,
        remaining: Duration,
        now: Instant,
    ) -> Step {
        match self.phase {
            Phase::Failed(_) => return Step::Nothing,
            Phase::Joining => return self.fail(format!("rank {rank} gathers before all ranks have joined")),
            Phase::Running => {}
        }
        let (current, num_ranks) = (self.round, self.members.len());
        let Some(slot) = self.blobs.get_mut(rank).filter(|slot| slot.is_none() && round == current) else {
            return self.fail(format!(
                "rank {rank} of {num_ranks} gathers in round {}, the group is in round {} (root {})",
                round.saturating_add(1),
                current + 1,
                self.root
            ));
        };
        self.round_bytes = self.round_bytes.saturating_add(blob.len());
        *slot = Some(blob);
        if self.round_bytes > MAX_ROUND_BYTES {
            return self.fail(format!(
                "the {num_ranks} ranks gave more than {MAX_ROUND_BYTES} bytes to all-gather round {} (root {})",
                current + 1,
                self.root
            ));
        }
        self.sooner(remaining, remaining, now);
        if self.blobs.iter().all(Option::is_some) { self.deliver() } else { self.check_departures() }
    }

    /// The connection of a rank ended.
    pub(super) fn leave(&mut self, rank: usize) -> Step {
        if let Some(member) = self.members.get_mut(rank) {
            *member = Presence::Gone;
        }
        match self.phase {
            Phase::Failed(_) => Step::Nothing,
            Phase::Joining => {
                let (num_ranks, root) = (self.members.len(), self.root);
                self.fail(format!(
                    "rank {rank} of {num_ranks} left before all ranks had joined (root {root})"
                ))
            }
            Phase::Running if self.blobs.iter().any(Option::is_some) => self.check_departures(),
            Phase::Running => Step::Nothing,
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) -> Step {
        let Some((_, waited)) = self.deadline.filter(|(deadline, _)| now >= *deadline) else {
            return Step::Nothing;
        };
        let (num_ranks, root) = (self.members.len(), self.root);
        match self.phase {
            Phase::Failed(_) => Step::Nothing,
            Phase::Joining => {
                let absent =
                    name_ranks(&self.ranks(|rank| self.members.get(rank) == Some(&Presence::Absent)));
                self.fail(format!(
                    "{absent} of {num_ranks} did not join within {} (root {root}); check that they were started \
                     with the same id{}",
                    seconds(waited),
                    self.strangers()
                ))
            }
            Phase::Running => {
                let missing = name_ranks(&self.ranks(|rank| self.blobs.get(rank) == Some(&None)));
                self.fail(format!(
                    "{missing} of {num_ranks} did not take part in all-gather round {} within {} (root {root})",
                    self.round + 1,
                    seconds(waited)
                ))
            }
        }
    }

    /// Breaks the group; a group that is broken already keeps its first sentence.
    pub(super) fn fail(&mut self, text: String) -> Step {
        if self.has_failed() {
            return Step::Nothing;
        }
        self.blobs.clear();
        self.phase = Phase::Failed(text.clone());
        Step::Fail(text)
    }

    /// When [`Group::tick`] is due. While the group fails, until when late ranks may come for the reason.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.map(|(deadline, _)| deadline)
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.phase, Phase::Failed(_))
    }

    pub(super) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// No rank has joined yet.
    pub(super) fn is_untouched(&self) -> bool {
        self.members.is_empty()
    }

    /// Every rank has come once, so none is left to be told why the group failed.
    pub(super) fn all_came(&self) -> bool {
        !self.members.contains(&Presence::Absent)
    }

    /// All ranks joined and all have left.
    pub(super) fn is_over(&self) -> bool {
        self.is_running() && self.members.iter().all(|member| *member == Presence::Gone)
    }

    fn mark_here(&mut self, rank: usize) {
        if let Some(member) = self.members.get_mut(rank) {
            *member = Presence::Here;
        }
    }

    fn sooner(&mut self, remaining: Duration, timeout: Duration, now: Instant) {
        let new = (later(now, remaining), timeout);
        self.deadline = Some(self.deadline.filter(|old| old.0 <= new.0).unwrap_or(new));
    }

    fn ranks(&self, matches: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.members.len()).filter(|&rank| matches(rank)).collect()
    }

    /// Fails the round when a rank that left owes its blob.
    fn check_departures(&mut self) -> Step {
        let owing = self.ranks(|rank| {
            self.members.get(rank) == Some(&Presence::Gone) && self.blobs.get(rank) == Some(&None)
        });
        if owing.is_empty() {
            return Step::Nothing;
        }
        self.fail(format!(
            "{} of {} left or died before all-gather round {} was complete (root {})",
            name_ranks(&owing),
            self.members.len(),
            self.round + 1,
            self.root
        ))
    }

    fn deliver(&mut self) -> Step {
        let bytes = self.blobs.len() * 8 + self.round_bytes;
        let head =
            Frame { kind: Kind::Result, bytes: bytes as u64, round: self.round, remaining: Duration::ZERO };
        let mut frame = Vec::new();
        if frame.try_reserve_exact(super::wire::FRAME_BYTES + bytes).is_err() {
            let root = self.root;
            return self.fail(format!("the root {root} has no memory for a round of {bytes} bytes"));
        }
        frame.extend_from_slice(&head.encode());
        for blob in self.blobs.iter().flatten() {
            frame.extend_from_slice(&(blob.len() as u64).to_le_bytes());
        }
        for blob in &mut self.blobs {
            frame.extend_from_slice(&blob.take().unwrap_or_default());
        }
        self.deadline = None;
        self.round_bytes = 0;
        self.round += 1;
        Step::Deliver(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group() -> Group {
        Group::new(SocketAddr::from(([10, 0, 0, 1], 1234)))
    }

    fn as_rank(rank: u32, num_ranks: u32) -> Join {
        let timeout = Duration::from_secs(30);
        Join { rank, num_ranks, remaining: timeout, timeout, process: 0 }
    }

    fn text(step: Step) -> String {
        match step {
            Step::Fail(text) | Step::Refuse(text) | Step::TurnAway(text) => text,
            other => panic!("{other:?} is no failure"),
        }
    }

    fn joined(num_ranks: u32, now: Instant) -> Group {
        let mut group = group();
        for rank in 0..num_ranks - 1 {
            assert_eq!(group.join(&as_rank(rank, num_ranks), now), Step::Nothing);
        }
        assert_eq!(group.join(&as_rank(num_ranks - 1, num_ranks), now), Step::Welcome);
        group
    }

    #[test]
    fn absent_ranks_are_named_at_the_deadline() {
        let (mut group, now) = (group(), Instant::now());
        for rank in [0, 1, 3, 4, 6, 7] {
            assert_eq!(group.join(&as_rank(rank, 8), now), Step::Nothing);
        }
        assert_eq!(group.tick(now + Duration::from_secs(29)), Step::Nothing);
        assert_eq!(
            text(group.tick(now + Duration::from_secs(30))),
            "ranks 2 and 5 of 8 did not join within 30.0 s (root 10.0.0.1:1234); check that they were started \
             with the same id"
        );
        assert!(text(group.join(&as_rank(2, 8), now)).starts_with("ranks 2 and 5"));
        assert!(!group.all_came());
        assert!(text(group.join(&as_rank(5, 8), now)).starts_with("ranks 2 and 5"));
        assert!(group.all_came());
    }

    #[test]
    fn strangers_are_counted_in_the_text_of_a_timeout_and_change_nothing_else() {
        let (mut group, now) = (group(), Instant::now());
        group.join(&as_rank(0, 2), now);
        group.note_stranger(Some([10, 0, 0, 7].into()));
        let late = now + Duration::from_secs(31);
        let mut once = group;
        let sentence = text(once.tick(late));
        assert!(sentence.starts_with("rank 1 of 2 did not join"), "{sentence}");
        assert!(
            sentence.ends_with("; a connection with another secret was refused, the last one from 10.0.0.7")
        );

        let mut twice = self::group();
        twice.note_stranger(None);
        twice.note_stranger(Some([10, 0, 0, 8].into()));
        twice.join(&as_rank(0, 2), now);
        assert_eq!(twice.join(&as_rank(1, 2), now), Step::Welcome);
        let mut lonely = self::group();
        (0..2).for_each(|_| lonely.note_stranger(None));
        lonely.join(&as_rank(0, 2), now);
        assert!(text(lonely.tick(late)).ends_with("; 2 connections with another secret were refused"));
    }

    #[test]
    fn contradictions_name_the_ranks() {
        let now = Instant::now();
        let mut twice = group();
        twice.join(&as_rank(1, 4), now);
        assert!(text(twice.join(&as_rank(1, 4), now)).starts_with("rank 1 of 4 joined twice"));

        let mut beyond = group();
        beyond.join(&as_rank(1, 4), now);
        assert!(text(beyond.join(&as_rank(4, 4), now)).starts_with("rank 4 is out of range: the 4 ranks"));

        let mut sizes = group();
        sizes.join(&as_rank(1, 4), now);
        let sentence = text(sizes.join(&as_rank(2, 8), now));
        assert!(sentence.starts_with("rank 2 was started with 8 ranks, but rank 1 with 4"), "{sentence}");

        let mut full = joined(2, now);
        assert!(text(full.join(&as_rank(1, 2), now)).contains("rank 1 cannot join: all 2 ranks"));
        assert!(full.is_running());
    }

    #[test]
    fn departure_fails_only_a_round_that_lacks_the_blob() {
        let now = Instant::now();
        let far = Duration::from_secs(9);
        let mut group = joined(2, now);
        assert_eq!(group.gather(0, 0, vec![1], far, now), Step::Nothing);
        assert!(matches!(group.gather(1, 0, vec![], far, now), Step::Deliver(_)));
        assert_eq!(group.leave(1), Step::Nothing);
        assert!(text(group.gather(0, 1, vec![], far, now)).starts_with("rank 1 of 2 left or died before"));

        let mut over = joined(2, now);
        assert_eq!(over.leave(0), Step::Nothing);
        assert!(!over.is_over());
        assert_eq!(over.leave(1), Step::Nothing);
        assert!(over.is_over());
    }

    #[test]
    fn round_out_of_turn_fails() {
        let now = Instant::now();
        let far = Duration::from_secs(9);
        let mut group = joined(2, now);
        group.gather(0, 0, vec![1], far, now);
        assert!(text(group.gather(0, 0, vec![1], far, now)).contains("rank 0 of 2 gathers in round 1"));
        assert_eq!(group.gather(1, 0, vec![1], far, now), Step::Nothing);
        let mut group = joined(2, now);
        assert!(text(group.gather(0, u64::MAX, vec![1], far, now)).contains("the group is in round 1"));
    }
}
