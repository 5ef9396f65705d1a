//! Commands to the proxy, and the ring that they go through. `kernels/include/ep/command.h` says the same in C:
//! a kernel may be the producer. A test of the `ep` package compares the two.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::Stream;

/// Bytes of a command.
pub const COMMAND_BYTES: usize = 16;
/// Bytes of the unit of offsets and lengths.
pub const UNIT: u64 = 16;
/// Bytes of the longest message.
pub const MAX_BYTES: u64 = ((1 << LENGTH_BITS) - 1) * UNIT;
/// Bits of a message's number in a command.
pub const SEQ_BITS: u32 = 16;

/// Send a slot.
pub const OP_SEND: u8 = 1;
/// Give credit.
pub const OP_CREDIT: u8 = 2;

// First word: phase | op | link | stream | seq | length. Second word: phase | source | target.
const PHASE_AT: u32 = 63;
const OP_AT: u32 = 60;
const LINK_AT: u32 = 47;
const STREAM_AT: u32 = 40;
const SEQ_AT: u32 = 24;
const LENGTH_BITS: u32 = 24;
const SOURCE_AT: u32 = 32;
const SOURCE_BITS: u32 = 31;
const TARGET_BITS: u32 = 32;

const _: () = assert!(LENGTH_BITS == SEQ_AT && SEQ_AT + SEQ_BITS == STREAM_AT && STREAM_AT + 7 == LINK_AT);
const _: () = assert!(LINK_AT + 13 == OP_AT && OP_AT + 3 == PHASE_AT && SOURCE_AT + SOURCE_BITS == PHASE_AT);

/// What a command says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// `OP_`.
    pub op: u8,
    /// The sender's number of the link.
    pub link: u16,
    /// [`Stream::id`].
    pub stream: u8,
    /// Low bits of the message's number; of a credit, how many messages are freed.
    pub seq: u16,
    /// Bytes, a multiple of [`UNIT`], at most [`MAX_BYTES`].
    pub bytes: u64,
    /// Offset of the source in the region, a multiple of [`UNIT`], below 32 GiB.
    pub source: u64,
    /// Offset of the target in the peer's landing area of this link, a multiple of [`UNIT`], below 64 GiB.
    pub target: u64,
}

impl Command {
    /// Both words, in the phase `phase` (0 or 1) of the ring's lap.
    pub const fn encode(&self, phase: u64) -> [u64; 2] {
        let first = phase << PHASE_AT
            | (self.op as u64 & 7) << OP_AT
            | (self.link as u64 & 0x1FFF) << LINK_AT
            | (self.stream as u64 & 0x7F) << STREAM_AT
            | (self.seq as u64) << SEQ_AT
            | (self.bytes / UNIT) & ((1 << LENGTH_BITS) - 1);
        let second = phase << PHASE_AT
            | ((self.source / UNIT) & ((1 << SOURCE_BITS) - 1)) << SOURCE_AT
            | (self.target / UNIT) & ((1 << TARGET_BITS) - 1);
        [first, second]
    }

    /// Unpacks any two words.
    pub const fn decode(words: [u64; 2]) -> Command {
        let [first, second] = words;
        Command {
            op: (first >> OP_AT & 7) as u8,
            link: (first >> LINK_AT & 0x1FFF) as u16,
            stream: (first >> STREAM_AT & 0x7F) as u8,
            seq: (first >> SEQ_AT & 0xFFFF) as u16,
            bytes: (first & ((1 << LENGTH_BITS) - 1)) * UNIT,
            source: (second >> SOURCE_AT & ((1 << SOURCE_BITS) - 1)) * UNIT,
            target: (second & ((1 << TARGET_BITS) - 1)) * UNIT,
        }
    }
}

/// The phase in which the command at `position` is written: 1 in the first lap, since fresh memory is 0.
const fn phase(position: u64, depth: u64) -> u64 {
    (position / depth) & 1 ^ 1
}

/// One producer, one consumer, memory that both see; it may be mapped to a device.
///
/// Each word carries the phase of its lap, and a reader that sees both in the new phase has the whole command, so it
/// need not write back. Room comes back by the `posted` word, which counts commands that the consumer has taken.
#[derive(Debug)]
pub struct Ring<'a> {
    commands: &'a [[AtomicU64; 2]],
    posted: &'a AtomicU64,
}

impl<'a> Ring<'a> {
    /// A ring of `commands.len()` commands, a power of two.
    pub fn new(commands: &'a [[AtomicU64; 2]], posted: &'a AtomicU64) -> Ring<'a> {
        assert!(commands.len().is_power_of_two(), "a ring of {} commands", commands.len());
        Ring { commands, posted }
    }

    fn depth(&self) -> u64 {
        self.commands.len() as u64
    }

    /// Producer: puts `command` at `position`, the number of commands so far. False if there is no room.
    #[inline]
    pub fn push(&self, position: u64, command: &Command) -> bool {
        // Acquire: pairs with the release in `retire`; the consumer has read what was here a lap ago.
        if position - self.posted.load(Ordering::Acquire) >= self.depth() {
            return false;
        }
        let [first, second] = command.encode(phase(position, self.depth()));
        let place = &self.commands[(position & (self.depth() - 1)) as usize];
        // Release, twice: pairs with the acquires in `peek`; publishes the message's bytes. Whichever word the
        // consumer sees last, the command is whole.
        place[1].store(second, Ordering::Release);
        place[0].store(first, Ordering::Release);
        true
    }

    /// Consumer: the command at `position`, the number of commands taken so far, if it is there.
    #[inline]
    pub fn peek(&self, position: u64) -> Option<Command> {
        let expected = phase(position, self.depth());
        let place = &self.commands[(position & (self.depth() - 1)) as usize];
        // Acquire: pairs with the release of the same word in `push`, or in a kernel's.
        let first = place[0].load(Ordering::Acquire);
        if first >> PHASE_AT != expected {
            return None;
        }
        // Acquire: as above. A producer on a device may show its words in any order.
        let second = place[1].load(Ordering::Acquire);
        (second >> PHASE_AT == expected).then(|| Command::decode([first, second]))
    }

    /// Consumer: the commands before `position` were taken.
    #[inline]
    pub fn retire(&self, position: u64) {
        // Release: pairs with the acquire in `push`; the reads of those commands are done.
        self.posted.store(position, Ordering::Release);
    }
}

/// The stream that a command names, if there can be one.
pub(super) fn stream_of(command: &Command) -> Option<Stream> {
    Stream::from_id(command.stream.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(depth: usize) -> Vec<[AtomicU64; 2]> {
        (0..depth).map(|_| Default::default()).collect()
    }

    fn numbered(number: u64) -> Command {
        Command {
            op: (number % 3) as u8,
            link: (number % 8192) as u16,
            stream: (number % 128) as u8,
            seq: (number % 65536) as u16,
            bytes: number % (1 << 24) * UNIT,
            source: number.wrapping_mul(0x9E37_79B9) % (1 << 31) * UNIT,
            target: number.wrapping_mul(0x85EB_CA6B) % (1 << 32) * UNIT,
        }
    }

    #[test]
    fn fields_come_back_and_do_not_touch_each_other() {
        let full = Command {
            op: 7,
            link: 8191,
            stream: 127,
            seq: 65535,
            bytes: MAX_BYTES,
            source: (1 << 35) - 16,
            target: (1 << 36) - 16,
        };
        assert_eq!(full.encode(1), [u64::MAX; 2]);
        assert_eq!(full.encode(0), [u64::MAX >> 1; 2]);
        for number in (0..1 << 40).step_by(104_729 * 1009) {
            let command = numbered(number);
            assert_eq!(Command::decode(command.encode(number & 1)), command);
        }
    }

    #[test]
    fn an_empty_ring_shows_nothing_and_a_full_one_takes_nothing() {
        let (commands, posted) = (words(4), AtomicU64::new(0));
        let ring = Ring::new(&commands, &posted);
        assert_eq!(ring.peek(0), None);
        assert!((0..4).all(|at| ring.push(at, &numbered(at))));
        assert!(!ring.push(4, &numbered(4)));
        assert_eq!(ring.peek(0), Some(numbered(0)));
        ring.retire(1);
        assert!(ring.push(4, &numbered(4)));
        assert_eq!(ring.peek(4), Some(numbered(4)));
        assert_eq!(ring.peek(1), Some(numbered(1)), "still the lap before");
    }

    #[test]
    fn half_a_command_is_not_seen() {
        let (commands, posted) = (words(4), AtomicU64::new(0));
        let ring = Ring::new(&commands, &posted);
        let [first, second] = numbered(1).encode(1);
        commands[0][0].store(first, Ordering::Relaxed);
        assert_eq!(ring.peek(0), None);
        commands[0][1].store(second, Ordering::Relaxed);
        assert_eq!(ring.peek(0), Some(numbered(1)));
    }

    #[test]
    fn commands_pass_between_threads_in_order_over_many_laps() {
        const COUNT: u64 = 200_000;
        let (commands, posted) = (words(64), AtomicU64::new(0));
        let ring = Ring::new(&commands, &posted);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for position in 0..COUNT {
                    while !ring.push(position, &numbered(position)) {
                        std::thread::yield_now();
                    }
                }
            });
            for position in 0..COUNT {
                let command = loop {
                    match ring.peek(position) {
                        Some(command) => break command,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(command, numbered(position));
                ring.retire(position + 1);
            }
        });
    }
}
